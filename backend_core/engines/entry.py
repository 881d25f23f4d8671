"""The entry points of every family: import its adapter of an engine and let it register.

An exception in an entry point ends every process of vLLM, with or without the flag, and is only
logged by sglang. So it is one line of ours, and an error where the flag asks for the family.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

from backend_core.engines import ENGINES
from backend_core.family import PACKAGES
from backend_core.strict import FallbackError, strict_mode, warn_once


def register_vllm(family: str) -> None:
    """Run ``register()`` of a family's adapter in a process of vLLM; never raises.

    A failure is logged, and reported by `vllm_flag` for every model that the flag is passed for.
    """
    try:
        importlib.import_module(f"{family}_backend.engines.vllm").register()
    except Exception as error:
        try:
            from backend_core.engines import vllm_flag
        except Exception:  # a release that lacks what is imported there
            warn_once(_reason("vllm", family, error))
        else:
            vllm_flag.report_broken(family, error)


def register_sglang(family: str) -> None:
    """Run ``register()`` of a family's adapter in a process of sglang.

    Raises:
        SystemExit: it failed, in strict mode; sglang would serve upstream's kernels.
    """
    try:
        importlib.import_module(f"{family}_backend.engines.sglang").register()
    except Exception as error:
        reason = _reason("sglang", family, error)
        if strict_mode():
            raise SystemExit(reason) from error
        warn_once(reason)


def _reason(engine: str, family: str, error: Exception) -> str:
    """Why a family's adapter could not be registered: the release, where that is not supported."""
    supported = ENGINES[engine]
    version = supported.installed()
    try:
        known = version is not None and supported.supports(version)
    except ValueError:
        known = True
    if not known and not isinstance(error, FallbackError):
        return (
            f"kda-dsv4-backend serves {engine} {supported.supported}, got {version}: nothing is"
            " registered"
        )
    return (
        f"kda-dsv4-backend could not register {family} with {engine}:"
        f" {type(error).__name__}: {error}"
    )


_FAMILIES = [package.removesuffix("_backend") for package in PACKAGES]
vllm = SimpleNamespace(**{name: functools.partial(register_vllm, name) for name in _FAMILIES})
"""The entry points of ``vllm.general_plugins``, by family."""
sglang = SimpleNamespace(**{name: functools.partial(register_sglang, name) for name in _FAMILIES})
"""Those of ``sglang.srt.plugins``."""
