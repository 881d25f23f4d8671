"""The launch parameters of each compressor kernel path, and what DSv4's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backend_core.tables.schema import NoParams, Operator, TableSchema

Pdl = Literal["off", "wait", "release_after_wait", "release_first"]
"""Programmatic dependent launch, see ``backend_core.kernels.pdl``."""

Prefetch = Literal["none", "load", "pool"]
"""What a decode step does before its PDL wait, where the step plan is ``pdl_prefetch_safe``:
nothing, load all but its input, or also pool the rows that it loaded."""


@dataclass(frozen=True)
class InPlaceParams:
    """``compress_norm_rope_hadamard_``: one program per row, which it holds in registers."""

    num_warps: int
    pdl: Pdl = "off"


@dataclass(frozen=True)
class DecodeParams:
    """A decode step in one launch, one program per request.

    Attributes:
        block_w: window rows per inner step.
    """

    num_warps: int
    block_w: int
    pdl: Pdl = "off"


@dataclass(frozen=True)
class DecodeC4Params(DecodeParams):
    """A decode step of ratio 4 in one launch, one program per request.

    Attributes:
        block_w: window rows per inner step; 8 is the whole window.
    """

    prefetch: Prefetch = "none"

    def __post_init__(self) -> None:
        if self.prefetch != "none" and self.pdl == "off":
            raise ValueError(f"prefetch must be none where pdl is off, got {self.prefetch!r}")


@dataclass(frozen=True)
class DecodeC128Params(DecodeParams):
    """A decode step of ratio 128 in one launch.

    Attributes:
        block_w: window rows per inner step.
        splits: programs that share a request's channels, of which the last to arrive finishes its
            row. More than one needs ``num_warps`` 1 on HIP, where a barrier of a workgroup does not
            wait for its stores.
        max_registers: limit per thread; 0 is none.
        left_to_cutedsl: too little is gained over vLLM's own CuTe DSL kernels, and its adapter
            leaves the step to them.
    """

    max_registers: int = 0
    left_to_cutedsl: bool = False
    splits: Literal[1, 2, 4, 8] = 1


@dataclass(frozen=True)
class QueriesParams:
    """``quantise_indexer_queries``: ``heads`` heads of a token per program."""

    num_warps: int
    heads: int


@dataclass(frozen=True)
class OneLaunchParams:
    """A prefill step in one launch.

    Attributes:
        block_w: window rows per inner step.
        rows: tokens whose state rows one program writes.
    """

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
    """A prefill step that pools ``block_d`` channels per program, then finishes and writes."""

    num_warps: int
    block_w: int
    block_d: int
    rest_num_warps: int


_REQUESTS = "requests"
_WINDOWS = "windows in the step plan"
_DECODE_C4 = {"one_launch": DecodeC4Params, "torch": NoParams}
_PREFILL_C4 = {"one_launch": OneLaunchParams, "two_launch": TwoLaunchParams, "torch": NoParams}
_IN_PLACE = {"in_registers": InPlaceParams, "torch": NoParams}

TABLES = TableSchema(
    family="dsv4",
    operators=(
        Operator("indexer_decode", _REQUESTS, _DECODE_C4),
        Operator("main_c4_decode", _REQUESTS, _DECODE_C4),
        Operator(
            "main_c128_decode", _REQUESTS, {"one_launch": DecodeC128Params, "torch": NoParams}
        ),
        Operator("indexer_prefill", _WINDOWS, _PREFILL_C4),
        Operator("main_c4_prefill", _WINDOWS, _PREFILL_C4),
        Operator(
            "main_c128_prefill", _WINDOWS, {"column_split": ColumnSplitParams, "torch": NoParams}
        ),
        Operator(
            "queries", "tokens times heads", {"in_registers": QueriesParams, "torch": NoParams}
        ),
        Operator("in_place_128", "rows", _IN_PLACE),
        Operator("in_place_512", "rows", _IN_PLACE),
    ),
)
"""A compressor's kind is ``indexer``, ``main_c4`` or ``main_c128``. A path with the feature
``ring`` or ``paged`` serves states of that layout."""
