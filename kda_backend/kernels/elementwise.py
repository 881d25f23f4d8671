"""Scalar functions shared by the KDA kernels: base-2 exponentials, the forget gate, beta.

``FAST_MATH`` selects PTX's single-instruction approximations (2 ulp, subnormals flushed) in place
of the library functions, which expand to hundreds of instructions on NVIDIA.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

# How ``g`` becomes a decay; values of the constexpr GATE.
GATE_LOG = tl.constexpr(0)  # g is already the natural logarithm of the decay
GATE_SOFTPLUS = tl.constexpr(1)  # -exp(A_log) * softplus(g + dt_bias)
GATE_BOUNDED = tl.constexpr(2)  # lower_bound * sigmoid(exp(A_log) * (g + dt_bias))

# How ``beta`` becomes a step size; values of the constexpr BETA.
BETA_GIVEN = tl.constexpr(0)
BETA_SIGMOID = tl.constexpr(1)
BETA_TWICE_SIGMOID = tl.constexpr(2)  # eigenvalues of the transition in (-1, 1)


@triton.jit
def ex2(x, FAST_MATH: tl.constexpr):
    """2^x in fp32."""
    if FAST_MATH:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def lg2(x, FAST_MATH: tl.constexpr):
    """log2(x) in fp32."""
    if FAST_MATH:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def reciprocal(x, FAST_MATH: tl.constexpr):
    """1 / x in fp32."""
    if FAST_MATH:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def sigmoid(x, FAST_MATH: tl.constexpr):
    return reciprocal(1.0 + ex2(-LOG2E * x, FAST_MATH), FAST_MATH)


@triton.jit
def softplus_log2(x, FAST_MATH: tl.constexpr):
    """log2(1 + e^x), without overflow for large x and without cancellation for very negative x."""
    y = x * LOG2E
    e = ex2(tl.minimum(y, 40.0), FAST_MATH)
    # log(1 + e) = e - e^2/2 + e^3/3 - e^4/4 + O(e^5): 1 + e rounds away the digits of a small e
    series = LOG2E * e * (1.0 - e * (0.5 - e * (0.33333333 - e * 0.25)))
    return tl.where(e < 0.03, series, tl.maximum(lg2(1.0 + e, FAST_MATH), y))


@triton.jit
def log2_decay(g, rate, bias, lower_bound, GATE: tl.constexpr, FAST_MATH: tl.constexpr):
    """log2 of the per-channel decay, <= 0. ``rate`` is exp(A_log); ``bias`` broadcasts over g."""
    if GATE == GATE_LOG:
        y = g * LOG2E
    elif GATE == GATE_SOFTPLUS:
        y = -rate * softplus_log2(g + bias, FAST_MATH)
    else:
        y = (lower_bound * LOG2E) * sigmoid(rate * (g + bias), FAST_MATH)
    return y


@triton.jit
def load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K: tl.constexpr):
    """exp(A_log) of a head and its dt_bias; 1 and zeros where they are not given."""
    rate = 1.0
    if a_log_ptr is not None:
        rate = tl.exp(tl.load(a_log_ptr + i_hv).to(tl.float32))
    if dt_bias_ptr is not None:
        b_bias = tl.load(dt_bias_ptr + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    else:
        b_bias = tl.zeros_like(o_k).to(tl.float32)
    return rate, b_bias


@triton.jit
def step_size(beta, BETA: tl.constexpr, FAST_MATH: tl.constexpr):
    """beta in fp32 from the caller's beta."""
    b = beta.to(tl.float32)
    if BETA == BETA_SIGMOID:
        b = sigmoid(b, FAST_MATH)
    elif BETA == BETA_TWICE_SIGMOID:
        b = 2.0 * sigmoid(b, FAST_MATH)
    return b
