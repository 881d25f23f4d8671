"""Plans of block-sparse attention, and the paths that make them from values on the device.

A path is a module, ``torch`` or ``triton``, whose `bind` returns a `PlanPath`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan

Pair = tuple[int, int]


class PlanPath(Protocol):
    """One path; the arguments were checked."""

    def packed(
        self,
        offsets: tuple[Tensor, Tensor],
        longest: Pair,
        room: Pair,
        num_heads: int,
        sizes: Pair,
        is_causal: bool,
    ) -> tuple[Tensor, ...]:
        """Rows, work, sequences, key blocks and first blocks of a plan of packed sequences.

        Args:
            offsets: of queries and of keys, where sequences begin and end.
            longest: the most queries and keys of a sequence.
            room: tiles and blocks that the plan has room for.
            sizes: queries in a tile and keys in a block.
        """

    def of_map(self, kept: Tensor, lengths: Pair, sizes: Pair, keep_first: bool) -> BlockPlan:
        """The plan of a map, as ``predicted.from_map`` takes it."""
