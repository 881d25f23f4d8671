"""From a checked call to its launches; kernels are chosen once for each kind of compressor.

A decode step is one launch: state rows, pooling, norm, RoPE, rotation, quantisation and store, and
for a C4 layer main and indexer together. A prefill step is two: windows, then the state rows
(a ring of pages reuses rows that the windows still read).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from backend_core.target import Target, detect_target
from dsv4_backend import arguments, reference_step, validation
from dsv4_backend import selection as paths
from dsv4_backend import step_plan as plans
from dsv4_backend.arguments import LAYER, PAIR, PLAN, Argument, Part

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch, Packed

T = TypeVar("T")
_Two = tuple[T, T]
_READY_LIMIT = 64  # kinds of calls that a layer remembers


@dataclass(eq=False)
class Ready(Generic[T]):
    """What calls of one layer with like tensors share."""

    kernels: paths.Paths[T]
    packs: dict[tuple[KernelLaunch, int], Packed] = field(default_factory=dict)
    pairs: dict[Ready[T], paths.Paths[T]] = field(default_factory=dict)


def ready(
    part: Part, plan: plans.DecodePlan | plans.PrefillPlan, phase: str, target: Target | None
) -> Ready[Any]:
    """Check a call and choose its kernels, once for calls that agree in all that a check or a pack
    looks at.

    Raises:
        ValueError: the call breaks its operator's contract.
        LookupError: there are no kernel paths for the target.
    """
    layer, kv_score, state, cache = part
    rows = kv_score.shape
    facts = (
        type(plan), phase, getattr(plan, "device", None), getattr(plan, "is_settled", None), target,
        rows[1:], kv_score.stride(), kv_score.dtype, kv_score.device,
        state.data_ptr(), state.shape, state.stride(), state.dtype, state.device,
        cache.data_ptr(), cache.shape, cache.stride(), cache.dtype, cache.device,
        layer.ape.data_ptr(), layer.norm_weight.data_ptr(), layer.rope_table.data_ptr(),
    )  # fmt: skip
    found: Ready[Any] | None = layer.ready.get(facts)
    if found is not None and rows[0] >= plan.num_tokens:
        return found
    validation.check_step(layer, kv_score, state, cache, plan, phase)
    target = target or detect_target(kv_score.device)
    if len(layer.ready) >= _READY_LIMIT:
        layer.ready.clear()
    found = layer.ready[facts] = Ready(_paths(target, part, plan))
    return found


def ready_pair(
    parts: _Two[Part], both: _Two[plans.DecodePlan], target: Target | None
) -> _Two[Ready[Any]]:
    """``ready`` of both; the first knows the kernels that serve it together with the second."""
    main, indexer = parts
    found = ready(main, both[0], "decode", target), ready(indexer, both[1], "decode", target)
    validation.check_pair_plans(*both)
    if found[1] not in found[0].pairs:
        validation.check_pair(main[0], indexer[0])
        found[0].pairs[found[1]] = paths.pair_paths(
            target or detect_target(main[1].device),
            main[0].spec,
            indexer[0].spec,
            both[0].layout,
            (main[2].shape[1], indexer[2].shape[1]),
            both[0].is_settled and both[1].is_settled,
        )
    return found


def _paths(target: Target, part: Part, plan: plans.DecodePlan | plans.PrefillPlan) -> Any:
    spec, state_block = part[0].spec, part[2].shape[1]
    if isinstance(plan, plans.DecodePlan):
        return paths.decode_paths(target, spec, plan.layout, state_block, plan.is_settled)
    return paths.prefill_paths(target, spec, plan.layout, state_block)


def run_in_place(
    target: Target,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rope_table: torch.Tensor,
    plan: plans.SeqLens | plans.RowPlan,
    compress_ratio: int,
    rotate: bool,
) -> None:
    selected = paths.in_place_paths(target, plan.phase, kv.shape[1], compress_ratio, rotate)
    entries = plan.seq_lens if isinstance(plan, plans.SeqLens) else plan.rows
    launch = selected.launch(plan.num_tokens)
    if launch is None:
        reference_step.compress_in_place(kv, weight, eps, rope_table, plan, compress_ratio, rotate)
        return
    launch(
        (plan.num_tokens, 1, 1),
        kv, weight, rope_table, entries, eps, kv.stride()[0], rope_table.stride()[0],
    )  # fmt: skip


def run_decode(part: Part, plan: plans.DecodePlan, target: Target | None) -> None:
    found = ready(part, plan, "decode", target)
    tokens = plan.num_tokens
    launch = found.kernels.launch(tokens)
    if launch is None:
        reference_step.step(*part, plan)
        return
    packs = (launch.pack(arguments.input_values(part[1])), *_packs(launch, found, part, plan))
    launch.packed((tokens, 1, 1), packs, lambda: arguments.of_kernel(launch.kernel, part, plan))


def run_decode_pair(parts: _Two[Part], both: _Two[plans.DecodePlan], target: Target | None) -> None:
    found = ready_pair(parts, both, target)
    tokens = both[0].num_tokens
    launch = found[0].pairs[found[1]].launch(tokens)
    if launch is None:
        for part, plan in zip(parts, both, strict=True):
            reference_step.step(*part, plan)
        return
    packs = [
        launch.pack(arguments.input_values(parts[0][1])),
        *_packs(launch, found[0], parts[0], both[0]),
        launch.pack(arguments.input_values(parts[1][1])),
        *_packs(launch, found[1], parts[1], both[1], PAIR),
    ]
    launch.packed((tokens, 2, 1), packs, lambda: arguments.of_pair(launch.kernel, parts, both))


def run_prefill(part: Part, plan: plans.PrefillPlan, target: Target | None) -> None:
    found = ready(part, plan, "prefill", target)
    num_windows, num_writes = plan.num_windows, plan.num_writes
    launches = found.kernels.launch(num_windows)
    if launches is None:
        reference_step.step(*part, plan)
        return
    layer, kv_score, _, _ = part
    windows, rest, num_splits = launches.windows, launches.rest, launches.num_splits
    packs = (
        windows.pack(arguments.input_values(kv_score)),
        *_packs(windows, found, part, plan),
    )
    if rest is None:
        groups = max(num_windows, -(-num_writes // layer.spec.compress_ratio))
        grid = (groups * num_splits, 1, 1)
        windows.packed(grid, packs, lambda: arguments.of_kernel(windows.kernel, part, plan))
        return
    pooled: torch.Tensor | None = None
    pooled_packs: tuple[Packed, ...] = ()
    rest_grid = num_writes
    if num_splits > 1:
        pooled = kv_score.new_empty(num_windows, layer.spec.head_dim, dtype=torch.float32)
        pooled_packs = (windows.pack((pooled,)),)
        rest_grid += num_windows
    windows.packed(
        (num_windows, num_splits, 1),
        packs + pooled_packs,
        lambda: arguments.of_kernel(windows.kernel, part, plan, pooled),
    )
    rest.packed(
        (rest_grid, 1, 1),
        (packs[0], *_packs(rest, found, part, plan), *pooled_packs),
        lambda: arguments.of_kernel(rest.kernel, part, plan, pooled),
    )


def warm_up_decode(part: Part, plan: plans.DecodePlan, target: Target | None) -> None:
    """Compile whatever ``run_decode`` may launch for tensors like these."""
    for launch in ready(part, plan, "decode", target).kernels.launches():
        launch.warm_up(*arguments.of_kernel(launch.kernel, part, plan))


def warm_up_decode_pair(
    parts: _Two[Part], both: _Two[plans.DecodePlan], target: Target | None
) -> None:
    """Compile whatever ``run_decode_pair`` may launch for tensors like these."""
    found = ready_pair(parts, both, target)
    for launch in found[0].pairs[found[1]].launches():
        launch.warm_up(*arguments.of_pair(launch.kernel, parts, both))


def warm_up_prefill(part: Part, plan: plans.PrefillPlan, target: Target | None) -> None:
    """Compile whatever ``run_prefill`` may launch for tensors like these."""
    pooled = part[1].new_empty((plan.num_windows, part[0].spec.head_dim), dtype=torch.float32)
    for launches in ready(part, plan, "prefill", target).kernels.launches():
        for launch in (launches.windows, launches.rest):
            if launch is not None:
                launch.warm_up(*arguments.of_kernel(launch.kernel, part, plan, pooled))


def _packs(
    launch: KernelLaunch,
    found: Ready[Any],
    part: Part,
    plan: plans.DecodePlan | plans.PrefillPlan,
    first: int = 0,
) -> tuple[Packed, Packed]:
    """The layer's and the plan's arguments, whose groups follow group ``first``."""
    key = (launch, first)
    of_layer, of_plan = found.packs.get(key), plan.packs.get(key)
    if of_layer is None:
        of_layer = found.packs[key] = _pack(launch, first + LAYER, arguments.layer_values(part))
    if of_plan is None:
        of_plan = plan.packs[key] = _pack(launch, first + PLAN, arguments.plan_values(plan))
    return of_layer, of_plan


def _pack(launch: KernelLaunch, group: int, values: dict[str, Argument]) -> Packed:
    return launch.pack(values[arguments.plain_name(name)] for name in launch.groups[group])
