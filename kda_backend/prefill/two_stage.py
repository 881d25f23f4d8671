"""Chunked prefill: the paths a table can name, each a pipeline that reads as the equation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend_core.target import detect_target
from kda_backend.contract.inputs import KdaInputs, StateInputs
from kda_backend.launch_params import TwoStageParams
from kda_backend.prefill import torch as torch_path
from kda_backend.prefill.two_stage_sm90 import two_stage_sm90
from kda_backend.scratch import Workspace
from kda_backend.step_plan import CHUNK, ChunkMetadata

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from backend_core.tables.select import KernelPath


def tile_elements(key_dim: int, value_dim: int) -> int:
    """Elements of one (chunk, head) tile: w, q_in, k_out [64, K], u [64, V], A_qk [64, 64], and as
    many for the intra-chunk kernel's own use.

    Rows end at a multiple of eight elements.
    """
    row_k, row_v = -(-key_dim // 8) * 8, -(-value_dim // 8) * 8
    return CHUNK * (3 * row_k + row_v + 2 * CHUNK)


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
    """One kernel over all chunks at once, then a scan over chunks, split over value rows."""
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
        0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
    )
    assert meta.chunk_table is not None
    num_tiles = meta.num_chunks * value_heads
    tile_bytes = tile_elements(key_dim, value_dim) * dtype.itemsize
    tiles, totals = workspace.buffers(num_tiles, tile_bytes, key_dim)
    tiles = tiles.view(dtype)
    _, stride_q_t, stride_q_h, _ = x.q.stride()
    _, stride_k_t, stride_k_h, _ = x.k.stride()
    _, stride_v_t, stride_v_h, _ = x.v.stride()
    _, stride_g_t, stride_g_h, _ = x.g.stride()
    _, stride_beta_t, stride_beta_h = x.beta.stride()
    _, stride_o_t, stride_o_h, _ = out.stride()
    kernels.intra(
        (num_tiles, 1, 1),
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.a_log,
        x.dt_bias,
        tiles,
        totals,
        meta.chunk_table.start,
        meta.chunk_table.length,
        x.lower_bound,
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
    )
    tasks = value_heads * meta.num_sequences
    block_v = kernels.value_rows(tasks, detect_target(x.q.device).num_sms)
    kernels.scans[block_v](
        (-(-value_dim // block_v) * tasks, 1, 1),
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
        meta.chunk_table.offsets,
        x.scale,
        stride_o_t,
        stride_o_h,
        *state.strides(state.read),
        *state.strides(state.write),
        *state.strides(chunk_states),
        value_heads,
    )


@dataclass(frozen=True)
class _TwoStageKernels:
    """``scans``: by the value rows of a program, ascending."""

    intra: KernelLaunch
    scans: dict[int, KernelLaunch]
    value_dim: int

    def value_rows(self, tasks: int, num_sms: int) -> int:
        """The fewest with which all programs run at once, since few make a step short."""
        for rows in self.scans:
            if tasks * -(-self.value_dim // rows) <= num_sms:
                return rows
        return max(self.scans)


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
    num_snapshots: int,
) -> _TwoStageKernels:
    """The kernels of one model on one path; the imports need triton."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.intra import intra_kernel
    from kda_backend.kernels.scan import scan_kernel

    params: TwoStageParams = path.params
    # the interpreter runs the same kernels on CPU tensors, where PTX and tf32 do not exist
    fast_math = params.fast_math and is_gpu
    precision = params.fp32_precision if is_gpu else "ieee"
    pow2_k = max(64, triton.next_power_of_2(key_dim))
    pow2_v = max(16, triton.next_power_of_2(value_dim))
    least, most = (min(rows, pow2_v) for rows in (params.block_v, params.block_v_max))
    scan_stages = params.scan_num_stages
    overlap = params.scan_overlaps and is_gpu
    if pow2_k * dtype.itemsize > 256:
        # the table is for rows of up to 128 half-precision channels: of wider ones fewer chunks
        # fit shared memory, and fewer value rows the registers
        least, most, scan_stages = 16, 16, min(scan_stages, 2)
    # a warp for each block of 16 tokens; the limit is for 128 channels, others would spill
    intra_options = {"num_warps": 4, "num_stages": 1}
    if params.intra_max_registers and dtype == torch.float16 and pow2_k == 128:
        intra_options["maxnreg"] = params.intra_max_registers
    intra = KernelLaunch(
        intra_kernel,
        {
            "HEADS_PER_KEY": heads_per_key,
            "K": key_dim,
            "V": value_dim,
            "GATE": gate,
            "BETA": beta,
            "L2NORM": l2norm,
            "PRECISION": precision,
            "FAST_MATH": fast_math,
            "OVERLAP": overlap,
            "CHUNK": CHUNK,
        },
        intra_options,
    )
    scan_options = {"num_warps": params.scan_num_warps}
    if overlap:
        scan_options["launch_pdl"] = True
    scans = {
        rows: KernelLaunch(
            scan_kernel,
            {
                "K": key_dim,
                "V": value_dim,
                "BLOCK_K": pow2_k,
                "BLOCK_V": rows,
                "PRECISION": precision,
                "NUM_STAGES": scan_stages,
                "NUM_SNAPSHOTS": num_snapshots,
                "OVERLAP": overlap,
                "CHUNK": CHUNK,
            },
            scan_options,
        )
        for rows in (16, 32, 64, 128)
        if least <= rows <= most
    }
    for scan in scans.values():
        scan.alternatives = tuple(scans.values())
    return _TwoStageKernels(intra, scans, value_dim)


PIPELINES = {
    "two_stage": two_stage,
    "two_stage_sm90": two_stage_sm90,
    "torch": torch_path.prefill,
}
