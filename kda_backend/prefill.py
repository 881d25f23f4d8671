"""Chunked prefill: the paths a table can name, each a pipeline that reads as the equation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kda_backend import reference
from kda_backend.metadata import CHUNK, ChunkMetadata
from kda_backend.validation import (
    BETA_GIVEN,
    BETA_TWICE_SIGMOID,
    GATE_LOG,
    KdaInputs,
    StateInputs,
)

if TYPE_CHECKING:
    from backend_core.launch import KernelLaunch
    from backend_core.path_table import KernelPath


class Workspace:
    """Scratch memory of the prefill kernels, grown to the largest step and kept.

    One serves all layers of a model, which run one after another on one stream. Grow it before a
    CUDA graph is captured (``reserve``): a graph keeps the addresses it has seen.
    """

    def __init__(self, device: torch.device) -> None:
        self._tiles = torch.empty(0, dtype=torch.uint8, device=device)
        self._totals = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, num_tiles: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
        """Make room for ``num_tiles`` (chunks times value heads)."""
        need = num_tiles * tile_elements(key_dim, value_dim) * dtype.itemsize
        if need > self._tiles.shape[0]:
            self._tiles = self._tiles.new_empty(need)
            self._totals = self._totals.new_empty(num_tiles * key_dim)
        elif num_tiles * key_dim > self._totals.shape[0]:
            self._totals = self._totals.new_empty(num_tiles * key_dim)

    def tiles(
        self, num_tiles: int, key_dim: int, value_dim: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(tiles in ``dtype``, total decays in fp32), both flat and at least large enough."""
        self.reserve(num_tiles, key_dim, value_dim, dtype)
        return self._tiles.view(dtype), self._totals

    @property
    def nbytes(self) -> int:
        return self._tiles.nbytes + self._totals.nbytes


def tile_elements(key_dim: int, value_dim: int) -> int:
    """Elements of one (chunk, head) tile: w, q_in, k_out [64, K], u [64, V], A_qk, L [64, 64]."""
    return CHUNK * (3 * key_dim + value_dim + 2 * CHUNK)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the tensor cores multiply: fp16 for 16-bit inputs (three bits more than bf16)."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def two_stage(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Chunk-parallel scores and solve, then a scan over chunks, split over value rows."""
    value_heads, value_dim = x.v.shape[2:]
    key_dim = x.q.shape[3]
    dtype = operand_dtype(x.q.dtype)
    kernels = _two_stage_kernels(
        path,
        x.q.is_cuda,
        dtype,
        value_heads // x.q.shape[2],
        key_dim,
        value_dim,
        x.gate,
        x.beta_kind,
        x.l2norm,
    )
    num_tiles = meta.num_chunks * value_heads
    tiles, totals = workspace.tiles(num_tiles, key_dim, value_dim, dtype)
    _, stride_q_t, stride_q_h, _ = x.q.stride()
    _, stride_k_t, stride_k_h, _ = x.k.stride()
    _, stride_v_t, stride_v_h, _ = x.v.stride()
    _, stride_g_t, stride_g_h, _ = x.g.stride()
    _, stride_beta_t, stride_beta_h = x.beta.stride()
    _, stride_o_t, stride_o_h, _ = out.stride()
    kernels.scores(
        (num_tiles, 1, 1),
        x.q,
        x.k,
        x.g,
        x.beta,
        x.a_log,
        x.dt_bias,
        tiles,
        totals,
        kernels.masks(x.q.device, dtype),
        meta.chunk_start,
        meta.chunk_len,
        x.lower_bound,
        stride_q_t,
        stride_q_h,
        stride_k_t,
        stride_k_h,
        stride_g_t,
        stride_g_h,
        stride_beta_t,
        stride_beta_h,
        value_heads,
    )
    kernels.solve(
        (num_tiles, 1, 1),
        x.v,
        x.beta,
        tiles,
        meta.chunk_start,
        meta.chunk_len,
        stride_v_t,
        stride_v_h,
        stride_beta_t,
        stride_beta_h,
        value_heads,
    )
    kernels.scan(
        (kernels.value_blocks * value_heads * meta.num_sequences, 1, 1),
        tiles,
        totals,
        out,
        state.read,
        state.write,
        state.indices,
        state.has_initial,
        chunk_states,
        state.snapshot_chunks,
        state.snapshots,
        meta.cu_seqlens,
        meta.chunk_offsets,
        x.scale,
        0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
        stride_o_t,
        stride_o_h,
        *state_strides(state.read, state),
        *state_strides(state.write, state),
        *state_strides(chunk_states, state),
        value_heads,
    )


@dataclass(frozen=True)
class _TwoStageKernels:
    scores: KernelLaunch
    solve: KernelLaunch
    scan: KernelLaunch
    masks: Callable[[torch.device, torch.dtype], torch.Tensor]
    value_blocks: int


