"""A step of ratio 1 or 2 in two launches: latents and main records, then keys and state rows."""

from __future__ import annotations

import torch

from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from dsv4_backend.low_ratio_step import LAYER, PLAN, LowRatioCall, LowRatioRun, LowRatioStep
from dsv4_backend.low_ratio_step import LowRatioStepSpec as Spec
from dsv4_backend.spec import LATENT_DIM
from dsv4_backend.variants import low_ratio_variants


def bind(row: KernelPath, spec: Spec, target: Target) -> LowRatioRun:
    variants = low_ratio_variants(row, spec.compressor, spec.state_block)
    latents, keys = (v.launch(layer=LAYER, plan=PLAN).launch for v in variants)
    params, has_state = row.params, spec.compressor.compress_ratio == 2

    def run(call: LowRatioCall, plan: LowRatioStep) -> None:
        rows, kv_score = plan.num_latents, call.kv_score
        given = {
            "latent_ptr": kv_score.new_empty(rows, LATENT_DIM, dtype=torch.bfloat16),
            "token_ptr": kv_score.new_empty(rows, dtype=torch.int32),
            "input_ptr": kv_score,
            "score_ptr": call.score,
            "layer": call.packed,
            "plan": plan.packed,
        }
        latents((rows, 1, 1), **given)
        writers = -(-plan.num_tokens // params.rows) if has_state else 0
        keys((-(-rows // params.block_m) + writers, 1, 1), num_rows=rows, **given)

    return run
