"""One KDA decode step of a layer: convolution, gate, state update, output and its norm.

For the token x of each sequence, its convolution window and the state S [V, K] of each head:

    q, k, v = silu(conv4(window, x) + bias)          window shifts by one
    S       = S diag(alpha) + beta (v - S diag(alpha) k) k^T
    o       = scale S q
    out     = o / rms(o) * weight * sigmoid(gate)

A program holds the state of one head, or BLOCK_V rows of it where neither the window (which one
program must shift after all have read it) nor the norm (over all of V) is its business.

The state is a tile [V, K / K_INNER, K_INNER]: K_INNER / 4 lanes share a row, so a sum over K is
mostly a thread's own. q and k enter the products before they are normalised, which then costs a
factor, and o is S_old q + (k q) delta, so both products with the state are one pass.

Grid: (V / BLOCK_V * HV * N,): one axis, since the others stop at 65,535.
"""

import triton
import triton.language as tl

from kda_backend.kernels.elementwise import ex2, load_gate, log2_decay, sigmoid, step_size
from kda_backend.kernels.step_conv import conv_silu, load_taps, load_window, store_window


@triton.jit
def add3(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def delta_step(b_state, b_q, b_k, b_v, b_decay, beta, L2NORM: tl.constexpr, K_INNER: tl.constexpr):
    """The state [V, KB, K_INNER] behind a token and S q [V], from q, k, decay [K] and v [V]."""
    KB: tl.constexpr = b_state.shape[1]
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


@triton.jit(do_not_specialize=["null_slot"])
def decode_step_kernel(
    q_ptr,  # [N, H, K]
    k_ptr,  # [N, H, K]
    v_ptr,  # [N, HV, V]
    g_ptr,  # [N, HV, K]
    beta_ptr,  # [N, HV]
    a_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    state_ptr,  # [slots, HV, V, K], in place
    state_indices_ptr,  # [N] int32
    conv_state_ptr,  # [slots, C, W] by strides, in place, or None: q, k and v are convolved already
    conv_weight_ptr,  # [C, 4]
    conv_bias_ptr,  # [C] or None
    norm_weight_ptr,  # [V], or None: o is the output
    norm_gate_ptr,  # [N, HV, V]
    out_ptr,  # [N, HV, V]
    null_slot,
    lower_bound,
    scale,
    eps,
    stride_q_n,
    stride_k_n,
    stride_v_n,
    stride_g_n,
    stride_beta_n,
    stride_state_n,
    stride_conv_n,
    stride_conv_c,
    stride_conv_w,
    stride_gate_n,
    stride_out_n,
    HV,
    HEADS_PER_KEY: tl.constexpr,  # HV / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_INNER: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST_MATH: tl.constexpr,
    EVICTION: tl.constexpr,
):
    NUM_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    KB: tl.constexpr = BLOCK_K // K_INNER
    i_v = tl.program_id(0) % NUM_V
    i_hv = tl.program_id(0) // NUM_V % HV
    i_n = (tl.program_id(0) // (NUM_V * HV)).to(tl.int64)  # rows may lie 2^31 elements apart
    i_h = i_hv // HEADS_PER_KEY
    slot = tl.load(state_indices_ptr + i_n).to(tl.int64)

    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = o_v < V
    p_out = out_ptr + i_n * stride_out_n + i_hv * V + o_v
    if (slot < 0) | (slot == null_slot):
        tl.store(p_out, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=m_v)
        return

    o_state_k = tl.arange(0, KB)[None, :, None] * K_INNER + tl.arange(0, K_INNER)[None, None, :]
    m_state = (o_state_k < K) & m_v[:, None, None]
    p_state = state_ptr + slot * stride_state_n + i_hv * (V * K)
    p_state += o_v[:, None, None] * K + o_state_k
    b_state = tl.load(p_state, mask=m_state, other=0.0, eviction_policy=EVICTION)
    b_q = tl.load(q_ptr + i_n * stride_q_n + i_h * K + o_k, mask=m_k, other=0.0)
    b_k = tl.load(k_ptr + i_n * stride_k_n + i_h * K + o_k, mask=m_k, other=0.0)
    b_v = tl.load(v_ptr + i_n * stride_v_n + i_hv * V + o_v, mask=m_v, other=0.0)
    b_g = tl.load(g_ptr + i_n * stride_g_n + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + i_n * stride_beta_n + i_hv)
    rate, b_bias = load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K)
    if norm_weight_ptr is not None:
        b_weight = tl.load(norm_weight_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
        p_gate = norm_gate_ptr + i_n * stride_gate_n + i_hv * V + o_v
        b_gate = tl.load(p_gate, mask=m_v, other=0.0).to(tl.float32)

    if conv_state_ptr is not None:
        # channels of q, k and v follow one another; here HV is H
        c_q = i_hv * K + o_k
        c_k = HV * K + c_q
        c_v = 2 * HV * K + i_hv * V + o_v
        conv_state_ptr += slot * stride_conv_n
        w_q = load_window(conv_state_ptr, c_q, m_k, stride_conv_c, stride_conv_w)
        w_k = load_window(conv_state_ptr, c_k, m_k, stride_conv_c, stride_conv_w)
        w_v = load_window(conv_state_ptr, c_v, m_v, stride_conv_c, stride_conv_w)
        t_q = load_taps(conv_weight_ptr, conv_bias_ptr, c_q, m_k)
        t_k = load_taps(conv_weight_ptr, conv_bias_ptr, c_k, m_k)
        t_v = load_taps(conv_weight_ptr, conv_bias_ptr, c_v, m_v)
        x_q, x_k, x_v = b_q, b_k, b_v
        b_q = conv_silu(t_q, w_q, x_q, FAST_MATH)
        b_k = conv_silu(t_k, w_k, x_k, FAST_MATH)
        b_v = conv_silu(t_v, w_v, x_v, FAST_MATH)
        tl.debug_barrier()  # every thread has read the window
        store_window(conv_state_ptr, c_q, m_k, stride_conv_c, stride_conv_w, w_q[1], w_q[2], x_q)
        store_window(conv_state_ptr, c_k, m_k, stride_conv_c, stride_conv_w, w_k[1], w_k[2], x_k)
        store_window(conv_state_ptr, c_v, m_v, stride_conv_c, stride_conv_w, w_v[1], w_v[2], x_v)

    b_decay = ex2(log2_decay(b_g, rate, b_bias, lower_bound, GATE, FAST_MATH), FAST_MATH)
    b_state, b_o = delta_step(
        b_state.to(tl.float32),
        b_q.to(tl.float32),
        b_k.to(tl.float32),
        b_v.to(tl.float32),
        b_decay,
        step_size(beta, BETA, FAST_MATH),
        L2NORM,
        K_INNER,
    )
    tl.store(
        p_state, b_state.to(state_ptr.dtype.element_ty), mask=m_state, eviction_policy=EVICTION
    )
    b_o *= scale
    if norm_weight_ptr is not None:
        b_o = gated_norm(b_o, b_weight, b_gate, eps, V, FAST_MATH)
    tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_v)
