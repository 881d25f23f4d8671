"""Launching a compiled Triton kernel with little host time.

``fn[grid](...)`` binds, specialises and hashes every argument and every option on each launch.
``KernelLaunch`` fixes the constexprs and options once, keeps the compiled kernels in a dictionary
and hands them to Triton's own launcher, ``compiled.run``.

Written against Triton 3.6.0 (``runtime/jit.py``, ``compiler/compiler.py`` and the two
``driver.py``), and read against 3.8.0 and 3.9.0, for CUDA and HIP. Under ``TRITON_INTERPRET=1`` the
kernel is an interpreted function and is called plainly.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver
from triton.tools.tensor_descriptor import TensorDescriptor

Argument: TypeAlias = "Tensor | TensorDescriptor | int | float | bool | None"
Grid = tuple[int, int, int]

Packed = tuple[int, tuple[object, ...]]
"""Some of a launch's arguments, made ready once for many launches: a number of their class, and
their values, which hold the tensors' addresses and keep none alive."""

_RECENT = 4096  # exact argument lists that a kernel remembers
_PACK_KEYS: dict[tuple[object, ...], int] = {}
_PACK_NUMBERS = itertools.count()


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

    ``launch`` takes the arguments by name and finds the variant by a finer key still. A pointer's
    name ends in ``_ptr``; only such arguments may be tensors there.

    A key seen for the first time goes through ``fn.warmup``, which compiles only where Triton has
    no such variant yet. An int that varies while serving should be named in ``do_not_specialize``
    of the kernel, or it compiles up to three variants.

    Tensors are passed to the launcher as addresses, which saves it a driver query for each pointer
    and its refusal of CPU tensors: check devices beforehand (``contracts.expect_kernel_device`` of
    one tensor, ``contracts.expect_device`` of the others).
    """

    def __init__(
        self,
        fn: Any,
        constexprs: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        groups: Sequence[Sequence[str]] = (),
    ) -> None:
        """Args:
            fn: the kernel; its ``tl.constexpr`` parameters stand last in its signature.
            constexprs: a value for each of them.
            options: ``num_warps``, ``num_stages`` and other compiler options.
            groups: for ``packed``, argument names grouped by lifetime: for instance per call, per
                layer, per step. A name that the kernel does not take is passed over.

        Raises:
            ValueError: the constexprs are not those of the kernel, or do not stand last; or the
                groups lack one of its other arguments, or have a name twice.
        """
        self.kernel = self._fn = fn
        self._kwargs = {**constexprs, **(options or {})}
        self.alternatives: tuple[KernelLaunch, ...] = ()
        """Launches with the same arguments that a later call may choose instead of this one: what
        is compiled here is compiled for them too."""
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._recent: dict[tuple[object, ...], Any] = {}
        self._packed: dict[tuple[int, ...], Any] = {}
        self.argument_names = wanted = tuple(n for n in fn.arg_names if n not in constexprs)
        """Of the run-time arguments, in the order of the kernel's signature."""
        if groups:
            given = [name for names in groups for name in names]
            if set(wanted) - set(given) or len(set(given)) != len(given):
                raise ValueError(f"groups of {fn.__name__} must be of {list(wanted)}, got {given}")
            self._in_order = operator.itemgetter(*[given.index(name) for name in wanted])
        self.launch: Callable[..., None] = self._call_by_name
        """``launch(grid, **arguments)``: as a call, with the run-time arguments by name."""
        self._interpreted = not isinstance(fn, JITFunction)
        if self._interpreted:
            return
        declared = [param.name for param in fn.params if param.is_constexpr]
        names = list(fn.arg_names)
        if declared != names[len(names) - len(declared) :]:
            raise ValueError(f"constexprs of {fn.__name__} must stand last, got {names}")
        if set(declared) != set(constexprs):
            raise ValueError(
                f"constexprs of {fn.__name__} must be {sorted(declared)}, got {sorted(constexprs)}"
            )
        self._tail = tuple(constexprs[name] for name in declared)
        self.launch = _launcher(self, self.argument_names)

    def __call__(self, grid: Grid, *args: Argument) -> None:
        """Launch on the current device and stream; a grid with a zero launches nothing.

        ``launch`` is the same by names, and faster.

        Args:
            grid: number of programs along x, y and z.
            args: the run-time arguments, in the order of the kernel's signature.
        """
        if self._interpreted:
            self._fn[grid](*args, **self._kwargs)
            return
        active = driver.active
        device = active.get_current_device()
        names, values = _specialise(args, torch.version.hip is not None)
        key = (device, *names)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(key, args)
        _run(compiled, grid, active.get_current_stream(device), (*values, *self._tail))

    def _call_by_name(self, grid: Grid, **named: Argument) -> None:
        """What ``launch`` is where nothing is compiled."""
        if named.keys() != set(self.argument_names):
            missing = sorted(set(self.argument_names) - named.keys())
            unknown = sorted(named.keys() - set(self.argument_names))
            raise TypeError(
                f"{self._fn.__name__} takes {len(self.argument_names)} arguments by name: missing"
                f" {missing}, unknown {unknown}"
            )
        self(grid, *[named[name] for name in self.argument_names])

    def _find(self, exact: tuple[object, ...], device: int, args: tuple[Argument, ...]) -> Any:
        """The compiled kernel for the classes of the arguments, kept for their exact values."""
        key = (device, *_specialise(args, torch.version.hip is not None)[0])
        compiled = self._compiled.get(key) or self._compile(key, args)
        if len(self._recent) >= _RECENT:
            self._recent.clear()
        self._recent[exact] = compiled
        return compiled

    @staticmethod
    def pack(args: Iterable[Argument]) -> Packed:
        """A group's arguments for ``packed``, in the group's order."""
        key, values = _specialise(args, torch.version.hip is not None)
        number = _PACK_KEYS.get(tuple(key))
        if number is None:  # a number of its own, whichever thread comes first
            number = _PACK_KEYS.setdefault(tuple(key), next(_PACK_NUMBERS))
        return number, tuple(values)

    def packed(
        self, grid: Grid, packs: Sequence[Packed], arguments: Callable[[], Sequence[Argument]]
    ) -> None:
        """Launch with arguments that were made ready before, in the order of ``groups``.

        Args:
            grid: as above.
            packs: one for each group.
            arguments: gives what the packs stand for, in the order of the kernel's signature.
                Called where the kernel has to be compiled or is interpreted.
        """
        if self._interpreted:
            self(grid, *arguments())
            return
        active = driver.active
        device = active.get_current_device()
        values: tuple[object, ...] = ()
        key = [device]
        for number, group in packs:
            key.append(number)
            values += group
        compiled = self._packed.get(tuple(key))
        if compiled is None:
            given = tuple(arguments())
            full = (device, *_specialise(given, torch.version.hip is not None)[0])
            compiled = self._compiled.get(full) or self._compile(full, given)
            self._packed[tuple(key)] = compiled
        args = (*self._in_order(values), *self._tail)
        _run(compiled, grid, active.get_current_stream(device), args)

    def warm_up(self, *args: Argument | torch.dtype) -> None:
        """Compile and load the variant that these arguments select, without launching it.

        A dtype stands for a 16-byte aligned tensor, within 2 GiB on HIP. Does nothing under the
        interpreter.
        """
        if self._interpreted:
            return
        device = driver.active.get_current_device()
        key = (device, *_specialise(args, torch.version.hip is not None)[0])
        if key not in self._compiled:
            self._compile(key, args)

    def _compile(self, key: tuple[object, ...], args: tuple[Argument | torch.dtype, ...]) -> Any:
        for launch in (self, *self.alternatives):
            if key not in launch._compiled:
                compiled = launch._fn.warmup(*args, grid=(1,), **launch._kwargs)
                # Reading run loads the binary: not lazily at the first launch, which may be in a
                # capture.
                compiled.run  # noqa: B018
                launch._compiled[key] = compiled
        return self._compiled[key]


