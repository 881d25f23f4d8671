"""Random calls of attention over blocks, in 16 and in 8 bits, against float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backend_core.tables.load import load_table
from backend_core.target import Target
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.drop_ins.sageattention import sageattn
from block_sparse_backend.launch_params import TABLES
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import (
    FULL,
    PARTIAL,
    SKIP,
    BlockPlan,
    from_kinds,
    uniform_sequences,
)
from block_sparse_backend.sage import quantised_attention
from block_sparse_backend.selection import default_blocks_int8
from block_sparse_backend.spec import BlockSparseSpec, SageMode
from block_sparse_backend.testing.cases import LSE_ERROR, OUT_ERROR, causal_seen
from block_sparse_backend.testing.checks import INT8_ERROR
from tools.fuzz.batches import (
    Draw,
    FuzzBatch,
    FuzzCase,
    MismatchError,
    expect_untouched,
    output_error,
    worst,
)

EDGES = (1, 2, 63, 64, 65, 127, 128, 129)
LONGEST = 200
_INT8_LSE = 1.0
_UNTOUCHED = 123.0


@dataclass(frozen=True)
class Shape:
    """Head sizes, dtype and the blocks of plans: each is a compilation of its own."""

    name: str
    dim: int
    dv: int
    dtype: torch.dtype
    block_m: int
    block_n: int


SHAPES = (
    Shape("D 128", 128, 128, torch.bfloat16, 128, 128),
    Shape("D 64, blocks of 64 keys", 64, 64, torch.float16, 128, 64),
    Shape("D 64, blocks of 32", 64, 64, torch.bfloat16, 32, 32),
    Shape("D 192 and 128", 192, 128, torch.bfloat16, 64, 64),
)
KINDS = ("dense", "causal", "kinds", "ragged")
SAGE_MODES = {
    "e4m3 values": SageMode(),
    "16-bit values": SageMode(fp8_values=False),
}


class _Sparse:
    """A plan with the elements that it has, and tensors for it."""

    def __init__(self, draw: Draw, device: torch.device) -> None:
        self.device = device
        self.shape = draw.choice("shape", SHAPES)
        self.kind = draw.choice("kind", KINDS)
        self.kv_heads = draw.choice("key heads", (1, 2))
        self.heads = self.kv_heads * draw.choice("group", (1, 3))
        ragged = self.kind == "ragged"
        self.batch = 1 if ragged else draw.choice("batch", (1, 2))
        count = draw.integer("sequences", 1, 4) if ragged else 1
        edges = (0, *EDGES) if ragged else EDGES
        self.queries = [
            n if ragged else max(n, 1) for n in draw.lengths("queries", count, edges, LONGEST)
        ]
        self.keys = [
            n if ragged else max(n, 1) for n in draw.lengths("keys", count, edges, LONGEST)
        ]
        self.keys[0] = max(self.keys[0], 1)  # kernels want a key, though it be of another sequence
        self.order = draw.choice("layout", ("tokens first", "heads first"))
        self.spare = draw.choice("spare rows", (0, 3)) if ragged else 0
        self.plan, self.seen = self._plan(draw)
        self._allocate(draw)

    def _plan(self, draw: Draw) -> tuple[BlockPlan, list[Tensor]]:
        """The plan, and bool [H or 1, M, N] for each sequence."""
        shape, device, heads = self.shape, self.device, self.heads
        blocks: dict[str, Any] = {"block_m": shape.block_m, "block_n": shape.block_n}
        m, n = self.queries[0], self.keys[0]
        if self.kind == "ragged":
            return self._ragged(draw, blocks)
        here = blocks | {"batch": self.batch, "device": device}
        if self.kind == "dense":
            return intervals.dense(m, n, heads, **here), [torch.ones(1, m, n, dtype=torch.bool)]
        if self.kind == "causal":
            return intervals.causal(m, n, heads, **here), [causal_seen(m, n)[None]]
        rng = torch.Generator().manual_seed(draw.seed())
        rate = draw.choice("rate", (0.1, 0.5, 0.9))
        tiles, cols = -(-m // shape.block_m), -(-n // shape.block_n)
        chosen = torch.rand(1, self.kv_heads, tiles, cols, generator=rng) < rate
        sequences = uniform_sequences(self.batch, m, n, device)
        kinds = torch.where(chosen, FULL, SKIP).to(torch.int8)
        if n % shape.block_n:  # the last block ends early
            kinds[..., -1] = torch.where(chosen[..., -1], PARTIAL, SKIP).to(torch.int8)
        plan = from_kinds(kinds.to(device), heads, sequences, shape.block_m, shape.block_n)
        seen = chosen[0].repeat_interleave(heads // self.kv_heads, 0)
        seen = seen.repeat_interleave(shape.block_m, 1).repeat_interleave(shape.block_n, 2)
        return plan, [seen[:, :m, :n]]

    def _ragged(self, draw: Draw, blocks: dict[str, Any]) -> tuple[BlockPlan, list[Tensor]]:
        device, heads = self.device, self.heads
        is_causal = draw.chance("causal", 0.7)
        seen = [
            causal_seen(m, n)[None] if is_causal else torch.ones(1, m, n, dtype=torch.bool)
            for m, n in zip(self.queries, self.keys, strict=True)
        ]
        cu_q, cu_k = (
            torch.tensor([0, *x], device=device).cumsum(0).int() for x in (self.queries, self.keys)
        )
        longest = (max(1, *self.queries), max(1, *self.keys))
        plan = intervals.ragged(cu_q, cu_k, *longest, heads, is_causal=is_causal, **blocks)
        return plan, seen

    def _allocate(self, draw: Draw) -> None:
        shape, total_q, total_k = self.shape, sum(self.queries), sum(self.keys)

        def tokens(heads: int, count: int, dim: int) -> Tensor:
            if self.order == "heads first":
                size = (self.batch, heads, count, dim)
                return torch.empty(size, dtype=shape.dtype, device=self.device)
            size = (self.batch, count, heads, dim)
            return torch.empty(size, dtype=shape.dtype, device=self.device).transpose(1, 2)

        self.q = tokens(self.heads, total_q + self.spare, shape.dim)
        self.k = tokens(self.kv_heads, total_k + self.spare, shape.dim)
        self.v = tokens(self.kv_heads, total_k + self.spare, shape.dv)
        self.out = tokens(self.heads, total_q + self.spare, shape.dv)
        self.lse = torch.empty(self.out.shape[:3], device=self.device)

    def fill(self, seed: int) -> None:
        rng = torch.Generator(self.device).manual_seed(seed)
        total = (sum(self.queries), sum(self.keys), sum(self.keys))
        for x, count in zip((self.q, self.k, self.v), total, strict=True):
            x.fill_(math.nan)  # beyond the last sequence
            drawn = torch.randn(*x.shape[:2], count, x.shape[3], generator=rng, device=self.device)
            x[:, :, :count] = drawn.to(x.dtype)
        self.out.fill_(_UNTOUCHED)
        self.lse.fill_(_UNTOUCHED)

    def error(self) -> tuple[float, float]:
        begin_q = begin_k = 0
        found = [(0.0, OUT_ERROR)]
        for m, n, seen in zip(self.queries, self.keys, self.seen, strict=True):
            at_q, at_k = slice(begin_q, begin_q + m), slice(begin_k, begin_k + n)
            begin_q, begin_k = at_q.stop, at_k.stop
            if not m:
                continue
            want, want_lse = reference.attention(
                self.q[:, :, at_q],
                self.k[:, :, at_k],
                self.v[:, :, at_k],
                seen.to(self.device),
                self.shape.dim**-0.5,
            )
            found += _errors(self.out[:, :, at_q], self.lse[:, :, at_q], want, want_lse)
        rest = self.out[:, :, begin_q:]
        expect_untouched("an output row of no sequence", torch.full_like(rest, _UNTOUCHED), rest)
        return worst(*found)


def _errors(
    out: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor, lse_error: float = LSE_ERROR
) -> list[tuple[float, float]]:
    dead = want_lse.isinf()
    if not torch.equal(lse.isneginf(), dead) or bool(out[dead].any()):
        raise MismatchError("a query that sees no key must have output 0 and LSE -inf")
    off = (lse.double() - want_lse)[~dead].abs()
    largest = float(off.max()) if off.numel() else 0.0
    return [output_error(out[~dead], want[~dead], OUT_ERROR), (largest, lse_error)]


def block_sparse_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random call of ``block_sparse_attention``."""
    x = _Sparse(draw, device)
    needs = BlockSparseSpec.of(x.q, x.k, x.v, x.plan).requires()
    rows = [row for row in load_table(TABLES, target).rows if row.operator == "block_sparse"]
    path = draw.choice("path", [row for row in rows if needs <= row.features])

    def run() -> None:
        block_sparse_attention(x.q, x.k, x.v, x.plan, path=path.name, out=x.out, lse=x.lse)

    return FuzzBatch(x.fill, run, x.error)


