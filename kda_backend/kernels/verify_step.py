"""Tokens of a draft, one after the other, with the state after each of them kept.

The recurrence is that of ``decode_step``; no accepted state is lost before the engine has accepted
a prefix of the draft. An index says where a state goes: token t of sequence n writes row
``write_indices[n, t]`` of ``write_ptr`` (the pool with a slot for each token, as vLLM lays drafts
out), or row ``write_indices[n]``, step t, of a buffer of its own (sglang).

The convolution's window is read from column ``num_accepted - 1`` on. With ``windows_ptr`` the
window after each token is stored there; without, the pool's columns become the two inputs before
the draft, then the draft.

Grid: (HV * N,).
"""

import triton
import triton.language as tl

from backend_core.kernels.math import ex2
from kda_backend.kernels.functions.conv import conv_silu, load_head, store_window
from kda_backend.kernels.functions.delta import delta_step, gated_norm, state_tile
from kda_backend.kernels.functions.gate import load_gate, log2_decay, step_size
from kda_backend.kernels.functions.state import as_stored


@triton.jit
def channels_of(i_hv, HV, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """A head's channels of q, k and v, which follow one another; here HV is H."""
    c_q = i_hv * K + o_k
    return c_q, HV * K + c_q, 2 * HV * K + i_hv * V + o_v


@triton.jit
def store_column(p_column, stride_c, channels, inputs, masks):
    """One input of a head's channels of q, k and v into a column of the pool of windows."""
    tl.store(p_column + channels[0] * stride_c, inputs[0], mask=masks[0])
    tl.store(p_column + channels[1] * stride_c, inputs[1], mask=masks[1])
    tl.store(p_column + channels[2] * stride_c, inputs[2], mask=masks[2])


@triton.jit
def convolve(taps, x0, x1, x2, b_x, element: tl.constexpr, FAST_MATH: tl.constexpr):
    """(the convolution's output of a token, the window of three inputs after it)."""
    x3 = b_x.to(element)
    return conv_silu(taps, (x0, x1, x2), b_x, FAST_MATH), x1, x2, x3


@triton.jit
def convolve_head(taps, windows, inputs, element: tl.constexpr, FAST_MATH: tl.constexpr):
    """(what the convolutions of a token's q, k and v put out, their windows after it)."""
    w_q, w_k, w_v = windows
    b_q, q0, q1, q2 = convolve(taps[0], w_q[0], w_q[1], w_q[2], inputs[0], element, FAST_MATH)
    b_k, k0, k1, k2 = convolve(taps[1], w_k[0], w_k[1], w_k[2], inputs[1], element, FAST_MATH)
    b_v, v0, v1, v2 = convolve(taps[2], w_v[0], w_v[1], w_v[2], inputs[2], element, FAST_MATH)
    return (b_q, b_k, b_v), ((q0, q1, q2), (k0, k1, k2), (v0, v1, v2))


@triton.jit
def store_windows(p_window, channels, masks, strides, w_q, w_k, w_v):
    """The windows of a head's channels of q, k and v in a buffer of their own."""
    store_window(p_window, channels[0], masks[0], strides, w_q)
    store_window(p_window, channels[1], masks[1], strides, w_k)
    store_window(p_window, channels[2], masks[2], strides, w_v)


@triton.jit
def keep_windows(
    conv_state_ptr, windows_ptr, place, windows, channels, masks, own, stride_c, strides
):
    """Stores the windows after a token at (row, token) ``place`` of a buffer of their own, or where
    there is none the newest inputs into a column of the pool."""
    if windows_ptr is None:
        newest = windows[0][2], windows[1][2], windows[2][2]
        store_column(conv_state_ptr, stride_c, channels, newest, masks)
    else:
        p_w = windows_ptr + place[0] * strides[0] + place[1] * strides[1]
        of_windows = (strides[2], strides[3])
        store_windows(p_w, channels, own, of_windows, windows[0], windows[1], windows[2])


@triton.jit
def store_inputs_before(p_column, strides, channels, masks, w_q, w_k, w_v):
    """The two inputs before a draft into the pool's first columns, from ``p_column`` on, once every
    thread has read the window."""
    tl.debug_barrier()
    for i in tl.static_range(1, 3):
        store_column(p_column, strides[0], channels, (w_q[i], w_k[i], w_v[i]), masks)
        p_column += strides[1]


@triton.jit
def open_windows(conv_state_ptr, p_conv, windows_ptr, weights, channels, masks, own, strides):
    """A head's windows at ``p_conv``, its taps and the pool's next column, before the first token.

    Where windows have no buffer of their own, the inputs before the draft are stored where ``own``.
    """
    windows, taps = load_head(p_conv, weights, channels, masks, strides)
    if windows_ptr is None:
        store_inputs_before(
            conv_state_ptr, strides, channels, own, windows[0], windows[1], windows[2]
        )
        conv_state_ptr += strides[1]
    return windows, taps, conv_state_ptr


@triton.jit
def convolve_token(
    taps, windows, inputs, conv_state_ptr, windows_ptr, place, channels, masks, own, strides,
    of_windows, FAST_MATH: tl.constexpr,
):  # fmt: skip
    """A token's q, k and v behind their convolutions, its windows, which are stored, and the pool's
    next column."""
    element = conv_state_ptr.dtype.element_ty
    inputs, windows = convolve_head(taps, windows, inputs, element, FAST_MATH)
    conv_state_ptr += strides[1]
    keep_windows(
        conv_state_ptr, windows_ptr, place, windows, channels, masks, own, strides[0], of_windows
    )
    return inputs, windows, conv_state_ptr


@triton.jit
def at_token(p_token, number, strides):
    """Pointers to q, k, v, the gate and beta of the token that comes ``number`` tokens later."""
    return (
        p_token[0] + number * strides[0],
        p_token[1] + number * strides[1],
        p_token[2] + number * strides[2],
        p_token[3] + number * strides[3],
        p_token[4] + number * strides[4],
    )


@triton.jit
def load_token(p_q, p_k, p_v, p_g, m_k, m_v):
    """q, k, v and the gate, in fp32, of a head and token."""
    b_q = tl.load(p_q, mask=m_k, other=0.0)
    b_k = tl.load(p_k, mask=m_k, other=0.0)
    b_v = tl.load(p_v, mask=m_v, other=0.0)
    return b_q, b_k, b_v, tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)


