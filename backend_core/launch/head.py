"""A kernel's head: its arguments, of which some stand together in NamedTuples.

    class State(NamedTuple):
        ptr: Any
        stride_n: Any

    @triton.jit
    def kernel(state: State, out_ptr, eps, BLOCK: tl.constexpr): ...

has the arguments ``state_ptr``, ``stride_state_n``, ``out_ptr`` and ``eps``: a field ``ptr`` and a
stride of one letter have the parameter's name in theirs, and a field of any other name is an
argument of that name. Triton compiles the values of a tuple as if each were a parameter, but for
``do_not_specialize``, which knows parameters alone.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple


class HeadPart(NamedTuple):
    """A parameter: the names of its arguments, and the class of their tuple if it is one."""

    names: tuple[str, ...]
    group: Any


def parts_of(kernel: Any) -> tuple[HeadPart, ...]:
    """The parameters of a kernel, constexprs among them, in order."""
    kinds = inspect.get_annotations(kernel.fn, eval_str=True)
    parts = []
    for name in kernel.arg_names:
        fields = getattr(kinds.get(name), "_fields", None)
        if fields is None:
            parts.append(HeadPart((name,), None))
        else:
            parts.append(HeadPart(tuple([_argument(name, x) for x in fields]), kinds[name]))
    return tuple(parts)


def _argument(parameter: str, field: str) -> str:
    if field == "ptr":
        return f"{parameter}_ptr"
    if len(field) == len("stride_n") and field.startswith("stride_"):
        return f"stride_{parameter}_{field[-1]}"
    return field


def argument_names(kernel: Any) -> tuple[str, ...]:
    """The names of a kernel's arguments and constexprs, in order."""
    return tuple([name for part in parts_of(kernel) for name in part.names])


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values of arguments in order, from what the parameters take."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def grouped(parts: Sequence[HeadPart], values: Iterable[Any]) -> Iterator[Any]:
    """Put the values of arguments, which come in order, together as the parameters take them; the
    last parameters may go without."""
    given = iter(values)
    for names, group in parts:
        taken = tuple(itertools.islice(given, len(names)))
        if taken:
            yield taken[0] if group is None else group(*taken)
