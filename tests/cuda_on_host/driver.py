"""Builds kernels for the CPU, and runs their launches."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from backend_core.launch.cuda import PARAMS_HEADER, CudaParams, shared_bytes_of

HERE = Path(__file__).parent
GXX = shutil.which("g++")


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The scheduler, one per process: kernels find its functions by their names."""
    library = _build((str(HERE / "runtime.cpp"),), "")
    runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    runtime.run.restype = ctypes.c_char_p
    return runtime


def run_launches(seed: int) -> None:
    """Run all launches since the last call to their end.

    Raises:
        RuntimeError: no thread can go on, lanes of a warp part, and the like.
    """
    message = _runtime().run(seed)
    if message is not None:
        raise RuntimeError(message.decode())


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
    ) -> None:
        """``run_seed``: a launch runs too, and those before it."""
        _runtime()
        options = (
            *(f"-D{key}={value}" for key, value in defines.items()),
            *(f'-DSOURCE="{source}"', f"-DKERNEL={name}"),
            *(f"-I{place}" for place in (HERE, source.parent)),
            str(HERE / "kernel.cpp"),
        )
        texts = (file.read_bytes() for file in sorted(source.parent.glob("*.cu*")))
        digest = hashlib.sha256(b"".join(texts)).hexdigest()
        file = _build(options, params.header, digest)
        self._cluster_size, self._run_seed = cluster_size, run_seed
        self._shared_bytes = shared_bytes_of(file.read_bytes())
        self._kernel = ctypes.CDLL(str(file)).kernel_on_host

    def __call__(self, grid: int, block: int, params: bytes, *, pdl: bool = False) -> None:
        sizes = (len(params), grid, block, self._cluster_size, self._shared_bytes, int(pdl))
        _runtime().launch(self._kernel, params, *sizes)
        if self._run_seed is not None:
            run_launches(self._run_seed)


@functools.cache
def _build(arguments: tuple[str, ...], params_header: str, digest: str = "") -> Path:
    """``digest``: of sources that may change while the process runs."""
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-host-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / PARAMS_HEADER).write_text(params_header)
    library = folder / "library.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic"]
    done = subprocess.run(
        [*command, f"-I{folder}", *arguments, "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return library
