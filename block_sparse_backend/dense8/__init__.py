"""The paths of attention over blocks in 8 bits: a module for each, whose `bind` returns a
`QuantisedPath`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.variants.sage import Quantised


class QuantisedPath(Protocol):
    """One path, bound to a kind of call; all three take checked tensors."""

    def quantise(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Quantised:
        """q, k and v in the call's mode."""

    def predict(
        self, q: Tensor, k: Tensor, v: Tensor, choice: Choice, scale: float
    ) -> tuple[Quantised, BlockPlan]:
        """The same, and the blocks that ``plan.predicted.predict`` would keep."""

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, out: Tensor
    ) -> None:
        """Quantise the packed sequences of a plan and attend; fills ``out``."""

    def attend(
        self, x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor | None
    ) -> None:
        """Fills ``out`` [B, H, M, D] and ``lse`` [B, H, M], contiguous; of packed sequences there
        is no LSE."""