@triton.jit
def store_output(
    p_out, b_o, scale, b_weight, gate, token, o_head, o_v, m_v, eps, V: tl.constexpr,
    FAST_MATH: tl.constexpr,
):  # fmt: skip
    """Stores a token's output, scaled, and behind the gated norm where that has a weight; ``gate``:
    the norm's gates, and the distance of tokens in them."""
    b_o *= scale
    if b_weight is not None:
        p_gate = gate[0] + token * gate[1] + o_head + o_v
        b_gate = tl.load(p_gate, mask=m_v, other=0.0).to(tl.float32)
        b_o = gated_norm(b_o, b_weight, b_gate, eps, V, FAST_MATH)
    tl.store(p_out, b_o.to(p_out.dtype.element_ty), mask=m_v)


@triton.jit
def tokens_of(cu_seqlens_ptr, i_n, tokens_per_sequence, max_tokens):
    """(first token, number of tokens) of a sequence."""
    if cu_seqlens_ptr is not None:
        bos = tl.load(cu_seqlens_ptr + i_n).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens_ptr + i_n + 1).to(tl.int64) - bos).to(tl.int32)
        num_tokens = tl.minimum(num_tokens, max_tokens)
    else:
        bos = i_n * tokens_per_sequence
        num_tokens = tokens_per_sequence
    return bos, num_tokens


@triton.jit
def last_accepted(num_accepted_ptr, i_n, max_tokens):
    """The last accepted token of the step before."""
    accepted = 0
    if num_accepted_ptr is not None:
        accepted = tl.load(num_accepted_ptr + i_n).to(tl.int32) - 1
        accepted = tl.maximum(tl.minimum(accepted, max_tokens - 1), 0)
    return accepted


@triton.jit
def store_zeros(p_out, stride_out_t, num_tokens, m_v, BLOCK_V: tl.constexpr):
    """The output of a padded row."""
    for _ in range(num_tokens):
        tl.store(p_out, tl.zeros([BLOCK_V], p_out.dtype.element_ty), mask=m_v)
        p_out += stride_out_t