def _launcher(kernel: KernelLaunch, names: Sequence[str]) -> Callable[..., None]:
    """A function of grid and named arguments that launches a kernel.

    It is generated, as Triton's own binder is: its parameters are the kernel's, so that Python
    brings them in order and refuses others, and nothing loops over them. It remembers the variant
    for the numbers themselves, which saves deciding their classes in every launch.
    """
    is_pointer = {name: name.endswith("_ptr") for name in names}
    hip = torch.version.hip is not None
    lines = [f"def launch(grid, *, {', '.join(names)}):"]
    exact, values = ["device"], []
    for name in names:
        if not is_pointer[name]:
            # 1, 1.0 and True are equal, and have variants of their own
            exact += [name, f"type({name})"]
            values.append(name)
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
        values.append(f"{name}_address")
    lines += [
        "    active = driver.active",
        "    device = active.get_current_device()",
        f"    exact = ({', '.join(exact)},)",
        "    compiled = recent.get(exact)",
        "    if compiled is None:",
        f"        compiled = find(exact, device, ({', '.join(names)},))",
        "    stream = active.get_current_stream(device)",
        "    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook",
        "    if getattr(enter, 'calls', enter) or getattr(leave, 'calls', leave):",
        f"        compiled[grid]({', '.join(values)}, *tail, stream=stream)",
        "        return",
        "    function, metadata = compiled.function, compiled.packed_metadata",
        "    compiled.run(*grid, stream, function, metadata, None, None, None,"
        f" {', '.join(values)}, *tail)",
    ]
    scope: dict[str, Any] = {
        "driver": driver,
        "recent": kernel._recent,
        "find": kernel._find,
        "hooks": knobs.runtime,
        "tail": kernel._tail,
    }
    exec("\n".join(lines), scope)
    launch: Callable[..., None] = scope["launch"]
    return launch


def _run(compiled: Any, grid: Grid, stream: int, args: tuple[object, ...]) -> None:
    """``compiled[grid]``, without the records for launch hooks where none are installed."""
    hooks = knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    # a chain of hooks has its calls; a hook may also be a function, or None
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[grid](*args, stream=stream)
        return
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(*grid, stream, function, metadata, None, None, None, *args)


def _specialise(
    args: Iterable[Argument | torch.dtype], hip: bool
) -> tuple[list[object], list[object]]:
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
        elif isinstance(arg, torch.dtype):
            key += (arg, True, True) if hip else (arg, True)
        elif arg is None or type(arg) is bool:
            key.append(type(arg))
            values.append(arg)
        else:
            raise TypeError(f"kernel argument must be a tensor, number or None, got {arg!r}")
    return key, values


class _IntClass(dict[int, str]):
    """What Triton makes of an int argument, remembered: a look-up costs less than deciding."""

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
