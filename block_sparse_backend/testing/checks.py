"""What ``kda-dsv4 check`` runs of the block-sparse paths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from backend_core.testing.numerics import relative_error
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals, predicted
from block_sparse_backend.sage import DEFAULT_MODE, quantised_attention
from block_sparse_backend.testing.cases import (
    OUT_ERROR,
    causal_seen,
    elements_seen,
    inputs,
)
from block_sparse_backend.variants.sage import SageMode

if TYPE_CHECKING:
    from backend_core.family import CheckCase
    from backend_core.tables.schema import KernelPath
    from backend_core.target import Target

INT8_ERROR = {True: 6e-2, False: 2e-2}
"""Relative L2 with values in e4m3, and in 16 bits."""


def check_cases(path: KernelPath) -> Mapping[str, CheckCase]:
    """Causal calls with fewer queries than keys and with more, in each head size and mode; one over
    predicted blocks or a map; packed sequences where the path has them."""
    if path.operator == "block_sparse":
        cases: dict[str, CheckCase] = {
            f"causal, {queries} queries, D {dim}": partial(_sixteen_bit, path, queries, dim)
            for queries, dim in ((200, 128), (320, 64))
        }
        cases["predicted blocks"] = partial(_predicted, path)
        if "packed" in path.features:
            cases |= {f"packed, D {dim}": partial(_packed, path, dim) for dim in (128, 64)}
        return cases
    modes = {"16-bit values": SageMode(fp8_values=False)}
    if "e4m3_values" in path.features:
        modes["e4m3 values"] = DEFAULT_MODE
    found: dict[str, CheckCase] = {name: partial(_int8, path, mode) for name, mode in modes.items()}
    return found | {"map of blocks": partial(_mapped, path)}


def _sixteen_bit(
    path: KernelPath, queries: int, dim: int, target: Target, device: torch.device
) -> tuple[float, float]:
    q, k, v = inputs((4, queries, dim), (2, 256, dim), seed=1, device=device)
    block_m, block_n = path.params.blocks
    plan = intervals.causal(queries, 256, 4, block_m=block_m, block_n=block_n, device=device)
    result = block_sparse_attention(q, k, v, plan, path=path.name)
    return _error(result, (q, k, v), causal_seen(queries, 256)), OUT_ERROR


def _error(
    result: tuple[torch.Tensor, torch.Tensor],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
) -> float:
    """Of the output, relative L2.

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


def _predicted(path: KernelPath, target: Target, device: torch.device) -> tuple[float, float]:
    """Attention over blocks that pooled queries and keys predict, with and without likenesses.

    Raises:
        RuntimeError: the kernels keep other blocks than torch, or all blocks.
    """
    generator = torch.Generator().manual_seed(7)
    block_m, block_n = path.params.blocks

    def blocks_alike(heads: int, tokens: int, block: int) -> torch.Tensor:
        x = torch.randn(1, heads, -(-tokens // block), 64, generator=generator)
        x = x.repeat_interleave(block, 2)[:, :, :tokens]
        return (2 * x + 0.2 * torch.randn(x.shape, generator=generator)).half()

    q, k = blocks_alike(2, 2 * block_m + 8, block_m), blocks_alike(1, 6 * block_n - 8, block_n)
    v = torch.randn(k.shape, generator=generator).half()
    q, k, v = (x.to(device) for x in (q, k, v))
    kernels = "torch" if path.name == "torch" else "triton"
    errors = []
    for least in (0.3, -0.1):
        asked = {"topk": 0.4, "min_likeness": least, "block_m": block_m, "block_n": block_n}
        plan = predicted.predict(q, k, path=kernels, **asked)
        result = block_sparse_attention(q, k, v, plan, path=path.name)
        want = predicted.predict(q.cpu(), k.cpu(), path="torch", **asked)
        seen, by_torch = (elements_seen(p) for p in (plan, want))
        if not torch.equal(seen, by_torch) or bool(seen.all()):
            raise RuntimeError("the kernels keep other blocks than torch, or all of them")
        errors.append(_error(result, (q, k, v), seen))
    return max(errors), OUT_ERROR


def _packed(
    path: KernelPath, dim: int, target: Target, device: torch.device
) -> tuple[float, float]:
    """Four sequences: fewer queries than keys, none, more, and one query. The keys of the one
    without queries are NaN, which lie beyond another's last key."""
    q_lens, kv_lens = (70, 0, 300, 1), (80, 40, 130, 64)
    block_m, block_n = path.params.blocks
    cu_q, cu_k = (torch.tensor((0, *x)).cumsum(0) for x in (q_lens, kv_lens))
    q, k, v = inputs((4, 371, dim), (2, 314, dim), seed=3, device=device)
    for x in (k, v):
        x[:, :, cu_k[1] : cu_k[2]] = torch.nan
    offsets = (cu_q.int().to(device), cu_k.int().to(device))
    lengths = (max(q_lens), max(kv_lens))
    plan = intervals.ragged(*offsets, *lengths, 4, block_m=block_m, block_n=block_n)
    out = torch.full_like(q, torch.nan)
    out, lse = block_sparse_attention(q, k, v, plan, path=path.name, out=out)
    errors = []
    for i in (0, 2, 3):
        at_q, at_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        own = q[:, :, at_q], k[:, :, at_k], v[:, :, at_k]
        result = out[:, :, at_q], lse[:, :, at_q]
        errors.append(_error(result, own, causal_seen(q_lens[i], kv_lens[i])))
    return max(errors), OUT_ERROR


def _int8(
    path: KernelPath, mode: SageMode, target: Target, device: torch.device
) -> tuple[float, float]:
    q, k, v = inputs((4, 200, 64), (2, 256, 64), seed=2, device=device)
    block_m, block_n = path.params.blocks
    plan = intervals.causal(200, 256, 4, block_m=block_m, block_n=block_n, device=device)
    result = quantised_attention(q, k, v, plan, mode=mode, path=path.name)
    return _error(result, (q, k, v), causal_seen(200, 256)), INT8_ERROR[mode.fp8_values]


def _mapped(path: KernelPath, target: Target, device: torch.device) -> tuple[float, float]:
    """Blocks of a map, some tiles of which see the first block alone."""
    q, k, v = inputs((2, 200, 64), (1, 500, 64), seed=4, device=device)
    block_m, block_n = path.params.blocks
    shape = (1, 2, -(-200 // block_m), -(-500 // block_n))
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.4
    plan = predicted.from_map(kept.to(device), (200, 500), (block_m, block_n), True)
    mode = SageMode(fp8_values=False)
    result = quantised_attention(q, k, v, plan, mode=mode, path=path.name)
    return _error(result, (q, k, v), elements_seen(plan)), INT8_ERROR[False]
