"""CUDA C++ kernels compiled at model load by NVRTC, which every CUDA build of torch brings.

No compiler is needed on the user's machine. Compiled code is kept on disk, named after all that it
depends on, so a second start of an engine loads it in milliseconds.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
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


_Parameters = ctypes.c_char_p * 1  # a kernel's only one
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_OVERLAPPING = ctypes.pointer(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (0, 1)))


class CudaKernel:
    """One ``extern "C" __global__`` function, which takes one struct by value.

    Compiled for the architecture of the current device at construction, and loaded on a device by
    ``load`` or at its first launch there (during a CUDA graph's warm-up, not its capture).
    """

    def __init__(
        self, source: Path, name: str, defines: Mapping[str, int], shared_bytes: int = 0
    ) -> None:
        """Args:
            source: the ``.cu`` file; it includes nothing but headers (``.cuh``) beside it.
            name: the function.
            defines: preprocessor constants.
            shared_bytes: dynamic shared memory of a block.

        Raises:
            ImportError: NVRTC is not installed beside torch.
            RuntimeError: the source does not compile; the message holds the compiler's log.
        """
        major, minor = torch.cuda.get_device_capability()
        suffix = "a" if major >= 9 else ""
        options = (
            f"--gpu-architecture=sm_{major}{minor}{suffix}",
            "--std=c++17",
            *(f"-D{key}={value}" for key, value in defines.items()),
        )
        self._name = name
        self._shared_bytes = shared_bytes
        self._image = _compiled(source, options)
        self._functions: dict[int, ctypes.c_void_p] = {}

    def load(self) -> ctypes.c_void_p:
        """The function on the current device, loaded if it is not there yet."""
        device = torch.cuda.current_device()
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = _load(self._image, self._name, self._shared_bytes)
        return function

    def __call__(self, grid: int, block: int, params: bytes, *, overlaps: bool = False) -> None:
        """Launch ``grid`` blocks of ``block`` threads on the current device and stream.

        Args:
            params: the struct's bytes; copied by the launch.
            overlaps: start when every block of the kernel before allows it (programmatic dependent
                launch), not when that kernel is over.

        Raises:
            RuntimeError: the driver refuses the launch.
        """
        if grid == 0:
            return
        device = torch.cuda.current_device()
        function = self._functions.get(device) or self.load()
        stream = torch._C._cuda_getCurrentRawStream(device)
        config = _launch_config(grid, block, self._shared_bytes, stream, overlaps)
        status = _launch()(config, function, _Parameters(params), None)
        if status:
            raise RuntimeError(f"launch of {self._name} failed: {_driver_error(status)}")


@functools.lru_cache(maxsize=4096)
def _launch_config(
    grid: int, block: int, shared_bytes: int, stream: int, overlaps: bool
) -> ctypes._Pointer[_LaunchConfig]:
    return ctypes.pointer(
        _LaunchConfig(grid, 1, 1, block, 1, 1, shared_bytes, stream, _OVERLAPPING, int(overlaps))
    )


@functools.cache
def _launch() -> Callable[..., int]:
    function: Callable[..., int] = _driver().cuLaunchKernelEx
    return function


def _load(image: bytes, name: str, shared_bytes: int) -> ctypes.c_void_p:
    torch.cuda.current_stream()  # makes torch's context current on this thread
    torch.empty(0, device="cuda")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    if status := _driver().cuModuleLoadData(ctypes.byref(module), image):
        raise RuntimeError(f"loading {name} failed: {_driver_error(status)}")
    if status := _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()):
        raise RuntimeError(f"{name} is not in its module: {_driver_error(status)}")
    if status := _driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes):
        raise RuntimeError(f"{name} cannot have {shared_bytes} B: {_driver_error(status)}")
    return function


def _compiled(source: Path, options: tuple[str, ...]) -> bytes:
    """The cubin, from the cache where it is there."""
    text = source.read_bytes()
    library = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256(text)
    for header in sorted(source.parent.glob("*.cuh")):
        key.update(header.read_bytes())
    key.update(repr((options, major.value, minor.value)).encode())
    cached = _cache_directory() / f"{source.stem}-{key.hexdigest()[:24]}.cubin"
    if cached.is_file():
        return cached.read_bytes()
    include = f"--include-path={source.parent}"
    image = _compile(library, text, source.name, (*options, include))
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, cached)  # processes of one engine may compile at the same time
    except OSError:
        pass  # a read-only home costs the next start two seconds
    return image


def _compile(library: ctypes.CDLL, text: bytes, name: str, options: tuple[str, ...]) -> bytes:
    program = ctypes.c_void_p()
    _check(
        library,
        library.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None),
    )
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


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kda-dsv4"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver_error(status: int) -> str:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """The NVRTC that torch's packages brought, else the system's."""
    for library in _LIBRARIES:
        for candidate in (*_installed(library), library):
            try:
                return _open(candidate)
            except OSError:
                continue
    raise ImportError(f"none of {', '.join(_LIBRARIES)} is installed beside torch")


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