@functools.cache
def _two_stage_kernels(
    path: KernelPath,
    is_gpu: bool,
    dtype: torch.dtype,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    gate: int,
    beta: int,
    l2norm: bool,
) -> _TwoStageKernels:
    """The kernels of one model on one path; the imports need triton."""
    import triton

    from backend_core.launch import KernelLaunch
    from kda_backend.kernels.scan import scan_kernel
    from kda_backend.kernels.scores import scores_kernel, sum_masks
    from kda_backend.kernels.solve import solve_kernel

    params = path.params
    # the interpreter runs the same kernels on CPU tensors, where PTX and tf32 do not exist
    fast_math = bool(params["fast_math"]) and is_gpu
    precision = params["fp32_precision"] if is_gpu else "ieee"
    pow2_k, pow2_v = (max(16, triton.next_power_of_2(d)) for d in (key_dim, value_dim))
    block_v = min(int(params["block_v"]), pow2_v)
    scores = KernelLaunch(
        scores_kernel,
        {
            "HEADS_PER_KEY": heads_per_key,
            "K": key_dim,
            "V": value_dim,
            "BLOCK_K": min(int(params["scores_block_k"]), pow2_k),
            "GATE": gate,
            "BETA": beta,
            "L2NORM": l2norm,
            "PRECISION": precision,
            "FAST_MATH": fast_math,
            "CHUNK": CHUNK,
        },
        {"num_warps": params["scores_num_warps"], "num_stages": 1},
    )
    solve = KernelLaunch(
        solve_kernel,
        {
            "K": key_dim,
            "V": value_dim,
            "BLOCK_K": min(64, pow2_k),
            "BLOCK_V": min(64, pow2_v),
            "BETA": beta,
            "PRECISION": precision,
            "FAST_MATH": fast_math,
            "CHUNK": CHUNK,
        },
        {"num_warps": params["solve_num_warps"], "num_stages": 1},
    )
    scan = KernelLaunch(
        scan_kernel,
        {
            "K": key_dim,
            "V": value_dim,
            "BLOCK_K": pow2_k,
            "BLOCK_V": block_v,
            "PRECISION": precision,
            "NUM_STAGES": params["scan_num_stages"],
            "CHUNK": CHUNK,
        },
        {"num_warps": params["scan_num_warps"]},
    )
    blocks = triton.cdiv(value_dim, block_v)
    return _TwoStageKernels(scores, solve, scan, functools.cache(sum_masks), blocks)


def torch_reference(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """The chunked torch form in fp32: the CPU's path."""
    q, k, v, decay, beta = activate(x)
    assert meta.cu_seqlens_cpu is not None  # the CPU's metadata always has them
    before = read_states(state, meta.num_sequences, v.shape[1], v.shape[2], k.shape[2], x.q.device)
    o, after, chunk = reference.chunk_kda(
        q, k, v, decay, beta, scale=x.scale, state=before, cu_seqlens=list(meta.cu_seqlens_cpu)
    )
    if state.snapshots is not None and state.snapshot_chunks is not None:
        _write_snapshots(state, meta, chunk, after)
    if chunk_states is not None:
        chunk_states.copy_(chunk if state.v_dim == 2 else chunk.mT)
    write_states(state, after)
    out.copy_(o.view(out.shape))


PIPELINES = {"two_stage": two_stage, "reference": torch_reference}


def state_strides(tensor: torch.Tensor | None, state: StateInputs) -> tuple[int, int, int, int]:
    """(row, head, V, K) strides in elements; zeros where there is no tensor."""
    if tensor is None:
        return (0, 0, 0, 0)
    stride = tensor.stride()
    return (stride[0], stride[1], stride[state.v_dim], stride[state.k_dim])


def activate(x: KdaInputs) -> tuple[torch.Tensor, ...]:
    """Packed q, k, v, log decay and step size in fp32, for the torch paths."""
    q, k, v, g, beta = (y.float().flatten(0, 1) for y in (x.q, x.k, x.v, x.g, x.beta))
    if x.l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if x.gate != GATE_LOG:
        g = reference.log_decay(g, x.a_log, x.dt_bias, x.lower_bound or None)
    if x.beta_kind != BETA_GIVEN:
        beta = beta.sigmoid() * (2.0 if x.beta_kind == BETA_TWICE_SIGMOID else 1.0)
    return q, k, v, g, beta


def read_states(
    state: StateInputs,
    num_sequences: int,
    value_heads: int,
    value_dim: int,
    key_dim: int,
    device: torch.device,
) -> torch.Tensor:
    """The states [N, HV, V, K] in fp32, for the torch paths."""
    if state.read is None:
        return torch.zeros(num_sequences, value_heads, value_dim, key_dim, device=device)
    rows = state.read if state.v_dim == 2 else state.read.mT
    if state.indices is None:
        return rows.float()
    reads = state.indices >= 0
    if state.has_initial is not None:
        reads = reads & state.has_initial
    rows = rows[state.indices.clamp(min=0).long()].float()
    return torch.where(reads[:, None, None, None], rows, 0.0)


def write_states(state: StateInputs, after: torch.Tensor) -> None:
    if state.write is None:
        return
    rows = after if state.v_dim == 2 else after.mT
    if state.indices is None:
        state.write.copy_(rows)
    else:
        writes = state.indices >= 0
        state.write[state.indices[writes].long()] = rows[writes].to(state.write.dtype)


def _write_snapshots(
    state: StateInputs, meta: ChunkMetadata, chunk: torch.Tensor, after: torch.Tensor
) -> None:
    assert state.snapshots is not None and state.snapshot_chunks is not None
    assert meta.cu_seqlens_cpu is not None
    first = 0
    offsets = meta.cu_seqlens_cpu
    for n, boundaries in enumerate(state.snapshot_chunks.tolist()):
        count = (offsets[n + 1] - offsets[n] + CHUNK - 1) // CHUNK
        for s, boundary in enumerate(boundaries):
            if 0 <= boundary < count:
                state.snapshots[n, s] = chunk[first + boundary]
            elif boundary == count:
                state.snapshots[n, s] = after[n]
        first += count
