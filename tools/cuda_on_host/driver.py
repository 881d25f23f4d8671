"""Builds kernels for the CPU, and runs their launches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from backend_core.launch.cuda import PARAMS_HEADER, shared_bytes_of
from backend_core.launch.cuda_params import CudaParams

HERE = Path(__file__).parent
GXX = shutil.which("g++") if shutil.which("addr2line") else None
MAP_MAGIC = 0x70616D5F726F736E
"""The first word of a tensor map of the model, whose second is an address (async.cpp)."""
# longjmp to another fiber's stack is what a fortified one takes for a mistake
_LANGUAGE = ("-std=c++20", "-fPIC", "-w", "-U_FORTIFY_SOURCE")
# The compiler calls the model before each access to memory. Lines are found in its tables.
_KERNEL = (
    *("-O1", "-g1", "-gdwarf-4", "-fno-strict-aliasing", "-fstack-reuse=none", "-fsanitize=thread"),
    *("--param", "tsan-distinguish-volatile=1", "--param", "tsan-instrument-func-entry-exit=0"),
)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The scheduler, one per process: kernels find its functions by their names."""
    files = [file for kind in ("*.cpp", "*.h") for file in HERE.glob(kind)]
    sources = {file.name: file.read_text() for file in files if file.name != "kernel.cpp"}
    library = _library(("-O2",), tuple(sorted(sources.items())))
    runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    runtime.run.restype = ctypes.c_char_p
    runtime.place_tensor.restype = ctypes.c_void_p
    return runtime


_placed: dict[int, tuple[torch.UntypedStorage, int]] = {}
"""Storages by their address that the next run's kernels may access, and where they lie for them."""


def run_launches(seed: int) -> None:
    """Run all launches since the last call to their end.

    Raises:
        RuntimeError: a race, a missing fence, a deadlock, an overrun and the like; the message says
            where in the source.
    """
    runtime = _runtime()
    try:
        for address, (storage, place) in _placed.items():
            ctypes.memmove(place, address, storage.nbytes())
        message = runtime.run(seed)
        text = None if message is None else _with_lines(message.decode())
        for address, (storage, place) in _placed.items():
            ctypes.memmove(address, place, storage.nbytes())
    finally:
        _placed.clear()
        runtime.forget()
    if text is not None:
        raise RuntimeError(text)


class HostKernel:
    """Called as ``CudaKernel`` is; the launch waits for ``run_launches``."""

    def __init__(
        self,
        source: Path,
        name: str,
        params: CudaParams,
        defines: Mapping[str, int],
        *,
        cluster_size: int = 1,
        run_seed: int | None = None,
        instructions: Path | None = None,
    ) -> None:
        """Args:
        run_seed: a launch runs too, and those before it.
        instructions: a folder with more headers that stand in for those beside ``source``.
        """
        _runtime()
        self._name, self._pointers, self._size = name, list(_pointers(params)), params.size
        self._cluster_size, self._run_seed = cluster_size, run_seed
        if instructions is not None:
            _MODEL.update(file.name for file in instructions.glob("*.cuh"))
        places = [place for place in (HERE, instructions, source.parent) if place is not None]
        texts = _included(source.name, places) | {PARAMS_HEADER: params.header}
        texts["kernel.cpp"] = (HERE / "kernel.cpp").read_text()
        options = (*_KERNEL, f'-DSOURCE="{source.name}"', f"-DKERNEL={name}")
        options += tuple(f"-D{key}={value}" for key, value in defines.items())
        file = _library(options, tuple(sorted(texts.items())))
        self._shared_bytes = shared_bytes_of(file.read_bytes())
        library = ctypes.CDLL(str(file))
        library.library_on_host.restype = ctypes.c_void_p
        self._kernel, self._library = library.kernel_on_host, library.library_on_host()

    def __call__(self, grid: int, block: int, params: bytes, *, pdl: bool = False) -> None:
        if grid:
            if len(params) < self._size or any(params[self._size :]):  # zeros may pad it
                got = len(params)
                raise RuntimeError(f"{self._name} takes parameters of {self._size} B, got {got}")
            moved = bytearray(params)
            storages = functools.cache(_storages)
            for field, offset in self._pointers:
                address = int.from_bytes(moved[offset : offset + 8], "little")
                if field.endswith(".map"):
                    assert address == MAP_MAGIC, field
                    offset += 8
                    address = int.from_bytes(moved[offset : offset + 8], "little")
                if address:
                    place = _place(address, f"{field} of {self._name}", storages)
                    moved[offset : offset + 8] = place.to_bytes(8, "little")
            sizes = (len(moved), grid, block, self._cluster_size, self._shared_bytes, int(pdl))
            _runtime().launch(
                self._name.encode(),
                self._kernel,
                ctypes.c_void_p(self._library),
                bytes(moved),
                *sizes,
            )
        if self._run_seed is not None:
            run_launches(self._run_seed)


