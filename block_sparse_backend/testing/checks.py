"""Calls of the block-sparse paths that ``kda-dsv4 check`` runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from backend_core.testing.numerics import relative_error
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals, predicted
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.quantise.torch import dequantised
from block_sparse_backend.sage import (
    DEFAULT_MODE,
    packed_attention,
    predicted_attention,
    quantised_attention,
)
from block_sparse_backend.selection import default_blocks_int8
from block_sparse_backend.spec import SageMode
from block_sparse_backend.testing.cases import (
    OUT_ERROR,
    causal_seen,
    elements_seen,
    inputs,
    quantised,
)

if TYPE_CHECKING:
    from backend_core.family import CheckCase
    from backend_core.tables.schema import Row
    from backend_core.target import Target

INT8_ERROR = {True: 6e-2, False: 2e-2}
"""Relative L2 with values in e4m3, and in 16 bits."""


def check_cases(row: Row) -> Mapping[str, CheckCase]:
    """Causal calls with fewer queries than keys and with more, in each head size and mode; packed
    sequences where the path has them; inputs that are quantised; predicted plans and those of a
    map and of packed sequences."""
    modes = {"16-bit values": SageMode(fp8_values=False)}
    if "e4m3_values" in row.features:
        modes["e4m3 values"] = DEFAULT_MODE
    cases: dict[str, CheckCase]
    match row.operator:
        case "block_sparse":
            cases = {
                f"causal, {queries} queries, D {dim}": partial(_sixteen_bit, row, queries, dim)
                for queries, dim in ((200, 128), (320, 64))
            }
            if "packed" in row.features:
                cases |= {f"packed, D {dim}": partial(_packed, row, dim) for dim in (128, 64)}
        case "block_sparse_int8":
            cases = {name: partial(_int8, row, mode) for name, mode in modes.items()}
        case "quantise":
            cases = {name: partial(_quantised, row, mode) for name, mode in modes.items()}
            cases["packed sequences"] = partial(_packed_int8, row)
        case "predict":
            cases = {"predicted blocks": partial(_predicted, row)}
        case _:
            cases = {"map of blocks": partial(_mapped, row), "packed": partial(_offsets, row)}
    return cases


def _sixteen_bit(
    row: Row, queries: int, dim: int, target: Target, device: torch.device
) -> tuple[float, float]:
    q, k, v = inputs((4, queries, dim), (2, 256, dim), seed=1, device=device)
    block_m, block_n = row.params.blocks
    plan = intervals.causal(queries, 256, 4, block_m=block_m, block_n=block_n, device=device)
    result = block_sparse_attention(q, k, v, plan, path=row.name)
    return _error(result, (q, k, v), causal_seen(queries, 256)), OUT_ERROR


def _error(
    result: tuple[torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
) -> float:
    """The relative L2 error of the output.

    Raises:
        RuntimeError: a query that sees no key has another output or LSE than it must.
    """
    q, k, v = (x.cpu() for x in tensors)
    out, lse = (x.cpu() for x in result)
    want, want_lse = reference.attention(q, k, v, seen, q.shape[3] ** -0.5)
    dead = want_lse.isinf()
    if not torch.equal(lse.isneginf(), dead) or out[dead].any():
        raise RuntimeError("a query that sees no key must have output 0 and LSE -inf")
    return relative_error(out, want)


def _predicted(row: Row, target: Target, device: torch.device) -> tuple[float, float]:
    """Blocks that pooled queries and keys predict, with and without likenesses, by `predict` and
    while quantising; and the error of attention over them.

    Raises:
        RuntimeError: the path keeps other blocks than torch, or all blocks.
    """
    generator = torch.Generator().manual_seed(7)
    block_m, block_n = default_blocks_int8(device)

    def blocks_alike(heads: int, tokens: int, block: int) -> torch.Tensor:
        x = torch.randn(1, heads, -(-tokens // block), 64, generator=generator)
        x = x.repeat_interleave(block, 2)[:, :, :tokens]
        return (2 * x + 0.2 * torch.randn(x.shape, generator=generator)).half()

    q, k = blocks_alike(2, 2 * block_m + 8, block_m), blocks_alike(1, 6 * block_n - 8, block_n)
    v = torch.randn(k.shape, generator=generator).half()
    q, k, v = (x.to(device) for x in (q, k, v))
    errors, mode = [], SageMode(fp8_values=False)
    tile: dict[str, Any] = {"block_m": block_m, "block_n": block_n}
    for least in (0.3, -0.1):
        asked: dict[str, Any] = {"topk": 0.4, "min_likeness": least}
        want = elements_seen(predicted.predict(q.cpu(), k.cpu(), path="torch", **asked, **tile))
        plan = predicted.predict(q, k, path=row.name, **asked, **tile)
        *_, on_the_way = predicted_attention(q, k, v, Choice(**asked), mode=mode, path=row.name)
        seen = [elements_seen(found) for found in (plan, on_the_way)]
        if not all(torch.equal(want, x) for x in seen) or bool(want.all()):
            raise RuntimeError("other blocks are kept than in torch, or all of them")
        errors.append(_error(block_sparse_attention(q, k, v, plan), (q, k, v), want))
    return max(errors), OUT_ERROR


def _packed(row: Row, dim: int, target: Target, device: torch.device) -> tuple[float, float]:
    """Four sequences: fewer queries than keys, none, more, and one query. The keys of the one
    without queries are NaN, which lie beyond another's last key."""
    q_lens, kv_lens = (70, 0, 300, 1), (80, 40, 130, 64)
    block_m, block_n = row.params.blocks
    cu_q, cu_k = (torch.tensor((0, *x)).cumsum(0) for x in (q_lens, kv_lens))
    q, k, v = inputs((4, 371, dim), (2, 314, dim), seed=3, device=device)
    for x in (k, v):
        x[:, :, cu_k[1] : cu_k[2]] = torch.nan
    offsets = (cu_q.int().to(device), cu_k.int().to(device))
    lengths = (max(q_lens), max(kv_lens))
    plan = intervals.ragged(*offsets, *lengths, 4, block_m=block_m, block_n=block_n)
    out = torch.full_like(q, torch.nan)
    out, lse = block_sparse_attention(q, k, v, plan, path=row.name, out=out)
    errors = []
    for i in (0, 2, 3):
        at_q, at_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        own = q[:, :, at_q], k[:, :, at_k], v[:, :, at_k]
        result = out[:, :, at_q], lse[:, :, at_q]
        errors.append(_error(result, own, causal_seen(q_lens[i], kv_lens[i])))
    return max(errors), OUT_ERROR


