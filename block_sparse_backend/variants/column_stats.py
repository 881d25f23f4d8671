"""Means and ranges of each channel over the tokens of a tensor, by two small kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.prepared import prepared

E4M3_MAX = 448.0


def column_mean(x: Tensor, packed: BlockPlan | None = None) -> Tensor:
    """Mean over the tokens of [B, H, L, D]: float32 [B, H, D].

    Args:
        packed: the plan of packed sequences, each of which has a mean of its keys: [S, H, D].
    """
    b, h, length, d = x.shape
    sums = _partial(x, False, packed)
    rows, first_blocks, sequences = b, None, None
    if packed is not None:
        rows, first_blocks, sequences = (
            len(packed.sequences),
            packed.first_blocks,
            packed.sequences,
        )
    mean = torch.empty(rows, h, d, dtype=torch.float32, device=x.device)
    prepared(kernels.mean_kernel, 4, HEADS=h, D=d, STEP=32).launch(
        (rows * h, 1, 1),
        sums_ptr=sums,
        mean_ptr=mean,
        first_blocks_ptr=first_blocks,
        sequences_ptr=sequences,
        parts=sums.shape[1],
        length=length,
    )
    return mean


def value_scales(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of values [B, H, L, D], the scale that brings each channel to the range of e4m3,
    and its reciprocal; float32 [B, H, D]."""
    b, h, length, d = v.shape
    part = _partial(v, True, None)
    mean, scale, inverse = (
        torch.empty(b, h, d, dtype=torch.float32, device=v.device) for _ in range(3)
    )
    prepared(kernels.value_scales_kernel, 4, D=d, STEP=32, E4M3_MAX=E4M3_MAX).launch(
        (b * h, 1, 1),
        stats_ptr=part,
        mean_ptr=mean,
        scale_ptr=scale,
        inverse_ptr=inverse,
        parts=part.shape[1] // 3,
        length=length,
    )
    return mean, scale, inverse


def value_offset(sums: Tensor, mean: Tensor, scale: Tensor, length: int) -> Tensor:
    """mean(v - scale v8) from sums [B, H, blocks, D] of v8: float32 [B, H, D]."""
    b, h, parts, d = sums.shape
    offset = torch.empty_like(mean)
    prepared(kernels.value_offset_kernel, 4, D=d, STEP=32).launch(
        (b * h, 1, 1),
        sums_ptr=sums,
        mean_ptr=mean,
        scale_ptr=scale,
        offset_ptr=offset,
        parts=parts,
        length=length,
    )
    return offset


def _partial(x: Tensor, has_range: bool, packed: BlockPlan | None) -> Tensor:
    """[B * H, parts of sums, or of sums, minima and maxima one after another, D]; of packed
    sequences a part is a block of keys."""
    b, h, length, d = x.shape
    block = min(32, triton.next_power_of_2(length))
    chunk, spans = max(block, 512), None
    if packed is not None:
        chunk, spans = packed.block_n, packed.key_blocks
        block = min(32, chunk)
    parts = -(-length // chunk) if spans is None else len(spans)
    shape = (b * h, (3 if has_range else 1) * parts, d)
    part = torch.empty(shape, dtype=torch.float32, device=x.device)
    sizes = {"HEADS": h, "D": d, "CHUNK": chunk, "BLOCK": block}
    prepared(kernels.column_stats_kernel, 4, "x", HAS_RANGE=has_range, **sizes).launch(
        (parts * b * h, 1, 1), x_ptr=x, stats_ptr=part, spans_ptr=spans, length=length, parts=parts
    )
    return part


def has_kernels(x: Tensor) -> bool:
    """Whether Triton runs here: on a GPU, or on a CPU under its interpreter."""
    interpreted = not isinstance(kernels.column_stats_kernel, triton.runtime.JITFunction)
    return x.device.type != "cpu" or interpreted
