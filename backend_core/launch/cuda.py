"""CUDA C++ kernels compiled at model load by NVRTC, which every CUDA build of torch brings.

No compiler is needed on the user's machine. Compiled code is kept on disk, named after all that it
depends on, so a second start of an engine loads it in milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import operator
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char_p
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import torch

from backend_core.launch import cubin_cache
from backend_core.launch.cuda_params import CudaParams
from backend_core.launch.faults import with_fault

logger = logging.getLogger("kda_dsv4")

HEADERS = Path(__file__).parents[1] / "cuda"
"""The headers that every kernel may include beside its own: ``hopper.cuh``."""
PARAMS_HEADER = "params.cuh"
"""The name by which a kernel includes the ``struct Params`` generated for it."""
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", int)
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_uint), ("value", ctypes.c_int * 17))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")),
        *((name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_PDL = ctypes.pointer(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (0, 1)))


class CudaLaunch:
    """A kernel's launch of which all is packed but a layer's addresses.

    Called with a ``NamedTuple`` of addresses, of which it takes by name those that the kernel's
    parameters have.
    """

    def __init__(
        self,
        kernel: CudaKernel,
        grid: int,
        block: int,
        params: CudaParams,
        *,
        pdl: bool = False,
        **fields: float,
    ) -> None:
        """Args:
        grid, block, pdl: as `CudaKernel` takes them.
        fields: as `CudaParams.at` takes them.
        """
        self._launch = functools.partial(kernel, grid, block, pdl=pdl)
        self._fill = params.at({}, **fields)
        self._take = operator.attrgetter(*params.addresses)

    def __call__(self, addresses: NamedTuple) -> None:
        self._launch(self._fill(*self._take(addresses)))


class CudaKernel:
    """One ``extern "C" __global__`` function, which takes one ``struct Params`` by value.

    Its construction begins to compile it for the architecture of the current device, in a thread of
    its own: make all that a model needs, then load them. ``load``, or the first launch on a device
    (during a CUDA graph's warm-up, not its capture), waits for the compiler and loads it there. The
    dynamic shared memory of a block is that of the source's instance of ``shared_bytes``.
    """

    def __init__(
        self, source: Path, name: str, params: CudaParams, defines: Mapping[str, int]
    ) -> None:
        """Args:
        source: the ``.cu`` file; it includes nothing but headers (``.cuh``) beside it, those
            in ``HEADERS``, and ``params.cuh``.
        name: the function.
        params: its parameter.
        defines: preprocessor constants.
        """
        major, minor = torch.cuda.get_device_capability()
        suffix = "a" if major >= 9 else ""
        options = (
            f"--gpu-architecture=sm_{major}{minor}{suffix}",
            "--std=c++17",
            *(f"-D{key}={value}" for key, value in defines.items()),
        )
        self._name = name
        self._compiled = _compiler(os.getpid()).submit(_compiled, source, params.header, options)
        self._shared_bytes = 0  # until it is loaded
        self._functions: dict[int, ctypes.c_void_p] = {}

    def load(self) -> ctypes.c_void_p:
        """The function on the current device, loaded if it is not there yet.

        Raises:
            ImportError: NVRTC is not installed beside torch.
            RuntimeError: the source does not compile (the message holds the compiler's log), or
                has no instance of ``shared_bytes``; or the driver refuses to load it.
        """
        device = torch.cuda.current_device()
        function = self._functions.get(device)
        if function is None:
            image = self.image
            self._shared_bytes = shared_bytes_of(image)
            function = self._functions[device] = _load(image, self._name, self._shared_bytes)
        return function

    @property
    def image(self) -> bytes:
        """The cubin; waits for the compiler."""
        return self._compiled.result()

    def __call__(self, grid: int, block: int, params: bytes, *, pdl: bool = False) -> None:
        """Launch ``grid`` blocks of ``block`` threads on the current device and stream.

        Args:
            params: the struct's bytes (``CudaParams.pack``); copied by the launch.
            pdl: programmatic dependent launch: start when every block of the kernel before has
                allowed it, not when that kernel has ended.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        if grid == 0:
            return
        device = _current_device()  # parameters are on a GPU: CUDA is initialised
        function = self._functions.get(device) or self.load()
        config = _launch_config(grid, block, self._shared_bytes, _raw_stream(device), pdl)
        status = _launch()(config, function, byref(c_char_p(params)), None)
        if status:
            raise RuntimeError(
                with_fault(f"launch of {self._name} failed: {_driver_error(status)}")
            )


@functools.lru_cache(maxsize=4096)
def _launch_config(
    grid: int, block: int, shared_bytes: int, stream: int, pdl: bool
) -> ctypes._Pointer[_LaunchConfig]:
    return ctypes.pointer(
        _LaunchConfig(grid, 1, 1, block, 1, 1, shared_bytes, stream, _PDL, int(pdl))
    )


@functools.cache
def _launch() -> Callable[..., int]:
    function: Callable[..., int] | None = getattr(_driver(), "cuLaunchKernelEx", None)
    if function is None:
        raise RuntimeError(f"the NVIDIA driver has no cuLaunchKernelEx{_too_old()}")
    return function


def _load(image: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    torch.cuda.current_stream()  # makes torch's context current on this thread
    torch.empty(0, device="cuda")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if status := _driver().cuModuleLoadData(ctypes.byref(module), image):
        raise RuntimeError(f"loading {name} failed: {_driver_error(status)}{_too_old()}")
    if status := _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()):
        raise RuntimeError(f"{name} is not in its module: {_driver_error(status)}")
    if status := _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes):
        raise RuntimeError(f"{name} cannot have {shared_bytes} B: {_driver_error(status)}")
    return function


def shared_bytes_of(image: bytes) -> int:
    """The dynamic shared memory of a compiled kernel, in bytes.

    It stands in the name of the instance of ``shared_bytes`` (hopper.cuh), ``_Z12shared_bytesILj``,
    the number and ``EEvv``.

    Raises:
        RuntimeError: the source instantiates no ``shared_bytes``.
    """
    found = re.search(rb"shared_bytesILj(\d+)EE", image)
    if found is None:
        raise RuntimeError("the compiled kernel has no instance of shared_bytes (hopper.cuh)")
    return int(found[1])


@functools.cache
def _compiler(process: int) -> ThreadPoolExecutor:
    """The threads in which a process compiles: NVRTC leaves Python's lock to others meanwhile."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="kda-dsv4-nvrtc")


def _compiled(source: Path, params_header: str, options: tuple[str, ...]) -> bytes:
    """The cubin, from the cache where it is there."""
    text = source.read_bytes()
    library = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256(text)
    for folder in (source.parent, HEADERS):
        for header in sorted(folder.glob("*.cuh")):
            key.update(header.read_bytes())
    key.update(repr((params_header, options, major.value, minor.value)).encode())
    name = f"{source.stem}-{key.hexdigest()}.cubin"
    image = cubin_cache.load(name)
    if image is not None:
        return image
    _say_that_it_compiles()
    include = (f"--include-path={folder}" for folder in (source.parent, HEADERS))
    image = _compile(library, text, source.name, params_header, (*options, *include))
    cubin_cache.store(name, image)
    return image


_first_compilation = threading.Lock()  # taken once, by the thread that says so


def _say_that_it_compiles() -> None:
    if _first_compilation.acquire(blocking=False):
        logger.warning(
            "kda-dsv4-backend: compiling CUDA kernels in %d threads, once for all starts",
            os.cpu_count(),
        )


def _compile(
    library: ctypes.CDLL, text: bytes, name: str, params_header: str, options: tuple[str, ...]
) -> bytes:
    program = ctypes.c_void_p()
    headers = (ctypes.c_char_p * 1)(params_header.encode())
    header_names = (ctypes.c_char_p * 1)(PARAMS_HEADER.encode())
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), text, name.encode(), 1, headers, header_names
    )
    _check(library, status)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), arguments)
        if status:
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"{name} does not compile: {log.value.decode().strip()}")
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, image))
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC failed: {library.nvrtcGetErrorString(status).decode()}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver_error(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


def _too_old() -> str:
    """A hint for an error if the driver is older than the compiler; else nothing."""
    found, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _driver().cuDriverGetVersion(ctypes.byref(found))
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    driver = (found.value // 1000, found.value % 1000 // 10)
    if driver >= (major.value, minor.value):
        return ""
    return (
        f"; the NVIDIA driver is one for CUDA {driver[0]}.{driver[1]}, and the NVRTC that torch "
        f"brought is of CUDA {major.value}.{minor.value}: update the driver, or install a torch "
        "for the driver's CUDA"
    )


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC that torch's packages brought, else the system's; of torch's CUDA before others."""
    major = (torch.version.cuda or "").partition(".")[0]
    libraries = sorted(_LIBRARIES, key=lambda name: not name.endswith(f".{major}"))
    brought = [file for library in libraries for file in _installed(library)]
    for candidate in (*brought, *libraries):
        try:
            return _open(candidate)
        except OSError:
            continue
    raise ImportError(
        f"none of {', '.join(_LIBRARIES)} is installed beside torch, and the CUDA kernels are "
        "compiled by one of them: install nvidia-cuda-nvrtc (nvidia-cuda-nvrtc-cu12 for CUDA 12)"
    )


def _open(library: str) -> ctypes.CDLL:
    """NVRTC, and first its builtins, which it would look for on the system's path alone."""
    for builtins in Path(library).parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(library)


def _installed(library: str) -> list[str]:
    found = []
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            listed = files(package) or []
        except PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in listed if file.name == library]
    return found
