"""The indexer's queries: RoPE, rotation, quantisation, one launch."""

import triton
import triton.language as tl

from backend_core.kernels.codecs import round_bf16
from backend_core.kernels.rope_hadamard import hadamard, load_angles, rope_tail
from dsv4_backend.kernels.records import quantise_indexer_fp8, quantise_indexer_mxfp4


@triton.jit
def indexer_queries_kernel(
    q_ptr,  # [T, H, D] bf16 or fp32
    position_ptr,  # [T]
    table_ptr,  # [positions, 64]
    weight_ptr,  # [T, H]
    code_ptr,  # uint8 [T, H, D], or of "indexer_mxfp4" [T, H, D/2]
    scale_ptr,  # uint8 [T, H, D/32], None unless "indexer_mxfp4"
    out_ptr,  # [T, H] fp32
    num_heads,
    softmax_scale,
    head_scale,
    stride_q_t,
    stride_q_h,
    stride_table_p,
    stride_weight_t,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program per token and HEADS heads. An fp8 row's scale goes into its head's weight."""
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, D)
    position = tl.load(position_ptr + i_t)
    b_angles = load_angles(table_ptr, position, stride_table_p, D, IS_SPLIT_TABLE)
    for i in tl.static_range(HEADS):
        # beyond the last head: that one once more
        i_h = tl.minimum(tl.program_id(1) * HEADS + i, num_heads - 1)
        i_row = i_t * num_heads + i_h
        b_x = tl.load(q_ptr + i_t * stride_q_t + i_h * stride_q_h + o_d).to(tl.float32)
        weight = tl.load(weight_ptr + i_t * stride_weight_t + i_h).to(tl.float32)
        b_x = rope_tail(b_x, b_angles, D)
        if HAS_ROTATION:
            b_x = hadamard(b_x, D)
        if ROUNDING == "vllm":
            b_x = round_bf16(b_x)
        if FORMAT == "indexer_fp8":
            b_code, scale = quantise_indexer_fp8(b_x, ROUNDING, IS_FNUZ)
            tl.store(code_ptr + i_row * D + o_d, b_code)
            weight *= scale
        else:
            b_code, b_scale = quantise_indexer_mxfp4(b_x, D, ROUNDING)
            tl.store(code_ptr + i_row * (D // 2) + tl.arange(0, D // 2), b_code)
            tl.store(scale_ptr + i_row * (D // 32) + tl.arange(0, D // 32), b_scale)
        tl.store(out_ptr + i_row, weight * softmax_scale * head_scale)
