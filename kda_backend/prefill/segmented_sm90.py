"""Prefill on Hopper of long sequences over few heads: segments of a sequence at the same time.

The mathematics and what is promised about bits are in docs/families/kda.md, the kernels and their
order in kernels/sm90/segments.cuh. The intra-chunk stage is that of `two_stage_sm90`, which also
takes the steps that are not scanned by segments.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from backend_core.tables.schema import Row
from backend_core.target import Target
from kda_backend.contract.calls import PrefillCall, PreparedPrefill
from kda_backend.launch_params import SegmentedParams
from kda_backend.prefill.arguments_sm90 import (
    DIM,
    KERNELS,
    SNAPSHOT_POOL_FIELDS,
    STRUCTS,
    HopperPath,
    Track,
    variant_of,
)
from kda_backend.prefill.sm_schedule import CostModel, IntraCost, ScanCost, Schedule
from kda_backend.prefill.two_stage_sm90 import SCAN_FIELDS, Scan, TwoStageSm90
from kda_backend.scratch import Scratch
from kda_backend.spec import CHUNK
from kda_backend.step_plan import StepPlan
from kda_backend.token_spec import TYPE_CODES

if TYPE_CHECKING:
    from kda_backend.prefill.arguments_sm90 import PrefillVariant
    from kda_backend.selection import KdaShape

# Bytes of a segment and head: the end, [128, 128] fp32; the transition, [128, 128] fp16; its decay,
# [128] fp32. Then flags.
RESULT_BYTES = (4 * DIM * DIM, 2 * DIM * DIM, 4 * DIM)
FLAGS = 24
_ENDS_THREADS, _MERGE_THREADS, _SCAN_THREADS = 384, 160, 384

_MORE_FIELDS = (
    ("segment_chunks", "int"),  # chunks of a segment; the last of a sequence may have fewer
    ("num_sequences", "int"),
    ("num_end_tasks", "int"),  # of segment_ends.cu
    ("num_merge_tasks", "int"),  # of merge_segments.cu
    ("segment_ends", "float*"),  # [segments, HV, 128, 128], in the order of accumulators
    ("transitions", "u16*"),  # [segments, HV, 128, 128] fp16, in wgmma's blocks
    ("segment_decays", "float*"),  # [segments, HV, 128]
    ("segment_flags", "u32*"),  # [segments, HV, 24]
)
_MORE_PARAMS = CudaParams(_MORE_FIELDS)
SEGMENT_PARAMS = CudaParams((*SCAN_FIELDS, *_MORE_FIELDS), STRUCTS)
"""Parameters of all three kernels: the scan's, then those of segments."""
POOL_SEGMENT_PARAMS = CudaParams((*SCAN_FIELDS, *SNAPSHOT_POOL_FIELDS, *_MORE_FIELDS), STRUCTS)
"""Parameters of the variants that write snapshots to a pool."""


class Segments(NamedTuple):
    """How a batch divides into segments, each of so many chunks from its sequence's start.

    Attributes:
        total: segments of all sequences; an empty sequence has one.
        ends: results of the first pass over them: for a sequence of m > 1 segments the end of the
            first, and for those between first and last the local end and the transition.
        merged: sequences of more than two segments.
    """

    total: int
    ends: int
    merged: int


def bind(row: Row, spec: KdaShape, target: Target) -> SegmentedSm90:
    return SegmentedSm90(row.params, target)


class SegmentedSm90(HopperPath):
    """`TwoStageSm90`, whose scan runs on segments of the sequences."""

    def __init__(self, params: SegmentedParams, target: Target) -> None:
        self._params = params
        self._whole = TwoStageSm90(target)
        self._made: dict[tuple[bool, torch.dtype, Track], SegmentKernels] = {}

    def begin_to_compile(self, variant: PrefillVariant) -> list[CudaKernel]:
        return [*self._begin(variant), *self._whole.begin_to_compile(variant)]

    def _begin(self, variant: PrefillVariant) -> list[CudaKernel]:
        scanned = variant.int64_offsets, variant.state_dtype, variant.track
        if scanned not in self._made:
            self._made[scanned] = _make_kernels(*scanned)
        ends, merge, scan = self._made[scanned]
        return [ends, merge, *scan]

    def kernels(self, variant: PrefillVariant) -> SegmentKernels:
        for kernel in self._begin(variant):
            kernel.load()
        return self._made[variant.int64_offsets, variant.state_dtype, variant.track]

    def prepare(self, call: PrefillCall) -> PreparedPrefill | None:
        return self._whole.launch_with(call, self._scan)

    def _scan(self, call: PrefillCall) -> Scan:
        tokens, gate, step_plan, state, _, chunk_states, *_ = call
        kernels = self.kernels(variant_of(tokens, gate, step_plan, state, chunk_states))
        chunks, value_heads = self._params.segment_chunks, tokens.v.shape[2]
        return _scan_of(kernels, self._whole.cost_model, chunks, step_plan, value_heads)


