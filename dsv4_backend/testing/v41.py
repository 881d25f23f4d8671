"""Steps of a small engine with DeepSeek-V4.1's compressors, on a path and by the definition."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backend_core.operator import Selection, forced
from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend import (
    RecordSpec,
    V41Layer,
    V41Spec,
    V41Step,
    compress_v41_,
    reference,
)
from dsv4_backend.launch_params import TABLES
from dsv4_backend.spec import KEY_DIM, LATENT_DIM
from dsv4_backend.testing.engine import (
    MAX_POSITIONS,
    POISON,
    Chunk,
    default_device,
    move_plan,
    rope_table,
)
from dsv4_backend.testing.oracle import within_one_code, without_records
from dsv4_backend.v41.torch import step
from dsv4_backend.v41_step import V41Call

CPU = torch.device("cpu")
ALLOWED = 0.02
"""Share of the written values that may differ from the definition's: fp32 meets the middle of two
bf16 of the latent, or of the key, on the other side, and then the middle of two codes."""

FORMATS = (
    *(("fp8_ds_mla", "indexer_fp8"), ("mxfp8_rows", "indexer_mxfp4")),
    *(("nvfp4_rows", "indexer_fp8_ue8m0"), ("bf16_rows", "indexer_fp8_tiles")),
)
"""Main and index formats that engines use together, and all others once."""
SGLANG: tuple[str, str, int, str] = ("fp8_ds_mla", "indexer_mxfp4", 32, "sglang_v41")
"""sglang's, for `make_spec`."""


def make_spec(
    ratio: int,
    main: str = "fp8_ds_mla",
    index: str = "indexer_fp8",
    page_tokens: int = 32,
    rounding: str = "vllm",
) -> V41Spec:
    """Records as the engine that is named keeps them."""
    given: dict[str, Any] = {"page_tokens": page_tokens, "rounding": rounding, "fp8": "ocp"}
    return V41Spec(
        compress_ratio=ratio,
        main=RecordSpec(cache_format=main, **given),  # type: ignore[arg-type]
        index=RecordSpec(cache_format=index, **given),  # type: ignore[arg-type]
        rope_layout="split" if rounding == "vllm" else "interleaved",
        eps=1e-20,
    )


def make_layer(
    spec: V41Spec,
    seed: int = 0,
    device: torch.device | None = None,
    positions: int = MAX_POSITIONS,
) -> V41Layer:
    """Random weights: norms in [0.5, 1.5), a projection that keeps a latent's magnitude."""
    device, g = device or default_device(), torch.Generator().manual_seed(seed)
    norms = [0.5 + torch.rand(size, generator=g) for size in (LATENT_DIM, KEY_DIM)]
    projection = torch.randn(KEY_DIM, LATENT_DIM, generator=g) * LATENT_DIM**-0.5
    table = rope_table(spec.rope_layout, g, positions, device)
    return V41Layer(
        spec,
        norms[0].bfloat16().to(device),
        projection.bfloat16().to(device),
        norms[1].bfloat16().to(device),
        table,
    )


