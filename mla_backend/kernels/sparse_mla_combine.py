"""Merging what several programs have of one query token in sparse MLA, in Triton.

LSE = log2(sum_s 2^lse_s),  out = sum_s 2^(lse_s - LSE) partial_s

The rules are those of ``kernels/combine.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_wait
from mla_backend.kernels.combine import LN2, LOG2E


@triton.jit
def _entries(request, m_request, lengths_ptr, topk):
    """Entries of a list that count."""
    count = request * 0 + topk
    if lengths_ptr is not None:
        count = tl.load(lengths_ptr + request, mask=m_request, other=0)
        count = tl.minimum(tl.maximum(count, 0), topk)
    return count


@triton.jit
def _merge(
    out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sinks_ptr, i_row, i_part, head, row, stride,
    before, count, BLOCK_SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Channels of output row ``i_row``, of ``count`` rows of the scratch memory: ``row + before``,
    ``row + stride``, ``row + 2 stride``, ..."""
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    b_o = tl.zeros([BLOCK_DIM], tl.float32)
    o_dim = i_part * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    for begin in range(0, count, BLOCK_SPLITS):
        o_split = begin + tl.arange(0, BLOCK_SPLITS)
        m_split = o_split < count
        at = row + o_split.to(tl.int64) * stride + tl.where(o_split == 0, before, 0)
        b_lse = tl.load(partial_lse_ptr + at, mask=m_split, other=float("-inf"))
        now = tl.maximum(top, tl.max(b_lse, 0))
        shift = tl.where(now == float("-inf"), 0.0, now)
        keep = tl.exp2(top - shift)
        b_factor = tl.exp2(b_lse - shift)
        # a split of scale 0 adds nothing, whatever it holds
        m = m_split & (b_factor != 0.0)
        b_x = tl.load(
            partial_out_ptr + at[:, None] * 512 + o_dim[None, :], mask=m[:, None], other=0.0
        )
        b_o = b_o * keep + tl.sum(tl.where(m[:, None], b_x * b_factor[:, None], 0.0), 0)
        total = total * keep + tl.sum(b_factor, 0)
        top = now
    top = tl.where(top == float("-inf"), 0.0, top)
    none = (total == 0.0) | (total != total)
    weight = total
    if sinks_ptr is not None:
        weight = total + tl.exp2(tl.load(sinks_ptr + head) * LOG2E - top)
    b_o *= tl.where(none, total, 1.0 / weight)
    to = out_ptr + i_row.to(tl.int64) * 512 + o_dim
    tl.store(to, b_o.to(out_ptr.dtype.element_ty))
    if i_part == 0:
        all_lse = tl.where(none, float("inf"), tl.log2(total) + top)
        tl.store(lse_ptr + i_row, all_lse * LN2)


@triton.jit(do_not_specialize=["heads", "splits"])
def sparse_mla_combine_kernel(
    out_ptr,  # [tokens, heads, 512]
    lse_ptr,  # [tokens, heads], natural
    partial_out_ptr,  # [tokens * splits, heads, 512]
    partial_lse_ptr,  # [tokens * splits, heads], base 2
    sinks_ptr,  # [heads] or None
    heads,
    splits,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every token has the same number of splits.

    Grid: tokens x heads x (512 / BLOCK_DIM), the last fastest.
    """
    PARTS: tl.constexpr = 512 // BLOCK_DIM
    i_program = tl.program_id(0)
    i_row = i_program // PARTS
    head = i_row % heads
    row = (i_row // heads).to(tl.int64) * splits * heads + head
    pdl_wait(PDL)
    _merge(
        out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sinks_ptr, i_row, i_program % PARTS,
        head, row, stride=heads, before=0, count=splits,
        BLOCK_SPLITS=BLOCK_SPLITS, BLOCK_DIM=BLOCK_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "topk", "extra_topk", "query_tokens", "requests", "shares"])
def sparse_mla_combine_shares_kernel(
    out_ptr,  # [tokens, heads, 512]
    lse_ptr,  # [tokens, heads], natural
    partial_out_ptr,  # [2 shares, HEADS, 512]
    partial_lse_ptr,  # [2 shares, HEADS], base 2
    sinks_ptr,  # [heads] or None
    lengths_ptr,  # [requests] int32 or None
    extra_lengths_ptr,
    heads,
    topk,
    extra_topk,
    query_tokens,
    requests,
    shares,
    HEADS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERHEAD: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """All shares are equal: ``equal_share`` of kernels/sm90/sparse_mla_compute.py. A token that one
    of them has whole is written already.

    Grid: tokens x heads.
    """
    i_row = tl.program_id(0)
    head = i_row % heads
    token = i_row // heads
    o_request = tl.arange(0, REQUESTS)
    m_request = o_request < requests
    b_count = _entries(o_request, m_request, lengths_ptr, topk)
    b_extra = _entries(o_request, m_request, extra_lengths_ptr, extra_topk)
    b_item = tl.cdiv(b_count, BLOCK) + tl.cdiv(b_extra, BLOCK) + OVERHEAD
    b_item = tl.where(m_request, b_item, 0)
    each = query_tokens * ROW_TILES
    total = tl.sum(b_item, 0) * each
    request = token // query_tokens
    item = token * ROW_TILES + head // HEADS
    weight = tl.sum(tl.where(o_request == request, b_item, 0), 0)
    before = tl.sum(tl.where(o_request < request, b_item, 0), 0) * each
    start = (before + (item - request * each) * weight) * shares
    first = start // total
    count = (start + weight * shares - 1) // total - first + 1
    pdl_wait(PDL)
    if count > 1:
        row = first.to(tl.int64) * 2 * HEADS + head % HEADS
        _merge(
            out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, sinks_ptr, i_row, 0, head, row,
            stride=2 * HEADS, before=HEADS, count=count, BLOCK_SPLITS=BLOCK_SPLITS, BLOCK_DIM=512,
        )  # fmt: skip
