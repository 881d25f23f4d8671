"""A CDNA GPU in place of the CPU: Triton kernels that are launched inside it run as machine code.

    with Device("gfx950") as device:
        chunk_kda(...)          # on CPU tensors, with a plan for KNOWN_TARGETS["MI355X"]
    device.runs                 # what ran

The tests' process has Triton's interpreter on, so every launch ends in ``InterpretedFunction.run``;
this is where the kernel is compiled and executed instead.
"""

from __future__ import annotations

import gc
import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from backend_core.launch.head import argument_names, flat
from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS, Target
from tools.amdgcn.compiler import (
    Compiled,
    Compiler,
    Described,
    DescriptorArgument,
    Named,
    TensorArgument,
)
from tools.amdgcn.memory import GlobalMemory
from tools.amdgcn.program import parse
from tools.amdgcn.workgroup import Kernel

TARGETS: dict[str, Target] = {
    "gfx942": KNOWN_TARGETS["MI300X"],
    "gfx950": KNOWN_TARGETS["MI355X"],
}
_COMPILERS: dict[str, Compiler] = {}
_KERNELS: dict[tuple[str, Compiled], Kernel] = {}
_NEAR, _FAR = 0, 2**40
"""Reach of a tensor: within 2 GiB, for which Triton uses buffer instructions, or beyond."""


@dataclass
class Run:
    """The runs of one kernel inside a device.

    Attributes:
        instructions: run by all waves together. opcodes: of these, how many of each.
        seconds: of executing, without compiling.
    """

    launches: int = 0
    workgroups: int = 0
    instructions: int = 0
    unwaited_reads: int = 0
    seconds: float = 0.0
    opcodes: Counter[str] = field(default_factory=Counter)


class Device:
    """Where launches of Triton kernels go while it is entered.

    Args:
        arch: ``"gfx942"`` or ``"gfx950"``.
        is_large: compile for tensors beyond 2 GiB, which get no buffer instructions.
        change: what is done to a kernel's text before it runs: how tests plant a fault.
        seed: of the order in which waves run.
    """

    def __init__(
        self,
        arch: str,
        *,
        is_large: bool = False,
        change: Callable[[str], str] | None = None,
        seed: int = 0,
    ) -> None:
        self.arch, self.is_large, self.change, self.seed = arch, is_large, change, seed
        self.target = TARGETS[arch]
        self.runs: dict[str, Run] = {}
        self._launch: Any = None
        self._prepare: Any = None
        self._prepared: list[Any] = []  # storages of tensors that later launches know by address

    def __enter__(self) -> Device:
        device = self
        self._launch = InterpretedFunction.run

        def run(
            function: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any
        ) -> None:
            device.launch(function, arguments, grid, options)

        self._prepare = KernelLaunch.prepare

        def prepare(launch: Any, takes: Any, grid: Any, **named: Any) -> Any:
            given = (x for x in named.values() if isinstance(x, torch.Tensor))
            device._prepared += [tensor.untyped_storage() for tensor in given]
            return device._prepare(launch, takes, grid, **named)

        InterpretedFunction.run = run
        KernelLaunch.prepare = prepare  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        InterpretedFunction.run = self._launch
        KernelLaunch.prepare = self._prepare  # type: ignore[method-assign]

    def launch(self, function: Any, arguments: Any, grid: Any, options: dict[str, Any]) -> None:
        """Compile the variant that these arguments select, and run it on them."""
        name = function.fn.__name__
        named = dict(zip(argument_names(function), flat(arguments), strict=False))
        for key in _run_time_names(function):
            if key in options:
                named[key] = options[key]
        options = {key: _option(x) for key, x in options.items() if key not in named}
        kernel, taken = self._kernel(function, list(named.values()), options)
        sizes = (*grid, 1, 1)[:3]
        run = self.runs.setdefault(name, Run())
        before, unwaited = kernel.opcodes(), kernel.unwaited_reads
        begin = time.perf_counter()
        memory = GlobalMemory()
        values = _values(named, taken, memory, self._prepared)
        kernel.launch(sizes, values, memory, self.seed)
        ran = kernel.opcodes() - before
        run.seconds += time.perf_counter() - begin
        run.launches += 1
        run.workgroups += math.prod(sizes)
        run.instructions += ran.total()
        run.unwaited_reads += kernel.unwaited_reads - unwaited
        run.opcodes += ran

    def _kernel(
        self, function: Any, arguments: list[Any], options: dict[str, Any]
    ) -> tuple[Kernel, tuple[str, ...]]:
        if self.arch not in _COMPILERS:
            _COMPILERS[self.arch] = Compiler(self.arch)
        reach = _FAR if self.is_large else _NEAR
        described = [_described(x, reach) for x in arguments]
        compiled = _COMPILERS[self.arch].compile(
            function.fn.__module__, function.fn.__name__, described, options
        )
        if self.change is not None:
            text = self.change(compiled.text)
            kernel = Kernel(parse(text), compiled.num_warps, compiled.lds_bytes)
            return kernel, compiled.arguments
        key = self.arch, compiled
        if key not in _KERNELS:
            program = parse(compiled.text)
            _KERNELS[key] = Kernel(program, compiled.num_warps, compiled.lds_bytes)
        return _KERNELS[key], compiled.arguments


