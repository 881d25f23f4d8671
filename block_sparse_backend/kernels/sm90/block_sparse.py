# ruff: noqa: RUF005  Gluon needs lists added
"""Block-sparse attention for Hopper in Gluon, of sequences that are unpacked or packed.

A program takes an entry of the plan's ``work``; ``block_walk.py`` and ``block_load.py`` have what
its warps do.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from block_sparse_backend.kernels.sm90.block_load import allocate_ring, load_row
from block_sparse_backend.kernels.sm90.block_walk import compute_row


@gluon.jit
def _run(
    descs,
    row,
    place,
    outputs,
    factor,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    mask: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """A program: shared memory, barriers, and its three warp roles."""
    q_desc, k_desc, v_desc = descs
    batch, head, first, q_begin, q_len, k_begin, kv_len, q_position, mask_aux_ptr = place
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2] + q_desc.block_type.shape, q_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    k_s, v_s, k_full, k_empty, v_full, v_empty = allocate_ring(k_desc, v_desc, STAGES)
    buffers = (q_s, k_s, v_s)
    barriers = (q_full, k_full, k_empty, v_full, v_empty)
    place = (batch, head, first, q_begin, q_len, kv_len, q_position, mask_aux_ptr)
    loads = (batch, head, head // GROUP, q_begin + first if IS_PACKED else first, k_begin)
    # constexprs must be written in the call: a variable's would become tensors
    gl.warp_specialize(
        [
            (compute_row, (
                buffers, barriers, row, place, outputs, factor,
                mask, BLOCK_N, D, STAGES, 0, IS_PACKED,
            )),
            (compute_row, (
                buffers, barriers, row, place, outputs, factor,
                mask, BLOCK_N, D, STAGES, 1, IS_PACKED,
            )),
            (load_row, (descs, buffers, barriers, row, loads, STAGES, BLOCK_N, IS_PACKED)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def block_sparse_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    rows_ptr,
    cols_ptr,
    work_ptr,
    sequences_ptr,
    mask_aux_ptr,
    factor,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    stride_lse_b,
    stride_lse_h,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    mask: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """Descriptors of [B, H, M, D], [B, Hkv, N, D] and [B, Hkv, N, DV] in blocks of [1, 1, 64, D],
    [1, 1, BLOCK_N, D] and [1, 1, BLOCK_N, DV].

    IS_PACKED: sequences follow one another.
    """
    work = work_ptr + 4 * gl.program_id(0)
    i_s = gl.load(work)
    if i_s >= 0:
        head, tile, i_r = gl.load(work + 1), gl.load(work + 2), gl.load(work + 3)
        sequence = sequences_ptr + 6 * i_s
        batch, q_len = gl.load(sequence), gl.load(sequence + 2)
        kv_len, q_position = gl.load(sequence + 4), gl.load(sequence + 5)
        at = rows_ptr + 4 * i_r.to(gl.int64)
        begin, full_end, end = gl.load(at), gl.load(at + 1), gl.load(at + 2)
        outputs = (
            out_ptr, lse_ptr, stride_out_b, stride_out_h, stride_out_m, stride_lse_b, stride_lse_h,
        )  # fmt: skip
        # unpacked sequences begin at constants, which must be written in the call
        _run(
            (q_desc, k_desc, v_desc),
            (cols_ptr, begin, full_end, end),
            (
                batch, head, tile * 128, gl.load(sequence + 1) if IS_PACKED else 0, q_len,
                gl.load(sequence + 3) if IS_PACKED else 0, kv_len, q_position, mask_aux_ptr,
            ),
            outputs,
            factor,
            GROUP=GROUP,
            BLOCK_N=BLOCK_N,
            D=D,
            STAGES=STAGES,
            REGISTERS=REGISTERS,
            mask=mask,
            IS_PACKED=IS_PACKED,
        )  # fmt: skip
