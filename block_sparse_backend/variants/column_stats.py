"""Means and ranges of each channel over the tokens of a tensor, by two small kernels."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.prepared import prepared

E4M3_MAX = 448.0


def column_mean(x: Tensor, spans: Tensor | None = None) -> Tensor:
    """Mean over the tokens of [B, H, L, D]: float32 [B, H, D].

    Args:
        spans: of packed sequences, as ``kernels.quantise`` describes it.
    """
    b, h, length, d = x.shape
    sums = _partial(x, False, spans)
    mean = torch.empty(b, h, d, dtype=torch.float32, device=x.device)
    launch = prepared(kernels.mean_kernel, 4, HEADS=h, D=d, STEP=32).launch
    named = {"sums_ptr": sums, "mean_ptr": mean, "spans_ptr": spans}
    launch((b * h, 1, 1), **named, parts=sums.shape[1], length=length)
    return mean


def value_scales(v: Tensor, spans: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of values [B, H, L, D], the scale that brings each channel to the range of e4m3,
    and its reciprocal; float32 [B, H, D]."""
    b, h, length, d = v.shape
    part = _partial(v, True, spans)
    mean, scale, inverse = torch.empty(3, b, h, d, dtype=torch.float32, device=v.device)
    sizes = {"HEADS": h, "D": d, "STEP": 32}
    prepared(kernels.value_scales_kernel, 4, **sizes, E4M3_MAX=E4M3_MAX).launch(
        (b * h, 1, 1),
        stats_ptr=part,
        mean_ptr=mean,
        scale_ptr=scale,
        inverse_ptr=inverse,
        spans_ptr=spans,
        parts=part.shape[1] // 3,
        length=length,
    )
    return mean, scale, inverse


def _partial(x: Tensor, has_range: bool, spans: Tensor | None) -> Tensor:
    """[B * H, chunks of sums, or of sums, minima and maxima one after another, D]."""
    b, h, length, d = x.shape
    block = min(32, triton.next_power_of_2(length))
    chunk = max(block, 512)
    chunks = -(-length // chunk)
    shape = (b * h, (3 if has_range else 1) * chunks, d)
    part = torch.empty(shape, dtype=torch.float32, device=x.device)
    sizes = {"HEADS": h, "D": d, "CHUNK": chunk, "BLOCK": block}
    prepared(kernels.column_stats_kernel, 4, "x", HAS_RANGE=has_range, **sizes).launch(
        (chunks, b * h, 1), x_ptr=x, stats_ptr=part, spans_ptr=spans, length=length
    )
    return part


def has_kernels(x: Tensor) -> bool:
    """Whether Triton runs here: on a GPU, or on a CPU under its interpreter."""
    interpreted = not isinstance(kernels.column_stats_kernel, triton.runtime.JITFunction)
    return x.device.type != "cpu" or interpreted
