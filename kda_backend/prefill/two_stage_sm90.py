"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.launch.cuda import CudaKernel, CudaParams
from backend_core.launch.faults import FaultRecord, record
from backend_core.target import Target, detect_target
from kda_backend.contract.values import PrefillCall
from kda_backend.prefill import conv_sm90
from kda_backend.prefill.arguments_sm90 import (
    DIM,
    INTRA_FIELDS,
    KERNELS,
    SEQUENCE_FIELDS,
    SNAPSHOT_POOL_FIELDS,
    STRUCTS,
    TILE_BYTES,
    Track,
    Variant,
    address_of,
    beta_of,
    gate_parameter,
    intra_defines,
    layout_of,
    on_16_bytes,
    pack_snapshot_pool,
    tokens_on_16_bytes,
    variant_of,
)
from kda_backend.prefill.sm_schedule import CostModel, PrefillShape, Schedule, choose_schedule
from kda_backend.scratch import Scratch

if TYPE_CHECKING:
    from backend_core.tables.schema import KernelPath
    from kda_backend.selection import KdaShape

_INTRA_THREADS, _SCAN_THREADS = 128, 384

INTRA_PARAMS = CudaParams(INTRA_FIELDS, STRUCTS)
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
SCAN_PARAMS = CudaParams(SCAN_FIELDS, STRUCTS)
POOL_SCAN_PARAMS = CudaParams((*SCAN_FIELDS, *SNAPSHOT_POOL_FIELDS), STRUCTS)
"""Of the variants that write snapshots to a pool."""


class SegmentedScan(NamedTuple):
    """The scan of a call by segments of its sequences.

    Attributes:
        schedule: of the intra-chunk stage and the scan.
        num_tasks: segments times value heads.
        launch: the scan's launches, given the scan's parameters.
    """

    schedule: Schedule
    num_tasks: int
    launch: Callable[[bytes], None]


def bind(row: KernelPath, spec: KdaShape, target: Target) -> Callable[[PrefillCall], None]:
    return functools.partial(two_stage_sm90, row)