def _run_time_names(function: Any) -> list[str]:
    """The parameters of a kernel that are no constexprs."""
    parameters = inspect.signature(function.fn).parameters.values()
    return [x.name for x in parameters if "constexpr" not in str(x.annotation)]


def _described(argument: Any, reach: int) -> Described:
    if isinstance(argument, TensorDescriptor):
        return DescriptorArgument(_name(argument.base.dtype), tuple(argument.block_shape))
    if isinstance(argument, torch.Tensor):
        return TensorArgument(_name(argument.dtype), argument.data_ptr() % 16, reach)
    described: Described = argument
    return described


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _option(value: Any) -> Any:
    if isinstance(value, InterpretedFunction):
        return Named(value.fn.__module__, value.fn.__name__)
    if isinstance(value, tl.dtype):
        names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        return Named("triton.language", names[value.name])
    if hasattr(value, "_fields"):
        return Named(type(value).__module__, type(value).__name__, tuple(value))
    return value


def _around(place: int, storages: Iterable[Any]) -> Iterator[Any]:
    """Those that an address lies in."""
    return (x for x in storages if x.data_ptr() <= place < x.data_ptr() + x.nbytes())


def _values(
    arguments: dict[str, Any],
    taken: tuple[str, ...],
    memory: GlobalMemory,
    prepared: Sequence[Any],
) -> list[int | float | bool]:
    """The arguments that the compiled kernel takes; tensors as addresses of their memory.

    Args:
        prepared: storages, in which tensors lie that a prepared launch makes of an address alone.
    """
    addresses: dict[int, int] = {}

    def address(tensor: torch.Tensor, name: str) -> int:
        place = tensor.data_ptr()
        storage = next(_around(place, prepared), tensor.untyped_storage())
        if storage.nbytes() == tensor.dtype.itemsize:  # it may be memory of the call's own
            live = (x for x in gc.get_objects() if type(x) is torch.Tensor and x.nbytes)
            others = (x.untyped_storage() for x in live if x.device.type == "cpu")
            storage = max((storage, *_around(place, others)), key=lambda x: x.nbytes())
        if storage.data_ptr() not in addresses:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]
            addresses[storage.data_ptr()] = memory.add(data, name)
        return addresses[storage.data_ptr()] + place - storage.data_ptr()

    values: list[int | float | bool] = []
    for name in taken:
        argument = arguments[name]
        if isinstance(argument, torch.Tensor):
            values.append(address(argument, name))
        elif isinstance(argument, TensorDescriptor):
            # Triton's launcher for HIP takes a descriptor apart, sizes and strides twice
            sizes = [*argument.shape, *argument.strides]
            values += [address(argument.base, name), *sizes, argument.padding == "nan", *sizes]
        else:
            values.append(argument)
    return values
