"""A step of ratio 1 or 2 in one launch: state rows, latents, main records and indexer's keys."""

from __future__ import annotations

from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend.low_ratio_step import LowRatioStepSpec
from dsv4_backend.step import Launches
from dsv4_backend.variants import low_ratio_variants


def bind(row: Row, spec: LowRatioStepSpec, target: Target) -> Launches:
    (variant,) = low_ratio_variants(row, spec.compressor, spec.state_block)
    return Launches((variant.launch(),), lambda plan: ((plan.num_tokens, 2, 1),))
