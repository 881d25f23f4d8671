"""Block-sparse attention: plans, masks, variants, tiles and head sizes; 8 bits; predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backend_core.target import Target
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals, predicted
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.sliding_tile import sliding_tile
from block_sparse_backend.plan.token_order import tile_order
from block_sparse_backend.quantise.torch import dequantised
from block_sparse_backend.sage import packed_attention, quantised_attention
from block_sparse_backend.spec import SageMode
from block_sparse_backend.testing.cases import (
    LSE_ERROR,
    OUT_ERROR,
    causal_seen,
    elements_seen,
    inputs,
    quantised,
)
from block_sparse_backend.testing.checks import INT8_ERROR
from tools.amdgcn.case import CPU, Answer, error_of, worse

M, N = 70, 150
TILE = {"block_m": 64, "block_n": 64}
Pair = tuple[Tensor, Tensor]
Cases = dict[str, Callable[[Target], Answer]]


def all_cases() -> Cases:
    cases: dict[str, Callable[[], Answer]] = {}
    for dims, tile in (
        ((192, 128), (64, 64)), ((256, 256), (64, 64)), ((64, 64), (128, 128)),
        ((64, 64), (32, 32)), ((64, 64), (16, 16)),
    ):  # fmt: skip
        name = f"block_sparse: D {dims[0]}, DV {dims[1]}, tiles {tile[0]} x {tile[1]}, bf16"
        cases[name] = lambda dims=dims, tile=tile: _head_sizes(dims, tile)  # type: ignore[misc]
    cases |= {
        "block_sparse: packed sequences, bf16": _packed,
        "block_sparse: dense batch": _dense_batch,
        "block_sparse: sliding tiles": _sliding,
    }
    cases["block_sparse_int8"] = lambda: _quantised(SageMode(fp8_values=False))
    cases["block_sparse_int8: packed sequences"] = _packed_quantised
    for is_causal in (False, True):
        for amount in ({"cdf": 0.7}, {"topk": 0.3}):
            causal = "causal" if is_causal else "dense"
            name = f"predict: {causal}, {next(iter(amount))}"
            cases[name] = lambda a=amount, c=is_causal: _predicted(a, c, 0.3)  # type: ignore[misc]
    # several blocks in each lane, and the head size whose mean takes the widest stores
    many = {"queries": 20, "keys": 16 * 200 - 5, "block_m": 16, "block_n": 16, "dim": 128}
    for name, least in (("topk", -0.1), ("topk, likenesses", 0.3)):
        cases[f"predict: 200 blocks, {name}"] = lambda least=least: _predicted(  # type: ignore[misc]
            {"topk": 0.1}, False, least, **many
        )
    return {name: lambda target, run=run: run() for name, run in cases.items()}  # type: ignore[misc]


def _answer(got: Pair, want: Pair) -> Answer:
    """The worse of output and LSE; a query that sees nothing has 0 and -inf."""
    (out, lse), (ref, ref_lse) = ((a.double(), b.double()) for a, b in (got, want))
    dead = ref_lse.isinf()
    if not torch.equal(lse.isneginf(), dead) or bool(out[dead].any()):
        raise RuntimeError("a query that sees no key must have output 0 and LSE -inf")
    lse_error = float((lse - ref_lse)[~dead].abs().max())
    return worse((error_of(out, ref), OUT_ERROR), (lse_error, LSE_ERROR))


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Pair:
    """The operator over poisoned outputs, on the path of the table."""
    batch, heads, tokens, _ = q.shape
    out = torch.full((batch, heads, tokens, v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((batch, heads, tokens), torch.nan)
    return block_sparse_attention(q, k, v, plan, out=out, lse=lse)


def _inputs(queries: int = M, keys: int = N, dim: int = 64, **options: Any) -> list[Tensor]:
    return list(inputs((2, queries, dim), (1, keys, dim), seed=1, device=CPU, **options))


def _head_sizes(dims: tuple[int, int], tile: tuple[int, int]) -> Answer:
    q, k, v = _inputs(dim=dims[0], dv=dims[1], dtype=torch.bfloat16)
    plan = intervals.causal(M, N, 2, block_m=tile[0], block_n=tile[1], device=CPU)
    want = reference.attention(q, k, v, causal_seen(M, N), dims[0] ** -0.5)
    return _answer(_attend(q, k, v, plan), want)


def _packed() -> Answer:
    """One sequence has no queries, one fewer keys than queries."""
    q_lens, kv_lens = [70, 0, 5, 40], [80, 7, 64, 20]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (q_lens, kv_lens))
    q, k, v = _inputs(sum(q_lens), sum(kv_lens), 128, dtype=torch.bfloat16)
    plan = intervals.ragged(cu_q, cu_k, 128, 128, 2, **TILE)
    out, lse = _attend(q, k, v, plan)
    answers = []
    for i, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        at_q, at_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        own = q[:, :, at_q], k[:, :, at_k], v[:, :, at_k]
        if m:
            want = reference.attention(*own, causal_seen(m, n), 128**-0.5)
            answers.append(_answer((out[:, :, at_q], lse[:, :, at_q]), want))
    return worse(*answers)


def _dense_batch() -> Answer:
    q, k, v = _inputs(50, 128, batch=3)
    plan = intervals.dense(50, 128, 2, batch=3, **TILE, device=CPU)
    want = reference.attention(q, k, v, torch.ones(1, dtype=torch.bool), 0.125)
    return _answer(_attend(q, k, v, plan), want)


def _sliding() -> Answer:
    """A video's tokens in tiles, a window for each head, then text: `block_end`."""
    order = tile_order((2, 6, 7), (2, 4, 4), text=10, block=64, device=CPU)
    plan = sliding_tile(order, [(1, 3, 1), (1, 2, 1)], 2, even_windows="exact", **TILE)
    q, k, v = _inputs(2 * 6 * 7 + 10, 2 * 6 * 7 + 10)
    out, lse = _attend(*(order.gather(x, 2) for x in (q, k, v)), plan)
    seen = elements_seen(plan)[:, order.slot_of][:, :, order.slot_of]
    want = reference.attention(q, k, v, seen, 0.125)
    return _answer((order.scatter(out, 2), order.scatter(lse, 2)), want)


