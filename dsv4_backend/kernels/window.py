"""Where a window's rows lie, and their pooling: softmax over the rows, per channel.

A token's row is [kv (C·D) | score (C·D)], C = 2 for ratio 4 and 1 for ratio 128. The window that
ends with token p holds WINDOW = C·RATIO rows, tokens p - WINDOW + 1 to p; of the first RATIO (the
previous window, C = 2) it takes half 0 of the channels, of the last RATIO half C - 1.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.numerics import round_bf16

NO_SCORE = tl.constexpr(-2.0e38)  # finite, times log2(e) too: two of them differ by 0, not NaN
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate_decode(
    plan_ptr, aux_ptr, i_n, RATIO: tl.constexpr, WINDOW: tl.constexpr, PLAN: tl.constexpr
):
    """(seq_len, state row to write, page of the previous window, page of the own window).

    seq_len <= 0 or row < 0: nothing to do. State rows count tokens over all pages.
    """
    if PLAN == "ring":  # [N, 4] {seq_len, write_loc, read_page_0, read_page_1}
        entry_ptr = plan_ptr + 4 * i_n.to(tl.int64)
        seq_len = tl.load(entry_ptr)
        state_row = tl.load(entry_ptr + 1).to(tl.int64)
        page_0 = tl.load(entry_ptr + 2).to(tl.int64)
        page_1 = tl.load(entry_ptr + 3).to(tl.int64)
    elif PLAN == "ring_v1":  # seq_lens [N], ring pages [N] of WINDOW rows
        seq_len = tl.load(plan_ptr + i_n).to(tl.int32)
        page_1 = tl.load(aux_ptr + i_n).to(tl.int64)
        page_0 = page_1
        state_row = tl.where(page_1 < 0, -1, page_1 * WINDOW + (seq_len - 1) % WINDOW)
    else:  # positions [T], state slots [T]
        seq_len = tl.load(plan_ptr + i_n).to(tl.int32) + 1
        state_row = tl.load(aux_ptr + i_n).to(tl.int64)
        page_0 = state_row
        page_1 = state_row
    return seq_len, state_row, page_0, page_1


@triton.jit
def locate_prefill(
    plan_ptr, aux_ptr, position_ptr, request_ptr, i_n, WINDOW: tl.constexpr, PLAN: tl.constexpr
):
    """(token, seq_len, rows in the state, page 0, page 1, request) of window i_n.

    token < 0 or seq_len <= 0: padding. The rows in the state come first in the window.
    """
    if PLAN == "ring":  # [N, 4] {seq_len, token | buffer_len << 16, read_page_0, read_page_1}
        entry_ptr = plan_ptr + 4 * i_n.to(tl.int64)
        seq_len = tl.load(entry_ptr)
        packed = tl.load(entry_ptr + 1)
        token = tl.where(seq_len > 0, packed & 0xFFFF, -1)  # padding has every bit set
        buffer_len = (packed >> 16) & 0xFFFF
        page_0 = tl.load(entry_ptr + 2).to(tl.int64)
        page_1 = tl.load(entry_ptr + 3).to(tl.int64)
        request = 0
    elif PLAN == "ring_v1":  # [N, 4] {token, batch, position, window_len}, ring pages [B]
        entry_ptr = plan_ptr + 4 * i_n.to(tl.int64)
        token = tl.load(entry_ptr)
        request = tl.load(entry_ptr + 1)
        seq_len = tl.load(entry_ptr + 2) + 1
        buffer_len = tl.load(entry_ptr + 3)
        page_1 = tl.load(aux_ptr + request, mask=token >= 0, other=0).to(tl.int64)
        page_0 = page_1
    else:  # ends [N], query_starts [B + 1], positions [T], requests [T]
        token = tl.load(plan_ptr + i_n).to(tl.int32)
        m_token = token >= 0
        seq_len = tl.load(position_ptr + token, mask=m_token, other=-1).to(tl.int32) + 1
        request = tl.load(request_ptr + token, mask=m_token, other=0).to(tl.int32)
        start = tl.load(aux_ptr + request, mask=m_token, other=0).to(tl.int32)
        buffer_len = tl.maximum(WINDOW - 1 - (token - start), 0)
        page_0 = token.to(tl.int64)
        page_1 = page_0
    return token, seq_len, buffer_len, page_0, page_1, request


@triton.jit
def locate_write(plan_ptr, aux_ptr, position_ptr, i_n, WINDOW: tl.constexpr, PLAN: tl.constexpr):
    """(token, state row, position) of state write i_n; token < 0 or row < 0 is padding.

    The position is needed, and given, only where the state holds score + ape.
    """
    if PLAN == "ring":  # [M, 2] {token, write_loc}
        token = tl.load(plan_ptr + 2 * i_n.to(tl.int64))
        state_row = tl.load(plan_ptr + 2 * i_n.to(tl.int64) + 1).to(tl.int64)
        position = token
    elif PLAN == "ring_v1":  # [M, 4] {token, batch, position, window_len}, ring pages [B]
        entry_ptr = plan_ptr + 4 * i_n.to(tl.int64)
        token = tl.load(entry_ptr)
        request = tl.load(entry_ptr + 1)
        position = tl.load(entry_ptr + 2)
        page = tl.load(aux_ptr + request, mask=token >= 0, other=-1).to(tl.int64)
        state_row = tl.where(page < 0, -1, page * WINDOW + position % WINDOW)
    else:  # state slots [T], positions [T]
        token = i_n
        state_row = tl.load(plan_ptr + i_n).to(tl.int64)
        position = tl.load(position_ptr + i_n).to(tl.int32)
    return token, state_row, position


@triton.jit
def state_offsets(
    o_w,  # [BLOCK_W] rows of the window
    seq_len,
    page_0,
    page_1,
    block_row_ptr,  # the request's row of the block table, PLAN "paged"
    stride_state_b,
    stride_state_r,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Element offsets [BLOCK_W] int64 of the rows in the state."""
    if PLAN == "ring":
        page = tl.where(o_w < WINDOW - RATIO, page_0, page_1)
        o_r = o_w % RATIO
    elif PLAN == "ring_v1":
        page = page_1
        o_r = (seq_len + o_w) % WINDOW
    else:
        o_t = seq_len - WINDOW + o_w
        page = tl.load(block_row_ptr + o_t // STATE_BLOCK, mask=o_t >= 0, other=0).to(tl.int64)
        o_r = o_t % STATE_BLOCK
    return page * stride_state_b + o_r.to(tl.int64) * stride_state_r


@triton.jit
def window_rows(
    i_w,
    o_d,
    seq_len,
    buffer_len,
    token_ptr,
    state_ptr,
    ape_ptr,
    block_row_ptr,
    page_0,
    page_1,
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """(kv, score + ape) [BLOCK_W, BLOCK_D] fp32 of rows i_w and on; see `pool_window`.

    Rows before the sequence's first token have kv 0 and score NO_SCORE.
    """
    C: tl.constexpr = 2 if RATIO == 4 else 1
    WINDOW: tl.constexpr = C * RATIO
    o_w = i_w + tl.arange(0, BLOCK_W)
    o_c = o_w // RATIO if C == 2 else o_w * 0  # half of the channels
    m_input = (o_w >= buffer_len)[:, None]
    m_state = ((o_w < buffer_len) & (seq_len - WINDOW + o_w >= 0))[:, None]
    o_state = state_offsets(
        o_w, seq_len, page_0, page_1, block_row_ptr, stride_state_b, stride_state_r,
        RATIO, WINDOW, STATE_BLOCK, PLAN,
    )  # fmt: skip
    o_ape = (o_w % RATIO) * stride_ape_r + o_c * stride_ape_c
    b_ape = tl.load(ape_ptr + o_ape[:, None] + o_d[None, :]).to(tl.float32)
    o_input = (o_w - (WINDOW - 1)).to(tl.int64) * stride_input_t
    input_ptrs = token_ptr + (o_input + o_c * D)[:, None] + o_d[None, :]
    state_ptrs = state_ptr + (o_state + o_c * D)[:, None] + o_d[None, :]
    # Two masked loads, not one through a selected pointer: Triton 3.6 cannot compile that for
    # AMD where the tensors are within 2 GiB.
    b_kv = tl.load(input_ptrs, mask=m_input, other=0.0).to(tl.float32)
    b_s = tl.load(input_ptrs + C * D, mask=m_input, other=0.0).to(tl.float32)
    b_kv_old = tl.load(state_ptrs, mask=m_state, other=0.0).to(tl.float32)
    b_s_old = tl.load(state_ptrs + C * D, mask=m_state, other=NO_SCORE).to(tl.float32)
    b_kv = tl.where(m_input, b_kv, b_kv_old)
    if PLAN == "paged":  # the state holds score + ape
        return b_kv, tl.where(m_input, b_s + b_ape, b_s_old)
    return b_kv, tl.where(m_input, b_s, b_s_old) + b_ape


@triton.jit
def pool_rows(b_kv, b_s):
    """softmax over the rows of b_s [BLOCK_W, BLOCK_D], times b_kv, summed: [BLOCK_D]."""
    b_p = tl.exp2((b_s - tl.max(b_s, axis=0)[None, :]) * LOG2_E)
    return tl.sum(b_p * b_kv, axis=0) / tl.sum(b_p, axis=0)


@triton.jit
def pool_old_rows(b_kv, b_s):
    """Of rows 0 to 6 of a C4 window [8, D]: top score, sum of weights, weighted sum of kv, [D]."""
    m_old = (tl.arange(0, 8) < 7)[:, None]
    b_top = tl.max(tl.where(m_old, b_s, NO_SCORE), axis=0)
    b_p = tl.where(m_old, tl.exp2((b_s - b_top[None, :]) * LOG2_E), 0.0)
    return b_top, tl.sum(b_p, axis=0), tl.sum(b_p * b_kv, axis=0)


@triton.jit
def pool_last_row(b_top, b_sum, b_acc, b_kv, b_s):
    """The pooled C4 window [D]: `pool_old_rows` and row 7, (kv, score) [D].

    In every path the last row comes last, so that a step may pool the others before it has it.
    """
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
def old_rows(
    seq_len,  # 0: no row is read
    state_ptr,
    ape_ptr,
    block_row_ptr,
    page_0,
    page_1,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
):
    """(kv, score) [8, D] fp32 of the C4 window that ends with token seq_len - 1, but for its last
    row, and that row's ape [D]: what a decode step reads beside its input."""
    o_w = tl.arange(0, 8)
    o_d = tl.arange(0, D)
    o_c = o_w // 4
    m_state = ((o_w < 7) & (seq_len - 8 + o_w >= 0))[:, None]
    o_state = state_offsets(
        o_w, seq_len, page_0, page_1, block_row_ptr, stride_state_b, stride_state_r, 4, 8,
        STATE_BLOCK, PLAN,
    )  # fmt: skip
    state_ptrs = state_ptr + (o_state + o_c * D)[:, None] + o_d[None, :]
    b_kv = tl.load(state_ptrs, mask=m_state, other=0.0).to(tl.float32)
    b_s = tl.load(state_ptrs + 2 * D, mask=m_state, other=NO_SCORE).to(tl.float32)
    if PLAN != "paged":  # the state holds scores without ape
        o_ape = (o_w % 4) * stride_ape_r + o_c * stride_ape_c
        b_s += tl.load(ape_ptr + o_ape[:, None] + o_d[None, :]).to(tl.float32)
    b_ape = tl.load(ape_ptr + 3 * stride_ape_r + stride_ape_c + o_d).to(tl.float32)
    return b_kv, b_s, b_ape


@triton.jit
def load_last_row(token_ptr, b_ape, D: tl.constexpr):
    """(kv, score + ape) [D] fp32 of a C4 window's last token, from its input row."""
    o_d = tl.arange(0, D)
    b_kv = tl.load(token_ptr + D + o_d).to(tl.float32)
    return b_kv, tl.load(token_ptr + 3 * D + o_d).to(tl.float32) + b_ape


@triton.jit
def load_ape_row(
    ape_ptr, position, stride_ape_r, stride_ape_c, D: tl.constexpr, RATIO: tl.constexpr
):
    """The APE [C·D] fp32 of a position."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    o_s = tl.arange(0, C * D)
    o_ape = (position % RATIO) * stride_ape_r + (o_s // D) * stride_ape_c + o_s % D
    return tl.load(ape_ptr + o_ape).to(tl.float32)


@triton.jit
def pool_window(
    o_d,  # [BLOCK_D] channels
    seq_len,
    buffer_len,  # rows of the window that come from the state; the rest is in this call's input
    token_ptr,  # input row of the window's last token
    state_ptr,
    ape_ptr,  # [RATIO, C, D]
    block_row_ptr,
    page_0,
    page_1,
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """sum_w softmax_w(score + ape) · kv, [BLOCK_D] fp32; online if BLOCK_W is not the window."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    if BLOCK_W == WINDOW:
        b_kv, b_s = window_rows(
            0, o_d, seq_len, buffer_len, token_ptr, state_ptr, ape_ptr, block_row_ptr,
            page_0, page_1, stride_input_t, stride_state_b, stride_state_r, stride_ape_r,
            stride_ape_c, D, RATIO, STATE_BLOCK, PLAN, BLOCK_W,
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
                i_w, o_d, seq_len, buffer_len, token_ptr, state_ptr, ape_ptr, block_row_ptr,
                page_0, page_1, stride_input_t, stride_state_b, stride_state_r, stride_ape_r,
                stride_ape_c, D, RATIO, STATE_BLOCK, PLAN, BLOCK_W,
            )  # fmt: skip
            b_top = tl.maximum(b_max, tl.max(b_s, axis=0))
            b_scale = tl.exp2((b_max - b_top) * LOG2_E)
            b_p = tl.exp2((b_s - b_top[None, :]) * LOG2_E)
            b_sum = b_sum * b_scale + tl.sum(b_p, axis=0)
            b_acc = b_acc * b_scale + tl.sum(b_p * b_kv, axis=0)
            b_max = b_top
        return b_acc / b_sum


@triton.jit
def load_row(token_ptr, D: tl.constexpr, RATIO: tl.constexpr):
    """A token's (kv, score) [C·D] fp32 from its input row."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    o_s = tl.arange(0, C * D)
    b_kv = tl.load(token_ptr + o_s).to(tl.float32)
    return b_kv, tl.load(token_ptr + C * D + o_s).to(tl.float32)


@triton.jit
def write_paged_rows(
    o_t,  # [ROWS] tokens
    num_tokens,
    input_ptr,
    state_ptr,
    ape_ptr,
    state_slot_ptr,
    position_ptr,
    stride_input_t,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """Write the state rows of several tokens to a paged state, all loads before the first store."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    o_s = tl.arange(0, C * D)
    state_row = tl.load(state_slot_ptr + o_t, mask=o_t < num_tokens, other=-1).to(tl.int64)
    position = tl.load(position_ptr + o_t, mask=o_t < num_tokens, other=0).to(tl.int32)
    m_row = (state_row >= 0)[:, None]
    input_ptrs = input_ptr + (o_t.to(tl.int64) * stride_input_t)[:, None] + o_s[None, :]
    b_kv = tl.load(input_ptrs, mask=m_row).to(tl.float32)
    b_score = tl.load(input_ptrs + C * D, mask=m_row).to(tl.float32)
    o_ape = ((position % RATIO) * stride_ape_r)[:, None]
    o_ape += ((o_s // D) * stride_ape_c + o_s % D)[None, :]
    b_score += tl.load(ape_ptr + o_ape).to(tl.float32)
    if state_ptr.dtype.element_ty == tl.bfloat16:
        b_kv = round_bf16(b_kv)
        b_score = round_bf16(b_score)
    o_row = (state_row // STATE_BLOCK) * stride_state_b + (state_row % STATE_BLOCK) * stride_state_r
    state_ptrs = state_ptr + o_row[:, None] + o_s[None, :]
    tl.store(state_ptrs, b_kv.to(state_ptr.dtype.element_ty), mask=m_row)
    tl.store(state_ptrs + C * D, b_score.to(state_ptr.dtype.element_ty), mask=m_row)


@triton.jit
def write_state_row(
    b_kv,  # [C·D] fp32
    b_score,
    state_ptr,
    ape_ptr,
    state_row,
    position,
    stride_state_b,
    stride_state_r,
    stride_ape_r,
    stride_ape_c,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    PLAN: tl.constexpr,
):
    """Write one token's (kv, score) to its state row, with its APE added if the state is paged."""
    if PLAN == "paged":
        b_score += load_ape_row(ape_ptr, position, stride_ape_r, stride_ape_c, D, RATIO)
    store_state_row(
        b_kv, b_score, state_ptr, state_row, stride_state_b, stride_state_r, D, RATIO, STATE_BLOCK
    )


@triton.jit
def store_state_row(
    b_kv,  # [C·D] fp32
    b_score,
    state_ptr,
    state_row,
    stride_state_b,
    stride_state_r,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    C: tl.constexpr = 2 if RATIO == 4 else 1
    o_s = tl.arange(0, C * D)
    o_row = (state_row // STATE_BLOCK) * stride_state_b + (state_row % STATE_BLOCK) * stride_state_r
    if state_ptr.dtype.element_ty == tl.bfloat16:
        b_kv = round_bf16(b_kv)
        b_score = round_bf16(b_score)
    tl.store(state_ptr + o_row + o_s, b_kv.to(state_ptr.dtype.element_ty))
    tl.store(state_ptr + o_row + C * D + o_s, b_score.to(state_ptr.dtype.element_ty))
