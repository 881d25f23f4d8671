"""KDA token by token: decode, and any sequence short enough to walk.

With alpha_t the decay, for each token of a sequence and the state S [V, K]:

    S   = S diag(alpha_t)
    S   = S + beta_t (v_t - S k_t) k_t^T
    o_t = scale S q_t

The state is read once, kept in fp32 registers, and written once. Each program owns BLOCK_V value
rows of one sequence and head.

Grid: (cdiv(V, BLOCK_V) * HV * N,): one axis, since the others stop at 65,535.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import ex2
from kda_backend.kernels.functions.gate import load_gate, log2_decay, step_size
from kda_backend.kernels.functions.state import as_stored, reads_state, slot_of


@triton.jit(do_not_specialize=["stride_beta_t"])
def recurrent_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,  # [T, H, K]
    v_ptr,  # [T, HV, V]
    g_ptr,  # [T, HV, K]
    beta_ptr,  # [T, HV]
    a_log_ptr,  # [HV] fp32 or None
    dt_bias_ptr,  # [HV, K] fp32 or None
    o_ptr,  # [T, HV, V]
    state_in_ptr,  # [slots or N, HV, V, K] by strides, or None
    state_out_ptr,  # the same, or None
    state_indices_ptr,  # [N] int32 slot of each sequence, -1: no state; or None
    has_initial_state_ptr,  # [N] bool, or None
    cu_seqlens_ptr,  # [N + 1], or None: every sequence has tokens_per_sequence tokens
    tokens_per_sequence,
    lower_bound,
    scale,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_g_t,
    stride_g_h,
    stride_beta_t,
    stride_beta_h,
    stride_o_t,
    stride_o_h,
    stride_state_in_n,
    stride_state_in_h,
    stride_state_in_v,
    stride_state_in_k,
    stride_state_out_n,
    stride_state_out_h,
    stride_state_out_v,
    stride_state_out_k,
    HV,
    HEADS_PER_KEY: tl.constexpr,  # HV / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    NUM_V: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v = tl.program_id(0) % NUM_V
    i_hv = (tl.program_id(0) // NUM_V % HV).to(tl.int64)  # heads may lie 2^31 elements apart
    i_n = tl.program_id(0) // (NUM_V * HV)
    i_h = i_hv // HEADS_PER_KEY
    if cu_seqlens_ptr is not None:
        bos = tl.load(cu_seqlens_ptr + i_n).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens_ptr + i_n + 1).to(tl.int64) - bos).to(tl.int32)
    else:
        bos = i_n.to(tl.int64) * tokens_per_sequence
        num_tokens = tokens_per_sequence
    slot = slot_of(state_indices_ptr, i_n)

    o_k = tl.arange(0, BLOCK_K)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k = o_k < K
    m_v = o_v < V
    m_vk = m_v[:, None] & m_k[None, :]
    b_state = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if state_in_ptr is not None:
        reads = reads_state(has_initial_state_ptr, i_n, slot)
        o_state = o_v[:, None] * stride_state_in_v + o_k[None, :] * stride_state_in_k
        state_in_ptr += slot * stride_state_in_n + i_hv * stride_state_in_h
        b_state += tl.load(state_in_ptr + o_state, mask=m_vk & reads, other=0.0).to(tl.float32)

    a_log, b_bias = load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K)
    q_ptr += bos * stride_q_t + i_h * stride_q_h
    k_ptr += bos * stride_k_t + i_h * stride_k_h
    v_ptr += bos * stride_v_t + i_hv * stride_v_h
    g_ptr += bos * stride_g_t + i_hv * stride_g_h
    beta_ptr += bos * stride_beta_t + i_hv * stride_beta_h
    o_ptr += bos * stride_o_t + i_hv * stride_o_h
    for _ in range(num_tokens):
        b_q = tl.load(q_ptr + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k_ptr + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(v_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_g = tl.load(g_ptr + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_g = log2_decay(b_g, a_log, b_bias, lower_bound, GATE, FAST_MATH)
        if L2NORM:
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_state *= ex2(b_g, FAST_MATH)[None, :]
        b_new = b_v - tl.sum(b_state * b_k[None, :], 1)
        b_new *= step_size(tl.load(beta_ptr), BETA, FAST_MATH)
        b_state += b_new[:, None] * b_k[None, :]
        b_o = tl.sum(b_state * b_q[None, :], 1) * scale
        tl.store(o_ptr + o_v, b_o.to(o_ptr.dtype.element_ty), mask=m_v)
        q_ptr += stride_q_t
        k_ptr += stride_k_t
        v_ptr += stride_v_t
        g_ptr += stride_g_t
        beta_ptr += stride_beta_t
        o_ptr += stride_o_t

    if state_out_ptr is not None:
        o_state = o_v[:, None] * stride_state_out_v + o_k[None, :] * stride_state_out_k
        state_out_ptr += slot * stride_state_out_n + i_hv * stride_state_out_h
        b_state = as_stored(b_state, state_out_ptr.dtype.element_ty)
        tl.store(state_out_ptr + o_state, b_state, mask=m_vk & (slot >= 0))
