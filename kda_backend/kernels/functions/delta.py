"""One token of the delta rule on a state in registers, and the gated norm of its output.

The state is a tile with the axes V, K / K_INNER and K_INNER: K_INNER / 4 lanes share a row, so a
sum over K is mostly a thread's own. A thread has all blocks of K_INNER channels if their axis,
KB_AXIS, is the second for Triton 3.6 and the first for later releases, which spread a warp over the
other axis. q and k enter the products before they are normalised, which then costs a factor, and o
is S_old q + (k q) delta, so both products with the state are one pass.

Where a lane has one element of a sum, that is a `product`. Otherwise LLVM joins a multiplication
with the addition of another lane's value, and lanes get sums with other last bits. Triton 3.8 lets
all of them store their sum at one address, where it is undefined whose stays.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import sigmoid


@triton.jit
def add3(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def product(a, b):
    """a b, rounded before anything is added to it."""
    return tl.fma(a, b, 0.0)


@triton.jit
def delta_update(
    b_state,
    b_q,
    b_k,
    b_v,
    b_decay,
    beta,
    L2NORM: tl.constexpr,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
):
    """The state after a token, S q [V], and of the token the correction [V] of the state for k as
    it comes and for k behind its norm, from q, k, decay [K] and v [V]."""
    KB: tl.constexpr = b_state.shape[KB_AXIS]
    b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
    products = (product(b_q, b_q), product(b_k, b_k), product(b_q, b_k))
    qq, kk, qk = tl.reduce(products, 0, add3)
    if L2NORM:
        r_q = tl.rsqrt(qq + 1e-6)
        r_k = tl.rsqrt(kk + 1e-6)
    else:
        r_q = 1.0
        r_k = 1.0
    b_q = tl.expand_dims(tl.reshape(b_q, [KB, K_INNER]), 1 - KB_AXIS)
    b_k = tl.expand_dims(tl.reshape(b_k, [KB, K_INNER]), 1 - KB_AXIS)
    b_state *= tl.expand_dims(tl.reshape(b_decay, [KB, K_INNER]), 1 - KB_AXIS)
    b_sk = tl.sum(tl.sum(b_state * b_k, KB_AXIS), 1)
    b_sq = tl.sum(tl.sum(b_state * b_q, KB_AXIS), 1)
    b_delta = beta * (b_v - r_k * b_sk)
    b_correction = r_k * b_delta
    b_state += tl.expand_dims(b_correction[:, None], KB_AXIS) * b_k
    return b_state, r_q * (b_sq + (r_k * qk) * b_delta), b_correction, b_delta


@triton.jit
def delta_step(
    b_state,
    b_q,
    b_k,
    b_v,
    b_decay,
    beta,
    L2NORM: tl.constexpr,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
):
    """The state after a token and S q [V], from q, k, decay [K] and v [V]."""
    b_state, b_o, _, _ = delta_update(
        b_state, b_q, b_k, b_v, b_decay, beta, L2NORM, K_INNER, KB_AXIS
    )
    return b_state, b_o


@triton.jit
def gated_norm(b_o, b_weight, b_gate, eps, V: tl.constexpr, FAST_MATH: tl.constexpr):
    """o / rms(o) * weight * sigmoid(gate); o is zero beyond V."""
    b_y = b_o * tl.rsqrt(tl.sum(product(b_o, b_o), 0) * (1.0 / V) + eps) * b_weight
    return b_y * sigmoid(b_gate, FAST_MATH)


@triton.jit
def state_tile(
    o_row,
    m_v,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
):
    """Offsets of a state whose rows [V] begin at o_row, and their mask."""
    KB: tl.constexpr = BLOCK_K // K_INNER
    o_k = tl.arange(0, KB)[:, None] * K_INNER + tl.arange(0, K_INNER)[None, :]
    o_k = tl.expand_dims(o_k, 1 - KB_AXIS)
    return tl.expand_dims(o_row[:, None], KB_AXIS) + o_k, (o_k < K) & tl.expand_dims(
        m_v[:, None], KB_AXIS
    )
