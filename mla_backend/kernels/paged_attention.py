"""Attention of ragged queries to a paged cache of keys and values, grouped heads, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["window", "tiles"])
def paged_attention_kernel(
    q_ptr,  # [tokens, query heads, dim]
    k_ptr,  # [pages, page size, key heads, dim]
    v_ptr,
    out_ptr,  # [tokens, query heads, dim]
    lse_ptr,  # [tokens, query heads], base 2
    tile_request_ptr,  # [tiles]
    tile_start_ptr,  # [tiles]: first query token of the request that the tile has
    qo_indptr_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    last_page_len_ptr,
    scale,
    cap,
    window,
    stride_q_t,
    stride_q_h,
    stride_k_p,
    stride_k_t,
    stride_k_h,
    stride_v_p,
    stride_v_t,
    stride_v_h,
    heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: (tiles, key heads). Rows are BLOCK_TOKENS query tokens times BLOCK_GROUP heads."""
    i_tile, i_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tile_request_ptr + i_tile)
    start = tl.load(tile_start_ptr + i_tile)
    q_begin = tl.load(qo_indptr_ptr + request)
    q_len = tl.load(qo_indptr_ptr + request + 1) - q_begin
    first_page = tl.load(kv_indptr_ptr + request)
    pages = tl.load(kv_indptr_ptr + request + 1) - first_page
    kv_len = tl.where(pages > 0, (pages - 1) * PAGE_SIZE + tl.load(last_page_len_ptr + request), 0)
    kv_len = tl.where(start < q_len, kv_len, 0)  # nothing for a tile that is spare
    o_row = tl.arange(0, BLOCK_TOKENS * BLOCK_GROUP)
    token = start + o_row // BLOCK_GROUP
    group = o_row % BLOCK_GROUP
    head = i_head * GROUP + group
    m_row = (token < q_len) & (group < GROUP)
    o_dim = tl.arange(0, BLOCK_DIM)
    m_dim = o_dim < DIM
    q_at = (q_begin + token).to(tl.int64) * stride_q_t + head * stride_q_h
    m_q = m_row[:, None] & m_dim[None, :]
    b_q = tl.load(q_ptr + q_at[:, None] + o_dim[None, :], mask=m_q, other=0.0).to(OPERAND)
    query_position = kv_len - q_len + token
    b_top = tl.full([BLOCK_TOKENS * BLOCK_GROUP], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_TOKENS * BLOCK_GROUP], tl.float32)
    b_o = tl.zeros([BLOCK_TOKENS * BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for block in range(0, kv_len, BLOCK_KV):
        position = block + tl.arange(0, BLOCK_KV)
        m_token = position < kv_len
        page_at = kv_indices_ptr + first_page + position // PAGE_SIZE
        page = tl.load(page_at, mask=m_token, other=0).to(tl.int64)
        in_page = position % PAGE_SIZE
        m_kv = m_token[:, None] & m_dim[None, :]
        k_at = page * stride_k_p + in_page * stride_k_t + i_head * stride_k_h
        v_at = page * stride_v_p + in_page * stride_v_t + i_head * stride_v_h
        b_k = tl.load(k_ptr + k_at[:, None] + o_dim[None, :], mask=m_kv, other=0.0).to(OPERAND)
        b_v = tl.load(v_ptr + v_at[:, None] + o_dim[None, :], mask=m_kv, other=0.0).to(OPERAND)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if HAS_CAP:
            b_x = b_s / cap
            tanh = 1.0 - 2.0 / (tl.exp2(b_x * (2.0 * LOG2E)) + 1.0)
            # near 0 that difference has lost its digits: x - x^3 / 3 + 2 x^5 / 15
            square = b_x * b_x
            series = b_x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
            b_s = cap * tl.where(square < 0.0025, series, tanh)
        b_s = b_s * LOG2E
        seen = m_token[None, :] & m_row[:, None]
        if CAUSAL:
            seen = seen & (position[None, :] <= query_position[:, None])
        if HAS_WINDOW:
            seen = seen & (position[None, :] >= query_position[:, None] - window)
        b_s = tl.where(seen, b_s, float("-inf"))
        b_now = tl.maximum(b_top, tl.max(b_s, 1))
        shift = tl.where(b_now == float("-inf"), 0.0, b_now)
        keep = tl.exp2(b_top - shift)
        b_p = tl.exp2(b_s - shift[:, None])
        b_sum = b_sum * keep + tl.sum(b_p, 1)
        b_o = tl.dot(b_p.to(OPERAND), b_v, b_o * keep[:, None], input_precision="ieee")
        b_top = b_now
    none = b_sum == 0.0
    b_o = b_o * tl.where(none, 0.0, 1.0 / b_sum)[:, None]
    at = (q_begin + token).to(tl.int64) * heads + head
    to = out_ptr + at[:, None] * DIM + o_dim[None, :]
    tl.store(to, b_o.to(out_ptr.dtype.element_ty), mask=m_q)
    top = tl.where(none, 0.0, b_top)
    tl.store(lse_ptr + at, tl.where(none, float("-inf"), top + tl.log2(b_sum)), mask=m_row)
