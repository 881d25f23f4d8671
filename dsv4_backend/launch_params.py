"""The launch parameters of each compressor kernel path, and what DSv4's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from backend_core.tables.schema import NoParams, Operator, TableSchema

if TYPE_CHECKING:
    from dsv4_backend.spec import StepSpec

Pdl = Literal["off", "wait", "release_after_wait", "release_first"]
"""Programmatic dependent launch, see ``backend_core.kernels.pdl``."""

Prefetch = Literal["none", "load", "pool"]
"""The work of a decode step before its PDL wait, where the step plan is ``pdl_prefetch_safe``:
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
    """

    max_registers: int = 0
    splits: Literal[1, 2, 4, 8] = 1


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


@dataclass(frozen=True)
class V41StepParams:
    """A step of ratio 1 or 2 in one launch, two programs per token."""

    num_warps: int
    pdl: Pdl = "off"


@dataclass(frozen=True)
class V41TwoParams:
    """A step of ratio 1 or 2 in two launches: latents, then keys with ``keys_num_warps``.

    Attributes:
        block_m: latents whose keys one program makes.
        block_k: channels of latents per inner step.
        rows: tokens whose state rows one program writes.
    """

    num_warps: int
    block_m: int
    block_k: int
    keys_num_warps: int
    rows: int
    pdl: Pdl = "off"


_DECODE_C4 = {"one_launch": DecodeC4Params, "torch": NoParams}
_DECODE_C128 = {"one_launch": DecodeC128Params, "torch": NoParams}
_PREFILL_C4 = {"one_launch": OneLaunchParams, "two_launch": TwoLaunchParams, "torch": NoParams}
_PREFILL_C128 = {"column_split": ColumnSplitParams, "torch": NoParams}
_V41 = {
    "one_launch": V41StepParams,
    "two_launch": V41TwoParams,
    "torch": NoParams,
}
_IN_PLACE = {"in_registers": InPlaceParams, "torch": NoParams}


def _of_layout(spec: StepSpec) -> frozenset[str]:
    return frozenset({spec.state_layout})


_DECODE: dict[str, Any] = {"grid": "requests", "folder": "dsv4_backend.decode"}
_PREFILL: dict[str, Any] = {
    "grid": "windows in the step plan",
    "folder": "dsv4_backend.prefill",
    "requires": _of_layout,
    "features": {
        "one_launch": "paged",
        "two_launch": "ring",
        "column_split": "paged ring",
        "torch": "paged ring",
    },
}
_ROWS: dict[str, Any] = {"grid": "rows", "folder": "dsv4_backend.in_place", "paths": _IN_PLACE}

TABLES = TableSchema(
    family="dsv4",
    operators=(
        Operator("indexer_decode", paths=_DECODE_C4, **_DECODE),
        Operator("main_c4_decode", paths=_DECODE_C4, **_DECODE),
        Operator("main_c128_decode", paths=_DECODE_C128, **_DECODE),
        Operator("indexer_prefill", paths=_PREFILL_C4, **_PREFILL),
        Operator("main_c4_prefill", paths=_PREFILL_C4, **_PREFILL),
        Operator("main_c128_prefill", paths=_PREFILL_C128, **_PREFILL),
        Operator("v41", "tokens", _V41, "dsv4_backend.v41"),
        Operator("in_place_128", **_ROWS),
        Operator("in_place_512", **_ROWS),
    ),
)
"""A compressor's kind is ``indexer``, ``main_c4`` or ``main_c128``. A path with the feature
``ring`` or ``paged`` serves states of that layout."""
