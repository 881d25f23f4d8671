"""The needs of sglang and its benchmarks on a machine, checked before any time is spent.

The check imports nothing of sglang, since its wheels may have been installed without libraries and
sources that a measurement does not need.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

COMMON, FLASH_ATTENTION, FLASH_MLA = "sm90/common_ops", "flash_ops", "flashmla_ops"
"""Libraries of sglang-kernel: what every model needs, FlashAttention 3 and FlashMLA."""


def missing(
    libraries: Iterable[str] = (), modules: Iterable[str] = (), gpus: int = 1
) -> str | None:
    """The first thing that is missing, in a sentence; ``None`` where nothing is.

    Args:
        libraries: of sglang-kernel, besides ``COMMON``.
        modules: to be importable, besides sglang and what it needs.
        gpus: that torch has to see.
    """
    checks = (
        lambda: _libraries((COMMON, *libraries)),
        lambda: _modules(("sglang", "tvm_ffi", "uvloop", *modules)),
        lambda: _gpus(gpus),
    )
    return next((why for check in checks if (why := check()) is not None), None)


def require(libraries: Iterable[str] = (), modules: Iterable[str] = (), gpus: int = 1) -> None:
    """Raises:
    SystemExit: something is missing; the message says what.
    """
    if (why := missing(libraries, modules, gpus)) is not None:
        raise SystemExit(f"not started: {why}")


def _libraries(names: Iterable[str]) -> str | None:
    spec = importlib.util.find_spec("sgl_kernel")
    if spec is None or not spec.submodule_search_locations:
        return "sglang-kernel must be importable, got no sgl_kernel"
    folder = Path(spec.submodule_search_locations[0])
    for name in names:
        if not list(folder.glob(f"{name}*.so")):
            return f"sglang-kernel must have its library {name}, got none in {folder}"
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
