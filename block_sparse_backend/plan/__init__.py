"""Plans of block-sparse attention, and the paths that make them from values on the device.

A path is a module, ``torch`` or ``triton``, whose `bind` returns a `PlanPath`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from block_sparse_backend.plan.block_plan import BlockPlan

Pair = tuple[int, int]


class PackedShape(NamedTuple):
    """A plan of packed sequences but for their offsets.

    Attributes:
        longest: the most queries and keys of a sequence.
        room: tiles and blocks that the plan has room for.
        sizes: queries in a tile and keys in a block.
    """

    longest: Pair
    room: Pair
    num_heads: int
    sizes: Pair
    is_causal: bool


class PlanPath(NamedTuple):
    """One path, whose functions take checked arguments.

    Attributes:
        packed: from where the sequences of queries and of keys begin and end, rows, work,
            sequences, key blocks and first blocks of ``BlockPlan``.
        of_map: as ``predicted.from_map``.
    """

    packed: Callable[[Tensor, Tensor, PackedShape], tuple[Tensor, ...]]
    of_map: Callable[[Tensor, Pair, Pair, bool], BlockPlan]
