"""Merging splits of which every output row has the same number, in Triton.

LSE = log2(sum_s 2^lse_s),  out = sum_s 2^(lse_s - LSE) partial_s

The rules are those of ``kernels/combine.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backend_core.kernels.pdl import pdl_wait
from mla_backend.kernels.combine import LN2, LOG2E


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
    """Grid: tokens x heads x (512 / BLOCK_DIM), the last fastest; splits <= BLOCK_SPLITS."""
    PARTS: tl.constexpr = 512 // BLOCK_DIM
    i_program = tl.program_id(0)
    i_part = i_program % PARTS
    i_row = i_program // PARTS
    head = i_row % heads
    token = (i_row // heads).to(tl.int64)
    o_split = tl.arange(0, BLOCK_SPLITS)
    m_split = o_split < splits
    row = (token * splits + o_split) * heads + head
    pdl_wait(PDL)
    b_lse = tl.load(partial_lse_ptr + row, mask=m_split, other=float("-inf"))
    top = tl.max(b_lse, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(b_lse - top), 0)
    none = (total == 0.0) | (total != total)
    all_lse = tl.where(none, float("inf"), tl.log2(total) + top)
    weight = all_lse
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * LOG2E
        weight = tl.where(none, all_lse, tl.log2(total + tl.exp2(sink - top)) + top)
    b_factor = tl.exp2(b_lse - weight)
    # a split of scale 0 adds nothing, whatever it holds
    m = m_split & (b_factor != 0.0)
    o_dim = i_part * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    b_x = tl.load(partial_out_ptr + row[:, None] * 512 + o_dim[None, :], mask=m[:, None], other=0.0)
    b_o = tl.sum(tl.where(m[:, None], b_x * b_factor[:, None], 0.0), 0)
    to = out_ptr + i_row.to(tl.int64) * 512 + o_dim
    tl.store(to, b_o.to(out_ptr.dtype.element_ty))
    if i_part == 0:
        tl.store(lse_ptr + i_row, all_lse * LN2)
