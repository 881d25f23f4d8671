"""RMSNorm, RoPE and Walsh-Hadamard rotation of pooled rows, in place, one launch."""

import triton
import triton.language as tl

from backend_core.kernels.codecs import round_bf16
from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles
from dsv4_backend.kernels.arguments import Norm, Table
from dsv4_backend.kernels.finish import finish_row


@triton.jit
def norm_rope_rotate_kernel(
    kv_ptr,  # [rows, D] fp32 or bf16, rewritten
    norm: Norm,
    table: Table,  # interleaved cos, sin
    seq_len_ptr,  # [N]
    stride_kv_r,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per entry; the row stays in registers from its load to its store."""
    i_n = tl.program_id(0)
    pdl_begin(PDL)
    pdl_wait(PDL)
    seq_len = tl.load(seq_len_ptr + i_n).to(tl.int32)
    # A row is defined only where a window ends; -1 marks padding.
    if (seq_len <= 0) | (seq_len % RATIO != 0):
        return

    row_ptr = kv_ptr + i_n.to(tl.int64) * stride_kv_r + tl.arange(0, D)
    b_x = tl.load(row_ptr).to(tl.float32)
    b_w = tl.load(norm.weight_ptr + tl.arange(0, D)).to(tl.float32)
    b_angles = load_angles(table, seq_len - RATIO, D, False)
    b_x = finish_row(b_x, b_w, b_angles, norm.eps, D, HAS_ROTATION)
    if kv_ptr.dtype.element_ty == tl.bfloat16:
        b_x = round_bf16(b_x)
    tl.store(row_ptr, b_x.to(kv_ptr.dtype.element_ty))
