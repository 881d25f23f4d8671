"""Calls of a compressor path that ``kda-dsv4 check`` runs: steps of a small engine, byte by byte.

Each call is made twice, on the path under test and by the torch path in float64 on the CPU, from
the same state and cache. State rows must be equal bit for bit, bytes outside the written records
untouched, and records equal but for roundings that fp32 cannot tell apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backend_core.family import CheckCase
from backend_core.operator import forced
from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend import (
    CompressorLayer,
    CompressorSpec,
    SeqLens,
    compress_decode_,
    compress_norm_rope_hadamard_,
    compress_prefill_,
    reference,
)
from dsv4_backend.in_place.torch import in_torch as in_place_torch
from dsv4_backend.launch_params import TABLES
from dsv4_backend.step import CompressorCall
from dsv4_backend.step_plan import CompressorStepPlan, DecodeStepPlan, StateLayout
from dsv4_backend.testing import v41
from dsv4_backend.testing.engine import (
    CompressorEngine,
    make_history,
    make_layer,
    make_spec,
    move_plan,
    rope_table,
)
from dsv4_backend.testing.oracle import within_one_code, without_records
from dsv4_backend.torch_step import step, windows
from dsv4_backend.v41_step import OPERATOR as V41

CPU = torch.device("cpu")
ALLOWED = 0.02
"""Share of the written values that may differ from the definition's, each by one step of its code:
float32 meets the middle between two codes on the other side."""

AMD_LAYOUTS: tuple[tuple[str, StateLayout, CompressorSpec], ...] = (
    ("fp8 in tiles", "ring", make_spec("indexer_fp8_tiles", rounding="sglang")),
    ("fp8 in tiles", "paged", make_spec("indexer_fp8_tiles", rotate=False, rope_layout="split")),
    ("fp4 in planes", "ring", make_spec("indexer_mxfp4_planes", rounding="aiter")),
    ("fp4 in tiles", "paged", make_spec("indexer_mxfp4_tiles", rotate=False, rope_layout="split")),
    ("two pools", "ring", make_spec("fp8_two_pools", rounding="sglang", page_tokens=1)),
    ("two pools", "ring", make_spec("fp8_two_pools", 128, rounding="sglang", page_tokens=1)),
)
"""The record formats that engines keep on AMD GPUs alone, as the engine that has each calls us."""

BF16_ROWS: tuple[tuple[str, StateLayout, CompressorSpec], ...] = (
    ("bf16 rows", "ring", make_spec("bf16_rows", rounding="sglang", page_tokens=1)),
    ("bf16 rows", "paged", make_spec("bf16_rows", rope_layout="split")),
    ("bf16 rows", "ring", make_spec("bf16_rows", 128, rounding="sglang", page_tokens=1)),
    ("bf16 rows", "paged", make_spec("bf16_rows", 128, rope_layout="split")),
)
"""Main records that both engines keep on request: sglang in its window's pool, vLLM in pages."""


def check_cases(row: Row) -> dict[str, CheckCase]:
    """The calls that ``row`` must get right, by name.

    Each returns the share of values that differ and `ALLOWED`. None for the torch path, which is
    what the kernels are compared with.
    """
    if not row.is_kernel:
        return {}
    if row.operator == V41:
        return {name: _allowed(run) for name, run in v41.check_cases(row).items()}
    found: dict[str, Callable[[Target, torch.device], float]] = {}
    layouts: list[StateLayout] = [x for x in ("paged", "ring") if x in row.features]
    for adversarial in (False, True):
        name = "adversarial" if adversarial else "small"
        if row.operator.startswith("in_place"):
            found[name] = functools.partial(_in_place, row, adversarial)
        else:
            for layout in layouts or ("paged", "ring"):
                spec = _spec(row.operator.rpartition("_")[0], layout, adversarial)
                found[f"{name}, {layout}"] = functools.partial(
                    _steps, row, layout, spec, adversarial
                )
    splits = getattr(row.params, "splits", 0)
    if splits == 1:  # `tune` may choose another
        for layout in layouts or ("paged", "ring"):
            spec = _spec("main_c128", layout, False)
            found[f"split channels, {layout}"] = functools.partial(_split_steps, row, layout, spec)
    for title, layout, spec in AMD_LAYOUTS + BF16_ROWS:
        is_of_path = row.operator in (f"{spec.kind}_decode", f"{spec.kind}_prefill")
        if is_of_path and layout in (layouts or ("paged", "ring")):
            found[f"{title}, {layout}"] = functools.partial(_steps, row, layout, spec, False)
    return {name: _allowed(run) for name, run in found.items()}


