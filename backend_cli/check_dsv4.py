"""What ``kda-dsv4 check`` asks of a compressor path: steps of a small engine, byte by byte.

Each call is made twice, on the path under test and by ``dsv4_backend.reference_step`` in float64 on
the CPU, from the same state and cache. State rows must be equal bit for bit, bytes outside the
written records untouched, and records equal but for roundings that fp32 cannot tell apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from backend_cli.check_engine import PAGE_TOKENS, Engine, Layout, int32, make_engine
from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PathSelection
from backend_core.target import Target
from dsv4_backend import (
    CompressorLayer,
    CompressorSpec,
    PagedDecode,
    RowPlan,
    SeqLens,
    compress_decode_,
    compress_decode_pair_,
    compress_norm_rope_hadamard_,
    compress_prefill_,
    quantise_indexer_queries,
    reference,
    reference_step,
)
from dsv4_backend import selection as paths
from dsv4_backend.spec import CacheFormat
from dsv4_backend.step_plan import DecodePlan, PrefillPlan

Part = tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor]
Plan = TypeVar("Plan", bound=DecodePlan | PrefillPlan | SeqLens | RowPlan)

ALLOWED = 0.02
"""Share of the written values that may differ from the definition's, each by one step of its code:
float32 meets the middle between two codes on the other side."""

_KINDS = ("in_place_128", "in_place_512", "indexer", "main_c4", "main_c128", "pair", "queries")


def cases(path: KernelPath) -> dict[str, Callable[[Target, torch.device], float]]:
    """The calls that ``path`` must get right, by name; each returns the share of
    values that differ."""
    found: dict[str, Callable[[Target, torch.device], float]] = {}
    declared: list[Layout] = [x for x in ("paged", "ring", "ring_v1") if x in path.features]
    for kind in _KINDS:
        if kind not in path.features:
            continue
        for hard in (False, True):
            name = f"{kind}, {'adversarial' if hard else 'small'}"
            if kind.startswith("in_place"):
                found[name] = _in_place(path, int(kind[9:]), hard)
                continue
            if kind == "queries":
                found[name] = _queries(path, hard)
                continue
            for layout in declared or ("paged", "ring"):
                found[f"{name}, {layout}"] = _steps(path, kind, layout, hard)
    return found


def _steps(
    path: KernelPath, kind: str, layout: Layout, hard: bool
) -> Callable[[Target, torch.device], float]:
    def run(target: Target, device: torch.device) -> float:
        if kind == "pair":
            return _run_pair(path, layout, hard, target, device)
        engine = make_engine(kind, layout, hard)
        return max(
            _compare(path, (engine,), (plan,), rows, target, device)
            for plan, rows in _calls(engine, path.phase)
        )

    return run


def _calls(engine: Engine, phase: str) -> Iterator[tuple[DecodePlan | PrefillPlan, torch.Tensor]]:
    """Prefill in two chunks cut inside a window; or, behind such a prefill, one decoded token,
    as the launch before may have written anything and then as its plan is settled."""
    lengths = engine.lengths
    cut = [length // 2 + 1 for length in lengths]
    if phase == "prefill":
        for chunks in ([(0, c) for c in cut], list(zip(cut, lengths, strict=True))):
            yield engine.prefill_plan(chunks), engine.rows(chunks)
        return
    _advance(engine, [(0, length - 1) for length in lengths])
    last = [(length - 1, length) for length in lengths]
    positions: list[int | None] = [start for start, _ in last]
    positions[0] = None
    plan = engine.decode_plan(positions)
    yield plan, engine.rows(last)
    yield dataclasses.replace(plan, is_settled=True), engine.rows(last)


def _advance(engine: Engine, chunks: list[tuple[int, int]]) -> None:
    plan, rows = engine.prefill_plan(chunks), engine.rows(chunks)
    reference_step.step(engine.layer, rows, engine.state, engine.cache, plan)


def _run_pair(
    path: KernelPath, layout: Layout, hard: bool, target: Target, device: torch.device
) -> float:
    main, indexer = (make_engine(kind, layout, hard) for kind in ("main_c4", "indexer"))
    object.__setattr__(indexer.layer, "rope_table", main.layer.rope_table)
    worst = 0.0
    for steps in zip(_calls(main, "decode"), _calls(indexer, "decode"), strict=True):
        plans = tuple(plan for plan, _ in steps)
        if isinstance(plans[0], PagedDecode):
            object.__setattr__(plans[1], "requests", plans[0].requests)
        rows = [rows for _, rows in steps]
        worst = max(worst, _compare(path, (main, indexer), plans, rows, target, device))
    return worst


def _compare(
    path: KernelPath,
    engines: tuple[Engine, ...],
    plans: tuple[DecodePlan | PrefillPlan, ...],
    rows: torch.Tensor | list[torch.Tensor],
    target: Target,
    device: torch.device,
) -> float:
    """One call on the path and by the definition; engines go on from the definition's result."""
    inputs = rows if isinstance(rows, list) else [rows]
    moved = to_device(engines, plans, inputs, device)
    force(path, target, engines, plans)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what a settled plan promises
    if len(engines) == 2:
        (main, main_plan), (indexer, indexer_plan) = moved
        compress_decode_pair_(main, indexer, main_plan, indexer_plan, target=target)
    else:
        step: Any = compress_decode_ if path.phase == "decode" else compress_prefill_
        step(*moved[0][0], moved[0][1], target=target)
    worst = 0.0
    for engine, plan, row, ((_, _, state, cache), _) in zip(
        engines, plans, inputs, moved, strict=True
    ):
        before = engine.cache.clone()
        reference_step.step(engine.layer, row, engine.state, engine.cache, plan)
        if not torch.equal(_bits(state.cpu()), _bits(engine.state)):
            raise RuntimeError("state rows differ from those of the definition")
        worst = max(worst, _different(engine, cache.cpu(), before, plan))
    return worst


