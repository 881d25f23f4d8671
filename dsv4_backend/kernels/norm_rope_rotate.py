"""RMSNorm, RoPE and Walsh-Hadamard rotation of pooled rows, in place, one launch."""

import triton
import triton.language as tl

from dsv4_backend.kernels.numerics import (
    hadamard,
    load_angles,
    rms_norm,
    rope_tail,
    round_bf16,
    start_next,
    wait_for_previous,
)


@triton.jit
def norm_rope_rotate_kernel(
    kv_ptr,  # [rows, D] fp32 or bf16, rewritten
    weight_ptr,  # [D]
    table_ptr,  # [positions, 64] interleaved cos, sin
    plan_ptr,  # seq_lens [N], or [N, 4] {row, batch, position, window_len}
    eps,
    stride_kv_r,
    stride_table_p,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    IS_DECODE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a plan entry; the row stays in registers from its load to its store."""
    i_n = tl.program_id(0)
    start_next(PDL)
    wait_for_previous(PDL)
    if IS_DECODE:
        i_row = i_n
        seq_len = tl.load(plan_ptr + i_n).to(tl.int32)
    else:
        i_row = tl.load(plan_ptr + 4 * i_n.to(tl.int64)).to(tl.int32)
        seq_len = tl.load(plan_ptr + 4 * i_n.to(tl.int64) + 2).to(tl.int32) + 1
    # A row is defined only where a window ends; -1 marks padding in either plan.
    if (i_row < 0) | (seq_len <= 0) | (seq_len % RATIO != 0):
        return

    row_ptr = kv_ptr + i_row.to(tl.int64) * stride_kv_r + tl.arange(0, D)
    b_x = tl.load(row_ptr).to(tl.float32)
    b_w = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)
    b_angles = load_angles(table_ptr, seq_len - RATIO, stride_table_p, D, False)
    b_x = rope_tail(rms_norm(b_x, b_w, eps, D), b_angles, D)
    if HAS_ROTATION:
        b_x = hadamard(b_x, D)
    if kv_ptr.dtype.element_ty == tl.bfloat16:
        b_x = round_bf16(b_x)
    tl.store(row_ptr, b_x.to(kv_ptr.dtype.element_ty))
