"""The launch parameters of each compressor kernel path, and what DSv4's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backend_core.tables.schema import NoParams, Operator, TableSchema

Pdl = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class InPlaceParams:
    """``compress_norm_rope_hadamard_``: a row per program, held in registers.

    Attributes:
        pdl: programmatic dependent launch, see ``kernels.numerics.wait_for_previous``; 0 is none.
    """

    num_warps: int
    pdl: Pdl = 0


@dataclass(frozen=True)
class DecodeParams:
    """A decode step in one launch.

    Attributes:
        block_w: window rows per inner step.
        pdl: programmatic dependent launch; 0 is none.
        reads_early: plan and state may be read before the kernel before is over.
        pools_early: old rows are pooled before the wait for the kernel before.
    """

    num_warps: int
    block_w: int
    pdl: Pdl = 0
    reads_early: bool = False
    pools_early: bool = False


@dataclass(frozen=True)
class QueriesParams:
    """``quantise_indexer_queries``: ``heads`` heads of a token per program."""

    num_warps: int
    heads: int


@dataclass(frozen=True)
class OneLaunchParams:
    """A prefill step in one launch: ``rows`` tokens' state rows per program beside its window."""

    num_warps: int
    block_w: int
    rows: int


@dataclass(frozen=True)
class TwoLaunchParams:
    """A prefill step in two launches: windows, then state rows with ``rest_num_warps``."""

    num_warps: int
    block_w: int
    rest_num_warps: int


@dataclass(frozen=True)
class ColumnSplitParams:
    """A prefill step whose pooling is split over ``block_d`` channels, then finish and write."""

    num_warps: int
    block_w: int
    block_d: int
    rest_num_warps: int


_REQUESTS = "requests"
_WINDOWS = "windows in the step plan"
_DECODE = {"one_launch": DecodeParams, "torch": NoParams}
_PREFILL_C4 = {"one_launch": OneLaunchParams, "two_launch": TwoLaunchParams, "torch": NoParams}
_IN_PLACE = {"in_registers": InPlaceParams, "torch": NoParams}

TABLES = TableSchema(
    family="dsv4",
    operators=(
        Operator("indexer_decode", _REQUESTS, _DECODE),
        Operator("main_c4_decode", _REQUESTS, _DECODE),
        Operator("main_c128_decode", _REQUESTS, _DECODE),
        Operator("pair_decode", _REQUESTS, _DECODE),
        Operator("indexer_prefill", _WINDOWS, _PREFILL_C4),
        Operator("main_c4_prefill", _WINDOWS, _PREFILL_C4),
        Operator(
            "main_c128_prefill", _WINDOWS, {"column_split": ColumnSplitParams, "torch": NoParams}
        ),
        Operator(
            "queries", "tokens times heads", {"in_registers": QueriesParams, "torch": NoParams}
        ),
        Operator("in_place_128_decode", "rows", _IN_PLACE),
        Operator("in_place_512_decode", "rows", _IN_PLACE),
        Operator("in_place_128_prefill", "rows", _IN_PLACE),
        Operator("in_place_512_prefill", "rows", _IN_PLACE),
    ),
)
