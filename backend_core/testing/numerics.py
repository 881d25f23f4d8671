"""Errors of a result, its bytes, and memory that shows a read of what nobody wrote."""

from __future__ import annotations

import math

import torch


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| in the Frobenius norm, in float64.

    Infinite where anything is not finite; 0 where both are zero.
    """
    want = want.double()
    difference = float((got.double() - want).norm())
    if difference == 0.0:
        return 0.0
    size = float(want.norm())
    error = difference / size if size > 0.0 else math.inf
    return error if math.isfinite(error) else math.inf


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """uint8, so that NaN equals NaN."""
    return x.contiguous().view(torch.uint8)


def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of NaN: what a kernel reads before it was written shows in its result."""
    return torch.full(size, math.nan, dtype=dtype, device=device)
