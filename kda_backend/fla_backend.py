"""This package as a backend of FLA: ``fla.ops.kda.chunk_kda``, called as it is, runs here.

    FLA_KDA_DSV4=1 python script.py

FLA asks the backends that are registered with a function before it runs its own kernels, and knows
no way to find one. torch calls the entry points of ``torch.backends`` as it is imported: ours waits
for ``fla.ops.kda`` where the variable is set, and does nothing where it is not. What is not served,
for instance inputs that need gradients, runs on FLA's kernels, whose logger gives the reason.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from backend_core.engines.after_import import after_import
from backend_core.strict import is_on, warn_once

VARIABLE = "FLA_KDA_DSV4"
"""Turns the backend on, also for FLA, whose name for it follows from the backend's."""


def autoload() -> None:
    """The entry point; imports nothing, and never raises, which would end ``import torch``."""
    if is_on(VARIABLE):
        after_import("fla.ops.kda", register)


def register(module: ModuleType) -> None:
    """Register with ``chunk_kda`` of FLA's module; where that is not possible a line says so."""
    try:
        _register(module)
    except Exception as error:  # would end the import of FLA
        warn_once(
            f"kda-dsv4-backend could not register with FLA, whose own kernels run:"
            f" {type(error).__name__}: {error}"
        )


def _register(module: Any) -> None:
    from fla.backends import BaseBackend, register

    from kda_backend.fla import chunk_kda

    @register(module.chunk_kda)
    class KdaDsv4Backend(BaseBackend):  # type: ignore[misc]
        """Found before FLA's other backends, since the user has asked for it."""

        backend_type = "kda_dsv4"
        package_name = "kda_backend"
        env_var = VARIABLE
        default_enable = False
        priority = 1

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            reason = refusal(*args, **kwargs)
            return reason is None, reason

        def chunk_kda(self, *args: Any, **kwargs: Any) -> Any:
            return chunk_kda(*args, **kwargs)


def refusal(*args: Any, **kwargs: Any) -> str | None:
    """Why a call of ``chunk_kda`` stays FLA's, or ``None``; nothing is computed."""
    from kda_backend.fla import typed_values
    from kda_backend.operators import check_prefill

    try:
        bound = _signature().bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        v_first = bool(call["state_v_first"] or call["transpose_state_layout"])
        check_prefill(*typed_values(call, v_first), call["cu_seqlens"])
    except (TypeError, ValueError, LookupError) as error:
        return str(error)
    return None


@functools.cache
def _signature() -> inspect.Signature:
    """Made once: it takes longer than the checks of a call."""
    from kda_backend.fla import chunk_kda

    return inspect.signature(chunk_kda)
