"""Sparse MLA with a head of 512 channels that is key and value, in Triton (DeepSeek-V4).

A program has up to ``BLOCK_ROWS`` heads of one query token and a share of the rows that the token's
index lists name: first those of the window's cache, then those of the extra cache, one list after
the other in blocks of ``BLOCK_KV``. With k such a block and q the heads::

    s = scale q k^T, -inf where no row is named           [BLOCK_ROWS, BLOCK_KV]
    m' = max(m, max s);  p = exp(s - m');  l = l exp(m - m') + sum p
    o = o exp(m - m') + p k                               [BLOCK_ROWS, 512]
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DATA_BYTES = tl.constexpr(576)
SCALE_BYTES = tl.constexpr(8)
NOPE = tl.constexpr(448)

DECODE_PLAIN = tl.constexpr(0)


@triton.jit
def decode_e4m3(x):
    """Bytes of float8 e4m3fn as fp16; exact, subnormals too. The two NaN codes become 480."""
    bits = x.to(tl.uint16)
    half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def decode_e4m3_bf16(x, b_scale):
    """Four bytes of e4m3 times a scale each, as bf16, by packed instructions (sm_90); exact.

    The seven bits below the sign are put into bf16's at bit 4, which is the value times 2^-120,
    subnormals too. Both multiplications are exact, as long as the result is a normal number.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 lo, hi, a, b, up;
        mov.b32 up, 0x7B807B80;
        prmt.b32 lo, $2, 0, 0x1404;
        prmt.b32 hi, $2, 0, 0x3424;
        shr.u32 a, lo, 4;
        shr.u32 b, hi, 4;
        and.b32 a, a, 0x07F007F0;
        and.b32 b, b, 0x07F007F0;
        lop3.b32 a, lo, 0x80008000, a, 0xEA;
        lop3.b32 b, hi, 0x80008000, b, 0xEA;
        mul.bf16x2 a, a, up;
        mul.bf16x2 b, b, up;
        mul.bf16x2 $0, a, $3;
        mul.bf16x2 $1, b, $4;
        }
        """,
        "=&r,=&r,r,r,r",
        [x, b_scale],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def dequantise(b_bytes, b_scales, FIRST: tl.constexpr, OPERAND: tl.constexpr, DECODE: tl.constexpr):
    """Channels 64 FIRST and on of a block of keys, in ``OPERAND``.

    Args:
        b_bytes: ``[BLOCK_KV, channels]`` e4m3; b_scales: ``[BLOCK_KV]`` int64, of a row's scales
            the first in the lowest byte; a scale of byte b is 2^(b - 127).
    """
    BLOCK_KV: tl.constexpr = b_bytes.shape[0]
    GROUPS: tl.constexpr = b_bytes.shape[1] // 64
    shift = 8 * (FIRST + tl.arange(0, GROUPS))
    code = ((b_scales[:, None] >> shift[None, :].to(tl.int64)) & 0xFF).to(tl.int16)
    # bf16 has the same exponent: 0 is the subnormal 2^-127, 255 is NaN
    bits = (code << 7) | tl.where((code == 0) | (code == 255), 0x40, 0).to(tl.int16)
    b_groups = tl.reshape(b_bytes, [BLOCK_KV, GROUPS, 64])
    if DECODE == DECODE_PLAIN:
        b_scale = (bits.to(tl.uint16).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        b_k = (decode_e4m3(b_groups).to(tl.float32) * b_scale[:, :, None]).to(OPERAND)
    else:
        b_scale = bits.to(tl.bfloat16, bitcast=True)
        b_scale = tl.broadcast_to(b_scale[:, :, None], [BLOCK_KV, GROUPS, 64])
        b_k = decode_e4m3_bf16(b_groups, b_scale)
    return tl.reshape(b_k, [BLOCK_KV, GROUPS * 64])


@triton.jit
def load_queries(q_ptr, o_head, m_head, FIRST: tl.constexpr, COUNT: tl.constexpr, stride_h):
    """Channels of the queries, ``[BLOCK_ROWS, COUNT]``."""
    o_channel = FIRST + tl.arange(0, COUNT)
    at = o_head[:, None] * stride_h + o_channel[None, :]
    return tl.load(q_ptr + at, mask=m_head[:, None], other=0.0)


@triton.jit
def softmax_step(b_s, m_key, b_top, b_sum, scale_log2):
    """(maximum, sum, factor of what was summed before, p) after a block."""
    b_s = tl.where(m_key[None, :], b_s * scale_log2, float("-inf"))
    b_now = tl.maximum(b_top, tl.max(b_s, 1))
    shift = tl.where(b_now == float("-inf"), 0.0, b_now)
    keep = tl.exp2(b_top - shift)
    b_p = tl.exp2(b_s - shift[:, None])
    return b_now, b_sum * keep + tl.sum(b_p, 1), keep, b_p


@triton.jit
def accumulate(b_o, b_k, b_p, keep):
    return tl.dot(b_p, b_k, b_o * keep[:, None], input_precision="ieee")


@triton.jit
def finish(
    b_top, b_sum, o_head, m_head, sinks_ptr, lse_ptr, partial_lse_ptr, row, slot_row,
    is_partial: tl.constexpr,
):  # fmt: skip
    """The factor of each head's output; writes the log-sum-exp.

    Args:
        row, slot_row: of the program's first head, in the outputs and in the scratch memory.
    """
    none = b_sum == 0.0
    top = tl.where(none, 0.0, b_top)
    l2 = tl.where(none, float("-inf"), top + tl.log2(b_sum))
    total = b_sum
    if is_partial:
        tl.store(partial_lse_ptr + slot_row + o_head, l2, mask=m_head)
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + o_head, mask=m_head, other=0.0)
            total += tl.exp2(sink * LOG2E - top)
        bad = none | (b_sum != b_sum)
        tl.store(lse_ptr + row + o_head, tl.where(bad, float("inf"), l2 * LN2), mask=m_head)
    return tl.where(none, 0.0, 1.0 / total)


@triton.jit
def store_channels(
    to_ptr, b_o, weight, row, o_head, m_head, FIRST: tl.constexpr, COUNT: tl.constexpr
):
    """Channels of the result, of the program's heads."""
    o_channel = FIRST + tl.arange(0, COUNT)
    at = (row + o_head)[:, None] * 512 + o_channel[None, :]
    value = (b_o * weight[:, None]).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr + at, value, mask=m_head[:, None])


