"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.launch.cuda import CudaKernel, CudaParams
from backend_core.launch.faults import FaultRecord, record
from backend_core.target import detect_target
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.prefill.sm_schedule import CostModel, PrefillShape, Schedule, choose_schedule
from kda_backend.scratch import Scratch
from kda_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.tables.select import KernelPath

KERNELS = Path(__file__).parents[1] / "kernels" / "sm90"
DIM = 128
TILE_BYTES = 7 * 8192  # -k_in, q_in, T^T k_out, A_qk T in 8 KiB blocks
_INTRA_THREADS, _SCAN_THREADS = 128, 384

_STRUCTS = {
    "Rows": (("ptr", "void*"), ("stride_t", "i64"), ("stride_h", "i64")),
    "States": (("ptr", "void*"), *((f"stride_{axis}", "i64") for axis in "nhvk")),
}
INTRA_PARAMS = CudaParams(
    (
        ("q", "Rows"),  # [T, H, 128] bf16, like k; g [T, HV, 128] bf16
        ("k", "Rows"),
        ("g", "Rows"),
        ("beta", "Rows"),  # [T, HV] bf16, or fp32 with BETA_FP32
        ("a_log", "const float*"),  # [HV] or null
        ("dt_bias", "const float*"),  # [HV, 128] or null
        ("tiles", "u16*"),  # [chunks, HV, 7 * 4096] fp16: -k_in, q_in, T^T k_out, A_qk T
        ("chunk_decays", "float*"),  # [chunks, HV, 128], in the order in which the scan reads them
        ("chunk_start", "const int*"),  # [chunks]: first token
        ("chunk_len", "const int*"),  # [chunks]: tokens, 0 after the last chunk
        ("chunk_order", "const int*"),  # [chunks]: chunks in the order in which they are made
        ("num_value_heads", "int"),
        ("heads_per_key", "int"),  # value heads per key head
        ("lower_bound", "float"),  # of a bounded gate
        ("num_tiles", "int"),  # a tile's number is chunk * HV + value head
        ("first_scan_sm", "int"),  # SMs from this number on are reserved for the scan
        ("reserved_sm_tile_cap", "int"),  # tiles that a CTA on one of them makes before it ends
        ("progress", "Progress*"),
        ("fault", "Fault*"),  # in host memory
    ),
    _STRUCTS,
)
SCAN_PARAMS = CudaParams(
    (
        ("tiles", "const u16*"),  # as the intra stage has written them
        ("chunk_decays", "const float*"),
        ("v", "Rows"),  # [T, HV, 128] bf16, like o
        ("o", "Rows"),
        ("state_in", "States"),  # [slots, HV, V, K], or null
        ("state_out", "States"),
        ("state_indices", "const int*"),  # [N]: slots, or null: sequence n has slot n
        ("has_initial_state", "const unsigned char*"),  # [N], or null: all have
        ("chunk_states", "States"),  # [chunks, HV, V, K] bf16: before each chunk, or null
        ("snapshot_chunks", "const int*"),  # [N, num_snapshots]: after how many chunks
        ("snapshots", "float*"),  # [N, num_snapshots, HV, 128, 128]
        ("cu_seqlens", "const void*"),  # [N + 1] int32, or int64 with CU_INT64
        ("chunk_offsets", "const int*"),  # [N + 1]: first chunk
        ("sequence_order", "const int*"),  # [N]: longest first
        ("scale", "float"),
        ("num_snapshots", "int"),
        ("num_value_heads", "int"),
        ("num_tasks", "int"),  # sequences times value heads; twice as many in scan_split.cu
        ("progress", "Progress*"),
        ("fault", "Fault*"),
    ),
    _STRUCTS,
)


