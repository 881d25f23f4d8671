"""Merging the splits of an output row by their log-sum-exp, in Triton.

LSE = log2(sum_s 2^lse_s),  out = sum_s 2^(lse_s - LSE) partial_s
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_rows", "partial_rows", "heads"])
def combine_kernel(
    out_ptr,  # [requests, rows, DIM]
    lse_ptr,  # [requests, rows], natural
    partial_out_ptr,  # [slots, partial_rows, DIM]
    partial_lse_ptr,  # [slots, partial_rows], base 2
    num_splits_ptr,  # [tiles + 1], a prefix sum; the first tiles are the requests' own
    prefix_tile_ptr,  # [requests] or None: the tile of a shared prefix, or -1
    prefix_row_ptr,  # [requests]: the request's first row in that tile
    sinks_ptr,  # [heads] or None
    num_rows,
    partial_rows,
    heads,
    DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Grid: requests x rows. A row with one split was written by the main kernel and is left."""
    i_number = tl.program_id(0)
    request = i_number // num_rows
    row = i_number - request * num_rows
    own_slot = tl.load(num_splits_ptr + request)
    own = tl.load(num_splits_ptr + request + 1) - own_slot
    prefix = own * 0
    prefix_slot = own_slot * 0
    prefix_row = row * 0
    if prefix_tile_ptr is not None:
        shared = tl.load(prefix_tile_ptr + request)
        if shared >= 0:
            number = tl.load(prefix_row_ptr + request) + row
            prefix_row = number % 64
            prefix_slot = tl.load(num_splits_ptr + shared + number // 64)
            prefix = tl.load(num_splits_ptr + shared + number // 64 + 1) - prefix_slot
    count = prefix + own
    if count > 1:
        o_split = tl.arange(0, MAX_SPLITS)
        o_block = tl.arange(0, BLOCK_SPLITS)
        o_dim = tl.arange(0, DIM)
        at = tl.where(
            o_split < prefix,
            (prefix_slot + o_split) * partial_rows + prefix_row,
            (own_slot + o_split - prefix) * partial_rows + row,
        )
        b_lse = tl.load(partial_lse_ptr + at, mask=o_split < count, other=float("-inf"))
        top = tl.max(b_lse, 0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(b_lse - top), 0)
        none = (total == 0.0) | (total != total)
        all_lse = tl.where(none, float("inf"), tl.log2(total) + top)
        weight = all_lse
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + row % heads) * LOG2E
            weight = tl.where(none, all_lse, tl.log2(total + tl.exp2(sink - top)) + top)
        b_o = tl.zeros([DIM], tl.float32)
        for start in range(0, count, BLOCK_SPLITS):
            split = start + o_block
            slot_row = tl.where(
                split < prefix,
                (prefix_slot + split) * partial_rows + prefix_row,
                (own_slot + split - prefix) * partial_rows + row,
            )
            m_split = split < count
            lse = tl.load(partial_lse_ptr + slot_row, mask=m_split, other=float("-inf"))
            factor = tl.exp2(lse - weight)
            # a split of scale 0 adds nothing, whatever it holds
            m = m_split & (factor != 0.0)
            x = tl.load(
                partial_out_ptr + slot_row[:, None].to(tl.int64) * DIM + o_dim[None, :],
                mask=m[:, None],
                other=0.0,
            )
            b_o += tl.sum(tl.where(m[:, None], x * factor[:, None], 0.0), 0)
        to = out_ptr + i_number.to(tl.int64) * DIM + o_dim
        tl.store(to, b_o.to(out_ptr.dtype.element_ty))
        tl.store(lse_ptr + i_number, all_lse * LN2)


@triton.jit(do_not_specialize=["num_states", "heads"])
def merge_states_kernel(
    v_ptr,  # [tokens, states, heads, dim]
    s_ptr,  # [tokens, states, heads], base 2
    out_ptr,  # [tokens, heads, dim]
    num_states,
    heads,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Grid: tokens x heads. FlashInfer's merge: one pass, the maximum carried along."""
    i_number = tl.program_id(0)
    token = i_number // heads
    head = i_number - token * heads
    o_dim = tl.arange(0, BLOCK_DIM)
    m_dim = o_dim < DIM
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    b_o = tl.zeros([BLOCK_DIM], tl.float32)
    for i in range(0, num_states):
        at = (token.to(tl.int64) * num_states + i) * heads + head
        s = tl.load(s_ptr + at)
        now = tl.maximum(top, s)
        shift = tl.where(now == float("-inf"), 0.0, now)
        keep = tl.exp2(top - shift)
        factor = tl.exp2(s - shift)
        # a state of weight 0 adds nothing, whatever it holds
        m = tl.where(m_dim, factor, 0.0) != 0.0
        x = tl.load(v_ptr + at * DIM + o_dim, mask=m, other=0.0)
        b_o = b_o * keep + x.to(tl.float32) * factor
        total = total * keep + factor
        top = now
    weight = tl.where(total == 0.0, 0.0, 1.0 / total)
    tl.store(
        out_ptr + i_number.to(tl.int64) * DIM + o_dim,
        (b_o * weight).to(out_ptr.dtype.element_ty),
        mask=m_dim,
    )