@triton.jit
def listed(length_ptr, request, topk):
    """How many entries of a token's index list count."""
    count = topk
    if length_ptr is not None:
        count = tl.minimum(tl.maximum(tl.load(length_ptr + request), 0), topk)
    return count


@triton.jit
def attend_records(
    state,
    queries,
    records,
    i_block,
    scale_log2,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    OPERAND: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Add block ``i_block`` of an index list to (maximum, sum, outputs of the four parts).

    Args:
        records: (cache as bytes, as bf16, as int64, bytes of a page, rows in the cache, index list,
            how many of its entries count).
    """
    b_top, b_sum, b_o0, b_o1, b_o2, b_or = state
    b_q0, b_q1, b_q2, b_qr = queries
    cache_ptr, rope_ptr, scales_ptr, stride_page, rows, list_ptr, count = records
    o_256 = tl.arange(0, 256)[None, :]
    o_128 = tl.arange(0, 128)[None, :]
    o_64 = tl.arange(0, 64)[None, :]
    position = i_block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    index = tl.load(list_ptr + position, mask=position < count, other=-1)
    m_key = (index >= 0) & (index < rows)
    index = tl.where(m_key, index, 0)
    page = index // PAGE_SIZE
    row = index - page * PAGE_SIZE
    page_at = page.to(tl.int64) * stride_page
    row_at = tl.multiple_of(page_at + row * DATA_BYTES, 16)
    scale_at = page_at + PAGE_SIZE * DATA_BYTES + row * SCALE_BYTES
    m = m_key[:, None]
    cache = cache_ptr + row_at[:, None]
    b_0 = tl.load(cache + o_256, mask=m, other=0)
    b_1 = tl.load(cache + o_128 + 256, mask=m, other=0)
    b_2 = tl.load(cache + o_64 + 384, mask=m, other=0)
    b_r = tl.load(rope_ptr + (row_at // 2)[:, None] + o_64 + NOPE // 2, mask=m, other=0.0)
    b_scales = tl.load(scales_ptr + scale_at // 8, mask=m_key, other=0)
    b_k0 = dequantise(b_0, b_scales, 0, OPERAND, DECODE)
    b_k1 = dequantise(b_1, b_scales, 4, OPERAND, DECODE)
    b_k2 = dequantise(b_2, b_scales, 6, OPERAND, DECODE)
    b_kr = b_r.to(OPERAND)
    b_s = tl.dot(b_q0, tl.trans(b_k0), input_precision="ieee")
    b_s = tl.dot(b_q1, tl.trans(b_k1), b_s, input_precision="ieee")
    b_s = tl.dot(b_q2, tl.trans(b_k2), b_s, input_precision="ieee")
    b_s = tl.dot(b_qr, tl.trans(b_kr), b_s, input_precision="ieee")
    b_top, b_sum, keep, b_p = softmax_step(b_s, m_key, b_top, b_sum, scale_log2)
    b_p = b_p.to(OPERAND)
    b_o0 = accumulate(b_o0, b_k0, b_p, keep)
    b_o1 = accumulate(b_o1, b_k1, b_p, keep)
    b_o2 = accumulate(b_o2, b_k2, b_p, keep)
    b_or = accumulate(b_or, b_kr, b_p, keep)
    return b_top, b_sum, b_o0, b_o1, b_o2, b_or


@triton.jit(
    do_not_specialize=["topk", "extra_topk", "rows", "extra_rows", "query_tokens", "splits"]
)
def sparse_mla_records_kernel(
    q_ptr,  # [tokens, heads, 512]
    cache_ptr,  # bytes: [pages] of PAGE_SIZE rows of 576 bytes, then of their scales, 8 bytes each
    rope_ptr,  # the same memory as bf16
    scales_ptr,  # the same memory as int64
    indices_ptr,  # [tokens, topk] int32, page * PAGE_SIZE + row
    lengths_ptr,  # [requests] int32 or None: how many of the indices count
    extra_cache_ptr,  # as above, or None where there is no extra cache
    extra_rope_ptr,
    extra_scales_ptr,
    extra_indices_ptr,
    extra_lengths_ptr,
    sinks_ptr,  # [heads] fp32 natural logits, or None
    out_ptr,  # [tokens, heads, 512]
    lse_ptr,  # [tokens, heads] fp32, natural
    partial_out_ptr,  # [tokens * splits, heads, 512] fp32
    partial_lse_ptr,  # [tokens * splits, heads] fp32, base 2
    scale,
    stride_q_t,
    stride_q_h,
    stride_page,  # bytes, a multiple of 16
    stride_extra_page,
    stride_indices,
    stride_extra_indices,
    topk,
    extra_topk,
    rows,  # in the cache; an index beyond is as good as -1
    extra_rows,
    query_tokens,
    heads,
    splits,
    PAGE_SIZE: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OPERAND: tl.constexpr,
    DECODE: tl.constexpr,
):
    """Grid: query tokens x splits x ROW_TILES, the last fastest.

    The 448 channels with scales are multiplied as 256, 128 and 64, the 64 behind RoPE apart.
    ``OPERAND`` is the dtype of the products' operands; float32 in Triton's interpreter, which
    multiplies bf16 by its bits.
    """
    i_program = tl.program_id(0)
    i_rows = i_program % ROW_TILES
    i_split = i_program // ROW_TILES % splits
    i_token = (i_program // ROW_TILES // splits).to(tl.int64)
    request = i_token // query_tokens
    o_head = i_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_head = o_head < heads

    count = listed(lengths_ptr, request, topk)
    own_blocks = tl.cdiv(count, BLOCK_KV)
    blocks = own_blocks
    if extra_cache_ptr is not None:
        extra_count = listed(extra_lengths_ptr, request, extra_topk)
        blocks += tl.cdiv(extra_count, BLOCK_KV)
    begin = i_split * blocks // splits
    end = (i_split + 1) * blocks // splits

    q = q_ptr + i_token * stride_q_t
    queries = (
        load_queries(q, o_head, m_head, 0, 256, stride_q_h).to(OPERAND),
        load_queries(q, o_head, m_head, 256, 128, stride_q_h).to(OPERAND),
        load_queries(q, o_head, m_head, 384, 64, stride_q_h).to(OPERAND),
        load_queries(q, o_head, m_head, 448, 64, stride_q_h).to(OPERAND),
    )
    state = (
        tl.full([BLOCK_ROWS], float("-inf"), tl.float32),
        tl.zeros([BLOCK_ROWS], tl.float32),
        tl.zeros([BLOCK_ROWS, 256], tl.float32),
        tl.zeros([BLOCK_ROWS, 128], tl.float32),
        tl.zeros([BLOCK_ROWS, 64], tl.float32),
        tl.zeros([BLOCK_ROWS, 64], tl.float32),
    )
    scale_log2 = scale * LOG2E
    names = indices_ptr + i_token * stride_indices
    records = (cache_ptr, rope_ptr, scales_ptr, stride_page, rows, names, count)
    for i in range(begin, tl.minimum(end, own_blocks)):
        state = attend_records(
            state, queries, records, i, scale_log2, PAGE_SIZE, BLOCK_KV, OPERAND, DECODE
        )
    if extra_cache_ptr is not None:
        names = extra_indices_ptr + i_token * stride_extra_indices
        records = (
            extra_cache_ptr, extra_rope_ptr, extra_scales_ptr, stride_extra_page, extra_rows,
            names, extra_count,
        )  # fmt: skip
        for i in range(tl.maximum(begin, own_blocks) - own_blocks, end - own_blocks):
            state = attend_records(
                state, queries, records, i, scale_log2, EXTRA_PAGE_SIZE, BLOCK_KV, OPERAND, DECODE
            )

    b_top, b_sum, b_o0, b_o1, b_o2, b_or = state
    row = i_token * heads
    slot_row = (i_token * splits + i_split) * heads
    weight = finish(
        b_top, b_sum, o_head, m_head, sinks_ptr, lse_ptr, partial_lse_ptr, row, slot_row, IS_SPLIT
    )
    to = partial_out_ptr if IS_SPLIT else out_ptr
    to_row = slot_row if IS_SPLIT else row
    store_channels(to, b_o0, weight, to_row, o_head, m_head, 0, 256)
    store_channels(to, b_o1, weight, to_row, o_head, m_head, 256, 128)
    store_channels(to, b_o2, weight, to_row, o_head, m_head, 384, 64)
    store_channels(to, b_or, weight, to_row, o_head, m_head, 448, 64)


@triton.jit(do_not_specialize=["topk", "rows", "query_tokens"])
def sparse_mla_rows_kernel(
    q_ptr,  # [tokens, heads, 512]
    kv_ptr,  # [rows, 512] in the queries' dtype
    indices_ptr,  # [tokens, topk] int32
    lengths_ptr,  # [requests] int32 or None
    sinks_ptr,  # [heads] fp32 or None
    out_ptr,  # [tokens, heads, 512]
    lse_ptr,  # [tokens, heads] fp32, natural
    scale,
    stride_q_t,
    stride_q_h,
    stride_kv,
    stride_indices,
    topk,
    rows,
    query_tokens,
    heads,
    BLOCK_KV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid: query tokens x ROW_TILES. Keys and values are plain rows, as prefill gathers them."""
    i_program = tl.program_id(0)
    i_rows = i_program % ROW_TILES
    i_token = (i_program // ROW_TILES).to(tl.int64)
    o_head = i_rows * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    m_head = o_head < heads
    count = listed(lengths_ptr, i_token // query_tokens, topk)
    q = q_ptr + i_token * stride_q_t
    b_q = load_queries(q, o_head, m_head, 0, 512, stride_q_h).to(OPERAND)
    names = indices_ptr + i_token * stride_indices
    o_kv = tl.arange(0, BLOCK_KV)
    o_channel = tl.arange(0, 512)[None, :]
    b_top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    b_o = tl.zeros([BLOCK_ROWS, 512], tl.float32)
    for start in range(0, count, BLOCK_KV):
        position = start + o_kv
        index = tl.load(names + position, mask=position < count, other=-1)
        m_key = (index >= 0) & (index < rows)
        at = tl.where(m_key, index, 0).to(tl.int64) * stride_kv
        b_k = tl.load(kv_ptr + at[:, None] + o_channel, mask=m_key[:, None], other=0.0)
        b_k = b_k.to(OPERAND)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_top, b_sum, keep, b_p = softmax_step(b_s, m_key, b_top, b_sum, scale * LOG2E)
        b_o = accumulate(b_o, b_k, b_p.to(OPERAND), keep)
    row = i_token * heads
    weight = finish(b_top, b_sum, o_head, m_head, sinks_ptr, lse_ptr, None, row, row, False)
    store_channels(out_ptr, b_o, weight, row, o_head, m_head, 0, 512)
