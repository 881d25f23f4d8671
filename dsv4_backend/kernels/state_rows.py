"""State rows: a token's [kv | score], written where later windows read it.

A paged state holds score + APE, a ring raw scores.
"""

import triton
import triton.language as tl

from backend_core.kernels.codecs import round_bf16


@triton.jit
def load_row(token_ptr, D: tl.constexpr, RATIO: tl.constexpr):
    """A token's (kv, score) [C·D] fp32 from its input row."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    o_s = tl.arange(0, C * D)
    b_kv = tl.load(token_ptr + o_s).to(tl.float32)
    return b_kv, tl.load(token_ptr + C * D + o_s).to(tl.float32)


@triton.jit
def load_ape_row(ape, position, D: tl.constexpr, RATIO: tl.constexpr):
    """The APE [C·D] fp32 of a position."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    o_s = tl.arange(0, C * D)
    o_ape = (position % RATIO) * ape.stride_r + (o_s // D) * ape.stride_c + o_s % D
    return tl.load(ape.ptr + o_ape).to(tl.float32)


@triton.jit
def write_state_row(
    b_kv,  # [C·D] fp32
    b_score,
    state,
    ape,
    state_row,
    position,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Write one token's (kv, score) to its state row, with its APE added if the state is paged."""
    if LAYOUT == "paged":
        b_score += load_ape_row(ape, position, D, RATIO)
    store_state_row(b_kv, b_score, state, state_row, D, RATIO, STATE_BLOCK)


@triton.jit
def store_state_row(
    b_kv,  # [C·D] fp32
    b_score,
    state,
    state_row,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """Write one token's (kv, score) as they are, in the state's dtype."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    dtype: tl.constexpr = state.ptr.dtype.element_ty
    o_s = tl.arange(0, C * D)
    o_row = (state_row // STATE_BLOCK) * state.stride_b + (state_row % STATE_BLOCK) * state.stride_r
    if dtype == tl.bfloat16:
        b_kv = round_bf16(b_kv)
        b_score = round_bf16(b_score)
    tl.store(state.ptr + o_row + o_s, b_kv.to(dtype))
    tl.store(state.ptr + o_row + C * D + o_s, b_score.to(dtype))


@triton.jit
def write_state_columns(
    o_d,  # [BLOCK_D] channels
    b_kv,  # [BLOCK_D] fp32
    b_score,
    state,
    ape,
    state_row,
    position,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """`write_state_row` of some channels, C = 1."""
    tl.static_assert(RATIO != 4, "a row of ratio 4 has two halves")
    dtype: tl.constexpr = state.ptr.dtype.element_ty
    if LAYOUT == "paged":
        b_score += tl.load(ape.ptr + (position % RATIO) * ape.stride_r + o_d).to(tl.float32)
    if dtype == tl.bfloat16:
        b_kv = round_bf16(b_kv)
        b_score = round_bf16(b_score)
    o_row = (state_row // STATE_BLOCK) * state.stride_b + (state_row % STATE_BLOCK) * state.stride_r
    tl.store(state.ptr + o_row + o_d, b_kv.to(dtype))
    tl.store(state.ptr + o_row + D + o_d, b_score.to(dtype))


@triton.jit
def write_paged_rows(
    o_t,  # [ROWS] tokens
    num_tokens,
    input,
    state,
    ape,
    state_slot_ptr,
    position_ptr,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """Write the state rows of several tokens to a paged state, all loads before the first store."""
    C: tl.constexpr = 2 if RATIO == 4 else 1
    dtype: tl.constexpr = state.ptr.dtype.element_ty
    o_s = tl.arange(0, C * D)
    m_t = o_t < num_tokens
    state_row = tl.load(state_slot_ptr + o_t, mask=m_t, other=-1).to(tl.int64)
    position = tl.load(position_ptr + o_t, mask=m_t, other=0).to(tl.int32)
    m_row = (state_row >= 0)[:, None]
    input_ptrs = input.ptr + (o_t.to(tl.int64) * input.stride_t)[:, None] + o_s[None, :]
    b_kv = tl.load(input_ptrs, mask=m_row).to(tl.float32)
    b_score = tl.load(input_ptrs + C * D, mask=m_row).to(tl.float32)
    o_ape = ((position % RATIO) * ape.stride_r)[:, None]
    o_ape += ((o_s // D) * ape.stride_c + o_s % D)[None, :]
    b_score += tl.load(ape.ptr + o_ape).to(tl.float32)
    if dtype == tl.bfloat16:
        b_kv = round_bf16(b_kv)
        b_score = round_bf16(b_score)
    o_row = (state_row // STATE_BLOCK) * state.stride_b + (state_row % STATE_BLOCK) * state.stride_r
    state_ptrs = state.ptr + o_row[:, None] + o_s[None, :]
    tl.store(state_ptrs, b_kv.to(dtype), mask=m_row)
    tl.store(state_ptrs + C * D, b_score.to(dtype), mask=m_row)
