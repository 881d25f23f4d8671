"""The two caches of calls: of checks, by what they may look at; and a plan's, of launches.

Checking and packing take longer than a launch, and most calls of a layer agree in shapes, strides,
dtypes and devices. `Ready` makes a thing once for calls that agree, `Prepared` once for those of
one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeAlias, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Values = ParamSpec("Values")
Result = TypeVar("Result")
_KEPT = 1024  # results of one cache
_LAYOUTS = 256  # of the calls of one plan


class Ready(Generic[Values, Result]):
    """``make``, whose result is kept for calls that agree in all that it may look at.

    Its arguments are hashable values, tensors, or tuples of these of a fixed length; ``None`` may
    stand for a tensor or a tuple. It may look at the shapes, strides, dtypes and devices of the
    tensors, and at the other values; at no element, and it may return no tensor of the call. A call
    for which it raises is made again. Threads may meet here.
    """

    def __init__(self, make: Callable[Values, Result]) -> None:
        self.make = make
        # one value, replaced as a whole: a key is of the function beside it
        self._state: tuple[_Layout, Callable[..., Hashable], dict[Hashable, Result]]
        self._state = ([], _unknown, {})

    def __call__(self, *values: Values.args, **named: Values.kwargs) -> Result:
        assert not named, "the arguments are positional"
        try:
            _, signature, found = self._state
            return found[signature(*values)]
        except (KeyError, AttributeError, TypeError, ValueError):
            pass  # not seen, or a tensor where there was none, or none where there was one
        return self._miss(values)

    def _miss(self, values: tuple[object, ...]) -> Result:
        layout, signature, found = self._state
        learned = _learn(layout, values)
        result = self.make(*values)  # type: ignore[arg-type, call-arg]
        if learned != layout or len(found) >= _KEPT:
            signature, found = _signature_function(learned), {}
            self._state = learned, signature, found
        found[signature(*values)] = result
        return result


class Prepared(dict[Hashable, Any]):
    """Results for calls of one plan, by their layout: checked, chosen and packed once.

    It is the plan's, and dies with it; it holds addresses of the plan's tensors, and none of a
    call's. Where there is no plan it belongs to one layout of calls, and stands for it: it is
    compared by identity.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def keep(self, layout: Hashable, made: Result) -> Result:
        if len(self) >= _LAYOUTS:
            self.clear()
        self[layout] = made
        return made


def layout_of(*tensors: Tensor | None) -> tuple[object, ...]:
    """All that a check may look at of tensors, but for their addresses."""
    return tuple(
        [
            None if x is None else (x.shape, x.stride(), x.dtype, x.get_device() + 1 or x.device)
            for x in tensors
        ]
    )


class _Leaf(NamedTuple):
    """The values seen for one argument, or for one element of a tuple.

    Attributes:
        tensor, other: a tensor has; something else has, ``None`` included.
        value: something has that is neither.
        again: the tensor before it has come again, for instance a pool that is read and written.
    """

    tensor: bool = False
    other: bool = False
    value: bool = False
    again: bool = False

    def and_of(self, x: object, is_tensor: bool, before: object) -> _Leaf:
        again = self.again or (is_tensor and x is before)
        value = self.value or not (is_tensor or x is None)
        return _Leaf(self.tensor or is_tensor, self.other or not is_tensor, value, again)


_Layout: TypeAlias = "list[_Leaf | list[_Leaf]]"


def _learn(layout: _Layout, values: tuple[object, ...]) -> _Layout:
    """``layout`` with what the arguments of a call add to it."""
    from torch import Tensor

    learned: _Layout = [*layout, *(_Leaf() for _ in values[len(layout) :])]
    for position, value in enumerate(values):
        leaf = learned[position]
        if isinstance(value, tuple):
            if isinstance(leaf, _Leaf):
                leaf = [_Leaf(other=leaf.other)] * len(value)
            learned[position] = [
                one.and_of(x, isinstance(x, Tensor), before)
                for one, x, before in zip(leaf, value, (None, *value), strict=False)
            ]
        elif isinstance(leaf, list):
            learned[position] = [one.and_of(None, False, None) for one in leaf]
        else:
            learned[position] = leaf.and_of(value, isinstance(value, Tensor), None)
    return learned


def _signature_function(layout: _Layout) -> Callable[..., Hashable]:
    """A function of a call's arguments: a tuple of all that may be looked at.

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
        facts.append(f"{name} is None")
        for element, one, before in zip(elements, leaf, [name, *elements], strict=False):
            facts.append(_facts(element, one, before))
    names = ", ".join(f"x{position}" for position in range(len(layout)))
    source = "\n".join((f"def signature({names}):", *lines, f"    return ({', '.join(facts)},)"))
    from torch import Tensor

    scope: dict[str, Any] = {"Tensor": Tensor}
    exec(source, scope)
    found: Callable[..., Hashable] = scope["signature"]
    return found


def _facts(name: str, leaf: _Leaf, before: str) -> str:
    """Source text: what may be looked at of the argument ``name``."""
    if not leaf.tensor:
        return name
    # the number of a GPU is compared faster than a torch.device (those without one give -1)
    device = f"{name}.get_device() + 1 or {name}.device"
    text = f"{name}.shape, {name}.stride(), {name}.dtype, {device}"
    if leaf.again:
        text = f"'again' if {name} is {before} else ({text})"
    if leaf.value:
        return f"({text}) if isinstance({name}, Tensor) else {name}"
    if leaf.other:
        text = f"None if {name} is None else ({text})"
    return text


def _unknown(*_: object) -> Hashable:
    raise KeyError