def _storages() -> list[torch.UntypedStorage]:
    """Of all tensors that have memory; those that torch.compile leaves from its tracing do not."""
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = (x for x in gc.get_objects() if type(x) in plain)
    return [x.untyped_storage() for x in tensors if x.device.type == "cpu"]


def _place(address: int, name: str, storages: Callable[[], list[torch.UntypedStorage]]) -> int:
    """The address that kernels see for ``address``, in memory of its storage's own."""
    for begin, (storage, place) in _placed.items():
        if begin <= address < begin + storage.nbytes():
            return place + address - begin
    for storage in storages():
        begin, size = storage.data_ptr(), storage.nbytes()
        if begin <= address < begin + size:
            place = _runtime().place_tensor(
                ctypes.c_size_t(size), ctypes.c_size_t(begin), name.encode()
            )
            _placed[begin] = storage, place
            return place + address - begin
    _placed.clear()
    _runtime().forget()  # the launches before, too
    raise RuntimeError(f"stale pointer: {name} points to no tensor that there is")


_SIZES = {"int": 4, "float": 4}


def _pointers(params: CudaParams) -> Iterator[tuple[str, int]]:
    """(name, offset) of the struct's pointers, from its declaration; tensor maps are ``.map``."""
    structs = {
        match[1]: re.findall(r"^    (.+?) (\w+);$", match[2], re.MULTILINE)
        for match in re.finditer(r"struct (\w+) \{\n(.*?)\};", params.header, re.DOTALL)
    }
    offset = 0

    def place(kind: str, name: str) -> Iterator[tuple[str, int]]:
        nonlocal offset
        if kind == "TensorMap":
            offset = -(-offset // 8) * 8
            yield f"{name}.map", offset
            offset += 128
        elif kind in structs:
            for inner, member in structs[kind]:
                yield from place(inner, f"{name}.{member}")
        else:
            size = _SIZES.get(kind, 8)
            offset = -(-offset // size) * size
            if kind.endswith("*"):
                yield name, offset
            offset += size

    for kind, name in structs["Params"]:
        yield from place(kind, name)


def _run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done.stdout


def _included(name: str, places: Sequence[Path]) -> dict[str, str]:
    """By name, the text of a file and of all that it includes, each from the first place that has
    it: the model's headers stand in for those beside a kernel."""
    file = next((place / name for place in places if (place / name).is_file()), None)
    if file is None:
        assert name == PARAMS_HEADER, f"{name} is not in {places}"
        return {}
    texts = {name: file.read_text()}
    for included in re.findall(r'^#include "(.+)"$', texts[name], re.MULTILINE):
        texts |= _included(included, places)
    return texts


@functools.cache
def _library(options: tuple[str, ...], sources: tuple[tuple[str, str], ...]) -> Path:
    """A shared library of ``sources``, the text by file name.

    It is kept under ``$XDG_CACHE_HOME/kda-dsv4/cuda-on-host``, in a folder named after all that it
    is made of: processes share it, and nothing is compiled twice.
    """
    made_of = json.dumps([_run("g++", "--version"), _LANGUAGE, options, sources])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "kda-dsv4" / "cuda-on-host" / hashlib.sha256(made_of.encode()).hexdigest()
    if place.exists():
        return place / "library.so"
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=place.parent))
    try:
        for name, text in sources:
            (folder / name).write_text(text)
        compiled = [name for name, _ in sources if name.endswith(".cpp")]
        lines = f"-ffile-prefix-map={folder}={place}"  # where they will lie
        _run("g++", *_LANGUAGE, *options, lines, "-c", *compiled, folder=folder)
        objects = [name.replace(".cpp", ".o") for name in compiled]
        _run("g++", "-shared", "-Wl,-Bsymbolic", *objects, "-o", "library.so", folder=folder)
        with contextlib.suppress(OSError):  # another process was first
            folder.rename(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return place / "library.so"


_MODEL = {file.name for file in HERE.iterdir()}


def _with_lines(message: str) -> str:
    """Each place in a library, ``{file offset}``, as ``name:line `text` ``, from its debug lines.

    Of inlined functions the innermost that is not the model's own.
    """

    def line(match: re.Match[str]) -> str:
        found = _run("addr2line", "-i", "-e", match[1], match[2]).splitlines()
        for place in found:
            file, _, number = place.split(" ")[0].rpartition(":")
            path = Path(file)
            if path.name not in _MODEL and path.is_file() and number.isdigit():
                text = path.read_text().splitlines()[int(number) - 1].strip()
                return f"{path.name}:{number} `{text}`"
        return f"{match[0]} {found}"

    return re.sub(r"\{(\S+) (0x[0-9a-f]+)\}", line, message)