def _int8(row: Row, mode: SageMode, target: Target, device: torch.device) -> tuple[float, float]:
    q, k, v = inputs((4, 200, 64), (2, 256, 64), seed=2, device=device)
    block_m, block_n = row.params.blocks
    plan = intervals.causal(200, 256, 4, block_m=block_m, block_n=block_n, device=device)
    result = quantised_attention(q, k, v, plan, mode=mode, path=row.name)
    return _error(result, (q, k, v), causal_seen(200, 256)), INT8_ERROR[mode.fp8_values]


def _quantised(
    row: Row, mode: SageMode, target: Target, device: torch.device
) -> tuple[float, float]:
    """The largest error of q, k and v."""
    given = inputs((4, 200, 64), (2, 256, 64), seed=2, device=device)
    made = dequantised(quantised(*given, mode, 0.125, 64, row.name))
    errors = [relative_error(x.cpu(), y.cpu()) for x, y in zip(made, given, strict=True)]
    return max(errors), INT8_ERROR[mode.fp8_values]


def _packed_int8(row: Row, target: Target, device: torch.device) -> tuple[float, float]:
    """Two sequences of different keys' means, and tokens of none, which are 0."""
    q, k, v = inputs((2, 70, 64), (1, 150, 64), seed=5, device=device)
    k[:, :, :90] += 4.0
    ends_q, ends_k = (0, 20, 67), (0, 90, 143)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends_q, ends_k))
    out = packed_attention(q, k, v, cu_q, cu_k, (70, 150), is_causal=True, path=row.name)
    if out[:, :, 67:].any():
        raise RuntimeError("tokens of no sequence must have output 0")
    errors = []
    for i in range(2):
        at, keys = (slice(*ends[i : i + 2]) for ends in (ends_q, ends_k))
        own = [x.cpu() for x in (q[:, :, at], k[:, :, keys], v[:, :, keys])]
        seen = causal_seen(at.stop - at.start, keys.stop - keys.start)
        want, _ = reference.attention(own[0], own[1], own[2], seen, 64**-0.5)
        errors.append(relative_error(out[:, :, at].cpu(), want))
    return max(errors), INT8_ERROR[False]


def _mapped(row: Row, target: Target, device: torch.device) -> tuple[float, float]:
    """Elements that a map's plan sees and those of the map that differ, with the first block kept
    in any case."""
    shape, blocks = (1, 2, 4, 5), (64, 128)
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.4
    plan = predicted.from_map(kept.to(device), (200, 600), blocks, True, row.name)
    kept[..., 0] = True
    want = kept[0].repeat_interleave(64, 1).repeat_interleave(128, 2)[:, :200, :600]
    return float((elements_seen(plan) != want).sum()), 0.0


def _offsets(row: Row, target: Target, device: torch.device) -> tuple[float, float]:
    """Numbers of the plan of packed sequences that differ from torch's: more queries than keys,
    none, and fewer."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 70, 70, 300), (0, 40, 90, 700)))
    of: dict[str, Any] = {"tokens": (300, 700), "block_m": 64, "block_n": 64}
    want = intervals.ragged(cu_q, cu_k, 230, 610, 2, **of, path="torch")
    got = intervals.ragged(cu_q.to(device), cu_k.to(device), 230, 610, 2, **of, path=row.name)
    names = ("rows", "work", "sequences", "key_blocks", "first_blocks")
    pairs = [(getattr(got, name).cpu(), getattr(want, name)) for name in names]
    return float(sum(int((x != y).sum()) for x, y in pairs)), 0.0
