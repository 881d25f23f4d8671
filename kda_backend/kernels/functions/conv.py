"""The short convolution of KDA's q, k and v: four taps per channel, then SiLU.

The window holds the last three inputs of a channel, oldest first, before the convolution.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import sigmoid


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
def store_window(window_ptr, o_c, m_c, strides, window):
    """The three inputs before the next token, oldest first."""
    p_x = window_ptr + o_c * strides[0]
    element = window_ptr.dtype.element_ty
    tl.store(p_x, window[0].to(element), mask=m_c)
    tl.store(p_x + strides[1], window[1].to(element), mask=m_c)
    tl.store(p_x + 2 * strides[1], window[2].to(element), mask=m_c)


@triton.jit
def conv_silu(taps, window, b_x, FAST_MATH: tl.constexpr):
    """silu(w0 x[t-3] + w1 x[t-2] + w2 x[t-1] + w3 x[t] + bias) in fp32."""
    b_y = taps[4] + taps[0] * window[0].to(tl.float32) + taps[1] * window[1].to(tl.float32)
    b_y += taps[2] * window[2].to(tl.float32) + taps[3] * b_x.to(tl.float32)
    return b_y * sigmoid(b_y, FAST_MATH)


@triton.jit
def load_head(window_ptr, weights, channels, masks, strides):
    """Windows, then taps, of a head's channels of q, k and v.

    ``weights``: pointers to weight and bias; ``channels``, ``masks``: of q, k and v; ``strides``:
    of the window's channels and columns.
    """
    w_q = load_window(window_ptr, channels[0], masks[0], strides[0], strides[1])
    w_k = load_window(window_ptr, channels[1], masks[1], strides[0], strides[1])
    w_v = load_window(window_ptr, channels[2], masks[2], strides[0], strides[1])
    t_q = load_taps(weights[0], weights[1], channels[0], masks[0])
    t_k = load_taps(weights[0], weights[1], channels[1], masks[1])
    t_v = load_taps(weights[0], weights[1], channels[2], masks[2])
    return (w_q, w_k, w_v), (t_q, t_k, t_v)