def _allowed(run: Callable[[Target, torch.device], float]) -> CheckCase:
    return lambda target, device: (run(target, device), ALLOWED)


def _spec(kind: str, layout: StateLayout, adversarial: bool) -> CompressorSpec:
    """``paged`` follows vLLM's rounding, rotation and RoPE table, ``ring`` sglang's."""
    ratio = 128 if kind == "main_c128" else 4
    cache_format = "fp8_ds_mla"
    if kind == "indexer":
        cache_format = "indexer_mxfp4" if adversarial else "indexer_fp8"
    if layout == "paged":
        return make_spec(cache_format, ratio, rotate=False, rope_layout="split")
    return make_spec(cache_format, ratio, rounding="sglang")


def _steps(
    row: Row,
    layout: StateLayout,
    spec: CompressorSpec,
    adversarial: bool,
    target: Target,
    device: torch.device,
) -> float:
    """The worst of a few steps of one engine, which goes on from the definition's result."""
    if layout == "ring" and target.arch == "gfx942":  # sglang stores each GPU's own e4m3
        spec = dataclasses.replace(spec, fp8="fnuz")
    phase = row.operator.rpartition("_")[2]
    lengths = [130, 257, 128] if spec.compress_ratio == 128 else [6, 21, 4]
    engine, layer = CompressorEngine(layout, spec, lengths, device=CPU), make_layer(spec, 5, CPU)
    histories = [
        make_history(spec, length, 50 + n, adversarial=adversarial, device=CPU)
        for n, length in enumerate(lengths)
    ]
    calls = _decode_calls if phase == "decode" else _prefill_calls
    return max(
        _compare(row, engine, engine.call(layer, rows), plan, target, device)
        for plan, rows in calls(engine, layer, histories)
    )


def _split_steps(
    row: Row,
    layout: StateLayout,
    spec: CompressorSpec,
    target: Target,
    device: torch.device,
) -> float:
    """`_steps` with eight programs per request."""
    warps = 1 if target.vendor == "amd" else row.params.num_warps
    params = dataclasses.replace(row.params, splits=8, num_warps=warps, max_registers=0)
    return _steps(dataclasses.replace(row, params=params), layout, spec, False, target, device)


