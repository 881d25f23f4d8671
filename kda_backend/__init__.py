"""Kimi Delta Attention for inference engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kda_backend.api import chunk_kda, fused_recurrent_kda
    from kda_backend.decode_step import kda_decode_step, kda_verify_step

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_decode_step", "kda_verify_step"]

_MODULES = {
    "chunk_kda": "kda_backend.api",
    "fused_recurrent_kda": "kda_backend.api",
    "kda_decode_step": "kda_backend.decode_step",
    "kda_verify_step": "kda_backend.decode_step",
}


def __getattr__(name: str) -> Any:
    # imported when first asked for: `kda_backend.family` is read where torch is not installed
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
