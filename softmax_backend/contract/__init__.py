"""What the operators require of their inputs; here what several of them do."""

from __future__ import annotations

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride


def expect_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Require shape, dtype, device, and a last dimension without gaps."""
    expect_shape(name, tensor, shape)
    expect_dtype(name, tensor, dtype)
    expect_device(name, tensor, device)
    expect_stride(name, tensor, len(shape) - 1, 1)


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


def check_scale(scale: float) -> None:
    """The kernels scale after they have found a row's largest product.

    Raises:
        ValueError: the scale is not positive and finite.
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, got {scale}")
