"""Checks of tensor arguments, whose messages say what was expected and what came.

All raise ``ValueError`` and cost one comparison where the argument is right: they run on every
call of an operator, or once for calls alike (``once``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    import torch

Extent = int | str | None
Values = ParamSpec("Values")
Result = TypeVar("Result")
_KEPT = 1024  # results of one check


def once(check: Callable[Values, Result]) -> Callable[Values, Result]:
    """Keep what a check returns for calls that agree in all that it may look at.

    Its arguments are tensors, hashable values, or tuples of these. The check may look at the
    shapes, strides, dtypes and devices of the tensors and at the other values; it must look at no
    element or address, and return no tensor. A check that raises is made again.
    """
    from torch import Tensor

    found: dict[Hashable, Result] = {}
    tensors = {Tensor}  # Tensor and its subclasses that came: isinstance is slow for what is none

    @functools.wraps(check)
    def checked(*values: Values.args, **named: Values.kwargs) -> Result:
        assert not named, "the arguments of a check are positional"
        facts: list[object] = []
        last = None
        for value in values:
            for x in value if isinstance(value, tuple) else (value,):
                if type(x) not in tensors:
                    facts.append(x)
                elif x is last:  # for instance a pool, which is read and written
                    facts.append("again")
                else:
                    facts += x.shape, x.stride(), x.dtype, x.device
                    last = x
        key = tuple(facts)
        try:
            return found[key]
        except KeyError:
            kinds = {type(x) for value in values if isinstance(value, tuple) for x in value}
            kinds |= {type(value) for value in values}
            new = {kind for kind in kinds if issubclass(kind, Tensor)} - tensors
            if new:
                tensors.update(new)
                return checked(*values, **named)
            result = check(*values, **named)
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
