"""Gated RMS norm of a head's output: y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate).

Grid: (cdiv(T * HV, BLOCK_R),). A program owns BLOCK_R rows and may write them over x.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import sigmoid


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    x_ptr,  # [T, HV, V]
    gate_ptr,  # [T, HV, V]
    weight_ptr,  # [V]
    o_ptr,  # [T, HV, V], may be x
    eps,
    num_rows,  # T * HV
    HV,
    stride_x_t,
    stride_x_h,
    stride_gate_t,
    stride_gate_h,
    stride_o_t,
    stride_o_h,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_t = (o_r // HV).to(tl.int64)[:, None]
    o_h = (o_r % HV).to(tl.int64)[:, None]
    o_v = tl.arange(0, BLOCK_V)
    m_v = o_v < V
    m_rv = (o_r < num_rows)[:, None] & m_v[None, :]
    o_x = o_t * stride_x_t + o_h * stride_x_h + o_v[None, :]
    o_gate = o_t * stride_gate_t + o_h * stride_gate_h + o_v[None, :]
    o_o = o_t * stride_o_t + o_h * stride_o_h + o_v[None, :]
    b_x = tl.load(x_ptr + o_x, mask=m_rv, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + o_gate, mask=m_rv, other=0.0).to(tl.float32)
    b_w = tl.load(weight_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_x *= tl.rsqrt(tl.sum(b_x * b_x, 1) / V + eps)[:, None]
    b_x *= b_w[None, :] * sigmoid(b_gate, FAST_MATH)
    tl.store(o_ptr + o_o, b_x.to(o_ptr.dtype.element_ty), mask=m_rv)
