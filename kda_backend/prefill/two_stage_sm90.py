"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.target import detect_target
from kda_backend.contract.inputs import KdaInputs, StateInputs
from kda_backend.prefill.sm_schedule import Costs, Work, costs_of, lay_out
from kda_backend.scratch import Workspace
from kda_backend.step_plan import ChunkMetadata

if TYPE_CHECKING:
    from backend_core.launch.cuda import CudaKernel
    from backend_core.tables.select import KernelPath

KERNELS = Path(__file__).parents[1] / "kernels" / "sm90"
DIM = 128
TILE_BYTES = 7 * 8192  # -k_in, q_in, T^T k_out, A_qk T in 8 KiB blocks
_INTRA_THREADS, _INTRA_SHARED = 128, 56384  # sizeof(Shared) of intra_chunk.cu
_SCAN_THREADS = 384
_SCAN_SHARED = {False: 226304, True: 229376}  # sizeof(Shared) of scan.cu, by SPLIT
# struct Params of the two sources
_INTRA_PARAMS = struct.Struct("=11Q8q2if3iQ")
_SCAN_PARAMS = struct.Struct("=14Q16qf3iQ")


def two_stage_sm90(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Scores and solve of each chunk in one kernel, the scan of each sequence in another.

    The scan starts on multiprocessors that the first kernel leaves to it, and finds by flags which
    tiles are there.
    """
    if meta.num_sequences == 0:
        return  # no scan block would take back what intra blocks count in the workspace
    q, q_address, stride_q_t, stride_q_h = _rows(x.q)
    _k, k_address, stride_k_t, stride_k_h = _rows(x.k)
    v, v_address, stride_v_t, stride_v_h = _rows(x.v)
    _g, g_address, stride_g_t, stride_g_h = _rows(x.g)
    o, o_address, stride_o_t, stride_o_h = _rows(out)
    a_log, dt_bias = _parameter(x.a_log), _parameter(x.dt_bias)
    beta = x.beta if x.beta.dtype != torch.float16 else x.beta.float()
    _, stride_beta_t, stride_beta_h = beta.stride()
    value_heads = v.shape[2]
    pool = state.read if state.read is not None else state.write
    model = _model(
        path,
        q.device,
        x.gate,
        x.beta_kind,
        x.l2norm,
        beta.dtype,
        meta.cu_seqlens.dtype == torch.int64,
        pool is not None and pool.dtype == torch.bfloat16,
        chunk_states is not None or state.snapshots is not None,
    )
    num_tiles = meta.num_chunks * value_heads
    tiles, totals = workspace.buffers(num_tiles, TILE_BYTES, DIM)
    flags = workspace.flags().data_ptr()
    num_tasks = value_heads * meta.num_sequences
    work = Work(num_tiles, num_tasks, meta.max_chunks, value_heads * meta.long_sequences)
    layout = lay_out(model.costs, work)
    table = meta.chunk_table
    assert table is not None
    model.intra[layout.per_sm](
        layout.intra_blocks,
        _INTRA_THREADS,
        _INTRA_PARAMS.pack(
            q_address,
            k_address,
            g_address,
            beta.data_ptr(),
            _address(a_log),
            _address(dt_bias),
            tiles.data_ptr(),
            totals.data_ptr(),
            table.start.data_ptr(),
            table.length.data_ptr(),
            (table.in_turn if layout.in_turn else table.abreast).data_ptr(),
            stride_q_t,
            stride_q_h,
            stride_k_t,
            stride_k_h,
            stride_g_t,
            stride_g_h,
            stride_beta_t,
            stride_beta_h,
            value_heads,
            value_heads // q.shape[2],
            x.lower_bound,
            num_tiles,
            layout.first_scan_sm,
            layout.limit,
            flags,
        ),
    )
    scan_params = _SCAN_PARAMS.pack(
        tiles.data_ptr(),
        totals.data_ptr(),
        v_address,
        o_address,
        _address(state.read),
        _address(state.write),
        _address(state.indices),
        _address(state.has_initial),
        _address(chunk_states),
        _address(state.snapshot_chunks),
        _address(state.snapshots),
        meta.cu_seqlens.data_ptr(),
        table.offsets.data_ptr(),
        table.sequence_order.data_ptr(),
        stride_v_t,
        stride_v_h,
        stride_o_t,
        stride_o_h,
        *state.strides(state.read),
        *state.strides(state.write),
        *state.strides(chunk_states),
        x.scale,
        0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
        value_heads,
        num_tasks * (2 if layout.split else 1),
        flags,
    )
    scan = model.scan[layout.split]
    try:
        scan(layout.scan_blocks, _SCAN_THREADS, scan_params, overlaps=True)
    except Exception:
        workspace.clear_flags()  # which this scan would have taken back
        raise
    if o is not out:
        out.copy_(o)


class _Model(NamedTuple):
    """The kernels of one model on one path and device.

    ``intra`` by blocks on one multiprocessor; ``scan`` without and with SPLIT.
    """

    intra: Mapping[int, CudaKernel]
    scan: tuple[CudaKernel, CudaKernel]
    costs: Costs


@functools.cache
def _model(
    path: KernelPath,
    device: torch.device,
    gate: int,
    beta: int,
    l2norm: bool,
    beta_dtype: torch.dtype,
    int64_offsets: bool,
    bf16_state: bool,
    track: bool,
) -> _Model:
    from backend_core.launch.cuda import CudaKernel

    costs = costs_of(path.params, detect_target(device).num_sms)
    intra = {
        choice.blocks: CudaKernel(
            KERNELS / "intra_chunk.cu",
            "intra_chunk",
            intra_defines(gate, beta, l2norm, beta_dtype, choice.blocks),
            _INTRA_SHARED,
        )
        for choice in costs.intra
    }
    plain, split = (
        CudaKernel(
            KERNELS / "scan.cu",
            "scan",
            scan_defines(int64_offsets, bf16_state, track, split),
            _SCAN_SHARED[split],
        )
        for split in (False, True)
    )
    # all of them now: a later batch may be the first to choose one
    for kernel in (*intra.values(), plain, split):
        kernel.load()
    return _Model(intra, (plain, split), costs)


def intra_defines(
    gate: int, beta: int, l2norm: bool, beta_dtype: torch.dtype, min_blocks: int
) -> dict[str, int]:
    """Preprocessor constants of one variant of intra_chunk.cu."""
    return {
        "GATE": gate,
        "BETA": beta,
        "L2NORM": int(l2norm),
        "BETA_FP32": int(beta_dtype == torch.float32),
        "MIN_BLOCKS": min_blocks,
        "SHARED_BYTES": _INTRA_SHARED,
        "PARAM_BYTES": _INTRA_PARAMS.size,
    }


def scan_defines(int64_offsets: bool, bf16_state: bool, track: bool, split: bool) -> dict[str, int]:
    """Preprocessor constants of one variant of scan.cu."""
    return {
        "CU_INT64": int(int64_offsets),
        "STATE_BF16": int(bf16_state),
        "TRACK": int(track),
        "SPLIT": int(split),
        "SHARED_BYTES": _SCAN_SHARED[split],
        "PARAM_BYTES": _SCAN_PARAMS.size,
    }


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """(x, its address, token stride, head stride), or those of a packed copy: vector loads and
    stores want the rows of heads on 16 bytes."""
    _, stride_t, stride_h, _ = x.stride()
    address = x.data_ptr()
    if (address | 2 * stride_t | 2 * stride_h) & 15:
        return _rows(x.clone(memory_format=torch.contiguous_format))
    return x, address, stride_t, stride_h


def _parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gate parameter in fp32, aligned."""
    if x is None or (x.dtype == torch.float32 and x.data_ptr() % 16 == 0):
        return x
    return x.float() if x.dtype != torch.float32 else x.clone()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
