"""What ``kda-dsv4 check`` runs of the block-sparse paths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from softmax_backend import reference_block_sparse as reference
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.plan import intervals, predicted
from softmax_backend.sage import DEFAULT_MODE, quantised_attention
from softmax_backend.testing.prefill_cases import OUT_ERROR, causal_seen, inputs, relative_error
from softmax_backend.variants.sage import SageMode

if TYPE_CHECKING:
    from backend_core.family import CheckCase
    from backend_core.tables.schema import KernelPath
    from backend_core.target import Target

INT8_ERROR = {True: 6e-2, False: 3e-2}
"""Relative L2 with values in e4m3, and in 16 bits."""


def check_cases(path: KernelPath) -> Mapping[str, CheckCase]:
    """Causal calls with fewer queries than keys and with more, in each head size and mode, and one
    over predicted blocks."""
    if path.operator == "block_sparse":
        found: dict[str, CheckCase] = {
            f"causal, {queries} queries, D {dim}": partial(_sixteen_bit, path, queries, dim)
            for queries, dim in ((200, 128), (320, 64))
        }
        found["predicted blocks"] = partial(_predicted, path)
        return found
    modes = {"16-bit values": SageMode("per_thread", smooth_q=True, fp8_values=False)}
    if "e4m3_values" in path.features:
        modes["e4m3 values"] = DEFAULT_MODE
    return {name: partial(_int8, path, mode) for name, mode in modes.items()}


def _sixteen_bit(
    path: KernelPath, queries: int, dim: int, target: Target, device: torch.device
) -> tuple[float, float]:
    q, k, v = inputs((4, queries, dim), (2, 256, dim), seed=1, device=device)
    block_m, block_n = _blocks(path)
    plan = intervals.causal(queries, 256, 4, block_m=block_m, block_n=block_n, device=device)
    out, lse = block_sparse_attention(q, k, v, plan, path=path.name)
    seen = causal_seen(queries, 256)
    want, want_lse = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, dim**-0.5)
    dead = want_lse.isinf()
    if not torch.equal(lse.cpu().isneginf(), dead) or out.cpu()[dead].any():
        raise RuntimeError("a query that sees no key must have output 0 and LSE -inf")
    return relative_error(out, want), OUT_ERROR


def _predicted(path: KernelPath, target: Target, device: torch.device) -> tuple[float, float]:
    """Attention over blocks that pooled queries and keys predict.

    Raises:
        RuntimeError: the kernels keep other blocks than torch, or all blocks.
    """
    generator = torch.Generator().manual_seed(7)
    block_m, block_n = _blocks(path)

    def blocks_alike(heads: int, tokens: int, block: int) -> torch.Tensor:
        x = torch.randn(1, heads, -(-tokens // block), 64, generator=generator)
        x = x.repeat_interleave(block, 2)[:, :, :tokens]
        return (2 * x + 0.2 * torch.randn(x.shape, generator=generator)).half()

    q, k = blocks_alike(2, 2 * block_m + 8, block_m), blocks_alike(1, 6 * block_n - 8, block_n)
    v = torch.randn(k.shape, generator=generator).half()
    q, k, v = (x.to(device) for x in (q, k, v))
    kernels = "torch" if path.name == "torch" else "triton"
    asked = {"topk": 0.4, "min_likeness": 0.3, "block_m": block_m, "block_n": block_n}
    plan = predicted.predict(q, k, path=kernels, **asked)  # type: ignore[arg-type]
    out, _ = block_sparse_attention(q, k, v, plan, path=path.name)
    want = predicted.predict(q.cpu(), k.cpu(), path="torch", **asked)  # type: ignore[arg-type]
    seen, by_torch = (reference.elements_seen(p) for p in (plan, want))
    if not torch.equal(seen, by_torch) or bool(seen.all()):
        raise RuntimeError("the kernels keep other blocks than torch, or all of them")
    expected, _ = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, 64**-0.5)
    return relative_error(out, expected), OUT_ERROR


def _int8(
    path: KernelPath, mode: SageMode, target: Target, device: torch.device
) -> tuple[float, float]:
    q, k, v = inputs((4, 200, 64), (2, 256, 64), seed=2, device=device)
    block_m, block_n = _blocks(path)
    plan = intervals.causal(200, 256, 4, block_m=block_m, block_n=block_n, device=device)
    out, _ = quantised_attention(q, k, v, plan, mode=mode, path=path.name)
    seen = causal_seen(200, 256)
    want, _ = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, 64**-0.5)
    return relative_error(out, want), INT8_ERROR[mode.fp8_values]


def _blocks(path: KernelPath) -> tuple[int, int]:
    """(block_m, block_n) of a plan for the path."""
    if path.name == "torch":
        return 64, 64
    return path.params.block_m, path.params.block_n
