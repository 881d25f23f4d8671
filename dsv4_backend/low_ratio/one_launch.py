"""A step of ratio 1 or 2 in one launch: state rows, latents, main records and indexer's keys."""

from __future__ import annotations

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from dsv4_backend.low_ratio_step import LAYER, PLAN, LowRatioCall, LowRatioRun, LowRatioStep
from dsv4_backend.low_ratio_step import LowRatioStepSpec as Spec
from dsv4_backend.variants import low_ratio_variants


def bind(row: KernelPath, spec: Spec, target: Target) -> LowRatioRun:
    (variant,) = low_ratio_variants(row, spec.compressor, spec.state_block)
    launch = variant.launch(layer=LAYER, plan=PLAN).launch

    def run(call: LowRatioCall, plan: LowRatioStep) -> None:
        tensors = {"input_ptr": call.kv_score, "score_ptr": call.score}
        launch((plan.num_tokens, 2, 1), layer=call.packed, plan=plan.packed, **tensors)

    return run
