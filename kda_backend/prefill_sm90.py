"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import ctypes
import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kda_backend.metadata import ChunkMetadata
from kda_backend.validation import KdaInputs, StateInputs
from kda_backend.workspace import Workspace

if TYPE_CHECKING:
    from backend_core.cuda_source import CudaKernel
    from backend_core.path_table import KernelPath

KERNELS = Path(__file__).parent / "kernels" / "sm90"
DIM = 128
TILE_BYTES = 9 * 8192  # -w, q_in, k_out, A_qk, u in 8 KiB blocks
_INTRA_THREADS, _INTRA_SHARED = 128, 70912  # sizeof(Shared) of intra_chunk.cu
_SCAN_THREADS = 384
_SCAN_SHARED = {False: 231424, True: 224256}  # sizeof(Shared) of scan.cu, by SPLIT
# struct Params of the two sources
_INTRA_PARAMS = struct.Struct("=11Q10q2if4x")
_SCAN_PARAMS = struct.Struct("=12Q14qf2i4x")


def two_stage_sm90(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Scores and solve of each chunk in one launch, then the scan, 64 value rows a task.

    While there are few tasks, a cluster of two blocks shares each (``SPLIT`` of scan.cu).
    """
    q, k, v, g = (_aligned(y) for y in (x.q, x.k, x.v, x.g))
    a_log, dt_bias = _parameter(x.a_log), _parameter(x.dt_bias)
    beta = x.beta if x.beta.dtype != torch.float16 else x.beta.float()
    o = out if _is_aligned(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
    value_heads = v.shape[2]
    tiles, totals = workspace.buffers(meta.num_chunks * value_heads, TILE_BYTES, DIM)
    intra = _intra_kernel(
        x.gate, x.beta_kind, x.l2norm, beta.dtype, int(path.params["intra_min_blocks"])
    )
    assert meta.chunk_start is not None and meta.chunk_len is not None
    assert meta.chunk_offsets is not None
    intra(
        meta.num_chunks * value_heads,
        _INTRA_THREADS,
        _packed(
            _INTRA_PARAMS,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            g.data_ptr(),
            beta.data_ptr(),
            _address(a_log),
            _address(dt_bias),
            tiles.data_ptr(),
            totals.data_ptr(),
            meta.chunk_start.data_ptr(),
            meta.chunk_len.data_ptr(),
            *q.stride()[1:3],
            *k.stride()[1:3],
            *v.stride()[1:3],
            *g.stride()[1:3],
            *beta.stride()[1:3],
            value_heads,
            value_heads // q.shape[2],
            x.lower_bound,
        ),
    )
    pool = state.read if state.read is not None else state.write
    tasks = 2 * value_heads * meta.num_sequences  # 64 value rows each
    split = tasks <= int(path.params["scan_split_tasks"])
    scans = _scan_kernels(
        meta.cu_seqlens.dtype == torch.int64,
        pool is not None and pool.dtype == torch.bfloat16,
        chunk_states is not None or state.snapshots is not None,
    )
    scans[split](
        2 * tasks if split else tasks,
        _SCAN_THREADS,
        _packed(
            _SCAN_PARAMS,
            tiles.data_ptr(),
            totals.data_ptr(),
            o.data_ptr(),
            _address(state.read),
            _address(state.write),
            _address(state.indices),
            _address(state.has_initial),
            _address(chunk_states),
            _address(state.snapshot_chunks),
            _address(state.snapshots),
            meta.cu_seqlens.data_ptr(),
            meta.chunk_offsets.data_ptr(),
            *o.stride()[1:3],
            *state.strides(state.read),
            *state.strides(state.write),
            *state.strides(chunk_states),
            x.scale,
            0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
            value_heads,
        ),
    )
    if o is not out:
        out.copy_(o)


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


@functools.cache
def _intra_kernel(
    gate: int, beta: int, l2norm: bool, beta_dtype: torch.dtype, min_blocks: int
) -> CudaKernel:
    from backend_core.cuda_source import CudaKernel

    defines = intra_defines(gate, beta, l2norm, beta_dtype, min_blocks)
    return CudaKernel(KERNELS / "intra_chunk.cu", "intra_chunk", defines, _INTRA_SHARED)


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


@functools.cache
def _scan_kernels(int64_offsets: bool, bf16_state: bool, track: bool) -> tuple[CudaKernel, ...]:
    """The variants without and with SPLIT: both, so that no later step compiles one."""
    from backend_core.cuda_source import CudaKernel

    source = KERNELS / "scan.cu"
    return tuple(
        CudaKernel(
            source,
            "scan",
            scan_defines(int64_offsets, bf16_state, track, split),
            _SCAN_SHARED[split],
        )
        for split in (False, True)
    )


def _is_aligned(x: torch.Tensor) -> bool:
    """Rows of heads start on 16 bytes, as vector loads and stores want it."""
    return x.data_ptr() % 16 == 0 and x.stride(1) % 8 == 0 and x.stride(2) % 8 == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself where it is aligned, else a packed copy."""
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gate parameter in fp32, aligned."""
    if x is None or (x.dtype == torch.float32 and x.data_ptr() % 16 == 0):
        return x
    return x.float() if x.dtype != torch.float32 else x.clone()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _packed(layout: struct.Struct, *fields: int | float) -> ctypes.Array[ctypes.c_char]:
    buffer = ctypes.create_string_buffer(layout.size)
    layout.pack_into(buffer, 0, *fields)
    return buffer
