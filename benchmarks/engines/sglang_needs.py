"""The needs of sglang and its benchmarks on a machine, checked before any time is spent.

The check imports nothing of sglang, since its wheels may have been installed without libraries and
sources that a measurement does not need.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from backend_core.engines import ENGINES

PLUGINS = "sglang.srt.plugins"
FAMILIES = ("kda", "dsv4", "softmax")
COMMON, FLASH_ATTENTION, FLASH_MLA = "sm90/common_ops", "flash_ops", "flashmla_ops"
"""Libraries of sglang-kernel: what every model needs, FlashAttention 3 and FlashMLA."""


def missing(
    libraries: Iterable[str] = (), modules: Iterable[str] = (), gpus: int = 1
) -> str | None:
    """The first thing that is missing, in a sentence; ``None`` where nothing is.

    Args:
        libraries: of sglang-kernel, besides ``COMMON``.
        modules: to be importable, besides sglang's own.
        gpus: that torch has to see.
    """
    checks = (
        lambda: _release(),
        lambda: _entry_points(),
        lambda: _libraries((COMMON, *libraries)),
        lambda: _compiler(),
        lambda: _modules(("tvm_ffi", "uvloop", *modules)),
        lambda: _gpus(gpus),
    )
    return next((why for check in checks if (why := check()) is not None), None)


def require(libraries: Iterable[str] = (), modules: Iterable[str] = (), gpus: int = 1) -> None:
    """Raises:
    SystemExit: something is missing; the message says what.
    """
    if (why := missing(libraries, modules, gpus)) is not None:
        raise SystemExit(f"not started: {why}")


def _release() -> str | None:
    engine = ENGINES["sglang"]
    version = engine.installed()
    if version is None or not engine.supports(version):
        return f"sglang must be {engine.supported}, got {version}"
    return None


def _entry_points() -> str | None:
    found = {one.name for one in importlib.metadata.entry_points(group=PLUGINS)}
    if absent := [name for name in FAMILIES if name not in found]:
        return (
            f"the entry points {', '.join(absent)} of this package must be in {PLUGINS}, got"
            f" {sorted(found)}: pip install --no-deps -e ."
        )
    return None


def _libraries(names: Iterable[str]) -> str | None:
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or not spec.submodule_search_locations:
        return "sglang-kernel must be importable, got no sgl_kernel"
    folder = Path(spec.submodule_search_locations[0])
    for name in names:
        if not list(folder.glob(f"{name}*.so")):
            return f"sglang-kernel must have its library {name}, got none in {folder}"
    return None


def _compiler() -> str | None:
    """sglang compiles kernels as it meets them: their sources, nvcc, ninja and a C++ compiler."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    sources = Path(spec.submodule_search_locations[0]) / "kernels" / "jit"
    for part in ("csrc", "include"):
        if not list((sources / part).rglob("*.cuh")):
            return f"sglang must have its kernels' sources, got no *.cuh in {sources / part}"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not (Path(home) / "bin" / "nvcc").is_file():
        return f"sglang compiles kernels with nvcc, got none on the path and none in {home}/bin"
    for program in ("ninja", os.environ.get("CXX", "c++")):
        if shutil.which(program) is None:
            return f"sglang compiles kernels with {program}, got none on the path"
    return None


def _modules(names: Iterable[str]) -> str | None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            return f"the module {name} must be importable, got none"
    return None


def _gpus(wanted: int) -> str | None:
    import torch

    seen = torch.cuda.device_count()
    return None if seen >= wanted else f"torch must see {wanted} GPUs, got {seen}"
