"""The paths of attention over blocks in 8 bits: a module for each, whose `bind` returns an
`Attend`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.quantise import Quantised

Attend: TypeAlias = Callable[[Quantised, BlockPlan, float, Tensor, Tensor | None], None]
"""Fills ``out`` [B, H, M, D] and ``lse`` [B, H, M], contiguous, from quantised inputs, a plan and
the scale of the logits; of packed sequences there is no LSE."""
