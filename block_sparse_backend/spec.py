"""A kind of call of attention over blocks: all that its kernel is compiled for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.variants import masks

if TYPE_CHECKING:
    from block_sparse_backend.variants.sage import SageMode

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


class QuantisedSpec(NamedTuple):
    """Attention in 8 bits; the attributes are those of `BlockSparseSpec`."""

    mode: SageMode
    heads: int = 1
    group: int = 1
    dim: int = 128
    block_m: int = 128
    block_n: int = 128
    has_partial: bool = False
    mask: masks.Mask = masks.everything

    def of_plan(self, plan: BlockPlan) -> QuantisedSpec:
        """The same with a plan's mask, which is known when the inputs have been quantised."""
        return self._replace(has_partial=plan.has_partial, mask=plan.mask)

    def requires(self) -> frozenset[str]:
        """The features that a path must declare to serve such calls."""
        return frozenset({"e4m3_values"} if self.mode.fp8_values else ())
