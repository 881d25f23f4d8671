"""Contracts of the operators; here the checks that several of them share."""

from __future__ import annotations

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape


def expect_token_stride(name: str, tensor: torch.Tensor) -> None:
    """Tokens of all requests must lie at one stride: request r's follow r - 1's."""
    requests, tokens = tensor.shape[:2]
    if tokens > 1 and requests > 1 and tensor.stride(0) != tokens * tensor.stride(1):
        raise ValueError(
            f"{name} must have stride {tokens * tensor.stride(1)} in dimension 0, got"
            f" {tensor.stride(0)}"
        )


def expect_output(
    name: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Require a result's memory, where it is given, to be contiguous."""
    if tensor is None:
        return
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, dtype)
    expect_device(name, tensor, device)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def token_stride(x: torch.Tensor) -> int:
    """Elements from a query token of ``[requests, query tokens, ...]`` to the next one.

    Where a request has one query token, that dimension's stride may be anything.
    """
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)
