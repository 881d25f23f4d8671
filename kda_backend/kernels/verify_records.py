"""Tokens of a draft, one after the other, with a record of each token kept in place of a state.

The state before the draft is read once. The records that the draft before has left are folded into
it first, as many as the engine has accepted, and only then is it stored, once. After that the
recurrence is that of ``verify_step``, and the state after the draft is lost: the next call, or
``commit_records``, makes it again from the records.

A program has read all records of its head before it stores the first new one, so new ones take the
rows of the old. With a convolution k is rounded to the tokens' dtype before its norm, so that its
record is exact. The convolution's window is read from column ``num_accepted - 1`` on where the
pool's columns hold the draft before (``windows_ptr`` is None), else from column 0.

Grid: (HV * N,).
"""

import triton
import triton.language as tl

from backend_core.kernels.math import ex2
from kda_backend.kernels.functions.delta import delta_update, state_tile
from kda_backend.kernels.functions.gate import load_gate, log2_decay, step_size
from kda_backend.kernels.functions.records import (
    accepted_records,
    fold_record,
    load_record,
    store_record,
)
from kda_backend.kernels.functions.state import as_stored
from kda_backend.kernels.verify_step import (
    at_token,
    channels_of,
    convolve_token,
    load_token,
    open_windows,
    store_output,
    store_zeros,
    tokens_of,
)


@triton.jit
def load_inputs(p_token, m_k, m_v, exists):
    """q, k, v and the gate of a token, zeros where there is none."""
    p_q, p_k, p_v, p_g, _ = p_token
    return load_token(p_q, p_k, p_v, p_g, m_k & exists, m_v & exists)


