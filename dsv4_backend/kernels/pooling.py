"""Pooling of a window: softmax over its rows, per channel.

A token's row is [kv (C·D) | score (C·D)], C = 2 for ratio 4 and 1 for ratio 128. The window that
ends with token p holds WINDOW = C·RATIO rows, tokens p - WINDOW + 1 to p; of the first RATIO (the
previous window, C = 2) it takes half 0 of the channels, of the last RATIO half C - 1.

A window of ratio 4 is pooled in the same order in every kernel, its last row last, so that decode
and prefill give the same bytes although a decode step may pool the others before it has that row.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.locate import window_offsets

NO_SCORE = tl.constexpr(-2.0e38)  # finite, times log2(e) too: two of them differ by 0, not NaN
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def window_rows(
    i_w,
    o_d,
    window,
    step,
    token_ptr,
    stride_input_t,
    state,
    ape,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """(kv, score + ape) [BLOCK_W, BLOCK_D] fp32 of rows i_w and on; see `pool_window`.

    Rows before the sequence's first token have kv 0 and score NO_SCORE.
    """
    C: tl.constexpr = 2 if RATIO == 4 else 1
    WINDOW: tl.constexpr = C * RATIO
    o_w = i_w + tl.arange(0, BLOCK_W)
    o_c = o_w // RATIO if C == 2 else o_w * 0  # half of the channels
    m_input = (o_w >= window.rows_in_state)[:, None]
    m_state = ((o_w < window.rows_in_state) & (window.seq_len - WINDOW + o_w >= 0))[:, None]
    o_state = window_offsets(o_w, window, window.seq_len, step, state, RATIO, STATE_BLOCK, LAYOUT)
    o_ape = (o_w % RATIO) * ape.stride_r + o_c * ape.stride_c
    b_ape = tl.load(ape.ptr + o_ape[:, None] + o_d[None, :]).to(tl.float32)
    o_input = (o_w - (WINDOW - 1)).to(tl.int64) * stride_input_t
    input_ptrs = token_ptr + (o_input + o_c * D)[:, None] + o_d[None, :]
    state_ptrs = state.ptr + (o_state + o_c * D)[:, None] + o_d[None, :]
    # Two masked loads, not one through a selected pointer: Triton 3.6 cannot compile that for
    # AMD where the tensors are within 2 GiB.
    b_kv = tl.load(input_ptrs, mask=m_input, other=0.0).to(tl.float32)
    b_s = tl.load(input_ptrs + C * D, mask=m_input, other=0.0).to(tl.float32)
    b_kv_old = tl.load(state_ptrs, mask=m_state, other=0.0).to(tl.float32)
    b_s_old = tl.load(state_ptrs + C * D, mask=m_state, other=NO_SCORE).to(tl.float32)
    b_kv = tl.where(m_input, b_kv, b_kv_old)
    if LAYOUT == "paged":  # the state holds score + ape
        return b_kv, tl.where(m_input, b_s + b_ape, b_s_old)
    return b_kv, tl.where(m_input, b_s, b_s_old) + b_ape


@triton.jit
def pool_rows(b_kv, b_s):
    """softmax over the rows of b_s [BLOCK_W, BLOCK_D], times b_kv, summed: [BLOCK_D]."""
    b_p = tl.exp2((b_s - tl.max(b_s, axis=0)[None, :]) * LOG2_E)
    return tl.sum(b_p * b_kv, axis=0) / tl.sum(b_p, axis=0)


@triton.jit
def pool_old_rows(b_kv, b_s):
    """Pool rows 0 to 6 of a C4 window [8, D]: top score, sum of weights, weighted kv, [D]."""
    m_old = (tl.arange(0, 8) < 7)[:, None]
    b_top = tl.max(tl.where(m_old, b_s, NO_SCORE), axis=0)
    b_p = tl.where(m_old, tl.exp2((b_s - b_top[None, :]) * LOG2_E), 0.0)
    return b_top, tl.sum(b_p, axis=0), tl.sum(b_p * b_kv, axis=0)


@triton.jit
def pool_last_row(b_top, b_sum, b_acc, b_kv, b_s):
    """The pooled C4 window [D]: `pool_old_rows` and row 7, (kv, score) [D]."""
    b_gap = (b_s - b_top) * LOG2_E
    b_less = tl.exp2(-tl.abs(b_gap))
    b_old = tl.where(b_gap > 0, b_less, 1.0)
    b_new = tl.where(b_gap > 0, 1.0, b_less)
    return (b_acc * b_old + b_kv * b_new) / (b_sum * b_old + b_new)


@triton.jit
def last_row(b_x):
    """Row 7 of [8, D] fp32: [D]. Where a thread holds all rows this is a choice of registers."""
    u = tl.where((tl.arange(0, 8) == 7)[:, None], b_x.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(u, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def load_old_rows(
    window,
    seq_len,  # of the window; 0: no row is read
    step,
    state,
    ape,
    D: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """(kv, score) [8, D] fp32 of a C4 window but for its last row, and that row's APE [D]: what a
    decode step reads beside its input."""
    o_w = tl.arange(0, 8)
    o_d = tl.arange(0, D)
    o_c = o_w // 4
    m_state = ((o_w < 7) & (seq_len - 8 + o_w >= 0))[:, None]
    o_state = window_offsets(o_w, window, seq_len, step, state, 4, STATE_BLOCK, LAYOUT)
    state_ptrs = state.ptr + (o_state + o_c * D)[:, None] + o_d[None, :]
    b_kv = tl.load(state_ptrs, mask=m_state, other=0.0).to(tl.float32)
    b_s = tl.load(state_ptrs + 2 * D, mask=m_state, other=NO_SCORE).to(tl.float32)
    if LAYOUT != "paged":  # the state holds scores without ape
        o_ape = (o_w % 4) * ape.stride_r + o_c * ape.stride_c
        b_s += tl.load(ape.ptr + o_ape[:, None] + o_d[None, :]).to(tl.float32)
    b_ape = tl.load(ape.ptr + 3 * ape.stride_r + ape.stride_c + o_d).to(tl.float32)
    return b_kv, b_s, b_ape


@triton.jit
def load_last_row(token_ptr, b_ape, D: tl.constexpr):
    """(kv, score + ape) [D] fp32 of a C4 window's last token, from its input row."""
    o_d = tl.arange(0, D)
    b_kv = tl.load(token_ptr + D + o_d).to(tl.float32)
    return b_kv, tl.load(token_ptr + 3 * D + o_d).to(tl.float32) + b_ape


