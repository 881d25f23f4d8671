"""Launching a compiled Triton kernel with little host time.

``fn[grid](...)`` binds, specialises and hashes every argument and every option on each launch.
``KernelLaunch`` fixes the constexprs and options once, keeps the compiled kernels in a dictionary
and hands them to Triton's own launcher, ``compiled.run``.

Written against Triton 3.6.0 (``runtime/jit.py``, ``compiler/compiler.py`` and the two
``driver.py``), and read against 3.8.0 and 3.9.0, for CUDA and HIP. Under ``TRITON_INTERPRET=1`` the
kernel is an interpreted function and is called plainly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from backend_core.launch.head import HeadPart, grouped, parts_of

Argument: TypeAlias = "Tensor | TensorDescriptor | int | float | bool | None"
Grid = tuple[int, int, int]
Launch = Callable[["tuple[int, ...]"], None]
"""A launch that is ready but for addresses (`KernelLaunch.prepare`)."""


OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel. A product and the sum behind it are one operation, to which
kernels owe speed, and bits that two of them share; Triton 3.10 is to end this default."""
_RECENT = 4096  # exact argument lists that a kernel remembers


class KernelLaunch:
    """One ``@triton.jit`` kernel with its constexprs and compiler options fixed.

    Triton compiles one variant of a kernel for each specialisation of its run-time arguments. A
    launch finds its variant by a key that is at least as fine as Triton's own:

    - tensor: its dtype; whether its address is a multiple of 16 bytes; on HIP also whether its
      storage is within 2 GiB (such pointers get buffer instructions);
    - int: whether it is 1 (folded into the code), a multiple of 16, and fits int32, int64 or
      uint64;
    - tensor descriptor: its dtype, block and shared-memory layout (Triton's launcher makes the
      tensor map);
    - float, bool and ``None``: the type alone;
    - the current device, since a compiled kernel is loaded on one.

    ``launch`` takes the arguments by name and first looks for their exact numbers. A pointer's
    name ends in ``_ptr``, a tensor descriptor's in ``_desc``, and in ``_source`` where it may be
    either; only such arguments may be tensors there. Arguments that stand in a tuple of the
    kernel's head have names of their own (`backend_core.launch.head`).

    A key seen for the first time goes through ``fn.warmup``, which compiles only where Triton has
    no such variant yet. The stride of a dimension of one element is arbitrary, and of those that
    ``axes`` name none makes a variant where there is one for another stride; so what is compiled at
    model load needs calls of more rows than one. An int that varies while serving should be named
    in ``do_not_specialize`` of the kernel, or it compiles up to three variants.

    Tensors are passed to the launcher as addresses, which saves it a driver query for each pointer
    and its refusal of CPU tensors: check devices beforehand (``contracts.expect_kernel_device`` of
    one tensor, ``contracts.expect_device`` of the others).
    """

    def __init__(
        self,
        fn: Any,
        constexprs: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        *,
        axes: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
            fn: the kernel; its ``tl.constexpr`` parameters stand last in its signature.
            constexprs: a value for each of them.
            options: ``num_warps``, ``num_stages`` and other compiler options, beside `OPTIONS`.
            axes: a letter for each dimension of tensors, ``{"q": "thd"}``: ``launch`` fills in
                those of ``stride_q_t``, ``stride_q_h`` and ``stride_q_d`` that the kernel takes
                from ``q_ptr``; of an absent tensor they are ``None``. A dot is a dimension whose
                stride is given as other arguments are.

        Raises:
            ValueError: the constexprs are not those of the kernel, or do not stand last; or axes
                are not of the kernel's arguments.
        """
        self.kernel = self._fn = fn
        self._kwargs = {**constexprs, **(options or {}), **OPTIONS}
        self.alternatives: tuple[KernelLaunch, ...] = ()
        """Launches with the same arguments that a later call may choose instead of this one: what
        is compiled here is compiled for them too."""
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._recent: dict[tuple[object, ...], Any] = {}
        self._parts = parts_of(fn)
        names = tuple(n for part in self._parts for n in part.names if n not in constexprs)
        self.argument_names = names
        """Names of the run-time arguments, in the order of the kernel's signature."""
        self._strides = _strides(fn.__name__, names, axes or {})
        self.given = tuple(name for name in names if name not in self._strides)
        """Names of the run-time arguments that ``launch`` and ``prepare`` take."""
        self.launch: Callable[..., None] = self._call_by_name
        """``launch(grid, **arguments)`` on the current device and stream: by name the run-time
        arguments but for strides that are filled in. A grid is the number of programs along x, y
        and z; one with a zero launches nothing."""
        self._interpreted = not isinstance(fn, JITFunction)
        if self._interpreted:
            return
        declared = [param.name for param in fn.params if param.is_constexpr]
        if declared != list(fn.arg_names)[len(fn.arg_names) - len(declared) :]:
            raise ValueError(f"constexprs of {fn.__name__} must stand last, got {fn.arg_names}")
        if set(declared) != set(constexprs):
            raise ValueError(
                f"constexprs of {fn.__name__} must be {sorted(declared)}, got {sorted(constexprs)}"
            )
        self._tail = tuple(constexprs[name] for name in declared)
        self.launch, self._variant = _launchers(self)

    def prepare(self, takes: tuple[str, ...], grid: Grid, **named: Any) -> Launch:
        """Find the compiled kernel for a launch, and launch nothing.

        Args:
            takes: names of arguments, whose addresses the launch takes in this order; those that
                the kernel has not are passed over.
            grid, named: as ``launch`` takes them.

        Returns:
            The launch with other addresses of these arguments, on the device that is current now.
            Each must be as aligned as before, and on HIP of a storage within 2 GiB or not as
            before; where there was no tensor, the address is not used. It keeps no tensor of them.
        """
        if self._interpreted:
            return _interpreted_launch(self, takes, grid, named)
        compiled, values = self._variant(**named)
        absent = tuple([name for name in takes if named.get(name) is None])
        make = _prepared_launch(self._parts, takes, absent)
        launch: Launch = make(compiled, grid, (*values, *self._tail))
        return launch

    def _call_by_name(self, grid: Grid, **named: Any) -> None:
        """``launch`` without a compiled kernel."""
        self._interpret(grid, *self._in_order(named))

    def _in_order(self, named: Mapping[str, Any]) -> list[Any]:
        """The run-time arguments in the order of the kernel's signature."""
        if named.keys() != set(self.given):
            missing = [name for name in self.given if name not in named]
            unknown = sorted(named.keys() - set(self.given))
            raise TypeError(
                f"{self._fn.__name__} takes {len(self.given)} arguments by name: missing"
                f" {missing}, unknown {unknown}"
            )
        given = {**named}
        for stride, (tensor, dim) in self._strides.items():
            source = given[f"{tensor}_ptr"]
            given[stride] = None if source is None else source.stride()[dim]
        return [given[name] for name in self.argument_names]

    def _interpret(self, grid: Grid, *args: Argument) -> None:
        self._fn[grid](*grouped(self._parts, args), **self._kwargs)

    def _find(
        self,
        exact: tuple[object, ...],
        device: int,
        named: dict[str, Any],
    ) -> Any:
        """The compiled kernel for the classes of the arguments, kept for their exact values."""
        args = tuple(named[name] for name in self.argument_names)
        key = (device, *_specialise(args, torch.version.hip is not None)[0])
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._of_other_strides(key, named)
            if compiled is not None:
                return compiled  # not kept: the exact values do not tell the sizes
            compiled = self._compile(key, args)
        if len(self._recent) >= _RECENT:
            self._recent.clear()
        self._recent[exact] = compiled
        return compiled

    def _of_other_strides(self, key: tuple[object, ...], named: dict[str, Any]) -> Any:
        """A kernel that is compiled for a call which differs in strides of dimensions of one
        element alone: multiplied by zero, any is right. ``None`` where there is none."""
        free = {
            stride
            for stride, (tensor, dim) in self._strides.items()
            if (x := named[f"{tensor}_ptr"]) is not None and x.shape[dim] == 1
        }
        if not free:
            return None
        # like an int, None has one entry: where the keys differ, a stride is free
        masked = [None if name in free else named[name] for name in self.argument_names]
        fixed = (key[0], *_specialise(masked, torch.version.hip is not None)[0])
        for known, compiled in self._compiled.items():
            if len(known) == len(key) and all(
                a == b or (b != c and a in _INT32 and b in _INT32)
                for a, b, c in zip(known, key, fixed, strict=True)
            ):
                return compiled
        return None

    def _compile(self, key: tuple[object, ...], args: tuple[Argument, ...]) -> Any:
        for launch in (self, *self.alternatives):
            if key not in launch._compiled:
                given = grouped(launch._parts, args)
                compiled = launch._fn.warmup(*given, grid=(1,), **launch._kwargs)
                # Reading run loads the binary: not lazily at the first launch, which may be in a
                # capture.
                compiled.run  # noqa: B018
                launch._compiled[key] = compiled
        return self._compiled[key]


def _strides(
    kernel: str, names: Sequence[str], axes: Mapping[str, str]
) -> dict[str, tuple[str, int]]:
    """For each stride that is filled in: the tensor's name and its dimension."""
    found = {
        f"stride_{tensor}_{letter}": (tensor, dim)
        for tensor, letters in axes.items()
        for dim, letter in enumerate(letters)
        if f"stride_{tensor}_{letter}" in names
    }
    lacking = [tensor for tensor in axes if f"{tensor}_ptr" not in names]
    if lacking:
        raise ValueError(f"axes of {kernel}: no such tensor {lacking}")
    return found


def _launchers(
    kernel: KernelLaunch,
) -> tuple[Callable[..., None], Callable[..., tuple[Any, tuple[object, ...]]]]:
    """A function of grid and named arguments that launches a kernel; and one of the arguments
    that finds the compiled kernel and the values which it is launched with.

    They are generated, as Triton's own binder is: their parameters are the kernel's, so that Python
    brings them in order and refuses others, and nothing loops over them. They remember the variant
    for the numbers themselves, which saves deciding their classes in every launch.
    """
    strides, given = kernel._strides, kernel.given
    hip = torch.version.hip is not None
    lines: list[str] = []
    exact, value_of = ["device"], {}
    for name in given:
        if name.endswith(("_desc", "_source")):
            lines.append(f"    {name}_kind, {name}_value = described({name})")
            exact.append(f"{name}_kind")
            value_of[name] = f"{name}_value"
            continue
        if not name.endswith("_ptr"):
            # 1, 1.0 and True are equal, and have variants of their own
            exact += [name, f"type({name})"]
            value_of[name] = name
            continue
        lines += [
            f"    if {name} is None:",
            f"        {name}_address = {name}_kind = None",
            "    else:",
            f"        {name}_address = {name}.data_ptr()",
            f"        {name}_kind = {name}.dtype, {name}_address & 15"
            + (f", {name}.untyped_storage().nbytes() < 2**31" if hip else ""),
        ]
        exact.append(f"{name}_kind")
        value_of[name] = f"{name}_address"
    for tensor in dict.fromkeys(tensor for tensor, _ in strides.values()):
        filled = {name: dim for name, (of, dim) in strides.items() if of == tensor}
        lines += [
            f"    if {tensor}_ptr is None:",
            f"        {' = '.join(filled)} = None",
            "    else:",
            f"        strides = {tensor}_ptr.stride()",
            *(f"        {name} = strides[{dim}]" for name, dim in filled.items()),
        ]
        exact += filled
        value_of |= {name: name for name in filled}
    values = [value_of[name] for name in kernel.argument_names]
    constants = {f"constant_{n}": value for n, value in enumerate(kernel._tail)}
    arguments = map(_source, grouped(kernel._parts, (*values, *constants)))
    named = ", ".join(f"{name!r}: {name}" for name in (*given, *strides))
    lines += [
        "    active = driver.active",
        "    device = active.get_current_device()",
        f"    exact = ({', '.join(exact)},)",
        "    compiled = recent.get(exact)",
        "    if compiled is None:",
        f"        compiled = find(exact, device, {{{named}}})",
    ]
    scope: dict[str, Any] = {
        "driver": driver,
        "recent": kernel._recent,
        "find": kernel._find,
        "described": lambda x: _described(x, hip),
        "hooks": knobs.runtime,
        **constants,
    }
    function = [
        f"def launch(grid, *, {', '.join(given)}):",
        *lines,
        *_run_lines(", ".join(arguments), "    "),
        f"def variant(*, {', '.join(given)}):",
        *lines,
        f"    return compiled, {_source(tuple(values))}",
    ]
    exec("\n".join(function), scope)
    return scope["launch"], scope["variant"]


def _source(argument: Any) -> str:
    """Source text of what a parameter takes, of that of its arguments."""
    return f"({', '.join(argument)},)" if isinstance(argument, tuple) else argument


def _run_lines(values: str, indent: str) -> list[str]:
    """Source text: a launch of ``compiled`` on the current stream, by Triton's own launcher."""
    lines = [
        "grid_x, grid_y, grid_z = grid",
        "stream = active.get_current_stream(device)",
        "enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook",
        # a chain of hooks has its calls; a hook may also be a function, or None
        "if getattr(enter, 'calls', enter) or getattr(leave, 'calls', leave):",
        f"    compiled[grid]({values}, stream=stream)",
        "else:",
        "    function, metadata = compiled.function, compiled.packed_metadata",
        "    compiled.run(grid_x, grid_y, grid_z, stream, function, metadata,"
        f" None, None, None, {values})",
    ]
    return [indent + line for line in lines]


@functools.lru_cache(maxsize=1024)
def _prepared_launch(
    parts: tuple[HeadPart, ...], takes: tuple[str, ...], absent: tuple[str, ...]
) -> Callable[..., Launch]:
    """Makes `KernelLaunch.prepare`'s launches, of these parameters in order; it is generated as
    `_launchers` is. A tuple in which no address changes is made once."""
    names = [name for part in parts for name in part.names]
    taken = [name for name in takes if name in names and name not in absent]
    fixed = [f"fixed_{n}" if name not in taken else "_" for n, name in enumerate(names)]
    values = [f"fixed_{n}" if name not in taken else name for n, name in enumerate(names)]
    kept, arguments = [], []
    for n, argument in enumerate(grouped(parts, values)):
        arguments.append(_source(argument))
        if isinstance(argument, tuple) and not set(argument) & set(taken):
            kept.append(f"    tuple_{n} = {arguments[n]}")
            arguments[n] = f"tuple_{n}"
    source = [
        "def make(compiled, grid, values):",
        f"    {', '.join(fixed)}, = values",
        *kept,
        "    def launch(addresses):",
        f"        {', '.join(name if name in taken else '_' for name in takes)}, = addresses",
        "        active = driver.active",
        "        device = active.get_current_device()",
        *_run_lines(", ".join(arguments), "        "),
        "    return launch",
    ]
    scope: dict[str, Any] = {"driver": driver, "hooks": knobs.runtime}
    exec("\n".join(source), scope)
    make: Callable[..., Launch] = scope["make"]
    return make


def _interpreted_launch(
    kernel: KernelLaunch, takes: tuple[str, ...], grid: Grid, named: Mapping[str, Any]
) -> Launch:
    """`KernelLaunch.prepare`'s launch in the interpreter, which reads tensors: they have one
    element, since it knows memory by its address alone."""
    values, places = kernel._in_order(named), list[tuple[int, int, torch.dtype]]()
    for n, name in enumerate(kernel.argument_names):
        if name in takes and values[n] is not None:
            places.append((n, takes.index(name), values[n].dtype))
            values[n] = None

    def launch(addresses: tuple[int, ...]) -> None:
        arguments = [*values]
        for n, place, dtype in places:
            address = addresses[place]
            memory = (ctypes.c_char * dtype.itemsize).from_address(address)
            one = torch.frombuffer(memory, dtype=dtype) if address else torch.empty(0, dtype=dtype)
            arguments[n] = one
        kernel._interpret(grid, *arguments)

    return launch


def _described(x: Tensor | TensorDescriptor, hip: bool) -> tuple[tuple[object, ...], object]:
    """The key of a tensor or a descriptor, and what the launcher is handed."""
    key, (value,) = _specialise((x,), hip)
    return tuple(key), value


def _specialise(args: Iterable[Argument], hip: bool) -> tuple[list[object], list[object]]:
    """The key of ``args`` (see ``KernelLaunch``), without device, and what the launcher is handed.

    The entries of an argument start with its dtype, class or type, which fixes how many follow.
    """
    key: list[object] = []
    values: list[object] = []
    for arg in args:
        if type(arg) is int:
            key.append(_INT_CLASS[arg])
            values.append(arg)
        elif type(arg) is float:
            key.append(float)
            values.append(arg)
        elif isinstance(arg, Tensor):
            address = arg.data_ptr()
            key += (arg.dtype, address & 15 == 0)
            if hip:
                key.append(arg.untyped_storage().nbytes() < 2**31)
            values.append(address)
        elif hasattr(arg, "block_shape"):  # Triton's tensor descriptor, or Gluon's with a layout
            tile: Any = arg
            layout = getattr(arg, "layout", None)
            key += (tile.base.dtype, tuple(tile.block_shape), tile.padding, layout)
            values.append(arg)
        elif arg is None or type(arg) is bool:
            key.append(type(arg))
            values.append(arg)
        else:
            raise TypeError(f"kernel argument must be a tensor, number or None, got {arg!r}")
    return key, values


class _IntClass(dict[int, str]):
    """Triton's specialisation of an int argument, remembered: a look-up costs less."""

    def __missing__(self, value: int) -> str:
        if len(self) > 65536:
            self.clear()
        if value == 1:
            name = "1"
        else:
            width = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
            name = f"{width} x16" if value % 16 == 0 else width
        self[value] = name
        return name


_INT_CLASS = _IntClass()
_INT32 = ("1", "i32", "i32 x16")  # of values that fit a parameter of 32 bits
