"""Triton's interpreter without the work that it does over and over: half of its time.

Nothing of what it computes or refuses changes.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import triton
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

UNSEEN = ("num_warps", "num_stages", "max_registers", "pdl", "eviction")
"""Ends of the names of launch parameters that mean nothing to the interpreter."""


def seen_parameters(params: Any) -> tuple[tuple[str, Any], ...]:
    """The launch parameters of a path, without those that the interpreter does not see where it is
    what runs."""
    fields = dataclasses.asdict(params)
    if os.environ.get("TRITON_INTERPRET") == "1":
        fields = {name: value for name, value in fields.items() if not name.endswith(UNSEEN)}
    return tuple(fields.items())


def spare_repeated_work() -> None:
    """Patch the interpreter of Triton 3.6, whose inner functions these are, once in a process."""
    if not triton.__version__.startswith("3.6.") or hasattr(interpreter, "_kda_dsv4_patched"):
        return
    interpreter._kda_dsv4_patched = True
    _patch_the_language_once_in_a_launch()
    _know_numpys_types()
    _compare_and_unwrap_what_is_plain()
    _share_shapes()
    _broadcast_numbers()
    _leave_out_assertions_that_nobody_reads()
    interpreter.ReduceOps.generic_reduce = _reduce_by_slices


def _patch_the_language_once_in_a_launch() -> None:
    """Each call of a device function looks through all of ``triton.language`` for what to replace,
    which the launch's first call from that module has replaced already."""
    upstream, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    done: set[int] = set()

    def patch_lang(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in done:
            return interpreter._LangPatchScope()
        done.add(module)
        return upstream(fn)

    def restored(scope: Any) -> None:
        done.clear()
        restore(scope)

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        for name in names_of(pkg):
            if core.is_builtin(member := getattr(pkg, name)):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    @functools.cache
    def names_of(pkg: Any) -> list[str]:
        return [name for name in dir(pkg) if callable(getattr(pkg, name))]

    interpreter._patch_lang = patch_lang
    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope.restore = restored


def _know_numpys_types() -> None:
    """Each operation makes the table of them anew."""
    upstream = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(type: Any) -> Any:
        if type.name not in known:
            known[type.name] = upstream(type)
        return known[type.name]

    interpreter._get_np_dtype = get_np_dtype


def _compare_and_unwrap_what_is_plain() -> None:
    """Each type is compared by its name, also with itself, and whatever may be a constant is asked
    whether it is a list, a tuple and a constant."""
    upstream, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type}

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else upstream(value)

    core._unwrap_if_constexpr = unwrap
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _share_shapes() -> None:
    """Each tensor wraps the numbers of its shape, their types and the types' names anew."""
    upstream = core._type_for_tuple_values

    @functools.cache
    def type_of(*numbers: int) -> Any:
        return upstream(numbers)

    def type_for(values: Any, fields: Any = None) -> Any:
        if fields is None and all(type(x) is int for x in values):
            return type_of(*values)
        return upstream(values, fields)

    @functools.cache
    def shapes_of(*shape: int) -> tuple[Any, int, str, Any, Any]:
        """Of a block's type: its shape, number of elements and their text; of its tensors: both."""
        block = object.__new__(core.block_type)
        upstream_block(block, core.float32, list(shape))
        wrapped = core.tuple([core.constexpr(n) for n in shape])
        return block.shape, block.numel, f"{block.shape}", wrapped, core.constexpr(block.numel)

    def unwrap_shape(shape: Any) -> list[Any]:
        values = shape.values if type(shape) is core.tuple else shape
        values = [x.value if type(x) is core.constexpr else x for x in values]
        return values if all(type(x) is int for x in values) else upstream_unwrap(shape)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        assert isinstance(shape, (list, core.tuple))
        if id(shape) not in known:
            shapes = shapes_of(*unwrap_shape(shape))
            shape = shapes[0]
            known[id(shape)] = shapes  # which keeps it alive
        self.element_ty, self.shapes = element_ty, known[id(shape)]
        self.shape, self.numel, text, *_ = self.shapes
        self.name = f"<{text}, {element_ty}>"

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.shapes[3:] if type.is_block() else scalar

    known: dict[int, Any] = {}
    scalar = core.tuple([]), core.constexpr(1)
    upstream_unwrap, upstream_block = core._unwrap_shape, core.block_type.__init__
    core._unwrap_shape = unwrap_shape
    core.block_type.__init__ = init_block
    core._type_for_tuple_values = type_for
    core.tensor.__init__ = init


def _broadcast_numbers() -> None:
    """Shapes of two blocks are compared as tuples of constants; mostly they are the same."""
    upstream = TritonSemantic.broadcast_impl_value

    def widened(self: Any, x: Any, shape: list[int]) -> Any:
        if x.type.shape.values == shape:
            return x
        handle = self.builder.create_broadcast(x.handle, shape)
        return self.tensor(handle, core.block_type(x.type.scalar, shape))

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return upstream(self, lhs, rhs)
        left, right = lhs.type.shape, rhs.type.shape
        if left is right:
            return lhs, rhs
        pairs = list(zip(left.values, right.values, strict=False))
        if len(left) != len(right) or not all(m == n or 1 in (m, n) for m, n in pairs):
            return upstream(self, lhs, rhs)
        shape = [max(pair) for pair in pairs]
        return widened(self, lhs, shape), widened(self, rhs, shape)

    TritonSemantic.broadcast_impl_value = broadcast


def _leave_out_assertions_that_nobody_reads() -> None:
    """Integer arithmetic is done again in 64 bits, for an assertion that only debugging has."""
    upstream = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self: Any, lhs: Any, rhs: Any, operator: Any) -> None:
        if self.builder.options.debug:
            upstream(self, lhs, rhs, operator)

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize


def _reduce_by_slices(self: Any, input: Any) -> list[Any]:
    """A reduction by a function that NumPy has not: in the same order along the axis, of all other
    elements at once, where the interpreter takes a single number at a time."""
    given, axis = self.unravel(input, self.axis)
    shape = given[0].handle.data.shape
    left = shape[:axis] + shape[axis + 1 :]

    def tensors(values: Any) -> list[Any]:
        return [
            self.to_tensor(value.reshape(left), x.dtype)
            for value, x in zip(values, given, strict=True)
        ]

    reduced = tensors(x.handle.data.take(0, axis) for x in given)
    for place in range(1, shape[axis]):
        following = tensors(x.handle.data.take(place, axis) for x in given)
        combined = self.combine_fn.fn(*reduced, *following)
        combined = combined if isinstance(combined, tuple) else (combined,)
        reduced = tensors(x.handle.data for x in combined)
    if not self.keep_dims:
        return reduced
    kept = [1] * len(shape) if self.axis is None else [*shape[:axis], 1, *shape[axis + 1 :]]
    return [
        self.to_tensor(value.handle.data.reshape(kept), x.dtype)
        for value, x in zip(reduced, given, strict=True)
    ]
