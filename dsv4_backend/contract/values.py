"""Checks of single arguments, which specs, step plans and calls share."""

from __future__ import annotations

import math
from numbers import Real

import torch

from backend_core.contracts import (
    expect_device,
    expect_dtype,
    expect_shape,
    expect_stride,
    expect_tensors,
)

ROW_DTYPES = (torch.float32, torch.bfloat16)
ROPE_DIM = 64


def expect_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        wanted = " or ".join(str(choice) for choice in allowed)
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def expect_positive(name: str, value: object) -> None:
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a positive and finite number, got {value!r}")


def expect_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def check_index(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str, ...],
    device: torch.device | None = None,
) -> None:
    """An int32 or int64 tensor of ``shape``, contiguous, on ``device`` if one is given."""
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, torch.int32, torch.int64)
    expect_contiguous(name, tensor)
    if device is not None:
        expect_device(name, tensor, device)


def int32_entries(name: str, entries: torch.Tensor, columns: int) -> torch.Tensor:
    """A step plan's entries as [N, columns] int32, or a view of the same as [N, 4 columns] uint8.

    Raises:
        ValueError: they are neither.
    """
    expect_tensors(**{name: entries})
    if entries.dtype is torch.uint8:
        expect_shape(name, entries, ("N", 4 * columns))
        expect_contiguous(name, entries)
        entries = entries.view(torch.int32)
    check_index(name, entries, ("N", columns))
    return entries


def check_rope_table(name: str, table: torch.Tensor, device: torch.device) -> None:
    """[positions, 64] fp32 or bf16, last dimension contiguous."""
    expect_shape(name, table, ("positions", ROPE_DIM))
    expect_dtype(name, table, *ROW_DTYPES)
    expect_stride(name, table, 1, 1)
    expect_device(name, table, device)


def check_norm_weight(name: str, weight: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """[head_dim] fp32 or bf16, contiguous."""
    expect_shape(name, weight, (head_dim,))
    expect_dtype(name, weight, *ROW_DTYPES)
    expect_stride(name, weight, 0, 1)
    expect_device(name, weight, device)
