"""Compile Triton kernels for a GPU that is not there: a process that answers requests.

Triton's interpreter, which the tests run under, must be off to compile, so this is a process of its
own: ``python -m tools.amdgcn.compiler gfx950`` reads requests from its input, a line of JSON each,
and writes an answer for each. It compiles through ``warmup`` of Triton's own launch path, so that
arguments are specialised exactly as on a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend_core.launch.head import argument_names, flat, grouped, parts_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class TensorArgument:
    """The properties of a tensor that Triton looks at.

    Attributes:
        dtype: of torch, such as ``"float32"``.
        alignment: the address modulo 16.
        range: bytes that an offset can reach.
    """

    dtype: str
    alignment: int
    range: int


@dataclass(frozen=True)
class DescriptorArgument:
    """Properties of a tensor descriptor that Triton looks at: the tensor's dtype, and the block."""

    dtype: str
    block: tuple[int, ...]


@dataclass(frozen=True)
class Named:
    """A value of a constexpr that JSON does not have: a function, a dtype of Triton's, or a
    NamedTuple of the values."""

    module: str
    name: str
    values: tuple[Any, ...] | None = None


Described = TensorArgument | DescriptorArgument | int | float | bool | None


@dataclass(frozen=True)
class Compiled:
    """``arguments``: the names of those that the kernel takes at run time. Triton folds ``None``,
    and an int that is 1, into the code."""

    text: str
    arguments: tuple[str, ...]
    lds_bytes: int
    num_warps: int


class Compiler:
    """The process, as a caller sees it."""

    def __init__(self, arch: str) -> None:
        environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.amdgcn.compiler", arch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._known: dict[str, Compiled] = {}

    def compile(
        self,
        module: str,
        name: str,
        arguments: list[Described],
        options: dict[str, Any],
    ) -> Compiled:
        """One variant of a kernel; ``options`` are its constexprs and the compiler's.

        Raises:
            RuntimeError: it cannot be compiled.
        """
        request = json.dumps([module, name, arguments, options], sort_keys=True, default=asdict)
        if request not in self._known:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"the compiler ended while compiling {module}.{name}")
            found = json.loads(answer)
            if "error" in found:
                raise RuntimeError(f"{module}.{name} does not compile: {found['error']}")
            self._known[request] = Compiled(**found | {"arguments": tuple(found["arguments"])})
        return self._known[request]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class _Tensor:
    """Stands for a tensor in a call that compiles."""

    def __init__(self, dtype: Any, alignment: int = 0, reach: int = 0) -> None:
        self.dtype, self._alignment, self._range = dtype, alignment, reach

    def data_ptr(self) -> int:
        return self._alignment

    def ptr_range(self) -> int:
        return self._range


def _argument(sent: Any) -> Any:
    """A run-time argument as a call that compiles takes it."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if not isinstance(sent, dict):
        return sent
    dtype = getattr(torch, sent["dtype"])
    if "block" not in sent:
        return _Tensor(dtype, sent["alignment"], sent["range"])
    block = sent["block"]
    strides = [*[16] * (len(block) - 1), 1]
    return TensorDescriptor(_Tensor(dtype), block, strides, block)


def _option(sent: Any) -> Any:
    """A constexpr, or an option of the compiler's."""
    if not isinstance(sent, dict):
        return sent
    found = getattr(importlib.import_module(sent["module"]), sent["name"])
    return found if sent["values"] is None else found(*sent["values"])


def _serve(arch: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        """A device that kernels are compiled for and never launched on."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("hip", arch, 64)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

    driver.set_active(Driver())
    # what a kernel's module prints while it is imported must not be taken for an answer
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        module, name, arguments, options = json.loads(line)
        try:
            given = [_argument(x) for x in arguments]
            chosen = {name: _option(x) for name, x in options.items()}
            kernel = getattr(importlib.import_module(module), name)
            parts = parts_of(kernel)
            built = kernel.warmup(*grouped(parts, given), grid=(1,), **chosen)
            kinds = zip(argument_names(kernel), flat(built.src.signature.values()), strict=True)
            taken = tuple(argument for argument, kind in kinds if kind != "constexpr")
            metadata = built.metadata
            answer = asdict(
                Compiled(built.asm["amdgcn"], taken, metadata.shared, metadata.num_warps)
            )
        except Exception as error:  # the caller says which kernel it is
            answer = {"error": f"{type(error).__name__}: {error}"[-4000:]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
