"""A step of ratio 1 or 2 in one launch: state rows, latents, main records and indexer's keys."""

from __future__ import annotations

from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend.step import Launches
from dsv4_backend.v41_step import V41StepSpec
from dsv4_backend.variants import v41_variants


def bind(row: Row, spec: V41StepSpec, target: Target) -> Launches:
    (variant,) = v41_variants(row, spec.compressor, spec.state_block)
    return Launches((variant.launch(),), lambda plan: ((plan.num_tokens, 2, 1),))
