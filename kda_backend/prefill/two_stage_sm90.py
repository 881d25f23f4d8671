"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from backend_core.launch.faults import FaultRecord, record
from backend_core.target import Target
from kda_backend.contract.calls import Addresses, PrefillCall, PreparedPrefill
from kda_backend.contract.values import GateSpec
from kda_backend.prefill import conv_sm90
from kda_backend.prefill.arguments_sm90 import (
    DIM,
    INTRA_FIELDS,
    KERNELS,
    SEQUENCE_ADDRESSES,
    SEQUENCE_FIELDS,
    SNAPSHOT_POOL_FIELDS,
    STRUCTS,
    TILE_BYTES,
    HopperPath,
    PrefillVariant,
    Track,
    gate_parameter,
    intra_defines,
    snapshot_pool,
)
from kda_backend.prefill.sm_schedule import CostModel, PrefillShape, Schedule, choose_schedule
from kda_backend.scratch import Scratch
from kda_backend.token_spec import TYPE_CODES

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from kda_backend.selection import KdaShape

_INTRA_THREADS, _SCAN_THREADS = 128, 384

INTRA_PARAMS = CudaParams(
    INTRA_FIELDS,
    STRUCTS,
    (*("q", "k", "g", "beta", "a_log", "dt_bias"), *("tiles", "chunk_decays", "progress")),
)
SCAN_FIELDS = (
    ("tiles", "const u16*"),  # as the intra stage has written them
    ("chunk_decays", "const float*"),
    ("v", "Rows"),  # [T, HV, 128] bf16, like o
    ("o", "Rows"),
    *SEQUENCE_FIELDS,
    ("scale", "float"),
    ("num_snapshots", "int"),
    ("num_value_heads", "int"),
    ("num_tasks", "int"),  # sequences times value heads; twice as many in scan_split.cu
    ("progress", "Progress*"),
    ("fault", "Fault*"),
)
SCAN_PARAMS = CudaParams(
    SCAN_FIELDS,
    STRUCTS,
    ("tiles", "chunk_decays", "v", "o", *SEQUENCE_ADDRESSES, "progress"),
)
POOL_SCAN_PARAMS = CudaParams((*SCAN_FIELDS, *SNAPSHOT_POOL_FIELDS), STRUCTS)
"""Parameters of the variants that write snapshots to a pool."""


class Scan(NamedTuple):
    """The scan of a step.

    Attributes:
        schedule: of the intra-chunk stage and the scan.
        num_tasks: sequences, or their segments, times value heads.
        launch: the scan's launches, given the scan's parameters and the call's scratch memory.
    """

    schedule: Schedule
    num_tasks: int
    launch: Callable[[bytes, Scratch], None]


def bind(row: Row, spec: KdaShape, target: Target) -> TwoStageSm90:
    return TwoStageSm90(target)


class TwoStageSm90(HopperPath):
    """Scores and solve of each chunk in one kernel, the scan of each sequence in another.

    The scan starts on SMs that the first kernel leaves to it, and finds by flags which tiles are
    there. Between calls the counters in the scratch memory are zero: the scan resets what the intra
    stage has counted.
    """

    def __init__(self, target: Target) -> None:
        self.cost_model = CostModel(target.num_sms)
        self._made: dict[PrefillVariant, StageKernels] = {}

    def begin_to_compile(self, variant: PrefillVariant) -> list[CudaKernel]:
        if variant not in self._made:
            self._made[variant] = _make_kernels(self.cost_model, variant)
        kernels = self._made[variant]
        return [*kernels.intra.values(), *kernels.scan]

    def kernels(self, variant: PrefillVariant) -> StageKernels:
        for kernel in self.begin_to_compile(variant):
            kernel.load()
        return self._made[variant]

    def prepare(self, call: PrefillCall) -> PreparedPrefill | None:
        return self.launch_with(call, None)

    def launch_with(
        self, call: PrefillCall, segments: Callable[[PrefillCall], Scan] | None
    ) -> PreparedPrefill | None:
        """`prepare`; ``segments`` takes the place of a scan of whole sequences."""
        strides, variant, kernels = self.layout_of(call)
        return None if strides is None else _launch_of(kernels, strides, variant, segments, call)


