"""Random steps of a small engine and calls of the other operators, against float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.operator import Selection, forced
from backend_core.tables.load import load_table
from backend_core.tables.schema import UPSTREAM
from backend_core.target import Target
from backend_core.testing.numerics import as_bytes
from dsv4_backend import (
    CompressorSpec,
    SeqLens,
    compress_decode_,
    compress_norm_rope_hadamard_,
    compress_prefill_,
)
from dsv4_backend.in_place.torch import in_torch as in_place_torch
from dsv4_backend.launch_params import TABLES
from dsv4_backend.step_plan import CompressorStepPlan, StateLayout
from dsv4_backend.testing.engine import (
    POISON,
    Chunk,
    CompressorEngine,
    make_history,
    make_layer,
    make_spec,
    move_plan,
    rope_table,
)
from dsv4_backend.testing.oracle import equal_share, expected_rows
from tools.fuzz.batches import Draw, FuzzBatch, FuzzCase, MismatchError
from tools.fuzz.dsv4_v41 import v41_case

CPU = torch.device("cpu")
ALLOWED = 0.2
"""Share of a batch's bytes that may be those of a neighbouring value. It is 0 as a rule; where the
largest value of a group lies on the boundary of two scales, all codes of that group are others."""


@dataclass(frozen=True)
class Kind:
    """A compressor and the engine that serves it."""

    name: str
    layout: StateLayout
    spec: CompressorSpec
    state_dtype: torch.dtype = torch.float32


def _vllm(cache_format: str, ratio: int = 4, **changes: Any) -> CompressorSpec:
    return make_spec(cache_format, ratio, rotate=False, rope_layout="split", **changes)


KINDS = (
    Kind("main c4 in vLLM", "paged", _vllm("fp8_ds_mla")),
    Kind("main c128 in vLLM", "paged", _vllm("fp8_ds_mla", 128)),
    Kind("indexer in vLLM", "paged", _vllm("indexer_fp8", page_tokens=64)),
    Kind("fp4 indexer in vLLM", "paged", _vllm("indexer_mxfp4")),
    Kind("main c4 in sglang", "ring", make_spec("fp8_ds_mla", rounding="sglang")),
    Kind(
        "main c128 in sglang, bf16 rows and state",
        "ring",
        make_spec("bf16_rows", 128, rounding="sglang"),
        torch.bfloat16,
    ),
    Kind("indexer in sglang", "ring", make_spec("indexer_fp8", rounding="sglang", page_tokens=64)),
    Kind("fp8 indexer in tiles", "ring", make_spec("indexer_fp8_tiles", rounding="sglang")),
    Kind("fp4 indexer in planes", "ring", make_spec("indexer_mxfp4_planes", rounding="aiter")),
    Kind("fp4 indexer in tiles", "paged", _vllm("indexer_mxfp4_tiles")),
    Kind(
        "main c4 in two pools", "ring", make_spec("fp8_two_pools", rounding="sglang", page_tokens=1)
    ),
    Kind(
        "main c128 in two pools",
        "ring",
        make_spec("fp8_two_pools", 128, rounding="sglang", page_tokens=1),
    ),
)


def drawn_path(draw: Draw, target: Target, operator: str, *features: str) -> Selection[Any, Any]:
    """One of the paths that the table has for an operator."""
    paths = {
        f"{path.name} to {path.max_grid}": path
        for path in load_table(TABLES, target).rows
        if path.operator == operator and path.name != UPSTREAM and set(features) <= path.features
    }
    return forced(TABLES, target, None, paths[draw.choice("path", tuple(paths))])


class _Step:
    """``compress_decode_`` or ``compress_prefill_`` for a few requests of one engine."""

    def __init__(self, phase: str, draw: Draw, target: Target, device: torch.device) -> None:
        self.device, self.target = device, target
        kind = draw.choice("kind", KINDS)
        self.spec = spec = kind.spec
        ratio = spec.compress_ratio
        features = () if phase == "decode" else (kind.layout,)
        self.selection = drawn_path(draw, target, f"{spec.kind}_{phase}", *features)
        count = draw.integer("requests", 1, 6 if ratio == 4 else 3)
        longest = 40 if ratio == 4 else 300
        edges = [n for m in (1, 2) for n in (ratio * m - 1, ratio * m, ratio * m + 1)]
        # a request that has ended nothing yet has a single token
        self.lengths = [max(n, 1) for n in draw.lengths("lengths", count, edges, longest)]
        self.is_adversarial = draw.chance("adversarial", 0.4)
        self.engine = CompressorEngine(
            kind.layout, spec, self.lengths, kind.state_dtype, device=CPU
        )
        self.is_decode = phase == "decode"
        self.plan = self._decode_plan(draw) if self.is_decode else self._prefill_plan(draw)
        self.plan_here: CompressorStepPlan = move_plan(self.plan, device)
        self._allocate(draw)

    def _decode_plan(self, draw: Draw) -> CompressorStepPlan:
        self.is_padding = [draw.chance(f"padding {n}", 0.2) for n in range(len(self.lengths))]
        self.tokens: list[Chunk] = [
            (n, length - 1, length) for n, length in enumerate(self.lengths)
        ]
        entries = [
            None if self.is_padding[n] else (n, length) for n, length in enumerate(self.lengths)
        ]
        return self.engine.decode_plan(entries, draw.chance("safe to prefetch", 0.5))

    def _prefill_plan(self, draw: Draw) -> CompressorStepPlan:
        self.is_padding = [False] * len(self.lengths)
        self.tokens = []
        for n in draw.shuffled(range(len(self.lengths))):
            begin = draw.integer(f"begin {n}", 0, self.lengths[n] - 1)
            if draw.chance(f"whole {n}", 0.4):
                begin = 0
            self.tokens.append((n, begin, self.lengths[n]))
        return self.engine.prefill_plan(self.tokens, padding=draw.integer("padding", 0, 3))

    def _allocate(self, draw: Draw) -> None:
        device, spec, engine = self.device, self.spec, self.engine
        self.layer = make_layer(spec, draw.seed() % 1000, CPU)
        rows = sum(end - begin for _, begin, end in self.tokens)
        dtype = draw.choice("input", (torch.float32, torch.bfloat16))
        gap, extra = draw.choice("gap", (0, 64)), draw.choice("spare rows", (0, 2))
        wide = torch.empty(rows + extra, spec.row_width + gap, dtype=dtype, device=device)
        self.kv_score = wide[:, : spec.row_width]
        pages = len(engine.state)
        shape = (pages, engine.state_block + 1, spec.row_width)
        self.state_memory = torch.empty(shape, dtype=engine.state.dtype, device=device)
        self.state = self.state_memory[:, : engine.state_block]
        self.caches = [torch.empty_like(cache, device=device) for cache in engine.caches]
        names = ("ape", "norm_weight", "rope_table")
        here = {name: getattr(self.layer, name).to(device) for name in names}
        self.layer_here = dataclasses.replace(self.layer, **here)
        self.last_write = torch.zeros(1, device=device)

    def batch(self) -> FuzzBatch:
        return FuzzBatch(self.fill, self.run, self.error, self.kv_score)

    def fill(self, seed: int) -> None:
        engine, spec = self.engine, self.spec
        self.histories = [
            make_history(
                spec, length, (seed + n) % 2**40, adversarial=self.is_adversarial, device=CPU
            )
            for n, length in enumerate(self.lengths)
        ]
        engine.state.fill_(math.nan)
        for cache in engine.caches:
            cache.fill_(POISON)
        for n, begin, _ in self.tokens:
            engine.fill_state(self.layer, n, self.histories[n][:begin])
        rows = torch.cat([self.histories[n][begin:end] for n, begin, end in self.tokens])
        self.rows = rows
        self.kv_score.fill_(math.nan)
        self.kv_score[: len(rows)].copy_(rows)
        self.state_memory.fill_(math.nan)
        self.state.copy_(engine.state)
        for here, cache in zip(self.caches, engine.caches, strict=True):
            here.copy_(cache)
        self.last_write.zero_()  # the launch between, which a step that may prefetch asks for

    def run(self) -> None:
        operator: Callable[..., None] = compress_decode_ if self.is_decode else compress_prefill_
        operator(
            self.layer_here,
            self.kv_score,
            self.state,
            self.caches[0],
            self.plan_here,
            second_cache=self.caches[1] if len(self.caches) > 1 else None,
            target=self.target,
            selection=self.selection,
        )

    def error(self) -> tuple[float, float]:
        engine, spec, ratio = self.engine, self.spec, self.spec.compress_ratio
        call = engine.call(self.layer, self.rows)
        half, want_state = spec.row_width // 2, engine.state.clone()
        for token, position, row in self.plan.state_writes():
            fresh = call.kv_score[token].float()
            if engine.layout == "paged":
                fresh = fresh.clone()
                fresh[half:] += self.layer.ape[position % ratio].flatten()
            page = row // engine.state_block, row % engine.state_block
            want_state[page] = fresh.to(want_state.dtype)
        if not torch.equal(as_bytes(self.state.cpu()), as_bytes(want_state)):
            raise MismatchError("state rows differ from those of the definition")
        if not bool(self.state_memory[:, engine.state_block :].isnan().all()):
            raise MismatchError("memory between the pages of the state was written")
        want: dict[int, torch.Tensor] = {}
        for n, begin, end in self.tokens:
            if self.is_padding[n]:
                continue
            first, last = -(-(begin + 1) // ratio), end // ratio
            if first > last:
                continue
            done = expected_rows(self.layer, self.histories[n][: last * ratio])
            want |= {engine.slot(n, w * ratio): done[w - 1] for w in range(first, last + 1)}
        try:
            share = equal_share([cache.cpu() for cache in self.caches], spec, want)
        except AssertionError as error:
            raise MismatchError(str(error)) from error
        return 1.0 - share, ALLOWED


def steps_case(phase: str) -> FuzzCase:
    """``compress_decode_`` or ``compress_prefill_``."""
    return lambda draw, target, device: _Step(phase, draw, target, device).batch()


def in_place_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random call of ``compress_norm_rope_hadamard_``."""
    head_dim = draw.choice("head_dim", (128, 512))
    ratio = draw.choice("ratio", (4, 128)) if head_dim == 512 else 4
    rotate, dtype = head_dim == 128, draw.choice("dtype", (torch.bfloat16, torch.float32))
    rows = draw.integer("rows", 1, 12)
    selection = drawn_path(draw, target, f"in_place_{head_dim}")
    wide = torch.empty(rows, head_dim + draw.choice("gap", (0, 64)), dtype=dtype, device=device)
    kv, before = wide[:, :head_dim], torch.empty(rows, head_dim, dtype=dtype, device=device)
    table = rope_table("interleaved", torch.Generator().manual_seed(7), device=device)
    weight = torch.empty(head_dim, dtype=draw.choice("weight", (torch.bfloat16, torch.float32)))
    weight = weight.to(device)
    index = draw.choice("index", (torch.int32, torch.int64))
    lengths = torch.empty(rows, dtype=index, device=device)
    kinds = [draw.choice(f"row {n}", ("end", "end", "inside", "padding")) for n in range(rows)]
    adversarial = draw.chance("adversarial", 0.4)

    def fill(seed: int) -> None:
        rng = torch.Generator(device).manual_seed(seed)
        drawn = torch.randn(rows, head_dim, generator=rng, device=device)
        if adversarial:
            power = torch.rand(rows, 1, generator=rng, device=device)
            drawn *= 10.0 ** (30 * power - 20)
            drawn[0] = 0.0
        kv.copy_(drawn)
        before.copy_(kv)
        weight.copy_(0.5 + torch.rand(head_dim, generator=rng, device=device))
        of_kind = {
            "end": torch.randint(1, 1024 // ratio, (rows,), generator=rng, device=device) * ratio,
            "padding": torch.randint(-1, 1, (rows,), generator=rng, device=device),
        }
        of_kind["inside"] = of_kind["end"] + 1
        lengths.copy_(torch.stack([of_kind[kind][n] for n, kind in enumerate(kinds)]))

    def run() -> None:
        compress_norm_rope_hadamard_(
            kv,
            weight,
            1e-6,
            table,
            SeqLens(lengths),
            head_dim=head_dim,
            compress_ratio=ratio,
            rotate=rotate,
            target=target,
            selection=selection,
        )

    def error() -> tuple[float, float]:
        want = before.double()
        in_place_torch(want, weight, 1e-6, table, lengths, compress_ratio=ratio, rotate=rotate)
        idle = [n for n, kind in enumerate(kinds) if kind != "end"]
        if not torch.equal(as_bytes(kv[idle]), as_bytes(before[idle])):
            raise MismatchError("a row that ends no window was written")
        half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 0.0
        bound = 1.02 * half_ulp * want.abs() + 4e-6 * want.abs().amax(1, keepdim=True) + 1e-30
        return float(((kv.double() - want).abs() / bound).max()), 1.0

    return FuzzBatch(fill, run, error)


CASES: Mapping[str, FuzzCase] = {
    "decode": steps_case("decode"),
    "prefill": steps_case("prefill"),
    "in_place": in_place_case,
    "v41": v41_case,
}
