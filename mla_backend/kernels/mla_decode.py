"""Split-KV MLA decode in Triton: each program walks the blocks of one row of the work list.

With k a block of keys (its first 512 channels are the values too) and q up to ``BLOCK_ROWS`` query
rows, a row being a query token and a head::

    s = scale k q^T, masked                            [BLOCK_KV, BLOCK_ROWS]
    m' = max(m, max s);  p = exp(s - m');  l = l exp(m - m') + sum p
    o = o exp(m - m') + k[:, :512]^T p                 [512, BLOCK_ROWS]

The rows are the narrow side of both products, so few heads waste little of a matrix instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ALWAYS_PARTIAL = tl.constexpr(1)
NO_CAUSAL_MASK = tl.constexpr(2)


@triton.jit
def query_tile(tiles_ptr, lengths_ptr, i_tile, num_rows):
    """(first member, first row, rows, first token, end token, flags) of a query tile."""
    if tiles_ptr is None:
        zero = i_tile * 0
        member, row, rows = i_tile, zero, zero + num_rows
        begin, end, flags = zero, tl.load(lengths_ptr + i_tile), zero
    else:
        at = tiles_ptr + i_tile * 8
        member, row, rows = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        begin, end, flags = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    return member, row, rows, begin, end, flags


@triton.jit
def load_keys(
    kv_latent_ptr,
    kv_rope_ptr,
    latent_row,
    rope_row,
    m_token,
    OPERAND: tl.constexpr,
):
    """Keys of one block in ``OPERAND``: (latent [BLOCK_KV, 512], RoPE [BLOCK_KV, 64])."""
    o_latent = tl.arange(0, 512)
    o_rope = tl.arange(0, 64)
    m = m_token[:, None]
    b_latent = tl.load(kv_latent_ptr + latent_row[:, None] + o_latent[None, :], mask=m, other=0)
    b_rope = tl.load(kv_rope_ptr + rope_row[:, None] + o_rope[None, :], mask=m, other=0)
    return b_latent.to(OPERAND), b_rope.to(OPERAND)


@triton.jit
def locate_rows(number, m_row, members_ptr, member, stride_table, query_tokens, heads):
    """(request, query token, head, number within the request) of each query row ``[BLOCK_ROWS]``,
    and the offset of the block table's row that all of them read."""
    num_rows = query_tokens * heads
    member_row = number // num_rows
    index = number - member_row * num_rows
    token = index // heads
    head = index - token * heads
    if members_ptr is not None:
        request = tl.load(members_ptr + member + member_row, mask=m_row, other=0)
        table = tl.load(members_ptr + member).to(tl.int64) * stride_table
    else:
        request = member + member_row
        table = member.to(tl.int64) * stride_table
    return request, token, head, index, table


@triton.jit
def load_queries(latent_ptr, rope_ptr, q_token, head, strides, m_row, OPERAND: tl.constexpr):
    """Query rows in ``OPERAND``: (latent [512, BLOCK_ROWS], RoPE [64, BLOCK_ROWS]).

    ``strides``: of token and head, the latents' and then the RoPE channels'.
    """
    m = m_row[None, :]
    at = q_token * strides[0] + head * strides[1]
    b_q = tl.load(latent_ptr + at[None, :] + tl.arange(0, 512)[:, None], mask=m, other=0.0)
    at = q_token * strides[2] + head * strides[3]
    b_qr = tl.load(rope_ptr + at[None, :] + tl.arange(0, 64)[:, None], mask=m, other=0.0)
    return b_q.to(OPERAND), b_qr.to(OPERAND)


@triton.jit
def masked_logits(
    keys,
    queries,
    position,
    m_token,
    limit,
    scale,
):
    """Logits ``[BLOCK_KV, BLOCK_ROWS]`` of a block in base 2, -inf where a row does not see a key.

    ``keys`` and ``queries``: latents, then RoPE channels.
    """
    b_s = tl.dot(keys[0], queries[0], input_precision="ieee")
    b_s = tl.dot(keys[1], queries[1], b_s, input_precision="ieee")
    b_s = b_s * scale * LOG2E
    seen = m_token[:, None] & (position[:, None] < limit[None, :])
    return tl.where(seen, b_s, float("-inf"))