def _launch_of(
    kernels: StageKernels,
    strides: Mapping[str, tuple[int, ...]],
    variant: PrefillVariant,
    segments: Callable[[PrefillCall], Scan] | None,
    call: PrefillCall,
) -> PreparedPrefill:
    tokens, gate, step_plan, state, *_, stages = call
    device, value_heads = tokens.q.device, tokens.v.shape[2]
    num_tiles = step_plan.num_chunks * value_heads
    scan = _whole(kernels, num_tiles, value_heads, call) if segments is None else segments(call)
    schedule, num_tasks, launch_scan = scan
    table, fault = step_plan.chunk_table, fault_record().address
    assert table is not None
    order = table.sequence_major if schedule.sequence_major else table.chunk_major
    intra_params = INTRA_PARAMS.at(
        strides,
        chunk_start=table.start.data_ptr(),
        chunk_len=table.length.data_ptr(),
        chunk_order=order.data_ptr(),
        num_value_heads=value_heads,
        heads_per_key=value_heads // tokens.q.shape[2],
        lower_bound=gate.lower_bound,
        num_tiles=num_tiles,
        first_scan_sm=schedule.first_scan_sm,
        reserved_sm_tile_cap=schedule.reserved_sm_tile_cap,
        fault=fault,
    )
    scan_params = SCAN_PARAMS.at(
        strides,
        cu_seqlens=step_plan.cu_seqlens.data_ptr(),
        chunk_offsets=table.offsets.data_ptr(),
        sequence_order=table.sequence_order.data_ptr(),
        scale=tokens.scale,
        num_snapshots=state.num_snapshots,
        num_value_heads=value_heads,
        num_tasks=num_tasks * 2 if schedule.split else num_tasks,
        fault=fault,
    )
    intra = kernels.intra[schedule.intra_ctas_per_sm]
    if stages is not None:
        conv = stages.conv
        intra = conv_sm90.load_kernels(device, variant, conv.weight.dtype)[
            schedule.intra_ctas_per_sm
        ]
        conv_params = conv_sm90.params_of(conv, step_plan, tokens.q.shape[2])

    in_pool = snapshot_pool(state)

    def launch(
        rows: Addresses, gate: GateSpec, states: Addresses, scratch: Scratch, qk_conv: Addresses
    ) -> None:
        q, k, v, g, beta, o = rows
        tiles, decays, progress = scratch.addresses(num_tiles, TILE_BYTES, DIM)
        _a_log, a_log = gate_parameter(gate.a_log)
        _dt_bias, dt_bias = gate_parameter(gate.dt_bias)
        *sequences, slots = states
        of_intra = intra_params(q, k, g, beta, a_log, dt_bias, tiles, decays, progress)
        if qk_conv:
            of_intra += conv_params(*qk_conv, sequences[2], sequences[3])
        of_scan = scan_params(tiles, decays, v, o, *sequences, progress) + in_pool(slots)
        intra(schedule.intra_ctas, _INTRA_THREADS, of_intra)
        try:
            launch_scan(of_scan, scratch)
        except Exception:
            scratch.clear_flags()  # which this scan would have reset
            raise

    return launch


def _whole(kernels: StageKernels, num_tiles: int, value_heads: int, call: PrefillCall) -> Scan:
    """The scan of each sequence as a whole."""
    plan = call.step_plan
    num_tasks, long_tasks = plan.num_sequences * value_heads, plan.long_sequences * value_heads
    if chunks := plan.as_one(value_heads):
        one = PrefillShape(chunks * value_heads, value_heads, chunks, value_heads)
        schedule = kernels.schedule(one)
        # further CTAs find no task where one sequence has all tokens
        most = num_tasks * (4 if schedule.split else 1)
        schedule = schedule._replace(scan_ctas=min(most, kernels.num_sms // 2 * 2))
    else:
        schedule = kernels.schedule(PrefillShape(num_tiles, num_tasks, plan.max_chunks, long_tasks))
    scan = kernels.scan[schedule.split]

    def launch(params: bytes, scratch: Scratch) -> None:
        scan(schedule.scan_ctas, _SCAN_THREADS, params, pdl=True)

    return Scan(schedule, num_tasks, launch)


@functools.cache
def fault_record() -> FaultRecord:
    """Where these kernels say what they waited for in vain."""
    return record(
        "kda prefill",
        {
            1: "the scan of KDA's prefill waited in vain for tile {index} (chunk times value heads "
            "plus head) of launch {expected}, whose flag holds {seen}: the intra-chunk stage of "
            "this call has not run, or another call used its scratch memory meanwhile",
            2: "the intra-chunk stage of KDA's prefill waited in vain for its {expected} CTAs to "
            "start, of which {seen} did: its scratch memory was used by another call meanwhile, "
            "or the GPU had no room for them",
            3: "a segment of KDA's prefill waited in vain for flag {index} (of segment, value head "
            "and warp) of launch {expected}, which holds {seen}: its scratch memory was used by "
            "another call meanwhile",
        },
    )


class StageKernels(NamedTuple):
    """The kernels of a variant: ``intra`` by CTAs per SM, ``scan`` as (scan, scan_split); the
    schedule of each shape; and the GPU's SMs, of which a scan CTA takes a whole one."""

    intra: Mapping[int, CudaKernel]
    scan: tuple[CudaKernel, CudaKernel]
    schedule: Callable[[PrefillShape], Schedule]
    num_sms: int


def _make_kernels(cost_model: CostModel, variant: PrefillVariant) -> StageKernels:
    intra = {
        choice.ctas_per_sm: CudaKernel(
            KERNELS / "intra_chunk.cu",
            "intra_chunk",
            INTRA_PARAMS,
            intra_defines(variant, choice.ctas_per_sm),
        )
        for choice in cost_model.intra
    }
    params = scan_params_of(variant)
    scan, scan_split = (
        CudaKernel(KERNELS / f"{name}.cu", name, params, scan_defines(variant))
        for name in ("scan", "scan_split")
    )
    schedule = functools.lru_cache(4096)(functools.partial(choose_schedule, cost_model))
    return StageKernels(intra, (scan, scan_split), schedule, cost_model.num_sms)


def scan_params_of(variant: PrefillVariant) -> CudaParams:
    """The parameters of one variant of scan.cu or scan_split.cu."""
    return POOL_SCAN_PARAMS if variant.track == Track.POOL else SCAN_PARAMS


def scan_defines(variant: PrefillVariant) -> dict[str, int]:
    """Preprocessor constants of one variant of scan.cu or scan_split.cu."""
    return {
        "CU_INT64": int(variant.int64_offsets),
        "DT_STATE": TYPE_CODES[variant.state_dtype],
        "TRACK": int(variant.track),
    }
