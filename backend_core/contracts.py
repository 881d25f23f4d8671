"""Checks of tensor arguments, whose messages say what was expected and what came.

All raise ``ValueError`` and cost one comparison where the argument is right: they run on every
call of an operator, or once for calls alike (``once``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Extent = int | str | None
Tensors = TypeVar("Tensors", bound="tuple[torch.Tensor | None, ...]")
Options = TypeVar("Options", bound=Hashable)
Result = TypeVar("Result")
_KEPT = 1024  # results of one check


def once(check: Callable[[Tensors, Options], Result]) -> Callable[[Tensors, Options], Result]:
    """Keep what a check returns for calls that agree in all that it may look at.

    These are the shapes, strides, dtypes and devices of the tensors, and the options. It must look
    at no value or address, and return no tensor. A check that raises is made again.
    """
    found: dict[Hashable, Result] = {}

    @functools.wraps(check)
    def checked(tensors: Tensors, options: Options) -> Result:
        facts = [t if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        key = (options, *facts)
        try:
            return found[key]
        except KeyError:
            result = check(tensors, options)
        if len(found) >= _KEPT:
            found.clear()
        found[key] = result
        return result

    return checked


def expect_shape(name: str, tensor: torch.Tensor, expected: tuple[Extent, ...]) -> None:
    """Require ``tensor.shape == expected``.

    ``expected`` holds, for each dimension, its size, or a symbol (``"T"``) or ``None`` where any
    size will do; the symbol only names the dimension in the message.
    """
    shape = tensor.shape
    if shape == expected:
        return
    if len(shape) == len(expected):
        for want, got in zip(expected, shape, strict=True):
            if isinstance(want, int) and want != got:
                break
        else:
            return
    raise ValueError(f"{name} must have shape {_extents(expected)}, got {_extents(shape)}")


def expect_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Require the tensor's dtype to be one of ``dtypes``."""
    if tensor.dtype in dtypes:
        return
    allowed = " or ".join(_dtype(dtype) for dtype in dtypes)
    raise ValueError(f"{name} must have dtype {allowed}, got {_dtype(tensor.dtype)}")


def expect_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require the tensor to live on ``device``; give the index too, as ``tensor.device`` does."""
    if tensor.device == device:
        return
    raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def expect_stride(name: str, tensor: torch.Tensor, dim: int, value: int) -> None:
    """Require ``tensor.stride(dim) == value``, in elements.

    A dimension of one element has no stride to speak of and passes.
    """
    got = tensor.stride()[dim]  # half the time of stride(dim)
    if got == value or tensor.shape[dim] <= 1:
        return
    raise ValueError(f"{name} must have stride {value} in dimension {dim}, got {got}")


def _extents(extents: Sequence[Extent]) -> str:
    return "[" + ", ".join("any" if e is None else str(e) for e in extents) + "]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
