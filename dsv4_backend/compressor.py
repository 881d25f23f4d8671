"""From a checked call to its launches; kernels are chosen once for each kind of compressor.

A decode step is one launch: state rows, pooling, norm, RoPE, rotation, quantisation and store, and
for a C4 layer main and indexer together. A prefill step is two: windows, then the state rows
(a ring of pages reuses rows that the windows still read).
"""

from __future__ import annotations

import torch

from backend_core.target import Target
from dsv4_backend import paths, plans, reference_step
from dsv4_backend.metadata import CompressorLayer

Argument = torch.Tensor | int | float
Part = tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor]
"""A layer with its kv_score, state and cache."""


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
        kv, weight, rope_table, entries, eps, kv.stride(0), rope_table.stride(0),
    )  # fmt: skip


def run_decode(target: Target, part: Part, plan: plans.DecodePlan) -> None:
    layer, kv_score, state, cache = part
    selected = paths.decode_paths(target, layer.spec, plan.layout, state.shape[1])
    launch = selected.launch(plan.num_tokens)
    if launch is None:
        reference_step.step(layer, kv_score, state, cache, plan)
        return
    launch((plan.num_tokens, 1, 1), *decode_arguments(part, plan))


def run_decode_pair(
    target: Target,
    main: Part,
    indexer: Part,
    main_plan: plans.DecodePlan,
    indexer_plan: plans.DecodePlan,
) -> None:
    state_blocks = (main[2].shape[1], indexer[2].shape[1])
    specs = (main[0].spec, indexer[0].spec)
    selected = paths.pair_paths(target, *specs, main_plan.layout, state_blocks)
    launch = selected.launch(main_plan.num_tokens)
    if launch is None:
        reference_step.step(*main, main_plan)
        reference_step.step(*indexer, indexer_plan)
        return
    arguments = _pair_arguments(main, indexer, main_plan, indexer_plan)
    launch((main_plan.num_tokens, 2, 1), *arguments)


