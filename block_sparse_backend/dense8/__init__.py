"""The paths of attention over blocks in 8 bits: a module for each, whose `bind` returns a
`QuantisedRun`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.variants.sage import Quantised

QuantisedRun: TypeAlias = Callable[[Quantised, BlockPlan, float, Tensor, Tensor | None], None]
"""Of inputs, plan and scale; fills ``out`` [B, H, M, D] and ``lse`` [B, H, M], contiguous; of
packed sequences there is no LSE."""