def two_stage_sm90(
    path: KernelPath,
    tokens: TokenInputs,
    gate: GateSpec,
    step_plan: StepPlan,
    state: StateRef,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    scratch: Scratch,
) -> None:
    """Scores and solve of each chunk in one kernel, the scan of each sequence in another.

    The scan starts on SMs that the first kernel leaves to it, and finds by flags which tiles are
    there. Between calls the counters in ``scratch`` are zero: the scan resets what the intra stage
    has counted.
    """
    if step_plan.num_sequences == 0:
        return  # without sequences no scan would be launched, and none would reset the counters
    value_heads = tokens.v.shape[2]
    beta = tokens.beta if tokens.beta.dtype != torch.float16 else tokens.beta.float()
    pool = state.read if state.read is not None else state.write
    kernels = _kernels(
        path,
        tokens.q.device,
        gate.kind,
        tokens.beta_kind,
        tokens.l2norm,
        beta.dtype,
        step_plan.cu_seqlens.dtype == torch.int64,
        pool is not None and pool.dtype == torch.bfloat16,
        chunk_states is not None or state.snapshots is not None,
    )
    num_tiles = step_plan.num_chunks * value_heads
    num_tasks = value_heads * step_plan.num_sequences
    long_tasks = value_heads * step_plan.long_sequences
    shape = PrefillShape(num_tiles, num_tasks, step_plan.max_chunks, long_tasks)
    schedule = kernels.schedule(shape)
    _q, q = _rows(tokens.q)
    _k, k = _rows(tokens.k)
    _g, g = _rows(tokens.g)
    _v, v = _rows(tokens.v)
    o_tensor, o = _rows(out)
    _a_log, a_log = _gate_parameter(gate.a_log)
    _dt_bias, dt_bias = _gate_parameter(gate.dt_bias)
    plan = step_plan.addresses
    tiles, chunk_decays, progress = scratch.addresses(num_tiles, TILE_BYTES, DIM)
    fault = fault_record().address
    state_out = _states(state, state.write)
    state_in = state_out if state.read is state.write else _states(state, state.read)
    intra_params = INTRA_PARAMS.pack(
        q=q,
        k=k,
        g=g,
        beta=(beta.data_ptr(), *beta.stride()[1:]),
        a_log=a_log,
        dt_bias=dt_bias,
        tiles=tiles,
        chunk_decays=chunk_decays,
        chunk_start=plan.start,
        chunk_len=plan.length,
        chunk_order=plan.sequence_major if schedule.sequence_major else plan.chunk_major,
        num_value_heads=value_heads,
        heads_per_key=value_heads // tokens.q.shape[2],
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
        v=v,
        o=o,
        state_in=state_in,
        state_out=state_out,
        state_indices=_address(state.indices),
        has_initial_state=_address(state.has_initial),
        chunk_states=_states(state, chunk_states),
        snapshot_chunks=_address(state.snapshot_chunks),
        snapshots=_address(state.snapshots),
        cu_seqlens=plan.cu_seqlens,
        chunk_offsets=plan.offsets,
        sequence_order=plan.sequence_order,
        scale=tokens.scale,
        num_snapshots=0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
        num_value_heads=value_heads,
        num_tasks=num_tasks * 2 if schedule.split else num_tasks,
        progress=progress,
        fault=fault,
    )
    intra, scan = kernels.intra[schedule.intra_ctas_per_sm], kernels.scan[schedule.split]
    intra(schedule.intra_ctas, _INTRA_THREADS, intra_params)
    try:
        scan(schedule.scan_ctas, _SCAN_THREADS, scan_params, pdl=True)
    except Exception:
        scratch.clear_flags()  # which this scan would have reset
        raise
    if o_tensor is not out:
        out.copy_(o_tensor)


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """(x, its Rows); or a packed copy, since vector loads and stores need rows on 16 bytes."""
    _, stride_t, stride_h, _ = x.stride()
    address = x.data_ptr()
    if (address | 2 * stride_t | 2 * stride_h) & 15:
        return _rows(x.clone(memory_format=torch.contiguous_format))
    return x, (address, stride_t, stride_h)


def _states(state: StateRef, tensor: torch.Tensor | None) -> tuple[int, int, int, int, int]:
    """States of a tensor laid out like ``state``."""
    if tensor is None:
        return (0, 0, 0, 0, 0)
    return (tensor.data_ptr(), *state.strides(tensor))


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
        },
    )


class _Kernels(NamedTuple):
    """The kernels of one model on one path and device: ``intra`` by CTAs per SM, ``scan`` as
    (scan, scan_split); and the schedule of each shape."""

    intra: Mapping[int, CudaKernel]
    scan: tuple[CudaKernel, CudaKernel]
    schedule: Callable[[PrefillShape], Schedule]


@functools.cache
def _kernels(
    path: KernelPath,
    device: torch.device,
    gate: int,
    beta: int,
    l2norm: bool,
    beta_dtype: torch.dtype,
    int64_offsets: bool,
    bf16_state: bool,
    track: bool,
) -> _Kernels:
    cost_model = CostModel.from_table(path.params, detect_target(device).num_sms)
    intra = {
        choice.ctas_per_sm: CudaKernel(
            KERNELS / "intra_chunk.cu",
            "intra_chunk",
            INTRA_PARAMS,
            intra_defines(gate, beta, l2norm, beta_dtype, choice.ctas_per_sm),
        )
        for choice in cost_model.intra
    }
    defines = scan_defines(int64_offsets, bf16_state, track)
    scan, scan_split = (
        CudaKernel(KERNELS / f"{name}.cu", name, SCAN_PARAMS, defines)
        for name in ("scan", "scan_split")
    )
    # all of them now: a later batch may be the first to choose one
    for kernel in (*intra.values(), scan, scan_split):
        kernel.load()
    schedule = functools.lru_cache(4096)(functools.partial(choose_schedule, cost_model))
    return _Kernels(intra, (scan, scan_split), schedule)


def intra_defines(
    gate: int, beta: int, l2norm: bool, beta_dtype: torch.dtype, ctas_per_sm: int
) -> dict[str, int]:
    """Preprocessor constants of one variant of intra_chunk.cu."""
    return {
        "GATE": gate,
        "BETA": beta,
        "L2NORM": int(l2norm),
        "BETA_FP32": int(beta_dtype == torch.float32),
        "MIN_BLOCKS": ctas_per_sm,
    }


def scan_defines(int64_offsets: bool, bf16_state: bool, track: bool) -> dict[str, int]:
    """Preprocessor constants of one variant of scan.cu or scan_split.cu."""
    return {
        "CU_INT64": int(int64_offsets),
        "STATE_BF16": int(bf16_state),
        "TRACK": int(track),
    }


def _gate_parameter(x: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """In fp32, on 16 bytes; and its address, 0 for none."""
    if x is None:
        return None, 0
    address = x.data_ptr()
    if x.dtype != torch.float32 or address & 15:
        x = x.float() if x.dtype != torch.float32 else x.clone()
        address = x.data_ptr()
    return x, address


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
