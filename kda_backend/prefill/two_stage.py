"""Chunked prefill in Triton: one kernel for the tiles of all chunks, then a scan over chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend_core.target import detect_target
from kda_backend.contract.calls import PrefillCall
from kda_backend.launch_params import TwoStageParams
from kda_backend.spec import CHUNK, tile_width
from kda_backend.token_spec import TokenSpec, in_one_layout

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape


def tile_elements(key_dim: int, value_dim: int) -> int:
    """Elements of one (chunk, head) tile: w, q_in, k_out [64, K], u [64, V], A_qk [64, 64], and as
    many for the intra-chunk kernel's own use.

    Rows end at a multiple of eight elements.
    """
    row_k, row_v = -(-key_dim // 8) * 8, -(-value_dim // 8) * 8
    return CHUNK * (3 * row_k + row_v + 2 * CHUNK)


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """Operands of tensor cores: fp16 for 16-bit inputs (three bits more than bf16)."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def bind(row: Row, spec: KdaShape, target: Target) -> Callable[[PrefillCall], None]:
    return functools.partial(two_stage, row, spec.batch_invariant)


def two_stage(row: Row, batch_invariant: bool, call: PrefillCall) -> None:
    """One kernel over all chunks at once, then a scan over chunks, split over value rows.

    Args:
        batch_invariant: the split is that of a single sequence. The compiler makes the products of
            each split of other instructions, which may add in another order.
    """
    tokens, gate, step_plan, state, out, chunk_states, scratch, layout, _ = call
    if batch_invariant:
        tokens = in_one_layout(tokens)
    q, k, v, g, beta = tokens[:5]
    value_heads, value_dim = v.shape[2:]
    key_dim = q.shape[3]
    dtype = operand_dtype(q.dtype)
    kernels: _TwoStageKernels | None = layout.get(row)
    if kernels is None:
        spec = TokenSpec.of(tokens, gate)
        made = _two_stage_kernels(row, spec, dtype, state.num_snapshots, state.v_first)
        kernels = layout.keep(row, made)
    table = step_plan.chunk_table
    assert table is not None
    num_tiles = step_plan.num_chunks * value_heads
    tile_bytes = tile_elements(key_dim, value_dim) * dtype.itemsize
    tiles, totals = scratch.buffers(num_tiles, tile_bytes, key_dim)
    tiles = tiles.view(dtype)
    kernels.intra.launch(
        (num_tiles, 1, 1),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        a_log_ptr=gate.a_log,
        dt_bias_ptr=gate.dt_bias,
        tile_ptr=tiles,
        total_ptr=totals,
        chunk_start_ptr=table.start,
        chunk_len_ptr=table.length,
        lower_bound=gate.lower_bound,
        HV=value_heads,
    )
    num_tasks = value_heads * step_plan.num_sequences
    at_once = value_heads if batch_invariant else num_tasks
    block_v = kernels.value_rows(at_once, detect_target(q.device).num_sms)
    kernels.scans[block_v].launch(
        (-(-value_dim // block_v) * num_tasks, 1, 1),
        tile_ptr=tiles,
        total_ptr=totals,
        o_ptr=out,
        state_in_ptr=state.read,
        state_out_ptr=state.write,
        state_indices_ptr=state.indices,
        has_initial_state_ptr=state.has_initial,
        chunk_states_ptr=chunk_states,
        snapshot_chunks_ptr=state.snapshot_chunks,
        snapshot_indices_ptr=state.snapshot_indices,
        snapshots_ptr=state.snapshots,
        cu_seqlens_ptr=step_plan.cu_seqlens,
        chunk_offsets_ptr=table.offsets,
        scale=tokens.scale,
        stride_snapshot_n=state.snapshot_stride,
        HV=value_heads,
    )


@dataclass(frozen=True)
class _TwoStageKernels:
    """``scans``: by the value rows of a program, ascending."""

    intra: KernelLaunch
    scans: dict[int, KernelLaunch]
    value_dim: int

    def value_rows(self, tasks: int, num_sms: int) -> int:
        """The fewest value rows with which all programs run at once, which makes a step short."""
        for rows in self.scans:
            if tasks * -(-self.value_dim // rows) <= num_sms:
                return rows
        return max(self.scans)


@functools.cache
def _two_stage_kernels(
    row: Row,
    spec: TokenSpec,
    dtype: torch.dtype,
    num_snapshots: int,
    v_first: bool,
) -> _TwoStageKernels:
    """The kernels of one model on one path; the imports need triton."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.intra import intra_kernel
    from kda_backend.kernels.scan import scan_kernel

    params: TwoStageParams = row.params
    precision = "tf32x3" if spec.has_ptx else "ieee"
    pow2_k = tile_width(spec.key_dim)
    pow2_v = max(16, triton.next_power_of_2(spec.value_dim))
    least, most = (min(rows, pow2_v) for rows in (params.block_v, params.block_v_max))
    scan_stages = params.scan_num_stages
    pdl = params.scan_pdl and spec.has_ptx
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
        spec.constexprs()
        | {
            "PRECISION": precision,
            "PDL": "release_first" if pdl else "off",
            "CHUNK": CHUNK,
        },
        intra_options,
        axes=dict.fromkeys(("q", "k", "v", "g", "beta"), ".th"),
    )
    states = ("state_in", "state_out", "chunk_states")
    axes = {"o": ".th", **dict.fromkeys(states, "nhvk" if v_first else "nhkv")}
    scan_options: dict[str, int | bool] = {"num_warps": params.scan_num_warps}
    if pdl:
        scan_options["launch_pdl"] = True
    scans = {
        rows: KernelLaunch(
            scan_kernel,
            {
                "K": spec.key_dim,
                "V": spec.value_dim,
                "BLOCK_K": pow2_k,
                "BLOCK_V": rows,
                "PRECISION": precision,
                "NUM_STAGES": scan_stages,
                "NUM_SNAPSHOTS": num_snapshots,
                "PDL": "wait" if pdl else "off",
                "CHUNK": CHUNK,
            },
            scan_options,
            axes=axes,
        )
        for rows in (16, 32, 64, 128)
        if least <= rows <= most
    }
    for scan in scans.values():
        scan.alternatives = tuple(scans.values())
    return _TwoStageKernels(intra, scans, spec.value_dim)