@triton.jit
def fold_held(
    b_state,
    records,
    held,
    o_k,
    o_v,
    masks,
    gate,
    lower_bound,
    K: tl.constexpr,
    V: tl.constexpr,
    K_INNER: tl.constexpr,
    KB_AXIS: tl.constexpr,
    GATE: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """The state after the first ``held`` records of a head. Each is requested before the one before
    it is folded. ``records``: pointers to the first correction, and to the first key."""
    p_correction, p_key_gate = records
    upcoming = load_record(p_correction, p_key_gate, held > 0, o_k, o_v, masks, K)
    for i in range(held):
        record = upcoming
        p_correction += V
        p_key_gate += 2 * K
        upcoming = load_record(p_correction, p_key_gate, i + 1 < held, o_k, o_v, masks, K)
        b_state = fold_record(b_state, record, gate, lower_bound, K_INNER, KB_AXIS, GATE, FAST_MATH)
    return b_state


@triton.jit
def store_folded(p_state, m_state, m_stored, b_state):
    """Stores a state, and waits until every thread has read the records that new ones replace.
    Returns it as it is stored, which takes fewer registers to read again than to keep rounded."""
    element = p_state.dtype.element_ty
    tl.store(p_state, as_stored(b_state, element), mask=m_stored)
    tl.debug_barrier()
    if element != tl.float32:
        b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    return b_state


@triton.jit(do_not_specialize=["null_slot", "tokens_per_sequence", "max_tokens", "stride_beta_t"])
def verify_records_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,  # [tokens, H, K]
    v_ptr,  # [tokens, HV, V]
    g_ptr,  # [tokens, HV, K]
    beta_ptr,  # [tokens, HV]
    a_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    state_ptr,  # [slots, HV, V, K], in place
    state_indices_ptr,  # [N] int32
    correction_ptr,  # [rows, HV, max_tokens, V] fp32, in place
    key_gate_ptr,  # [rows, HV, max_tokens, 2 K], in place
    record_indices_ptr,  # [N] int32
    num_accepted_ptr,  # [N] int32, or None: no records are held
    conv_state_ptr,  # [slots, C, W] by strides, or None
    conv_weight_ptr,  # [C, 4]
    conv_bias_ptr,  # [C] or None
    windows_ptr,  # [rows, max_tokens, C, 3] by strides, or None
    norm_weight_ptr,  # [V] or None
    norm_gate_ptr,  # [tokens, HV, V]
    out_ptr,  # [tokens, HV, V]
    cu_seqlens_ptr,  # [N + 1] or None
    tokens_per_sequence,
    max_tokens,
    null_slot,
    lower_bound,
    scale,
    eps,
    stride_q_t,
    stride_k_t,
    stride_v_t,
    stride_g_t,
    stride_beta_t,
    stride_state_n,
    stride_correction_n,
    stride_key_gate_n,
    stride_conv_state_n,
    stride_conv_state_c,
    stride_conv_state_w,
    stride_windows_n,
    stride_windows_t,
    stride_windows_c,
    stride_windows_w,
    stride_norm_gate_t,
    stride_out_t,
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
    BY_NORM: tl.constexpr,  # u is for k as it comes
    FAST_MATH: tl.constexpr,
):
    i_hv, i_n = tl.program_id(0) % HV, (tl.program_id(0) // HV).to(tl.int64)
    i_h = i_hv // HEADS_PER_KEY
    bos, num_tokens = tokens_of(cu_seqlens_ptr, i_n, tokens_per_sequence, max_tokens)
    slot = tl.load(state_indices_ptr + i_n).to(tl.int64)
    row = tl.load(record_indices_ptr + i_n).to(tl.int64)
    accepted = accepted_records(num_accepted_ptr, i_n, max_tokens)
    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    p_out = out_ptr + bos * stride_out_t + i_hv * V + o_v
    # what a sequence without tokens holds, it goes on holding
    if (slot < 0) | (slot == null_slot) | (num_tokens == 0):
        store_zeros(p_out, stride_out_t, num_tokens, m_v, BLOCK_V)
        return

    o_state, m_state = state_tile(i_hv * (V * K) + o_v * K, m_v, K, BLOCK_K, K_INNER, KB_AXIS)
    p_state = state_ptr + slot * stride_state_n + o_state
    b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    gate = load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K)
    p_correction = correction_ptr + row * stride_correction_n + i_hv * (max_tokens * V)
    p_key_gate = key_gate_ptr + row * stride_key_gate_n + i_hv * (max_tokens * (2 * K))
    if num_accepted_ptr is not None:
        held = tl.where(row >= 0, accepted, 0)
        b_state = fold_held(
            b_state, (p_correction, p_key_gate), held, o_k, o_v, (m_k, m_v), gate, lower_bound,
            K=K, V=V, K_INNER=K_INNER, KB_AXIS=KB_AXIS, GATE=GATE, FAST_MATH=FAST_MATH,
        )  # fmt: skip
        b_state = store_folded(p_state, m_state, m_state & (held > 0), b_state)
    b_weight = None
    if norm_weight_ptr is not None:
        b_weight = tl.load(norm_weight_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
    channels, masks = channels_of(i_hv, HV, o_k, o_v, K, V), (m_k, m_k, m_v)
    if conv_state_ptr is not None:
        conv_state_ptr += slot * stride_conv_state_n
        p_conv = conv_state_ptr
        if windows_ptr is None:
            p_conv += tl.maximum(accepted - 1, 0) * stride_conv_state_w
        strides = (stride_conv_state_c, stride_conv_state_w)
        weights = (conv_weight_ptr, conv_bias_ptr)
        windows, taps, conv_state_ptr = open_windows(
            conv_state_ptr, p_conv, windows_ptr, weights, channels, masks, masks, strides
        )
    strides_t = (stride_q_t, stride_k_t, stride_v_t, stride_g_t, stride_beta_t)
    p_token = (q_ptr + i_h * K + o_k, k_ptr + i_h * K + o_k, v_ptr + i_hv * V + o_v,
               g_ptr + i_hv * K + o_k, beta_ptr + i_hv)  # fmt: skip
    p_token = at_token(p_token, bos, strides_t)
    upcoming = load_inputs(p_token, m_k, m_v, True)
    own = (m_k & (row >= 0), m_k & (row >= 0), m_v & (row >= 0))
    of_windows = (stride_windows_n, stride_windows_t, stride_windows_c, stride_windows_w)
    for i_t in range(num_tokens):
        b_q, b_k, b_v, b_g = upcoming
        beta = step_size(tl.load(p_token[4]), BETA, FAST_MATH)
        # the next token is requested before this one is computed
        p_token = at_token(p_token, 1, strides_t)
        upcoming = load_inputs(p_token, m_k, m_v, i_t + 1 < num_tokens)
        if conv_state_ptr is not None:
            inputs, windows, conv_state_ptr = convolve_token(
                taps, windows, (b_q, b_k, b_v), conv_state_ptr, windows_ptr, (row, i_t), channels,
                masks, own, strides, of_windows, FAST_MATH,
            )  # fmt: skip
            b_q, b_k, b_v = inputs
            b_k = b_k.to(key_gate_ptr.dtype.element_ty)
        b_decay = ex2(log2_decay(b_g, gate[0], gate[1], lower_bound, GATE, FAST_MATH), FAST_MATH)
        b_state, b_o, b_u, b_delta = delta_update(
            b_state, b_q, b_k, b_v, b_decay, beta, L2NORM, K_INNER, KB_AXIS
        )
        b_u = b_u if BY_NORM else b_delta
        store_record(p_correction, p_key_gate, o_k, o_v, own[1:], (b_u, b_k, b_g), K)
        p_correction += V
        p_key_gate += 2 * K
        store_output(
            p_out, b_o, scale, b_weight, (norm_gate_ptr, stride_norm_gate_t), bos + i_t, i_hv * V,
            o_v, m_v, eps, V, FAST_MATH,
        )  # fmt: skip
        p_out += stride_out_t