def _different(
    engine: Engine, cache: torch.Tensor, before: torch.Tensor, plan: DecodePlan | PrefillPlan
) -> float:
    """Share of the written values that are not the definition's."""
    spec = engine.spec
    ends = reference_step.windows(plan, spec, engine.block)
    slots = torch.tensor(sorted({w.slot for w in ends if w.slot >= 0}))
    outside = cache.clone()
    if len(slots):
        reference.store(outside, slots, PAGE_TOKENS, *_records(before, slots, spec))
    if not torch.equal(outside, before):
        raise RuntimeError("a cache byte outside the written records changed")
    if not len(slots):
        return 0.0
    got, want = (
        reference.dequantise(*_records(x, slots, spec), spec, engine.layer.fp8_scale)
        for x in (cache, engine.cache)
    )
    error, largest = (got - want).abs(), want.abs().amax(1, keepdim=True)
    if not bool((error <= largest / 64 + 0.26 * want.abs()).all()):
        raise RuntimeError("a cached value is more than one step of its code off")
    return float((error > 2e-6 * largest).float().mean())


def _records(
    cache: torch.Tensor, slots: torch.Tensor, spec: CompressorSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.load(cache, slots, spec.page_tokens, spec.cache_format)


def to_device(
    engines: tuple[Engine, ...],
    plans: tuple[DecodePlan | PrefillPlan, ...],
    rows: list[torch.Tensor],
    device: torch.device,
) -> list[tuple[Part, Any]]:
    """Copies on the device; what a pair shares stays shared."""
    table = engines[0].layer.rope_table.to(device)
    shared: dict[int, torch.Tensor] = {}
    moved = []
    for engine, plan, row in zip(engines, plans, rows, strict=True):
        layer = CompressorLayer(
            engine.spec, engine.layer.ape.to(device), engine.layer.norm_weight.to(device), table
        )
        full = engine.state.new_empty(
            len(engine.state), engine.block + 1, engine.spec.row_width
        ).to(device)
        state = full[:, : engine.block]
        state.copy_(engine.state)
        part = (layer, row.to(device, copy=True), state, engine.cache.to(device, copy=True))
        moved.append((part, _move(plan, device, shared)))
    return moved


def _move(plan: Plan, device: torch.device, shared: dict[int, torch.Tensor]) -> Plan:
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    tensors: dict[str, Any] = {
        name: shared.setdefault(id(value), value.to(device))
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return dataclasses.replace(plan, **tensors)


def force(
    path: KernelPath,
    target: Target,
    engines: tuple[Engine, ...],
    plans: tuple[DecodePlan | PrefillPlan, ...],
) -> None:
    """Let calls like these run ``path`` whatever their grid."""
    spec, layout = engines[0].spec, plans[0].layout
    for find in (paths.pair_paths, paths.decode_paths, paths.prefill_paths):
        find.cache_clear()  # of what another row was forced on
    selected: paths.Paths[Any]
    if len(engines) == 2:
        blocks = (engines[0].block, engines[1].block)
        settled = all(plan.is_settled for plan in plans if isinstance(plan, DecodePlan))
        selected = paths.pair_paths(target, spec, engines[1].spec, layout, blocks, settled)
    elif isinstance(plans[0], DecodePlan):
        block, settled = engines[0].block, plans[0].is_settled
        selected = paths.decode_paths(target, spec, layout, block, settled)
    else:
        selected = paths.prefill_paths(target, spec, layout, engines[0].block)
    force_selection(selected, path)


def force_selection(selected: paths.Paths[Any], path: KernelPath) -> None:
    rows = tuple(selected.selection.explain())
    same = [row for row in selected.selection.paths if _row_of(row) == _row_of(path)]
    if not same:
        raise RuntimeError("the table never chooses this row: another one comes before it")
    selected.selection = PathSelection(path.phase, (same[0],), (), rows)


def _row_of(path: KernelPath) -> tuple[object, ...]:
    return path.name, path.features, tuple(path.params.items())


def _in_place(
    path: KernelPath, head_dim: int, hard: bool
) -> Callable[[Target, torch.device], float]:
    """``compress_norm_rope_hadamard_``: the share of elements more than one bf16 ulp off."""

    def run(target: Target, device: torch.device) -> float:
        ratio, rotate = 4, head_dim == 128
        rng = torch.Generator().manual_seed(head_dim)
        kv = torch.randn(6, head_dim, generator=rng)
        if hard:
            kv *= 10.0 ** (30 * torch.rand(6, 1, generator=rng) - 20)
            kv[2] = 0.0
        kv = kv.bfloat16()
        weight = (0.5 + torch.rand(head_dim, generator=rng)).bfloat16()
        angle = 6.3 * torch.rand(1024, 32, generator=rng)
        table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
        plan: SeqLens | RowPlan = SeqLens(int32([4, 5, 28, -1, 0, 400]))
        if path.phase == "prefill":
            rows = [[0, 0, 3, 0], [-1, -1, -1, -1], [2, 0, 27, 0], [5, 0, 399, 0], [4, 0, 400, 0]]
            plan = RowPlan(int32(rows))
        want = kv.clone()
        reference_step.compress_in_place(want, weight, 1e-6, table, plan, ratio, rotate)
        got = kv.to(device)
        paths.in_place_paths.cache_clear()
        selected = paths.in_place_paths(target, path.phase, head_dim, ratio, rotate)
        force_selection(selected, path)
        compress_norm_rope_hadamard_(
            got, weight.to(device), 1e-6, table.to(device), _move(plan, device, {}),
            head_dim=head_dim, compress_ratio=ratio, rotate=rotate, target=target,
        )  # fmt: skip
        result = got.cpu()
        if not torch.equal(result[[1, 3, 4]], kv[[1, 3, 4]]):
            raise RuntimeError("a row outside the plan was written")
        ulp = 2.0**-7 * want.float().abs() + 1e-6
        if not bool(((result.float() - want.float()).abs() <= ulp).all()):
            raise RuntimeError("an element is more than one bf16 ulp off")
        return float((result != want)[[0, 2, 5]].float().mean())

    return run


def _queries(path: KernelPath, hard: bool) -> Callable[[Target, torch.device], float]:
    """``quantise_indexer_queries``: the share of codes that differ."""

    def run(target: Target, device: torch.device) -> float:
        rng = torch.Generator().manual_seed(4)
        q = torch.randn(6, 4, 128, generator=rng)
        if hard:
            q *= 10.0 ** (8 * torch.rand(6, 4, 1, generator=rng) - 4)
            q[2] = 0.0
        q = q.bfloat16()
        weights = torch.rand(6, 4, generator=rng) + 0.5
        angle = 6.3 * torch.rand(1024, 32, generator=rng)
        table = torch.cat((angle.cos(), angle.sin()), 1)
        positions = torch.tensor([0, 1, 28, 400, 7, 1023])
        worst = 0.0
        formats: tuple[CacheFormat, ...] = ("indexer_fp8", "indexer_mxfp4")
        for cache_format in formats:
            spec = CompressorSpec(
                128, 4, cache_format, 64, "vllm", rotate=True, fp8="ocp", rope_layout="split"
            )
            want = quantise_indexer_queries(spec, q, positions, table, weights, 0.1, 0.5)
            paths.query_paths.cache_clear()
            force_selection(paths.query_paths(target, spec), path)
            codes, scales, out = quantise_indexer_queries(
                spec, q.to(device), positions.to(device), table.to(device), weights.to(device),
                0.1, 0.5, target=target,
            )  # fmt: skip
            worst = max(worst, float((codes.cpu() != want[0]).float().mean()))
            known = want[1]
            if scales is not None and known is not None and not torch.equal(scales.cpu(), known):
                raise RuntimeError("a scale differs from that of the definition")
            if not torch.allclose(out.cpu(), want[2], rtol=1e-6, atol=0):
                raise RuntimeError("a head's weight differs from that of the definition")
        return worst

    return run


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)
