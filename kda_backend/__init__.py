"""Kimi Delta Attention for inference engines.

What is listed here is imported at its first use, so that path tables are read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kda_backend.contract.values import (
        LOG_DECAY,
        ConvInputs,
        DraftInputs,
        GateSpec,
        NormInputs,
        Records,
        StateRef,
        TokenInputs,
    )
    from kda_backend.fla import chunk_kda, fused_recurrent_kda
    from kda_backend.operators import (
        kda_commit_,
        kda_decode_step,
        kda_prefill,
        kda_recurrent,
        kda_verify_step,
    )
    from kda_backend.scratch import Scratch
    from kda_backend.selection import KdaSelection, KdaShape, select
    from kda_backend.step_plan import StepPlan, build_step_plan

__all__ = [
    "LOG_DECAY",
    "ConvInputs",
    "DraftInputs",
    "GateSpec",
    "KdaSelection",
    "KdaShape",
    "NormInputs",
    "Records",
    "Scratch",
    "StateRef",
    "StepPlan",
    "TokenInputs",
    "build_step_plan",
    "chunk_kda",
    "fused_recurrent_kda",
    "kda_commit_",
    "kda_decode_step",
    "kda_prefill",
    "kda_recurrent",
    "kda_verify_step",
    "select",
]
_MODULES = ("fla", "operators", "contract.values", "scratch", "step_plan", "selection")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
