"""One token of the delta rule on a state in registers, and the gated norm of its output.

The state is a tile [V, K / K_INNER, K_INNER]: K_INNER / 4 lanes share a row, so a sum over K is
mostly a thread's own. q and k enter the products before they are normalised, which then costs a
factor, and o is S_old q + (k q) delta, so both products with the state are one pass.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import sigmoid


@triton.jit
def add3(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def delta_step(b_state, b_q, b_k, b_v, b_decay, beta, L2NORM: tl.constexpr, K_INNER: tl.constexpr):
    """The state [V, KB, K_INNER] after a token and S q [V], from q, k, decay [K] and v [V]."""
    KB: tl.constexpr = b_state.shape[1]
    b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
    qq, kk, qk = tl.reduce((b_q * b_q, b_k * b_k, b_q * b_k), 0, add3)
    if L2NORM:
        r_q = tl.rsqrt(qq + 1e-6)
        r_k = tl.rsqrt(kk + 1e-6)
    else:
        r_q = 1.0
        r_k = 1.0
    b_q = tl.reshape(b_q, [KB, K_INNER])[None, :, :]
    b_k = tl.reshape(b_k, [KB, K_INNER])[None, :, :]
    b_state *= tl.reshape(b_decay, [KB, K_INNER])[None, :, :]
    b_sk = tl.sum(tl.sum(b_state * b_k, 1), 1)
    b_sq = tl.sum(tl.sum(b_state * b_q, 1), 1)
    b_delta = beta * (b_v - r_k * b_sk)
    b_state += (r_k * b_delta)[:, None, None] * b_k
    return b_state, r_q * (b_sq + (r_k * qk) * b_delta)


@triton.jit
def gated_norm(b_o, b_weight, b_gate, eps, V: tl.constexpr, FAST_MATH: tl.constexpr):
    """o / rms(o) * weight * sigmoid(gate); o is zero beyond V."""
    b_y = b_o * tl.rsqrt(tl.sum(b_o * b_o, 0) * (1.0 / V) + eps) * b_weight
    return b_y * sigmoid(b_gate, FAST_MATH)


@triton.jit
def state_tile(o_v, m_v, K: tl.constexpr, BLOCK_K: tl.constexpr, K_INNER: tl.constexpr):
    """Offsets and mask [V, KB, K_INNER] of a head's state [V, K]."""
    KB: tl.constexpr = BLOCK_K // K_INNER
    o_k = tl.arange(0, KB)[None, :, None] * K_INNER + tl.arange(0, K_INNER)[None, None, :]
    return o_v[:, None, None] * K + o_k, (o_k < K) & m_v[:, None, None]