@triton.jit
def log_sum(b_top, b_sum):
    """(rows without a key, their largest logit, their log-sum-exp in base 2) after all keys."""
    none = b_sum == 0.0
    top = tl.where(none, 0.0, b_top)
    return none, top, tl.where(none, float("-inf"), top + tl.log2(b_sum))


@triton.jit
def accumulate(b_o, b_top, b_sum, b_s, b_k, OPERAND: tl.constexpr):
    """One step of the online softmax: (o, largest logit, sum) with logits ``b_s [BLOCK_KV,
    BLOCK_ROWS]`` in base 2, -inf where masked, and keys ``b_k``."""
    b_now = tl.maximum(b_top, tl.max(b_s, 0))
    shift = tl.where(b_now == float("-inf"), 0.0, b_now)
    keep = tl.exp2(b_top - shift)
    b_p = tl.exp2(b_s - shift[None, :])
    b_sum = b_sum * keep + tl.sum(b_p, 0)
    b_o = tl.dot(tl.trans(b_k), b_p.to(OPERAND), b_o * keep[None, :], input_precision="ieee")
    return b_o, b_now, b_sum


@triton.jit
def store_partial(out_ptr, lse_ptr, row_at, m_row, b_o, b_sum, none, l2):
    """The result of one split: normalised, with its log-sum-exp in base 2."""
    weight = tl.where(none, 0.0, 1.0 / b_sum)
    to = out_ptr + row_at[None, :] * 512 + tl.arange(0, 512)[:, None]
    tl.store(to, b_o * weight[None, :], mask=m_row[None, :])
    tl.store(lse_ptr + row_at, l2, mask=m_row)


