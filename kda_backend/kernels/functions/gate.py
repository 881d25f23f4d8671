"""The forget gate and the step size of KDA, as every kernel computes them.

The values of GATE and BETA are those of `kda_backend.spec`.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import LOG2E, ex2, lg2, sigmoid
from kda_backend.spec import Beta, Gate

GATE_LOG = tl.constexpr(int(Gate.LOG))
GATE_SOFTPLUS = tl.constexpr(int(Gate.SOFTPLUS))
BETA_SIGMOID = tl.constexpr(int(Beta.SIGMOID))
BETA_TWICE_SIGMOID = tl.constexpr(int(Beta.TWICE_SIGMOID))


LARGEST = tl.constexpr(60.0)  # A_log whose rate is a factor; what is above it joins the exponent


@triton.jit
def softplus_log2(x, FAST_MATH: tl.constexpr):
    """log2(1 + e^x), without overflow for large x and without cancellation for very negative x."""
    y = x * LOG2E
    e = ex2(tl.minimum(y, 40.0), FAST_MATH)
    # log(1 + e) = e - e^2/2 + e^3/3 - e^4/4 + O(e^5): 1 + e rounds away the digits of a small e
    series = LOG2E * e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)))
    return tl.where(e < 0.03, series, tl.maximum(lg2(1.0 + e, FAST_MATH), y))


@triton.jit
def log2_decay(g, a_log, bias, lower_bound, GATE: tl.constexpr, FAST_MATH: tl.constexpr):
    """log2 of the per-channel decay, <= 0. ``a_log`` is a head's A_log; ``bias`` broadcasts over g.

    exp(A_log) and softplus(x) may leave fp32 on either side where their product does not. With
    A_log above 60 the decay is 0 unless softplus(x) = e^x < e^-20, where
    exp(A_log) softplus(x) = exp(60) softplus(x + A_log - 60).
    """
    if GATE == GATE_LOG:
        y = g * LOG2E
    elif GATE == GATE_SOFTPLUS:
        rate = tl.exp(tl.minimum(a_log, LARGEST))
        y = -rate * softplus_log2(g + (bias + tl.maximum(a_log - LARGEST, 0.0)), FAST_MATH)
    else:
        rate = tl.exp(tl.minimum(a_log, 88.0))  # finite, since 0 times it is 0
        y = (lower_bound * LOG2E) * sigmoid(rate * (g + bias), FAST_MATH)
    return y


@triton.jit
def load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K: tl.constexpr):
    """A_log of a head and its dt_bias; zeros where they are not given."""
    a_log = tl.full([], 0.0, tl.float32)
    if a_log_ptr is not None:
        a_log = tl.load(a_log_ptr + i_hv).to(tl.float32)
    if dt_bias_ptr is not None:
        b_bias = tl.load(dt_bias_ptr + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    else:
        b_bias = tl.zeros_like(o_k).to(tl.float32)
    return a_log, b_bias


@triton.jit
def step_size(beta, BETA: tl.constexpr, FAST_MATH: tl.constexpr):
    """beta in fp32 from the caller's beta."""
    b = beta.to(tl.float32)
    if BETA == BETA_SIGMOID:
        b = sigmoid(b, FAST_MATH)
    elif BETA == BETA_TWICE_SIGMOID:
        b = 2.0 * sigmoid(b, FAST_MATH)
    return b
