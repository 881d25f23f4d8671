"""A step of ratio 1 or 2 in two launches: latents and main records, then keys and state rows."""

from __future__ import annotations

import torch

from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend.spec import LATENT_DIM
from dsv4_backend.step import Launches
from dsv4_backend.v41_step import V41Call, V41Step, V41StepSpec
from dsv4_backend.variants import v41_variants


def bind(row: Row, spec: V41StepSpec, target: Target) -> Launches:
    kernels = v41_variants(row, spec.compressor, spec.state_block)
    params, has_state = row.params, spec.compressor.compress_ratio == 2

    def grids(plan: V41Step) -> tuple[tuple[int, int, int], ...]:
        rows, writers = plan.num_latents, -(-plan.num_tokens // params.rows) if has_state else 0
        return (rows, 1, 1), (-(-rows // params.block_m) + writers, 1, 1)

    def memory(call: V41Call, plan: V41Step) -> tuple[torch.Tensor, torch.Tensor]:
        rows, new = plan.num_latents, call.kv_score.new_empty
        latent = new(rows, LATENT_DIM, dtype=torch.bfloat16)
        return latent, new(rows, dtype=torch.int32)

    return Launches(
        tuple(variant.launch() for variant in kernels),
        grids,
        ("latent_ptr", "token_ptr"),
        memory,
        num_rows=lambda plan: plan.num_latents,
    )
