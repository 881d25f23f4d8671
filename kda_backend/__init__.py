"""Kimi Delta Attention for inference engines.

The operators are imported at their first use, so that path tables are read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kda_backend.api import chunk_kda, fused_recurrent_kda
    from kda_backend.api_step import kda_decode_step, kda_verify_step
    from kda_backend.scratch import Scratch
    from kda_backend.selection import KdaSelection, KdaShape, select
    from kda_backend.step_plan import StepPlan, build_step_plan

__all__ = [
    "KdaSelection",
    "KdaShape",
    "Scratch",
    "StepPlan",
    "build_step_plan",
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_decode_step",
    "kda_verify_step",
    "select",
]

_MODULE_OF = {
    "KdaSelection": "selection",
    "KdaShape": "selection",
    "Scratch": "scratch",
    "StepPlan": "step_plan",
    "build_step_plan": "step_plan",
    "chunk_kda": "api",
    "fused_recurrent_kda": "api",
    "kda_decode_step": "api_step",
    "kda_verify_step": "api_step",
    "select": "selection",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