def make_history(spec: V41Spec, length: int, seed: int, adversarial: bool = False) -> torch.Tensor:
    """The projections of one sequence [length, 512·r] fp32; adversarial ones have magnitudes from
    1e-12 to 1e4, scores that differ by hundreds, and a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(length, spec.row_width, generator=g)
    if adversarial:
        x[:, :LATENT_DIM] *= 10.0 ** (16 * torch.rand(length, 1, generator=g) - 12)
        x[:, LATENT_DIM:] *= 100.0
        x[length // 2, :LATENT_DIM] = 0.0
    return x


@dataclass
class V41Engine:
    """Rings, caches and addressing of one compressor for a few requests.

    State rows start as NaN and cache bytes as ``POISON``: whatever reads or writes too much shows.
    Plans and calls are those of the engine whose rounding the spec has.

    Attributes:
        requests: of which each has a ring; ring 0 is nobody's, as in vLLM.
        longest: the longest sequence.
        ring_rows: rows of a ring.
    """

    spec: V41Spec
    requests: int
    longest: int
    ring_rows: int = 8
    state: torch.Tensor | None = field(init=False)
    caches: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    slot_of: torch.Tensor = field(init=False)
    is_sglang: bool = field(init=False)

    def __post_init__(self) -> None:
        spec, g = self.spec, torch.Generator().manual_seed(3)
        self.is_sglang = spec.main.rounding == "sglang_v41"
        groups = self.longest // spec.compress_ratio + 1
        self.state = None
        if spec.compress_ratio == 2:  # rings are further apart than their rows
            shape = (self.requests + 1, self.ring_rows + 1, spec.row_width)
            self.state = torch.full(shape, torch.nan)[:, : self.ring_rows]
        tokens = [records.page_tokens for records in (spec.main, spec.index)]
        pages = max(-(-self.requests * groups // n) for n in tokens) + 1
        slots = torch.randperm(pages * min(tokens), generator=g)[: self.requests * groups]
        self.slot_of = slots.view(self.requests, groups)
        strides = (((x.page_bytes + 63) // 64 + 1) * 64 for x in (spec.main, spec.index))
        main, index = (torch.full((pages, n), POISON, dtype=torch.uint8) for n in strides)
        self.caches = main, index

    def plan(self, chunks: Sequence[Chunk], padding: int = 2, known: bool = True) -> V41Step:
        """The plan of chunks one after another, then of padding: tokens, and empty requests.

        Args:
            known: the host knows how long the longest chunk is.
        """
        ratio = self.spec.compress_ratio
        tokens = [(n, p) for n, start, end in chunks for p in range(start, end)]
        slots = [
            int(self.slot_of[n, p // ratio]) if (p + 1) % ratio == 0 else -1 for n, p in tokens
        ]
        pad, lengths = [-1] * padding, [end - start for _, start, end in chunks]
        given: dict[str, Any] = {}
        if ratio == 2 and self.is_sglang:
            # any number above 0 is a token's; of padding the request may be a live one
            requests = [n + 1 for n, _ in tokens] + [1] * padding
            live = torch.tensor([1] * len(tokens) + [0] * padding)
            given = {"state_slots": live, "requests": torch.tensor(requests)}
            if known:
                given["query_starts"] = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        elif ratio == 2:
            starts = torch.tensor([0, *lengths, *[0] * padding]).cumsum(0).int()
            rows = [(n + 1) * self.ring_rows + p % self.ring_rows for n, p in tokens]
            given = {"state_slots": torch.tensor(rows + pad), "query_starts": starts}
        return V41Step(
            positions=torch.tensor([p for _, p in tokens] + [0] * padding),
            slots=torch.tensor(slots + pad),
            index_slots=torch.tensor(slots + pad),
            longest=max(lengths, default=0) if known else None,
            **given,
        )

    def call(self, layer: V41Layer, rows: torch.Tensor) -> V41Call:
        if not self.is_sglang or self.state is None:
            return V41Call(layer, rows, self.state, *self.caches)
        kv, score = (half.contiguous() for half in rows.chunk(2, 1))
        return V41Call(layer, kv, self.state, *self.caches, score)


def to_device(call: V41Call, device: torch.device) -> V41Call:
    """A copy of the call on the device, its rings apart as they were."""
    state = call.state
    if state is not None:
        rings, ring_rows, width = state.shape
        moved = torch.full((rings, ring_rows + 1, width), torch.nan, device=device)[:, :ring_rows]
        state = moved.copy_(state)
    weights = ("norm_weight", "key_projection", "key_norm_weight", "rope_table")
    layer = dataclasses.replace(
        call.layer, **{name: getattr(call.layer, name).to(device) for name in weights}
    )
    rows, cache, index_cache = (
        x.to(device, copy=True) for x in (call.kv_score, call.cache, call.index_cache)
    )
    score = None if call.score is None else call.score.to(device, copy=True)
    return V41Call(layer, rows, state, cache, index_cache, score)


def compare(
    engine: V41Engine,
    call: V41Call,
    plan: V41Step,
    target: Target,
    device: torch.device,
    selection: Selection[Any, Any] | None = None,
) -> float:
    """One call on the paths of a target and by the definition, which the engine goes on from: the
    share of written values that differ; see `judge`."""
    moved = to_device(call, device)
    compress_v41_(
        *(moved.layer, moved.kv_score, moved.state, moved.cache, moved.index_cache),
        move_plan(plan, device),
        score=moved.score,
        target=target,
        selection=selection,
    )
    return judge(engine, call, plan, moved)


def judge(engine: V41Engine, call: V41Call, plan: V41Step, moved: V41Call) -> float:
    """Make a step by the definition, on the engine's memory, and compare ``moved`` with it: the
    share of written values that differ, each by one step of its code.

    Raises:
        RuntimeError: a state row differs, a byte outside the records changed, or a value is more
            than one step of its code off.
    """
    before = [cache.clone() for cache in engine.caches]
    step(call, plan)
    if engine.state is not None and moved.state is not None:
        states = (x.contiguous().cpu().view(torch.int32) for x in (moved.state, engine.state))
        if not torch.equal(*states):
            raise RuntimeError("state rows differ from those of the definition")
    ends, worst = list(plan.group_ends(engine.ring_rows)), 0.0
    got = moved.cache.cpu(), moved.index_cache.cpu()
    for n, records in enumerate((engine.spec.main, engine.spec.index)):
        slots = torch.tensor(sorted({e.slots[n] for e in ends if e.slots[n] >= 0})).long()
        outside = (without_records([x[n]], slots, records)[0] for x in (got, before))
        if not torch.equal(*outside):
            raise RuntimeError(f"a byte outside the written records of {records} changed")
        if not len(slots):
            continue
        ours, wanted = (reference.load([x[n]], slots, records) for x in (got, engine.caches))
        if not bool(within_one_code(records, ours, wanted).all()):
            raise RuntimeError(f"a value of {records} is more than one step of its code off")
        one, other = (reference.dequantise(*record, records) for record in (ours, wanted))
        worst = max(worst, float((one != other).float().mean()))
    return worst


CHUNKS: tuple[tuple[Chunk, ...], ...] = (
    ((0, 0, 3), (1, 0, 4), (2, 0, 1)),
    ((1, 4, 5), (0, 3, 4), (2, 1, 6)),
    ((0, 4, 11), (2, 6, 7), (1, 5, 6)),
    ((0, 11, 12), (1, 6, 7)),
    ((2, 7, 12), (0, 12, 19)),
)
"""Steps that a program per token can serve: decodes, drafts, chunks that begin inside a pair."""
DECODES: tuple[tuple[Chunk, ...], ...] = tuple(
    tuple((n, p, p + 1) for n in range(3)) for p in range(4)
)
"""Steps that it can serve whose rings have two rows."""
LONG_CHUNKS: tuple[tuple[Chunk, ...], ...] = (
    ((0, 0, 9), (1, 0, 1), (2, 0, 17)),
    ((1, 1, 30), (0, 9, 10), (2, 17, 18)),
    ((0, 10, 43), (2, 18, 27), (1, 30, 31)),
)
"""Prompts that write over their ring, beside decodes."""


def serve(
    spec: V41Spec,
    steps: Sequence[Sequence[Chunk]],
    target: Target,
    device: torch.device,
    selection: Selection[Any, Any] | None = None,
    adversarial: bool = False,
    known: bool = True,
    ring_rows: int = 8,
) -> float:
    """The worst share of differing values in the steps of one engine; ``known`` as in
    `V41Engine.plan`."""
    longest = max(end for chunks in steps for _, _, end in chunks)
    engine, layer = V41Engine(spec, 3, longest, ring_rows), make_layer(spec, 5, CPU)
    histories = [make_history(spec, longest, 70 + n, adversarial) for n in range(3)]
    worst = 0.0
    for chunks in steps:
        rows = torch.cat([histories[n][a:b] for n, a, b in chunks])
        rows = torch.cat([rows, torch.full((2, spec.row_width), torch.nan)])
        call = engine.call(layer, rows)
        plan = engine.plan(chunks, known=known)
        worst = max(worst, compare(engine, call, plan, target, device, selection))
    return worst


def check_cases(row: Row) -> dict[str, Callable[[Target, torch.device], float]]:
    """The calls that a path must get right, by name; see `dsv4_backend.testing.check_cases`."""
    found: dict[str, Callable[[Target, torch.device], float]] = {}
    steps = CHUNKS if row.max_longest else LONG_CHUNKS
    for ratio in (1, 2):
        for main, index in FORMATS:
            spec = make_spec(ratio, main, index)
            found[f"ratio {ratio}, {main}, {index}"] = functools.partial(_run, row, spec, steps)
        spec, of_sglang = make_spec(ratio, *SGLANG), DECODES if row.max_longest else LONG_CHUNKS
        found[f"ratio {ratio}, sglang's"] = functools.partial(
            _run, row, spec, of_sglang, ring_rows=2
        )
        spec = make_spec(ratio)
        found[f"ratio {ratio}, adversarial"] = functools.partial(_run, row, spec, steps, True)
    return found


def _run(
    row: Row,
    spec: V41Spec,
    steps: Sequence[Sequence[Chunk]],
    *rest: Any,
    ring_rows: int = 8,
) -> float:
    *is_adversarial, target, device = rest
    chosen = forced(TABLES, target, None, row)
    return serve(spec, steps, target, device, chosen, bool(is_adversarial), ring_rows=ring_rows)
