"""Where tokens, windows and state rows of a step lie, by layout of the state.

LAYOUT "ring" (sglang): entries say it. LAYOUT "paged" (vLLM): positions and a block table do.
"""

import triton
import triton.language as tl

from dsv4_backend.kernels.arguments import Window


@triton.jit
def locate_decode(step, state_slot_ptr, i_n, RATIO: tl.constexpr, LAYOUT: tl.constexpr):
    """(window, state row to write) of entry i_n.

    window.seq_len <= 0 or state row < 0: nothing to do. State rows count tokens over all pages.
    """
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    if LAYOUT == "ring":
        entry_ptr = step.entry_ptr + 4 * i_n.to(tl.int64)
        seq_len = tl.load(entry_ptr)
        state_row = tl.load(entry_ptr + 1).to(tl.int64)
        page_0 = tl.load(entry_ptr + 2).to(tl.int64)
        page_1 = tl.load(entry_ptr + 3).to(tl.int64)
    else:
        seq_len = tl.load(step.position_ptr + i_n).to(tl.int32) + 1
        state_row = tl.load(state_slot_ptr + i_n).to(tl.int64)
        page_0 = tl.load(step.request_ptr + i_n).to(tl.int64)
        page_1 = page_0
    return Window(seq_len, WINDOW - 1, page_0, page_1), state_row


@triton.jit
def locate_prefill(step, i_n, RATIO: tl.constexpr, LAYOUT: tl.constexpr):
    """(token, window) of window i_n; token < 0 or window.seq_len <= 0 is padding."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    if LAYOUT == "ring":
        entry_ptr = step.entry_ptr + 4 * i_n.to(tl.int64)
        seq_len = tl.load(entry_ptr)
        packed = tl.load(entry_ptr + 1)
        token = tl.where(seq_len > 0, packed & 0xFFFF, -1)  # padding has every bit set
        rows_in_state = (packed >> 16) & 0xFFFF
        page_0 = tl.load(entry_ptr + 2).to(tl.int64)
        page_1 = tl.load(entry_ptr + 3).to(tl.int64)
    else:
        token = tl.load(step.window_end_ptr + i_n).to(tl.int32)
        m_token = token >= 0
        seq_len = tl.load(step.position_ptr + token, mask=m_token, other=-1).to(tl.int32) + 1
        request = tl.load(step.request_ptr + token, mask=m_token, other=0).to(tl.int32)
        start = tl.load(step.query_start_ptr + request, mask=m_token, other=0).to(tl.int32)
        rows_in_state = tl.maximum(WINDOW - 1 - (token - start), 0)
        page_0 = request.to(tl.int64)
        page_1 = page_0
    return token, Window(seq_len, rows_in_state, page_0, page_1)


@triton.jit
def locate_write(write_ptr, state_slot_ptr, position_ptr, i_n, LAYOUT: tl.constexpr):
    """(token, state row, position) of state write i_n; token < 0 or row < 0 is padding.

    The position is needed, and given, only where the state holds score + APE.
    """
    if LAYOUT == "ring":  # [M, 2] {token, state row}
        token = tl.load(write_ptr + 2 * i_n.to(tl.int64))
        state_row = tl.load(write_ptr + 2 * i_n.to(tl.int64) + 1).to(tl.int64)
        return token, state_row, token
    else:
        state_row = tl.load(state_slot_ptr + i_n).to(tl.int64)
        position = tl.load(position_ptr + i_n).to(tl.int32)
        return i_n, state_row, position


@triton.jit
def window_offsets(
    o_w,  # [BLOCK_W] rows of the window
    window,
    seq_len,  # of the window, or 0 where no row is read
    step,
    state,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Element offsets [BLOCK_W] int64 of a window's rows in the state."""
    WINDOW: tl.constexpr = 2 * RATIO if RATIO == 4 else RATIO
    if LAYOUT == "ring":
        page = tl.where(o_w < WINDOW - RATIO, window.page_0, window.page_1)
        o_r = o_w % RATIO
    else:
        o_t = seq_len - WINDOW + o_w
        block_ptrs = step.block_table_ptr + window.page_1 * step.stride_block_table_b
        block_ptrs += o_t // STATE_BLOCK
        page = tl.load(block_ptrs, mask=o_t >= 0, other=0).to(tl.int64)
        o_r = o_t % STATE_BLOCK
    return page * state.stride_b + o_r.to(tl.int64) * state.stride_r