def run_prefill(target: Target, part: Part, plan: plans.PrefillPlan) -> None:
    layer, kv_score, state, cache = part
    num_windows = _num_windows(plan)
    selected = paths.prefill_paths(target, layer.spec, plan.layout, state.shape[1])
    launches = selected.launch(num_windows)
    if launches is None:
        reference_step.step(layer, kv_score, state, cache, plan)
        return
    windows, rest = _prefill_arguments(part, plan, launches)
    num_writes = _write_pointers(plan)[2]
    if launches.rest is None:
        ratio = layer.spec.compress_ratio
        groups = max(num_windows, -(-num_writes // ratio))
        launches.windows((groups * launches.num_splits, 1, 1), *windows)
        return
    launches.windows((num_windows, launches.num_splits, 1), *windows)
    rest_grid = num_writes if launches.num_splits == 1 else num_windows + num_writes
    launches.rest((rest_grid, 1, 1), *rest)


def warm_up_decode(target: Target, part: Part, plan: plans.DecodePlan) -> None:
    """Compile whatever ``run_decode`` may launch for tensors like these."""
    selected = paths.decode_paths(target, part[0].spec, plan.layout, part[2].shape[1])
    for launch in selected.launches():
        launch.warm_up(*decode_arguments(part, plan))


def warm_up_decode_pair(
    target: Target,
    main: Part,
    indexer: Part,
    main_plan: plans.DecodePlan,
    indexer_plan: plans.DecodePlan,
) -> None:
    """Compile whatever ``run_decode_pair`` may launch for tensors like these."""
    state_blocks = (main[2].shape[1], indexer[2].shape[1])
    specs = (main[0].spec, indexer[0].spec)
    for launch in paths.pair_paths(target, *specs, main_plan.layout, state_blocks).launches():
        launch.warm_up(*_pair_arguments(main, indexer, main_plan, indexer_plan))


def warm_up_prefill(target: Target, part: Part, plan: plans.PrefillPlan) -> None:
    """Compile whatever ``run_prefill`` may launch for tensors like these."""
    selected = paths.prefill_paths(target, part[0].spec, plan.layout, part[2].shape[1])
    for launches in selected.launches():
        windows, rest = _prefill_arguments(part, plan, launches)
        launches.windows.warm_up(*windows)
        if launches.rest is not None:
            launches.rest.warm_up(*rest)


def decode_arguments(part: Part, plan: plans.DecodePlan) -> tuple[Argument, ...]:
    """What ``decode_step_kernel`` takes, without constexprs."""
    layer, kv_score, state, cache = part
    plan_ptr, aux, request, table = _decode_pointers(plan)
    return (
        kv_score, state, layer.ape, layer.norm_weight, layer.rope_table, cache,
        plan_ptr, aux, request, table, plan.slots,
        layer.spec.eps, 1.0 / layer.fp8_scale,
        *_strides(part), layer.rope_table.stride(0), table.stride(0), cache.stride(0),
    )  # fmt: skip


def _pair_arguments(
    main: Part, indexer: Part, main_plan: plans.DecodePlan, indexer_plan: plans.DecodePlan
) -> tuple[Argument, ...]:
    layer, other = main[0], indexer[0]
    plan_ptr, aux, request, table = _decode_pointers(main_plan)
    x_plan_ptr, x_aux, _, x_table = _decode_pointers(indexer_plan)
    return (
        main[1], main[2], layer.ape, layer.norm_weight, main[3],
        plan_ptr, aux, table, main_plan.slots,
        indexer[1], indexer[2], other.ape, other.norm_weight, indexer[3],
        x_plan_ptr, x_aux, x_table, indexer_plan.slots,
        layer.rope_table, request, layer.spec.eps, 1.0 / layer.fp8_scale,
        *_strides(main), table.stride(0), main[3].stride(0),
        *_strides(indexer), x_table.stride(0), indexer[3].stride(0),
        layer.rope_table.stride(0),
    )  # fmt: skip


def _prefill_arguments(
    part: Part, plan: plans.PrefillPlan, launches: paths.PrefillLaunches
) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
    """Those of the windows and those of the rest; see ``paths.PrefillLaunches``."""
    layer, kv_score, state, cache = part
    strides, table_stride = _strides(part), layer.rope_table.stride(0)
    plan_ptr, aux, positions, requests, table = _prefill_pointers(plan)
    write_ptr, write_aux, _ = _write_pointers(plan)
    eps, inv_scale = layer.spec.eps, 1.0 / layer.fp8_scale
    if launches.rest is None:
        return (
            kv_score, state, layer.ape, layer.norm_weight, layer.rope_table, cache,
            plan_ptr, aux, write_ptr, positions, requests, table, plan.slots,
            _num_windows(plan), plan.num_tokens, eps, inv_scale,
            *strides, table_stride, table.stride(0), cache.stride(0),
        ), ()  # fmt: skip
    if launches.num_splits == 1:
        return (
            kv_score, state, layer.ape, layer.norm_weight, layer.rope_table, cache,
            plan_ptr, aux, positions, requests, table, plan.slots,
            eps, inv_scale, *strides, table_stride, table.stride(0), cache.stride(0),
        ), (kv_score, state, layer.ape, write_ptr, write_aux, positions, *strides)  # fmt: skip
    num_windows = _num_windows(plan)
    pooled = kv_score.new_empty((num_windows, layer.spec.head_dim), dtype=torch.float32)
    return (
        kv_score, state, layer.ape, pooled, plan_ptr, aux, positions, requests, table,
        *strides, table.stride(0),
    ), (
        pooled, kv_score, state, layer.ape, layer.norm_weight, layer.rope_table, cache,
        plan_ptr, aux, write_ptr, write_aux, positions, requests, plan.slots, num_windows,
        eps, inv_scale, *strides, table_stride, cache.stride(0),
    )  # fmt: skip


def _num_windows(plan: plans.PrefillPlan) -> int:
    windows = plan.ends if isinstance(plan, plans.PagedPrefill) else plan.windows
    return windows.shape[0]


def _strides(part: Part) -> tuple[int, ...]:
    layer, kv_score, state, _ = part
    ape = layer.ape
    return (kv_score.stride(0), state.stride(0), state.stride(1), ape.stride(0), ape.stride(1))


def _decode_pointers(plan: plans.DecodePlan) -> tuple[torch.Tensor, ...]:
    """(plan, aux, requests, block table); what a layout lacks is filled with what it has."""
    if isinstance(plan, plans.RingDecode):
        return plan.plan, plan.slots, plan.slots, plan.plan
    if isinstance(plan, plans.RingDecodeV1):
        return plan.seq_lens, plan.pages, plan.slots, plan.seq_lens
    return plan.positions, plan.state_slots, plan.requests, plan.block_table


def _prefill_pointers(plan: plans.PrefillPlan) -> tuple[torch.Tensor, ...]:
    """(plan, aux, positions, requests, block table), filled in the same way."""
    if isinstance(plan, plans.RingPrefill):
        return plan.windows, plan.slots, plan.slots, plan.slots, plan.windows
    if isinstance(plan, plans.RingPrefillV1):
        return plan.windows, plan.pages, plan.slots, plan.slots, plan.windows
    return plan.ends, plan.query_starts, plan.positions, plan.requests, plan.block_table


def _write_pointers(plan: plans.PrefillPlan) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(plan, aux, number of state rows)."""
    if isinstance(plan, plans.RingPrefill):
        return plan.writes, plan.slots, plan.writes.shape[0]
    if isinstance(plan, plans.RingPrefillV1):
        return plan.writes, plan.pages, plan.writes.shape[0]
    return plan.state_slots, plan.slots, plan.num_tokens
