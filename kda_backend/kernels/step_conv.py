"""The short convolution of KDA's q, k and v as device functions: four taps a channel, then SiLU.

The window holds the last three inputs of a channel, oldest first, before the convolution.
"""

import triton
import triton.language as tl

from kda_backend.kernels.elementwise import sigmoid


@triton.jit
def load_taps(weight_ptr, bias_ptr, o_c, m_c):
    """Taps and bias of channels o_c; weight is [C, 4], the last tap meets the newest input."""
    b_w0 = tl.load(weight_ptr + o_c * 4, mask=m_c, other=0.0).to(tl.float32)
    b_w1 = tl.load(weight_ptr + o_c * 4 + 1, mask=m_c, other=0.0).to(tl.float32)
    b_w2 = tl.load(weight_ptr + o_c * 4 + 2, mask=m_c, other=0.0).to(tl.float32)
    b_w3 = tl.load(weight_ptr + o_c * 4 + 3, mask=m_c, other=0.0).to(tl.float32)
    b_bias = tl.zeros_like(b_w0)
    if bias_ptr is not None:
        b_bias += tl.load(bias_ptr + o_c, mask=m_c, other=0.0).to(tl.float32)
    return b_w0, b_w1, b_w2, b_w3, b_bias


@triton.jit
def load_window(window_ptr, o_c, m_c, stride_c, stride_w):
    """The three inputs before this token, in the pool's dtype."""
    p_x = window_ptr + o_c * stride_c
    b_x0 = tl.load(p_x, mask=m_c, other=0.0)
    b_x1 = tl.load(p_x + stride_w, mask=m_c, other=0.0)
    b_x2 = tl.load(p_x + 2 * stride_w, mask=m_c, other=0.0)
    return b_x0, b_x1, b_x2


@triton.jit
def store_window(window_ptr, o_c, m_c, stride_c, stride_w, b_x0, b_x1, b_x2):
    p_x = window_ptr + o_c * stride_c
    element = window_ptr.dtype.element_ty
    tl.store(p_x, b_x0.to(element), mask=m_c)
    tl.store(p_x + stride_w, b_x1.to(element), mask=m_c)
    tl.store(p_x + 2 * stride_w, b_x2.to(element), mask=m_c)


@triton.jit
def conv_silu(taps, window, b_x, FAST_MATH: tl.constexpr):
    """silu(w0 x[t-3] + w1 x[t-2] + w2 x[t-1] + w3 x[t] + bias) in fp32."""
    b_y = taps[4] + taps[0] * window[0].to(tl.float32) + taps[1] * window[1].to(tl.float32)
    b_y += taps[2] * window[2].to(tl.float32) + taps[3] * b_x.to(tl.float32)
    return b_y * sigmoid(b_y, FAST_MATH)
