"""One KDA decode step of a layer: convolution, gate, state update, output and its norm.

For the token x of each sequence, its convolution window and the state S [V, K] of each head:

    q, k, v = silu(conv4(window, x) + bias)          window shifts by one
    S       = S diag(alpha) + beta (v - S diag(alpha) k) k^T
    o       = scale S q
    out     = o / rms(o) * weight * sigmoid(gate)

A program holds the state of one head; or BLOCK_V rows of it, where there is neither a window (which
one program must shift after all have read it) nor a norm (over all of V).

Grid: (V / BLOCK_V * HV * N,): one axis, since the others stop at 65,535.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import ex2
from kda_backend.kernels.functions.conv import conv_silu, load_head, store_window
from kda_backend.kernels.functions.delta import delta_step, gated_norm, state_tile
from kda_backend.kernels.functions.gate import load_gate, log2_decay, step_size
from kda_backend.kernels.functions.state import as_stored


@triton.jit(do_not_specialize=["null_slot", "stride_beta_n"])
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
    stride_conv_state_n,
    stride_conv_state_c,
    stride_conv_state_w,
    stride_norm_gate_n,
    stride_out_n,
    HV,
    HEADS_PER_KEY: tl.constexpr,  # HV / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST_MATH: tl.constexpr,
    EVICTION: tl.constexpr,
):
    NUM_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
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

    o_state, m_state = state_tile(o_v * K, m_v, K, BLOCK_K, K_INNER, KB_AXIS)
    p_state = state_ptr + slot * stride_state_n + i_hv * (V * K) + o_state
    b_state = tl.load(p_state, mask=m_state, other=0.0, eviction_policy=EVICTION)
    b_q = tl.load(q_ptr + i_n * stride_q_n + i_h * K + o_k, mask=m_k, other=0.0)
    b_k = tl.load(k_ptr + i_n * stride_k_n + i_h * K + o_k, mask=m_k, other=0.0)
    b_v = tl.load(v_ptr + i_n * stride_v_n + i_hv * V + o_v, mask=m_v, other=0.0)
    b_g = tl.load(g_ptr + i_n * stride_g_n + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + i_n * stride_beta_n + i_hv)
    a_log, b_bias = load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K)
    if norm_weight_ptr is not None:
        b_weight = tl.load(norm_weight_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
        p_gate = norm_gate_ptr + i_n * stride_norm_gate_n + i_hv * V + o_v
        b_gate = tl.load(p_gate, mask=m_v, other=0.0).to(tl.float32)

    if conv_state_ptr is not None:
        # channels of q, k and v follow one another; here HV is H
        c_q = i_hv * K + o_k
        c_k = HV * K + c_q
        c_v = 2 * HV * K + i_hv * V + o_v
        conv_state_ptr += slot * stride_conv_state_n
        channels, masks = (c_q, c_k, c_v), (m_k, m_k, m_v)
        weights, strides = (
            (conv_weight_ptr, conv_bias_ptr),
            (stride_conv_state_c, stride_conv_state_w),
        )
        windows, taps = load_head(conv_state_ptr, weights, channels, masks, strides)
        w_q, w_k, w_v = windows
        t_q, t_k, t_v = taps
        x_q, x_k, x_v = b_q, b_k, b_v
        b_q = conv_silu(t_q, w_q, x_q, FAST_MATH)
        b_k = conv_silu(t_k, w_k, x_k, FAST_MATH)
        b_v = conv_silu(t_v, w_v, x_v, FAST_MATH)
        tl.debug_barrier()  # every thread has read the window
        store_window(conv_state_ptr, c_q, m_k, strides, (w_q[1], w_q[2], x_q))
        store_window(conv_state_ptr, c_k, m_k, strides, (w_k[1], w_k[2], x_k))
        store_window(conv_state_ptr, c_v, m_v, strides, (w_v[1], w_v[2], x_v))

    b_decay = ex2(log2_decay(b_g, a_log, b_bias, lower_bound, GATE, FAST_MATH), FAST_MATH)
    beta = step_size(beta, BETA, FAST_MATH)
    b_state = b_state.to(tl.float32)
    b_state, b_o = delta_step(b_state, b_q, b_k, b_v, b_decay, beta, L2NORM, K_INNER, KB_AXIS)
    b_state = as_stored(b_state, state_ptr.dtype.element_ty)
    tl.store(p_state, b_state, mask=m_state, eviction_policy=EVICTION)
    b_o *= scale
    if norm_weight_ptr is not None:
        b_o = gated_norm(b_o, b_weight, b_gate, eps, V, FAST_MATH)
    tl.store(p_out, b_o.to(out_ptr.dtype.element_ty), mask=m_v)
