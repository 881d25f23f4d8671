"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.target import detect_target
from kda_backend.metadata import ChunkMetadata
from kda_backend.validation import KdaInputs, StateInputs
from kda_backend.workspace import Workspace

if TYPE_CHECKING:
    from backend_core.cuda_source import CudaKernel
    from backend_core.path_table import KernelPath

KERNELS = Path(__file__).parent / "kernels" / "sm90"
DIM = 128
TILE_BYTES = 9 * 8192  # -w, q_in, k_out, A_qk, u in 8 KiB blocks
_INTRA_THREADS, _INTRA_SHARED = 128, 70928  # sizeof(Shared) of intra_chunk.cu
_SCAN_THREADS = 384
_SCAN_SHARED = {False: 231424, True: 224256}  # sizeof(Shared) of scan.cu, by SPLIT
# struct Params of the two sources
_INTRA_PARAMS = struct.Struct("=12Q10q2if3iQ")
_SCAN_PARAMS = struct.Struct("=12Q14qf2i4xQ")


def two_stage_sm90(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Scores and solve of each chunk in one kernel, the scan, 64 value rows a task, in another.

    The scan starts on multiprocessors that the first kernel leaves to it, and finds by flags which
    tiles are there.
    """
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
    layout = lay_out(model.costs, num_tiles, 2 * value_heads * meta.num_sequences, meta.max_chunks)
    assert meta.chunk_start is not None and meta.chunk_len is not None
    assert meta.chunk_order is not None and meta.chunk_offsets is not None
    model.intra(
        layout.intra_blocks,
        _INTRA_THREADS,
        _INTRA_PARAMS.pack(
            q_address,
            k_address,
            v_address,
            g_address,
            beta.data_ptr(),
            _address(a_log),
            _address(dt_bias),
            tiles.data_ptr(),
            totals.data_ptr(),
            meta.chunk_start.data_ptr(),
            meta.chunk_len.data_ptr(),
            meta.chunk_order.data_ptr(),
            stride_q_t,
            stride_q_h,
            stride_k_t,
            stride_k_h,
            stride_v_t,
            stride_v_h,
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
    model.scan[layout.split](
        layout.scan_blocks,
        _SCAN_THREADS,
        _SCAN_PARAMS.pack(
            tiles.data_ptr(),
            totals.data_ptr(),
            o_address,
            _address(state.read),
            _address(state.write),
            _address(state.indices),
            _address(state.has_initial),
            _address(chunk_states),
            _address(state.snapshot_chunks),
            _address(state.snapshots),
            meta.cu_seqlens.data_ptr(),
            meta.chunk_offsets.data_ptr(),
            stride_o_t,
            stride_o_h,
            *state.strides(state.read),
            *state.strides(state.write),
            *state.strides(chunk_states),
            x.scale,
            0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
            value_heads,
            flags,
        ),
        overlaps=True,
    )
    if o is not out:
        out.copy_(o)


class Costs(NamedTuple):
    """What the layout of a launch is estimated from: the path's parameters, times in ns.

    Attributes:
        num_sms: multiprocessors of the device.
        intra_min_blocks: intra blocks on one multiprocessor.
        tile_ns: one multiprocessor's time for a tile, its blocks together.
        scan_start_ns: a scan block's time beside its steps.
        scan_step_ns, split_step_ns: a chunk's time, in one block and split over a cluster of two.
    """

    num_sms: int
    intra_min_blocks: int
    tile_ns: int
    scan_start_ns: int
    scan_step_ns: int
    split_step_ns: int


class Layout(NamedTuple):
    """How one call shares the multiprocessors.

    Attributes:
        split: a cluster of two blocks shares each scan task.
        scan_blocks: each occupies a whole multiprocessor.
        intra_blocks: in all.
        first_scan_sm: the multiprocessors from this one on are left to the scan,
        limit: when every intra block there has made so many tiles.
    """

    split: bool
    scan_blocks: int
    intra_blocks: int
    first_scan_sm: int
    limit: int


@functools.lru_cache(maxsize=4096)
def lay_out(costs: Costs, num_tiles: int, tasks: int, max_chunks: int) -> Layout:
    """The layout with the least estimated time; a task is 64 value rows of a sequence and head."""
    sms, at_once = costs.num_sms, costs.intra_min_blocks * costs.num_sms
    round_ns = costs.intra_min_blocks * costs.tile_ns
    best: tuple[float, Layout] | None = None
    for split in (False, True):
        blocks = 2 * tasks if split else tasks
        step_ns = costs.split_step_ns if split else costs.scan_step_ns
        scan_ns = costs.scan_start_ns + max_chunks * step_ns
        # all tiles first, then the scan
        intra_blocks = sms if num_tiles <= sms else at_once
        rounds = -(-num_tiles // intra_blocks)
        intra_ns = rounds * (round_ns if num_tiles > sms else 2 * costs.tile_ns)
        waves = -(-blocks // sms)
        choices = [(float(intra_ns + waves * scan_ns), Layout(split, blocks, intra_blocks, sms, 0))]
        others = sms - blocks
        if others > 0:
            beside = others * scan_ns / costs.tile_ns
            most = max(0, int((num_tiles - beside) // at_once))
            for limit in (most, most + 1):
                head_ns = limit * round_ns
                rest_ns = max(0, num_tiles - limit * at_once) * costs.tile_ns / others
                first_ns = 2 * costs.tile_ns if limit == 0 else 0  # no tile is there before that
                ns = head_ns + max(first_ns + scan_ns, rest_ns + costs.scan_start_ns)
                count = sms if num_tiles <= others else at_once
                choices.append((ns, Layout(split, blocks, count, others, limit)))
        for choice in choices:
            if best is None or choice[0] < best[0]:
                best = choice
    assert best is not None
    return best[1]


class _Model(NamedTuple):
    """The kernels of one model on one path and device; ``scan`` without and with SPLIT."""

    intra: CudaKernel
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
    from backend_core.cuda_source import CudaKernel

    times = {name: int(path.params[name]) for name in Costs._fields if name != "num_sms"}
    costs = Costs(num_sms=detect_target(device).num_sms, **times)
    intra = CudaKernel(
        KERNELS / "intra_chunk.cu",
        "intra_chunk",
        intra_defines(gate, beta, l2norm, beta_dtype, costs.intra_min_blocks),
        _INTRA_SHARED,
    )
    plain, split = (
        CudaKernel(
            KERNELS / "scan.cu",
            "scan",
            scan_defines(int64_offsets, bf16_state, track, split),
            _SCAN_SHARED[split],
        )
        for split in (False, True)
    )
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