@triton.jit
def store_result(out_ptr, lse_ptr, sinks_ptr, head, row_at, m_row, b_o, b_sum, none, top, l2):
    """The result of a request with one split: with its sink, and a natural log-sum-exp."""
    total = b_sum
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=m_row, other=0.0)
        total += tl.exp2(sink * LOG2E - top)
    weight = tl.where(none, 0.0, 1.0 / total)
    to = out_ptr + row_at[None, :] * 512 + tl.arange(0, 512)[:, None]
    value = (b_o * weight[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(to, value, mask=m_row[None, :])
    bad = none | (b_sum != b_sum)
    tl.store(lse_ptr + row_at, tl.where(bad, float("inf"), l2 * LN2), mask=m_row)


@triton.jit(
    do_not_specialize=[
        "stride_block_table_r",
        "stride_kv_latent_p",
        "stride_kv_rope_p",
        "partial_rows",
        "query_tokens",
        "heads",
    ]
)
def mla_decode_kernel(
    q_latent_ptr,  # [tokens, heads, 512]
    q_rope_ptr,  # [tokens, heads, 64]
    kv_latent_ptr,  # [pages, page size, 512]
    kv_rope_ptr,  # [pages, page size, 64]
    block_table_ptr,  # [requests, pages]
    lengths_ptr,  # [requests]
    work_ptr,  # [programs, 8]
    num_splits_ptr,  # [tiles + 1]
    tiles_ptr,  # [tiles, 8] or None
    members_ptr,  # requests of the tiles, or None
    sinks_ptr,  # [heads] or None
    out_ptr,  # [requests, query tokens, heads, 512]
    lse_ptr,  # [requests, query tokens, heads], natural
    partial_out_ptr,  # [slots, partial_rows, 512]
    partial_lse_ptr,  # [slots, partial_rows], base 2
    scale,
    stride_q_latent_t,
    stride_q_latent_h,
    stride_q_rope_t,
    stride_q_rope_h,
    stride_kv_latent_p,
    stride_kv_latent_t,
    stride_kv_rope_p,
    stride_kv_rope_t,
    stride_block_table_r,
    partial_rows,
    query_tokens,
    heads,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: (rows of the work list, ceil(rows of a tile / BLOCK_ROWS)).

    ``OPERAND`` is the dtype of the products' operands: the queries' on a GPU, float32 in Triton's
    interpreter, which multiplies bf16 by its bits.
    """
    i_cta, i_rows = tl.program_id(0), tl.program_id(1)
    work = work_ptr + i_cta * 8
    first, first_block = tl.load(work), tl.load(work + 1)
    last, end_block, first_split = tl.load(work + 2), tl.load(work + 3), tl.load(work + 4)
    num_rows = query_tokens * heads
    o_row = i_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)

    for i in range(0, last - first + 1):
        i_tile = first + i
        member, row_begin, rows, kv_begin, kv_end, flags = query_tile(
            tiles_ptr, lengths_ptr, i_tile, num_rows
        )
        slot = tl.load(num_splits_ptr + i_tile)
        splits = tl.load(num_splits_ptr + i_tile + 1) - slot
        partial = (splits > 1) | ((flags & ALWAYS_PARTIAL) != 0)
        blocks = tl.cdiv(kv_end - kv_begin, 64)
        begin = tl.where(i_tile == first, first_block, 0)
        stop = tl.where(i_tile == last, tl.minimum(end_block, blocks), blocks)

        m_row = o_row < rows
        number = tl.where(m_row, row_begin + o_row, 0)
        request, token, head, index, table = locate_rows(
            number, m_row, members_ptr, member, stride_block_table_r, query_tokens, heads
        )
        q_token = request.to(tl.int64) * query_tokens + token
        strides = (stride_q_latent_t, stride_q_latent_h, stride_q_rope_t, stride_q_rope_h)
        b_q, b_qr = load_queries(q_latent_ptr, q_rope_ptr, q_token, head, strides, m_row, OPERAND)
        length = tl.load(lengths_ptr + request, mask=m_row, other=0)
        query_position = length - query_tokens + token
        limit = tl.zeros([BLOCK_ROWS], tl.int32) + kv_end
        if CAUSAL:
            masked = (flags & NO_CAUSAL_MASK) == 0
            limit = tl.where(masked, tl.minimum(limit, query_position + 1), limit)

        b_top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        b_o = tl.zeros([512, BLOCK_ROWS], tl.float32)
        token_end = tl.minimum(kv_begin + stop * 64, kv_end)
        for start in range(kv_begin + begin * 64, token_end, BLOCK_KV):
            position = start + tl.arange(0, BLOCK_KV)
            m_token = position < token_end
            entry = block_table_ptr + table + position // PAGE_SIZE
            page = tl.load(entry, mask=m_token, other=0).to(tl.int64)
            row = position % PAGE_SIZE
            b_k, b_kr = load_keys(
                kv_latent_ptr,
                kv_rope_ptr,
                page * stride_kv_latent_p + row * stride_kv_latent_t,
                page * stride_kv_rope_p + row * stride_kv_rope_t,
                m_token,
                OPERAND,
            )
            b_s = masked_logits(
                (b_k, b_kr),
                (b_q, b_qr),
                position,
                m_token,
                limit,
                scale,
            )
            b_o, b_top, b_sum = accumulate(b_o, b_top, b_sum, b_s, b_k, OPERAND)

        none, top, l2 = log_sum(b_top, b_sum)
        if partial:
            split = tl.where(i_tile == first, first_split, 0)
            # a tile with members of its own counts its rows from its first
            own = o_row if tiles_ptr is not None else index
            row_at = (slot + split).to(tl.int64) * partial_rows + own
            store_partial(partial_out_ptr, partial_lse_ptr, row_at, m_row, b_o, b_sum, none, l2)
        else:
            row_at = request.to(tl.int64) * num_rows + index
            store_result(
                out_ptr, lse_ptr, sinks_ptr, head, row_at, m_row, b_o, b_sum, none, top, l2
            )