def int8_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random call of ``sageattn``, or of ``quantised_attention`` with a plan."""
    mode = SAGE_MODES[draw.choice("mode of values", tuple(SAGE_MODES))]
    dim = draw.choice("D", (64, 128, 40))
    kv_heads, batch = draw.choice("key heads", (1, 2)), draw.choice("batch", (1, 2))
    heads = kv_heads * draw.choice("group", (1, 2))
    m, n = (max(1, draw.lengths(name, 1, EDGES, LONGEST)[0]) for name in ("queries", "keys"))
    is_causal = draw.chance("causal", 0.6)
    layout = draw.choice("layout", ("HND", "NHD"))
    dtype = draw.choice("dtype", (torch.float16, torch.bfloat16))
    planned = dim != 40 and draw.chance("planned", 0.4)
    q, k, v = (
        torch.empty(batch, h, count, dim, dtype=dtype, device=device)
        if layout == "HND"
        else torch.empty(batch, count, h, dim, dtype=dtype, device=device)
        for h, count in ((heads, m), (kv_heads, n), (kv_heads, n))
    )
    result: list[Tensor] = []
    views = [x if layout == "HND" else x.transpose(1, 2) for x in (q, k, v)]
    plan = None
    if planned:
        block_m, block_n = default_blocks_int8(device)
        make = intervals.causal if is_causal else intervals.dense
        plan = make(m, n, heads, batch=batch, block_m=block_m, block_n=block_n, device=device)

    def fill(seed: int) -> None:
        rng = torch.Generator(device).manual_seed(seed)
        for x, spread in zip(views, (2.0, 3.0, 1.0), strict=True):
            drawn = torch.randn(x.shape, generator=rng, device=device)
            # an offset in every channel, as models have
            offset = torch.randn(1, x.shape[1], 1, dim, generator=rng, device=device)
            x.copy_(drawn + spread * offset)

    def run() -> None:
        if plan is not None:
            result[:] = quantised_attention(views[0], views[1], views[2], plan, mode=mode)
            return
        out, lse = sageattn(q, k, v, layout, is_causal, None, True, mode)
        result[:] = (out if layout == "HND" else out.transpose(1, 2)), lse

    def error() -> tuple[float, float]:
        seen = causal_seen(m, n) if is_causal else torch.ones(m, n, dtype=torch.bool)
        want, want_lse = reference.attention(
            views[0], views[1], views[2], seen.to(device), dim**-0.5
        )
        out, lse = result
        of_lse = _errors(out, lse, want, want_lse, _INT8_LSE)[1]
        dead = want_lse.isinf()
        bound = INT8_ERROR[mode.fp8_values]
        return worst(output_error(out[~dead], want[~dead], bound), of_lse)

    return FuzzBatch(fill, run, error)


CASES: Mapping[str, FuzzCase] = {"block_sparse": block_sparse_case, "block_sparse_int8": int8_case}
