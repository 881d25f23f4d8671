"""A kind of call of attention over blocks: all that its kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from block_sparse_backend import masks
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import ChoiceKind

LOG2_E = 1.4426950408889634


class BlockSparseSpec(NamedTuple):
    """Attention in 16 bits.

    Attributes:
        group: query heads of a key head.
        dims: channels of keys and of values.
        mask: of PARTIAL blocks.
    """

    dims: tuple[int, int]
    group: int = 1
    block_m: int = 128
    block_n: int = 128
    has_partial: bool = False
    is_packed: bool = False
    mask: masks.Mask = masks.everything

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> BlockSparseSpec:
        return cls(
            (q.shape[3], v.shape[3]),
            plan.num_heads // k.shape[1],
            plan.block_m,
            plan.block_n,
            plan.has_partial,
            plan.is_packed,
            plan.mask,
        )

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve such calls."""
        d, dv = self.dims
        needs = {
            # tiles of 128 queries and blocks of 64 or 128 keys are what every path has
            "any_tile": self.block_m != 128 or self.block_n not in (64, 128),
            "any_head_size": d != dv or d not in (64, 128),
            # beyond the end of a sequence lies another one and not the end of the tensor
            "packed": self.is_packed,
        }
        return frozenset(name for name, is_needed in needs.items() if is_needed)


@dataclass(frozen=True)
class SageMode:
    """How inputs are quantised.

    Attributes:
        fp8_values: values in e4m3 without their mean, which is added to the output; else as they
            come, in 16 bits.
    """

    fp8_values: bool = True

    def span(self, block_n: int) -> int:
        """Keys of a block among which every fourth pair shares a scale; fewer make a call more
        accurate and slower."""
        return min(64 if self.fp8_values else 32, block_n)

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve the mode."""
        return frozenset({"e4m3_values"} if self.fp8_values else ())


class QuantisedSpec(NamedTuple):
    """Attention in 8 bits; the attributes are those of `BlockSparseSpec`. Every kernel masks, in a
    walk of its own, since logits of any size take that walk too."""

    mode: SageMode
    heads: int = 1
    group: int = 1
    dim: int = 128
    block_m: int = 128
    block_n: int = 128
    mask: masks.Mask = masks.everything

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve such calls."""
        return self.mode.requires()


class QuantiseSpec(NamedTuple):
    """Quantisation of inputs.

    Attributes:
        block_m, block_n: queries of a tile, and keys in a block of the plan.
        has_pool, has_likeness: sums of tiles and blocks are asked for, and their likenesses.
    """

    mode: SageMode
    block_m: int = 64
    block_n: int = 128
    has_pool: bool = False
    has_likeness: bool = False

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve such calls."""
        return self.mode.requires()


class PredictSpec(NamedTuple):
    """Prediction of the blocks that are kept.

    Attributes:
        heads, group: query heads, and those of a key head.
        block_m, block_n: queries of a tile, and keys in a block.
        kind: the choice but for its numbers.
        is_centred: what all keys share has been taken out of their sums.
    """

    heads: int
    group: int
    block_m: int
    block_n: int
    kind: ChoiceKind
    is_centred: bool

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, kind: ChoiceKind, blocks: tuple[int, int], *, is_centred: bool
    ) -> PredictSpec:
        heads = q.shape[1]
        return cls(heads, heads // k.shape[1], *blocks, kind, is_centred)