def two_stage_sm90(
    path: KernelPath,
    call: PrefillCall,
    segments: SegmentedScan | None = None,
) -> None:
    """Scores and solve of each chunk in one kernel, the scan of each sequence in another.

    The scan starts on SMs that the first kernel leaves to it, and finds by flags which tiles are
    there. Between calls the counters in ``scratch`` are zero: the scan resets what the intra stage
    has counted.

    Args:
        segments: what takes the scan's place (`segmented_sm90`).
    """
    tokens, gate, step_plan, state, out, chunk_states, scratch, kept, conv = call
    if step_plan.num_sequences == 0:
        return  # without sequences no scan would be launched, and none would reset the counters
    device = tokens.q.device
    what = (path, step_plan.cu_seqlens.dtype, chunk_states is None)
    known = kept.get(what)
    if known is None:
        variant = variant_of(tokens, gate, step_plan, state, chunk_states)
        layout = layout_of(tokens, state, out, chunk_states)
        known = kept[what] = (layout, variant, _kernels(path, device, variant))
    layout, variant, kernels = known
    q, k, v, g = [x.data_ptr() for x in tokens[:4]]
    o = out.data_ptr()
    if layout.misaligned or (q | k | v | g | o) & 15:
        rows = on_16_bytes(out)
        aligned = call._replace(tokens=tokens_on_16_bytes(tokens), out=rows, kept={})
        two_stage_sm90(path, aligned, segments)
        if rows is not out:
            out.copy_(rows)
        return
    value_heads = layout.value_heads
    num_tiles = step_plan.num_chunks * value_heads
    num_tasks = value_heads * step_plan.num_sequences
    tiles, chunk_decays, progress = scratch.addresses(num_tiles, TILE_BYTES, DIM)
    _a_log, a_log = gate_parameter(gate.a_log)
    _dt_bias, dt_bias = gate_parameter(gate.dt_bias)
    long_tasks = value_heads * step_plan.long_sequences
    shape = PrefillShape(num_tiles, num_tasks, step_plan.max_chunks, long_tasks)
    schedule = kernels.schedule(shape) if segments is None else segments.schedule
    num_tasks = num_tasks if segments is None else segments.num_tasks
    plan = step_plan.addresses
    beta = beta_of(tokens)  # a copy must live until the launch
    fault = fault_record().address
    intra_params = INTRA_PARAMS.pack(
        q=(q, *layout.q),
        k=(k, *layout.k),
        g=(g, *layout.g),
        beta=(beta.data_ptr(), *layout.beta),
        a_log=a_log,
        dt_bias=dt_bias,
        tiles=tiles,
        chunk_decays=chunk_decays,
        chunk_start=plan.start,
        chunk_len=plan.length,
        chunk_order=plan.sequence_major if schedule.sequence_major else plan.chunk_major,
        num_value_heads=value_heads,
        heads_per_key=layout.heads_per_key,
        lower_bound=gate.lower_bound,
        num_tiles=num_tiles,
        first_scan_sm=schedule.first_scan_sm,
        reserved_sm_tile_cap=schedule.reserved_sm_tile_cap,
        progress=progress,
        fault=fault,
    )
    scan_params = SCAN_PARAMS.pack(
        tiles=tiles,
        chunk_decays=chunk_decays,
        v=(v, *layout.v),
        o=(o, *layout.o),
        state_in=(address_of(state.read), *layout.state_in),
        state_out=(address_of(state.write), *layout.state_out),
        state_indices=address_of(state.indices),
        has_initial_state=address_of(state.has_initial),
        chunk_states=(address_of(chunk_states), *layout.chunk_states),
        snapshot_chunks=address_of(state.snapshot_chunks),
        snapshots=address_of(state.snapshots),
        cu_seqlens=plan.cu_seqlens,
        chunk_offsets=plan.offsets,
        sequence_order=plan.sequence_order,
        scale=tokens.scale,
        num_snapshots=layout.num_snapshots,
        num_value_heads=value_heads,
        num_tasks=num_tasks * 2 if schedule.split else num_tasks,
        progress=progress,
        fault=fault,
    )
    if state.snapshot_indices is not None:
        scan_params += pack_snapshot_pool(state)
    intra, scan = kernels.intra[schedule.intra_ctas_per_sm], kernels.scan[schedule.split]
    if conv is not None:
        convolving = kept.get(conv.weight.dtype)
        if convolving is None:
            convolving = conv_sm90.load_kernels(device, variant, conv.weight.dtype)
            kept[conv.weight.dtype] = convolving
        intra = convolving[schedule.intra_ctas_per_sm]
        intra_params += conv_sm90.pack(conv, state, step_plan, tokens.q.shape[2])
    intra(schedule.intra_ctas, _INTRA_THREADS, intra_params)
    whole = functools.partial(scan, schedule.scan_ctas, _SCAN_THREADS, pdl=True)
    _launch_scan(whole if segments is None else segments.launch, scan_params, scratch)


def _launch_scan(launch: Callable[[bytes], object], scan_params: bytes, scratch: Scratch) -> None:
    try:
        launch(scan_params)
    except Exception:
        scratch.clear_flags()  # which this scan would have reset
        raise


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


class _Kernels(NamedTuple):
    """The kernels of one model on one path and device: ``intra`` by CTAs per SM, ``scan`` as
    (scan, scan_split); and the schedule of each shape."""

    intra: Mapping[int, CudaKernel]
    scan: tuple[CudaKernel, CudaKernel]
    schedule: Callable[[PrefillShape], Schedule]


@functools.cache
def make_kernels(path: KernelPath, device: torch.device, variant: Variant) -> _Kernels:
    """The kernels of a model, which begin to compile."""
    cost_model = CostModel.from_table(path.params, detect_target(device).num_sms)
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
    return _Kernels(intra, (scan, scan_split), schedule)


@functools.cache
def _kernels(path: KernelPath, device: torch.device, variant: Variant) -> _Kernels:
    """All of them, loaded: a later batch may be the first to choose one."""
    kernels = make_kernels(path, device, variant)
    for kernel in (*kernels.intra.values(), *kernels.scan):
        kernel.load()
    return kernels


def scan_params_of(variant: Variant) -> CudaParams:
    """The parameters of one variant of scan.cu or scan_split.cu."""
    return POOL_SCAN_PARAMS if variant.track == Track.POOL else SCAN_PARAMS


def scan_defines(variant: Variant) -> dict[str, int]:
    """Preprocessor constants of one variant of scan.cu or scan_split.cu."""
    return {
        "CU_INT64": int(variant.int64_offsets),
        "STATE_BF16": int(variant.bf16_state),
        "TRACK": int(variant.track),
    }
