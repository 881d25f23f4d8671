"""Checks of tensor arguments, whose messages say what was expected and what came.

All raise ``ValueError`` and cost one comparison where the argument is right: they run on every
call of an operator, or once for calls alike (``once``).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

Extent = int | str | None
Values = ParamSpec("Values")
Result = TypeVar("Result")
_KEPT = 1024  # results of one check


def once(check: Callable[Values, Result]) -> Callable[Values, Result]:
    """Keep what a check returns for calls that agree in all that it may look at.

    Its arguments are hashable values, tensors, or tuples of these of a fixed length; ``None`` may
    stand for a tensor or a tuple. The check may look at the shapes, strides, dtypes and devices of
    the tensors and at the other values; it must look at no element or address, and return no
    tensor. A check that raises is made again.
    """
    # one value, replaced as a whole: threads may meet here, and a key is of the function beside it
    kept: tuple[_Layout, Callable[..., Hashable], dict[Hashable, Result]] = ([], _unknown, {})

    def miss(values: tuple[object, ...]) -> Result:
        nonlocal kept
        layout, signature, found = kept
        learned = _learn(layout, values)
        if learned != layout:
            signature, found = _signature_function(learned), {}
            kept = learned, signature, found
        result = check(*values)  # type: ignore[arg-type, call-arg]
        if len(found) >= _KEPT:
            found.clear()
        found[signature(*values)] = result
        return result

    @functools.wraps(check)
    def checked(*values: Values.args, **named: Values.kwargs) -> Result:
        assert not named, "the arguments of a check are positional"
        try:
            _, signature, found = kept
            return found[signature(*values)]
        except (KeyError, AttributeError, TypeError, ValueError):
            pass  # not seen, or a tensor where there was none, or none where there was one
        return miss(values)

    return checked


@dataclass
class _Leaf:
    """What has come as one argument of a check, or as one element of a tuple.

    Attributes:
        tensor, other: a tensor has; something else has.
        again: the tensor before it has come again, for instance a pool that is read and written.
    """

    tensor: bool = False
    other: bool = False
    again: bool = False

    def learn(self, x: object, is_tensor: bool, before: object) -> None:
        self.tensor |= is_tensor
        self.other |= not is_tensor
        self.again |= is_tensor and x is before


_Layout: TypeAlias = "list[_Leaf | list[_Leaf]]"


def _learn(layout: _Layout, values: tuple[object, ...]) -> _Layout:
    """``layout`` with what the arguments of a call add to it."""
    from torch import Tensor

    layout = copy.deepcopy(layout)
    layout += [_Leaf() for _ in values[len(layout) :]]
    for position, value in enumerate(values):
        leaf = layout[position]
        if isinstance(value, tuple):
            if isinstance(leaf, _Leaf):
                leaf = layout[position] = [_Leaf(other=leaf.other) for _ in value]
            for one, x, before in zip(leaf, value, (None, *value), strict=False):
                one.learn(x, isinstance(x, Tensor), before)
        elif isinstance(leaf, list):
            for one in leaf:
                one.learn(None, False, None)
        else:
            leaf.learn(value, isinstance(value, Tensor), None)
    return layout


def _signature_function(layout: _Layout) -> Callable[..., Hashable]:
    """A function of a call's arguments: a tuple of all that the check may look at.

    It runs in every call, so it is compiled for the arguments that come, without a loop.
    """
    lines, facts = [], []
    for position, leaf in enumerate(layout):
        name = f"x{position}"
        if isinstance(leaf, _Leaf):
            facts.append(_facts(name, leaf, name))
            continue
        elements = [f"{name}_{i}" for i in range(len(leaf))]
        unpacked = "".join(f"{element}, " for element in elements)
        lines += [
            f"    if {name} is None:",
            f"        {' = '.join(elements)} = None",
            "    else:",
            f"        {unpacked} = {name}",
        ]
        facts += f"{name} is None", *map(_facts, elements, leaf, [name, *elements])
    names = ", ".join(f"x{position}" for position in range(len(layout)))
    source = "\n".join((f"def signature({names}):", *lines, f"    return ({', '.join(facts)},)"))
    scope: dict[str, Callable[..., Hashable]] = {}
    exec(source, scope)
    return scope["signature"]


def _facts(name: str, leaf: _Leaf, before: str) -> str:
    """Source text: what a check may look at of the argument ``name``."""
    if not leaf.tensor:
        return name
    # the number of a GPU is compared faster than a torch.device; those without one give -1
    device = f"{name}.get_device() + 1 or {name}.device"
    text = f"{name}.shape, {name}.stride(), {name}.dtype, {device}"
    if leaf.again:
        text = f"'again' if {name} is {before} else ({text})"
    if leaf.other:
        text = f"None if {name} is None else ({text})"
    return text


def _unknown(*_: object) -> Hashable:
    raise KeyError


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


def expect_kernel_device(name: str, tensor: torch.Tensor) -> None:
    """Require the tensor to live where a kernel can read it: on a GPU, or on a CPU that Triton's
    interpreter runs on.

    Kernels are launched on addresses. A GPU kernel that gets one of the host's memory ends the
    process's CUDA context, so each operator and planner asks this of one of its tensors before it
    launches anything, and requires the others to be on that one's device.
    """
    if tensor.is_cuda or interprets():
        return
    raise ValueError(
        f"{name} must be on a GPU for kernels to read (on a CPU: with TRITON_INTERPRET=1), got"
        f" {tensor.device}"
    )


def interprets() -> bool:
    """Whether Triton's interpreter runs kernels on CPU tensors."""
    try:
        from triton import knobs
    except ModuleNotFoundError:
        return False
    return bool(knobs.runtime.interpret)


def expect_stride(name: str, tensor: torch.Tensor, dim: int, value: int) -> None:
    """Require ``tensor.stride(dim) == value``, in elements.

    A dimension of one element has no stride to speak of and passes.
    """
    got = tensor.stride()[dim]  # half the time of stride(dim)
    if got == value or tensor.shape[dim] <= 1:
        return
    raise ValueError(f"{name} must have stride {value} in dimension {dim}, got {got}")


def expect_near(name: str, tensor: torch.Tensor, dim: int) -> None:
    """Require a dimension to span fewer than 2^31 elements: kernels count along it in int32."""
    span = (tensor.shape[dim] - 1) * tensor.stride()[dim]
    if span < 2**31:
        return
    raise ValueError(f"{name} must span fewer than 2**31 elements in dimension {dim}, got {span}")


def _extents(extents: Sequence[Extent]) -> str:
    return "[" + ", ".join("any" if e is None else str(e) for e in extents) + "]"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