def _packed_quantised() -> Answer:
    """Two sequences and tokens of none, which are 0."""
    q, k, v = _inputs()
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ((0, 20, M - 3), (0, 90, N - 7))]
    got = packed_attention(q, k, v, *offsets, (M, N), is_causal=True)
    want = torch.zeros_like(got, dtype=torch.float64)
    for i in range(2):
        at, keys = (slice(*x[i : i + 2].tolist()) for x in offsets)
        seen = causal_seen(at.stop - at.start, keys.stop - keys.start)
        own = q[:, :, at], k[:, :, keys], v[:, :, keys]
        want[:, :, at] = reference.attention(*own, seen, q.shape[3] ** -0.5)[0]
    return error_of(got, want), INT8_ERROR[False]


def _quantised(mode: SageMode) -> Answer:
    """Inputs with an offset in every channel; beside float64 of the inputs, and beside float64 of
    what the quantisers made of them, which leaves the kernel's own rounding."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        (x.float() + 2 * torch.randn(1, x.shape[1], 1, 64, generator=generator)).half()
        for x in _inputs()
    )
    plan = intervals.causal(M, N, 2, **TILE, device=CPU)
    seen = causal_seen(M, N)
    got = quantised_attention(q, k, v, plan, mode=mode)
    want, _ = reference.attention(q, k, v, seen, 0.125)
    x = quantised(q, k, v, mode, 0.125, TILE["block_n"])
    plain = dataclasses.replace(x, k_mean=torch.zeros_like(x.k_mean))
    out, lse = reference.attention(*dequantised(plain), seen, 0.125)
    assert x.shift is not None
    exact = out, lse + x.shift.double()  # which is added to every logit of a query
    return worse((error_of(got[0], want), INT8_ERROR[False]), _answer(got, exact))


def _predicted(
    amount: dict[str, float],
    is_causal: bool,
    min_likeness: float,
    queries: int = 80,
    keys: int = 200,
    block_m: int = 64,
    block_n: int = 64,
    dim: int = 64,
) -> Answer:
    """The kernels' choice of blocks is torch's, and attention over it is float64's. No block is
    below a likeness under 0, so nobody asks for likenesses then."""
    generator = torch.Generator().manual_seed(7)
    q, k = (
        torch.randn(1, heads, -(-tokens // 16), dim, generator=generator).repeat_interleave(16, 2)[
            :, :, :tokens
        ]
        for heads, tokens in ((2, queries), (1, keys))
    )
    q, k = ((2 * x + 0.2 * torch.randn(x.shape, generator=generator)).half() for x in (q, k))
    v = torch.randn(k.shape, generator=generator).half()
    options: dict[str, Any] = amount | {"is_causal": is_causal, "min_likeness": min_likeness}
    options |= {"keep_first": True}
    options |= {"block_m": block_m, "block_n": block_n}
    plan = predicted.predict(q, k, **options)
    in_torch = predicted.predict(q, k, **options, path="torch")
    if _kept(plan) != _kept(in_torch):
        raise RuntimeError(f"kept {_kept(plan)}, and in torch {_kept(in_torch)}")
    want = reference.attention(q, k, v, elements_seen(plan), dim**-0.5)
    return _answer(_attend(q, k, v, plan), want)


def _kept(plan: BlockPlan) -> list[list[int]]:
    """The columns of each tile of each head."""
    rows, cols = plan.rows.tolist(), plan.cols.tolist()
    return [sorted(cols[rows[r][0] : rows[r][2]]) for *_, r in sorted(plan.work.tolist())]
