"""Prediction of the blocks in which most of the attention lies, from the mean tokens of blocks.

A path is a module, whose `bind` returns a `PredictPath`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.spec import PredictSpec


@dataclass(frozen=True)
class Pooled:
    """Sums over blocks of tokens, by a `PredictPath`, or on the way by what quantises them.

    Attributes:
        q_sums: float32 [B, H, tiles, D], over ``block_m`` queries each.
        k_sums: float32 [B, Hkv, blocks, D], over ``block_n`` keys each.
        q_likeness, k_likeness: float32 [B, H, tiles] and [B, Hkv, blocks], the mean cosine of all
            pairs of a block's tokens (keys without their mean); ``None`` where nobody asks.
        lengths: of queries and keys.
    """

    q_sums: Tensor
    k_sums: Tensor
    q_likeness: Tensor | None
    k_likeness: Tensor | None
    lengths: tuple[int, int]


class PredictPath(Protocol):
    """One path, bound to a kind of prediction."""

    def pool(self, q: Tensor, k: Tensor) -> Pooled:
        """The sums over the blocks of [B, H, M, D] and [B, Hkv, N, D]."""

    def select(self, x: Pooled, choice: Choice, scale: float) -> BlockPlan:
        """The plan of a choice that is of this kind, for logits of this scale."""


def plan_of(
    x: Pooled, spec: PredictSpec, rows: Tensor, cols: Tensor, work: Tensor, sequences: Tensor
) -> BlockPlan:
    """The plan of a prediction, from its lists."""
    return BlockPlan(
        rows,
        cols,
        work,
        sequences,
        spec.heads,
        spec.block_m,
        spec.block_n,
        has_partial=spec.kind.has_partial(x.lengths[1], spec.block_n),
        mask=spec.kind.mask,
        lengths=x.lengths,
    )