@triton.jit
def before_wait(b_x, b_y, b_z):
    """b_x, for CUDA; keeps the arithmetic of all three in front of the PDL wait that follows.

    Compilers move arithmetic past the wait, into the branch that uses its result, but not past a
    warp vote. This one depends on a NaN pattern that no addition gives.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .f32 s; .reg .pred p, q;
        add.f32 s, $4, $5; add.f32 s, s, $6; add.f32 s, s, $7; add.f32 s, s, $8;
        add.f32 s, s, $9; add.f32 s, s, $10; add.f32 s, s, $11; add.f32 s, s, $12;
        add.f32 s, s, $13; add.f32 s, s, $14; add.f32 s, s, $15;
        setp.eq.b32 p, s, 0x7FBADBAD; vote.sync.any.pred q, p, 0xFFFFFFFF; @q trap;
        mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }""",
        "=f,=f,=f,=f,f,f,f,f,f,f,f,f,f,f,f,f",
        [b_x, b_y, b_z],
        dtype=tl.float32,
        is_pure=False,
        pack=4,
    )


@triton.jit
def pool_window(
    o_d,  # [BLOCK_D] channels
    window,
    step,
    token_ptr,  # input row of the window's last token
    stride_input_t,
    state,
    ape,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """sum_w softmax_w(score + ape) · kv, [BLOCK_D] fp32; online if BLOCK_W is not the window."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    if BLOCK_W == WINDOW:
        b_kv, b_s = window_rows(
            0, o_d, window, step, token_ptr, stride_input_t, state, ape,
            D, RATIO, STATE_BLOCK, LAYOUT, BLOCK_W=BLOCK_W,
        )  # fmt: skip
        if RATIO == 4:
            b_top, b_sum, b_acc = pool_old_rows(b_kv, b_s)
            return pool_last_row(b_top, b_sum, b_acc, last_row(b_kv), last_row(b_s))
        return pool_rows(b_kv, b_s)
    else:
        b_max = tl.full((BLOCK_D,), NO_SCORE, tl.float32)
        b_sum = tl.zeros((BLOCK_D,), tl.float32)
        b_acc = tl.zeros((BLOCK_D,), tl.float32)
        for i_w in range(0, WINDOW, BLOCK_W):
            b_kv, b_s = window_rows(
                i_w, o_d, window, step, token_ptr, stride_input_t, state, ape,
                D, RATIO, STATE_BLOCK, LAYOUT, BLOCK_W=BLOCK_W,
            )  # fmt: skip
            b_top = tl.maximum(b_max, tl.max(b_s, axis=0))
            b_scale = tl.exp2((b_max - b_top) * LOG2_E)
            b_p = tl.exp2((b_s - b_top[None, :]) * LOG2_E)
            b_sum = b_sum * b_scale + tl.sum(b_p, axis=0)
            b_acc = b_acc * b_scale + tl.sum(b_p * b_kv, axis=0)
            b_max = b_top
        return b_acc / b_sum