def _prefill_calls(
    engine: CompressorEngine, layer: CompressorLayer, histories: list[torch.Tensor]
) -> Iterator[tuple[CompressorStepPlan, torch.Tensor]]:
    """Two chunks of each request, cut inside a window."""
    cut = [length // 2 + 1 for length in engine.lengths]
    for starts, ends in (([0] * len(cut), cut), (cut, engine.lengths)):
        chunks = [(n, a, b) for n, (a, b) in enumerate(zip(starts, ends, strict=True))]
        yield engine.prefill_plan(chunks), torch.cat([histories[n][a:b] for n, a, b in chunks])


def _decode_calls(
    engine: CompressorEngine, layer: CompressorLayer, histories: list[torch.Tensor]
) -> Iterator[tuple[CompressorStepPlan, torch.Tensor]]:
    """One decoded token per request: first as if the kernel in front wrote anything, then
    with a step plan that is safe to prefetch. The first request is padding."""
    for request, history in enumerate(histories):
        engine.fill_state(layer, request, history[:-1])
    entries = [None, *((n, len(history)) for n, history in enumerate(histories) if n)]
    rows = torch.stack([history[-1] for history in histories])
    for is_safe in (False, True):
        yield engine.decode_plan(entries, is_safe), rows


def _compare(
    row: Row,
    engine: CompressorEngine,
    call: CompressorCall,
    step_plan: CompressorStepPlan,
    target: Target,
    device: torch.device,
) -> float:
    """One call on the path and by the definition: the share of written values that differ."""
    moved, moved_plan = to_device(engine, call, device), move_plan(step_plan, device)
    operator: Any = compress_decode_
    if not isinstance(step_plan, DecodeStepPlan):
        operator = compress_prefill_
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what a plan that is safe to prefetch promises
    operator(
        *(moved.layer, moved.kv_score, moved.state, moved.cache, moved_plan),
        second_cache=moved.second_cache,
        target=target,
        selection=forced(TABLES, target, None, row),
    )
    before = [cache.clone() for cache in engine.caches]
    step(call, step_plan)
    if not torch.equal(_bits(moved.state.cpu()), _bits(engine.state)):
        raise RuntimeError("state rows differ from those of the definition")
    return _different(engine, [cache.cpu() for cache in moved.caches], before, step_plan)


def _different(
    engine: CompressorEngine,
    caches: list[torch.Tensor],
    before: list[torch.Tensor],
    step_plan: CompressorStepPlan,
) -> float:
    """Share of the written values that are not the definition's."""
    spec = engine.spec
    ends = windows(step_plan, spec, engine.state_block)
    slots = torch.tensor(sorted({w.slot for w in ends if w.slot >= 0}), dtype=torch.int64)
    outside = (without_records(x, slots, spec) for x in (caches, before))
    if not all(torch.equal(*pair) for pair in zip(*outside, strict=True)):
        raise RuntimeError("a cache byte outside the written records changed")
    if not len(slots):
        return 0.0
    records = [reference.load(x, slots, spec) for x in (caches, engine.caches)]
    got, want = (reference.dequantise(*record, spec) for record in records)
    error, largest = (got - want).abs(), want.abs().amax(1, keepdim=True)
    if not bool(within_one_code(spec, *records).all()):
        raise RuntimeError("a cached value is more than one step of its code off")
    return float((error > 2e-6 * largest).float().mean())


def to_device(
    engine: CompressorEngine, call: CompressorCall, device: torch.device
) -> CompressorCall:
    """A copy of the call on the device; its state has pages further apart than their rows."""
    layer = call.layer
    full = torch.empty(len(engine.state), engine.state_block + 1, engine.spec.row_width)
    state = full.to(device)[:, : engine.state_block]
    state.copy_(engine.state)
    weights = (layer.ape, layer.norm_weight, layer.rope_table)
    return CompressorCall(
        CompressorLayer(layer.spec, *(x.to(device) for x in weights)),
        call.kv_score.to(device, copy=True),
        state,
        *(cache.to(device, copy=True) for cache in engine.caches),
    )


def _in_place(row: Row, adversarial: bool, target: Target, device: torch.device) -> float:
    """``compress_norm_rope_hadamard_``: the share of elements that differ, by one bf16 ulp."""
    head_dim, ratio = int(row.operator.removeprefix("in_place_")), 4
    rotate = head_dim == 128
    rng = torch.Generator().manual_seed(head_dim)
    kv = torch.randn(6, head_dim, generator=rng)
    if adversarial:
        kv *= 10.0 ** (30 * torch.rand(6, 1, generator=rng) - 20)
        kv[2] = 0.0
    kv = kv.bfloat16()
    weight = (0.5 + torch.rand(head_dim, generator=rng)).bfloat16()
    table = rope_table("interleaved", rng, device=CPU)
    seq_lens = torch.tensor([4, 5, 28, -1, 0, 400], dtype=torch.int32)
    want = kv.clone()
    in_place_torch(want, weight, 1e-6, table, seq_lens, compress_ratio=ratio, rotate=rotate)
    got = kv.to(device, copy=True)
    compress_norm_rope_hadamard_(
        *(got, weight.to(device), 1e-6, table.to(device), SeqLens(seq_lens.to(device))),
        head_dim=head_dim,
        compress_ratio=ratio,
        rotate=rotate,
        target=target,
        selection=forced(TABLES, target, None, row),
    )
    result = got.cpu()
    if not torch.equal(result[[1, 3, 4]], kv[[1, 3, 4]]):
        raise RuntimeError("a row that ends no window was written")
    ulp = 2.0**-7 * want.float().abs() + 1e-6
    if not bool(((result.float() - want.float()).abs() <= ulp).all()):
        raise RuntimeError("an element is more than one bf16 ulp off")
    return float((result != want)[[0, 2, 5]].float().mean())


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)