def segments_of(segment_chunks: int, step_plan: StepPlan) -> Segments:
    """The segments of a step, whose lengths the host knows."""
    bounds, tokens = step_plan.cu_seqlens_cpu, segment_chunks * CHUNK
    assert bounds is not None  # the row has a limit of the longest sequence
    counts = [max(1, -(-(end - begin) // tokens)) for begin, end in itertools.pairwise(bounds)]
    return Segments(
        total=sum(counts),
        ends=sum(max(0, 2 * count - 3) for count in counts),
        merged=sum(count > 2 for count in counts),
    )


def choose_segment_schedule(
    model: CostModel, num_tiles: int, num_tasks: int, chunks: int
) -> Schedule:
    """All SMs make tiles, then all scan; of each stage the form with the least estimated time.

    Args:
        num_tasks: segments times value heads.
        chunks: of a segment.
    """
    sms = model.num_sms

    def intra_ns(cost: IntraCost) -> int:
        rounds, rest = divmod(-(-num_tiles // sms), cost.ctas_per_sm)
        last_ns = max(cost.alone_ns, rest * cost.tile_ns) if rest else 0
        return rounds * cost.ctas_per_sm * cost.tile_ns + last_ns

    def scan_ns(cost: ScanCost) -> int:
        return -(-num_tasks * cost.ctas_per_task // sms) * cost.task_ns(chunks)

    intra, scan = min(model.intra, key=intra_ns), min(model.scan, key=scan_ns)
    scan_ctas = 4 * num_tasks if scan.split else min(num_tasks, sms)
    intra_ctas = sms if num_tiles <= sms else intra.ctas_per_sm * sms
    return Schedule(intra.ctas_per_sm, scan.split, scan_ctas, intra_ctas, sms, 0, False)


class SegmentKernels(NamedTuple):
    """The kernels of a variant: ``scan`` as (scan, scan_split)."""

    ends: CudaKernel
    merge: CudaKernel
    scan: tuple[CudaKernel, CudaKernel]


def _scan_of(
    kernels: SegmentKernels,
    cost_model: CostModel,
    chunks: int,
    step_plan: StepPlan,
    value_heads: int,
) -> Scan:
    """The three launches that take the scan's place, each a programmatic dependent of the one
    before."""
    segments = segments_of(chunks, step_plan)
    num_sms, num_tasks = cost_model.num_sms, segments.total * value_heads
    num_tiles = step_plan.num_chunks * value_heads
    schedule = choose_segment_schedule(cost_model, num_tiles, num_tasks, chunks)
    end_tasks, merge_tasks = segments.ends * value_heads, 2 * segments.merged * value_heads
    num_sequences = step_plan.num_sequences

    def launch(scan_params: bytes, scratch: Scratch) -> None:
        ends, transitions, decays, flags = scratch.segment_addresses(num_tasks, RESULT_BYTES, FLAGS)
        params = scan_params + _MORE_PARAMS.pack(
            segment_chunks=chunks,
            num_sequences=num_sequences,
            num_end_tasks=end_tasks,
            num_merge_tasks=merge_tasks,
            segment_ends=ends,
            transitions=transitions,
            segment_decays=decays,
            segment_flags=flags,
        )
        kernels.ends(min(end_tasks, num_sms), _ENDS_THREADS, params, pdl=True)
        # one CTA waits for the first pass where there is nothing to merge
        kernels.merge(max(1, min(merge_tasks, num_sms)), _MERGE_THREADS, params, pdl=True)
        kernels.scan[schedule.split](schedule.scan_ctas, _SCAN_THREADS, params, pdl=True)

    return Scan(schedule, num_tasks, launch)


def _make_kernels(int64_offsets: bool, state_dtype: torch.dtype, track: Track) -> SegmentKernels:
    params = segment_params(track)
    ends, merge, scan, scan_split = (
        CudaKernel(KERNELS / f"{name}.cu", name, params, defines)
        for name, defines in (
            ("segment_ends", segment_defines(int64_offsets, state_dtype)),
            ("merge_segments", segment_defines(int64_offsets, state_dtype)),
            ("scan", segment_defines(int64_offsets, state_dtype, track)),
            ("scan_split", segment_defines(int64_offsets, state_dtype, track)),
        )
    )
    return SegmentKernels(ends, merge, (scan, scan_split))


def segment_params(track: Track) -> CudaParams:
    """The parameters of one variant of the kernels."""
    return POOL_SEGMENT_PARAMS if track == Track.POOL else SEGMENT_PARAMS


def segment_defines(
    int64_offsets: bool, state_dtype: torch.dtype, track: Track = Track.NONE
) -> dict[str, int]:
    """Preprocessor constants of one variant of the kernels; only the scans track states."""
    return {
        "CU_INT64": int(int64_offsets),
        "DT_STATE": TYPE_CODES[state_dtype],
        "TRACK": int(track),
        "SEGMENTS": 1,
    }
