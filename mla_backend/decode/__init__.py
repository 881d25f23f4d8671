"""MLA decode's paths: a module for each, whose `bind` returns a `MlaPath` and whose `plan` a
`Planning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.scratch import SplitScratch
from mla_backend.spec import MlaSpec
from mla_backend.step_plan import MlaPlan

PreparedDecode: TypeAlias = Callable[[MlaInputs, SplitScratch], None]
"""Runs checked calls of one plan whose tensors are laid out alike."""


class MlaPath(Protocol):
    """One path, bound to a kind of layer."""

    def prepare(self, x: MlaInputs) -> PreparedDecode:
        """Prepare the calls of ``x.plan`` that are laid out as this one.

        It keeps no tensor, and belongs to the plan.
        """


class Planning(NamedTuple):
    """The plans that a path runs.

    Attributes:
        num_ctas: CTAs that share the blocks of a tile of rows.
        shares_prefixes: requests that share a prefix read it once.
        lists_prefixes: prefixes have a list of their own, and requests to merge are listed.
        fill: writes the work list of a plan, from the tokens of each tile.
    """

    num_ctas: int
    shares_prefixes: bool
    lists_prefixes: bool
    fill: Callable[[MlaPlan, Tensor], None]


def ctas_of(spec: MlaSpec, num_sms: int, shares: bool, blocks: int = 1) -> int:
    """CTAs of a plan on so many SMs, each of which computes a block of rows of a tile."""
    row_tiles = 1 if shares else -(-spec.query_rows // 64)
    return max(num_sms // (row_tiles * blocks), 1)