@triton.jit(
    do_not_specialize=[
        *("null_slot", "null_write", "tokens_per_sequence", "max_tokens"),
        "stride_beta_t",
    ]
)
def verify_step_kernel(
    q_ptr,  # [tokens, H, K]
    k_ptr,  # [tokens, H, K]
    v_ptr,  # [tokens, HV, V]
    g_ptr,  # [tokens, HV, K]
    beta_ptr,  # [tokens, HV]
    a_log_ptr,  # [HV] or None
    dt_bias_ptr,  # [HV, K] or None
    state_ptr,  # [slots, HV, V, K]
    state_indices_ptr,  # [N] or [N, max_tokens] int32
    num_accepted_ptr,  # [N] int32 or None
    write_ptr,  # [rows, HV, V, K] or [rows, max_tokens, HV, V, K]
    write_indices_ptr,  # [N, max_tokens] or [N] int32
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
    null_write,
    lower_bound,
    scale,
    eps,
    stride_q_t,
    stride_k_t,
    stride_v_t,
    stride_g_t,
    stride_beta_t,
    stride_state_indices_n,
    stride_state_n,
    stride_write_indices_n,
    stride_write_indices_t,
    stride_write_n,
    stride_write_t,
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
    FAST_MATH: tl.constexpr,
):
    i_hv, i_n = tl.program_id(0) % HV, (tl.program_id(0) // HV).to(tl.int64)
    i_h = i_hv // HEADS_PER_KEY
    bos, num_tokens = tokens_of(cu_seqlens_ptr, i_n, tokens_per_sequence, max_tokens)
    accepted = last_accepted(num_accepted_ptr, i_n, max_tokens)
    state_indices_ptr += i_n * stride_state_indices_n
    slot = tl.load(state_indices_ptr + accepted).to(tl.int64)
    conv_slot = tl.load(state_indices_ptr).to(tl.int64)

    o_k, o_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K, o_v < V
    p_out = out_ptr + bos * stride_out_t + i_hv * V + o_v
    if (slot < 0) | (slot == null_slot) | (conv_slot < 0) | (conv_slot == null_slot):
        store_zeros(p_out, stride_out_t, num_tokens, m_v, BLOCK_V)
        return

    o_row = i_hv * (V * K) + o_v * K
    o_state, m_state = state_tile(o_row, m_v, K, BLOCK_K, K_INNER, KB_AXIS)
    p_state = state_ptr + slot * stride_state_n + o_state
    b_state = tl.load(p_state, mask=m_state, other=0.0).to(tl.float32)
    a_log, b_bias = load_gate(a_log_ptr, dt_bias_ptr, i_hv, o_k, m_k, K)
    b_weight = None
    if norm_weight_ptr is not None:
        b_weight = tl.load(norm_weight_ptr + o_v, mask=m_v, other=0.0).to(tl.float32)
    channels, masks = channels_of(i_hv, HV, o_k, o_v, K, V), (m_k, m_k, m_v)
    if conv_state_ptr is not None:
        conv_state_ptr += conv_slot * stride_conv_state_n
        p_conv = conv_state_ptr + accepted * stride_conv_state_w
        weights = (conv_weight_ptr, conv_bias_ptr)
        strides = (stride_conv_state_c, stride_conv_state_w)
        rolls = num_tokens > 0  # not that of an empty draft
        own = (m_k & rolls, m_k & rolls, m_v & rolls)
        windows, taps, conv_state_ptr = open_windows(
            conv_state_ptr, p_conv, windows_ptr, weights, channels, masks, own, strides
        )

    strides_t = (stride_q_t, stride_k_t, stride_v_t, stride_g_t, stride_beta_t)
    p_token = (q_ptr + bos * stride_q_t + i_h * K + o_k, k_ptr + bos * stride_k_t + i_h * K + o_k,
               v_ptr + bos * stride_v_t + i_hv * V + o_v, g_ptr + bos * stride_g_t + i_hv * K + o_k,
               beta_ptr + bos * stride_beta_t + i_hv)  # fmt: skip
    write_indices_ptr += i_n * stride_write_indices_n
    of_windows = (stride_windows_n, stride_windows_t, stride_windows_c, stride_windows_w)
    for i_t in range(num_tokens):
        row = tl.load(write_indices_ptr + i_t * stride_write_indices_t).to(tl.int64)
        writes = (row >= 0) & (row != null_write)
        b_q, b_k, b_v, b_g = load_token(p_token[0], p_token[1], p_token[2], p_token[3], m_k, m_v)
        beta = step_size(tl.load(p_token[4]), BETA, FAST_MATH)
        if conv_state_ptr is not None:
            own = (m_k & writes, m_k & writes, m_v & writes)
            inputs, windows, conv_state_ptr = convolve_token(
                taps, windows, (b_q, b_k, b_v), conv_state_ptr, windows_ptr, (row, i_t), channels,
                masks, own, strides, of_windows, FAST_MATH,
            )  # fmt: skip
            b_q, b_k, b_v = inputs
        b_decay = ex2(log2_decay(b_g, a_log, b_bias, lower_bound, GATE, FAST_MATH), FAST_MATH)
        b_state, b_o = delta_step(b_state, b_q, b_k, b_v, b_decay, beta, L2NORM, K_INNER, KB_AXIS)
        p_write = write_ptr + row * stride_write_n + i_t * stride_write_t + o_state
        tl.store(p_write, as_stored(b_state, write_ptr.dtype.element_ty), mask=m_state & writes)
        store_output(
            p_out, b_o, scale, b_weight, (norm_gate_ptr, stride_norm_gate_t), bos + i_t, i_hv * V,
            o_v, m_v, eps, V, FAST_MATH,
        )  # fmt: skip
        p_token = at_token(p_token, 1, strides_t)
        p_out += stride_out_t
