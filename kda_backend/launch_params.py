"""The launch parameters of each KDA kernel path, and what KDA's path tables may hold.

Imports no torch: tables are read where it is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Literal

from backend_core.tables.schema import NoParams, Operator, TableSchema
from kda_backend.spec import CHUNK

EvictionHint = Literal["", "evict_first", "evict_last"]
Warps = Literal[1, 2, 4, 8, 16, 32]
ScanRows = Literal[16, 32, 64, 128]
UpTo128 = Literal[1, 2, 4, 8, 16, 32, 64, 128]


@dataclass(frozen=True)
class TwoStageParams:
    """Prefill in Triton: the intra-chunk kernel, then the scan.

    Attributes:
        intra_max_registers: register limit per thread of the intra-chunk kernel, for K = 128 in
            16 bits; 0 is none.
        block_v, block_v_max: fewest and most value rows of a scan program; a call takes the fewest
            with which all programs run at once.
        scan_num_warps, scan_num_stages: of the scan.
        scan_pdl: programmatic dependent launch of the scan (NVIDIA, from Hopper on).
    """

    intra_max_registers: int
    block_v: ScanRows
    block_v_max: ScanRows
    scan_num_warps: Warps
    scan_num_stages: int
    scan_pdl: bool

    def __post_init__(self) -> None:
        if self.block_v > self.block_v_max:
            raise ValueError(
                f"block_v must be at most block_v_max, got {self.block_v} and {self.block_v_max}"
            )
        if self.scan_num_stages < 1 or self.intra_max_registers < 0:
            raise ValueError(
                "scan_num_stages must be at least 1 and intra_max_registers at least 0, got "
                f"{self.scan_num_stages} and {self.intra_max_registers}"
            )


@dataclass(frozen=True)
class RecurrentParams:
    """The recurrent kernel: a program walks the tokens of a sequence for ``block_v`` value rows."""

    block_v: Literal[UpTo128, 256]
    num_warps: Warps


@dataclass(frozen=True)
class FusedStepParams:
    """The decode step in one Triton launch.

    Attributes:
        num_warps: of a program that has a whole head, which convolution and norm need.
        k_inner: key channels per inner step.
        block_v, split_num_warps: value rows and warps of a program where neither convolution nor
            norm is fused.
        eviction: cache hint of the state's loads and stores.
    """

    num_warps: Warps
    k_inner: UpTo128
    block_v: UpTo128
    split_num_warps: Warps
    eviction: EvictionHint


@dataclass(frozen=True)
class FusedStepSm90Params:
    """The decode step in CUDA C++.

    Attributes:
        split: CTAs of a cluster that share a head's state.
        warps: of a CTA.
        load_hint, store_hint: L2 hints of the state's loads and stores.
    """

    split: Literal[1, 2, 4, 8]
    warps: Literal[4, 8, 16]
    load_hint: EvictionHint
    store_hint: EvictionHint


@dataclass(frozen=True)
class FusedVerifyParams:
    """Verification of drafts in one Triton launch; fields as in `FusedStepParams`."""

    num_warps: Warps
    k_inner: UpTo128


@dataclass(frozen=True)
class FusedRecordsParams:
    """Verification of drafts from records, and the fold of records, in Triton.

    Attributes:
        num_warps, k_inner: as in `FusedStepParams`.
        fold_block_v, fold_num_warps: value rows and warps of a program of the fold.
    """

    num_warps: Warps
    k_inner: UpTo128
    fold_block_v: UpTo128
    fold_num_warps: Warps


@dataclass(frozen=True)
class FusedRecordsSm90Params:
    """Verification of drafts from records in CUDA C++, and the fold of records in Triton.

    Attributes:
        split: CTAs of a cluster that share a head's state.
        k_inner, fold_block_v, fold_num_warps: of the fold, as in `FusedRecordsParams`.
    """

    split: Literal[1, 2, 4]
    k_inner: UpTo128
    fold_block_v: UpTo128
    fold_num_warps: Warps


@dataclass(frozen=True)
class TwoStageSm90Params:
    """Prefill on Hopper in two stages, whose schedule is chosen by `sm_schedule.CostModel`.

    Attributes:
        fused_conv_tiles: a step of at least so many tiles makes a layer's short convolution of q
            and k where the tiles are (`kda_backend.prefill.conv_sm90`), not by a launch of its own;
            0: no step does.
    """

    fused_conv_tiles: int

    def __post_init__(self) -> None:
        if self.fused_conv_tiles < 0:
            raise ValueError(f"fused_conv_tiles must not be negative, got {self.fused_conv_tiles}")


@dataclass(frozen=True)
class SegmentedParams(TwoStageSm90Params):
    """Prefill on Hopper that scans segments of long sequences at the same time.

    Attributes:
        segment_chunks: chunks of a segment.
    """

    segment_chunks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segment_chunks < 1:
            raise ValueError(f"segment_chunks must be at least 1, got {self.segment_chunks}")


ORDERS = {
    "one_launch_sm90": "two_stage_sm90",
    "two_stage_sm90": "two_stage_sm90",
    "fused_sm90": "fused_sm90",
}
"""Paths whose launch parameters do not change the order of operations on a token, and where two
have the same order its name. Rows of other paths with other parameters have other bits."""

_CHUNKS = "64-token chunks, each sequence's counted on its own, times value heads of this rank"
_SEQUENCES = "sequences times value heads of this rank"


_GATES = "bounded_gate unbounded_gate grouped_values"
_KEPT = f"{_GATES} batch_invariant"  # bits of a request, whatever else is in the call
_STEP = f"{_KEPT} any_dtype"
_ANY_STEP = f"{_STEP} any_head_dim"
_POOLED = f"{_ANY_STEP} unaligned_state"
_PREFILL = f"{_KEPT} deterministic_prefix"
_ANY_PREFILL = f"{_PREFILL} any_dtype any_head_dim wide_rows"
FEATURES = {
    "prefill": {
        "one_launch_sm90": _PREFILL,
        "segmented_sm90": _GATES,
        "two_stage_sm90": _PREFILL,
        "two_stage": _ANY_PREFILL,
        "torch": _ANY_PREFILL,
    },
    "recurrent": {"recurrent": _ANY_STEP, "torch": _ANY_STEP},
    "decode_step": {"fused_sm90": _STEP, "fused": _POOLED, "torch": _POOLED},
    "verify": {"fused": _ANY_STEP, "torch": _ANY_STEP},
    "verify_records": {"fused_sm90": _STEP, "fused": _POOLED, "torch": _POOLED},
}
"""By operator and path what `KdaShape.requires` may ask for, and the path has."""


def _operator(name: str, grid: str, paths: dict[str, type[Any]], unit_tokens: int = 1) -> Operator:
    requires, folder = methodcaller("requires", name), f"kda_backend.{name}"
    return Operator(name, grid, paths, folder, requires, unit_tokens, FEATURES[name])


TABLES = TableSchema(
    family="kda",
    operators=(
        _operator(
            "prefill",
            _CHUNKS,
            {
                "one_launch_sm90": NoParams,
                "segmented_sm90": SegmentedParams,
                "two_stage_sm90": TwoStageSm90Params,
                "two_stage": TwoStageParams,
                "torch": NoParams,
            },
            unit_tokens=CHUNK,
        ),
        _operator("recurrent", _SEQUENCES, {"recurrent": RecurrentParams, "torch": NoParams}),
        _operator(
            "decode_step",
            _SEQUENCES,
            {"fused_sm90": FusedStepSm90Params, "fused": FusedStepParams, "torch": NoParams},
        ),
        _operator("verify", _SEQUENCES, {"fused": FusedVerifyParams, "torch": NoParams}),
        _operator(
            "verify_records",
            _SEQUENCES,
            {
                "fused_sm90": FusedRecordsSm90Params,
                "fused": FusedRecordsParams,
                "torch": NoParams,
            },
        ),
    ),
)
