"""The entry points of every family: import its adapter of an engine and let it register.

An exception in an entry point ends every process of vLLM, with or without the flag, and is only
logged by sglang. So it is one line of ours, and an error where the flag asks for the family.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace

from backend_core.engines.log import PREFIX
from backend_core.engines.seam_list import SGLANG_FLAG, VLLM_FLAG
from backend_core.engines.seams import difference
from backend_core.family import PACKAGES
from backend_core.strict import FallbackError, fallback, strict_mode, warn_once


def register_vllm(family: str) -> None:
    """Run ``register()`` of a family's adapter in a process of vLLM; never raises.

    A failure is logged, and reported by `vllm_flag` for every model that the flag is passed for.
    """
    try:
        if (reason := difference(VLLM_FLAG)) is not None:
            warn_once(f"{PREFIX}: {reason}; nothing is registered")
            return
        importlib.import_module(f"{family}_backend.engines.vllm").register()
    except Exception as error:
        try:
            from backend_core.engines import vllm_flag
        except Exception:  # it fails to import what it needs of vLLM
            warn_once(_reason("vllm", family, error))
        else:
            vllm_flag.report_broken(family, error)


def register_sglang(family: str) -> None:
    """Run ``register()`` of a family's adapter in a process of sglang.

    Raises:
        SystemExit: it failed, in strict mode; sglang would serve upstream's kernels.
    """
    try:
        if (reason := difference(SGLANG_FLAG)) is not None:
            fallback(f"{reason}; --attention-backend means sglang's own backends alone")
            return
        importlib.import_module(f"{family}_backend.engines.sglang").register()
    except FallbackError as error:
        raise SystemExit(str(error)) from error
    except Exception as error:
        reason = _reason("sglang", family, error)
        if strict_mode():
            raise SystemExit(reason) from error
        warn_once(reason)


def _reason(engine: str, family: str, error: Exception) -> str:
    return f"{PREFIX} could not register {family} with {engine}: {type(error).__name__}: {error}"


_FAMILIES = [package.removesuffix("_backend") for package in PACKAGES]
vllm = SimpleNamespace(**{name: functools.partial(register_vllm, name) for name in _FAMILIES})
"""The entry points of ``vllm.general_plugins``, by family."""
sglang = SimpleNamespace(**{name: functools.partial(register_sglang, name) for name in _FAMILIES})
"""Entry points of ``sglang.srt.plugins``."""
