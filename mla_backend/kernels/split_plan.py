"""The work list of one step in Triton, from the lengths alone; one program.

The arithmetic is that of ``plan/split_kv.py``, which describes it, and of
kernels/sm90/split_plan.cu.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def last_at_most(start_ptr, count, x, STEPS: tl.constexpr):
    """The last i with ``start[i] <= x``, of ``count`` values that ascend from 0."""
    low = tl.zeros_like(x)
    high = low + count
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        go = (tl.load(start_ptr + middle) <= x) & (high - low > 1)
        high = tl.where(go | (high - low <= 1), high, middle)
        low = tl.where(go, middle, low)
    return low


@triton.jit
def boundary(
    x,
    tiles,
    end,
    total,
    share,
    overhead,
    min_blocks,
    start_ptr,
    blocks_ptr,
    STEPS: tl.constexpr,
):
    """(tile, block, split) at which the CTA starts whose share begins at ``x * share``."""
    place = x * share
    inside = place < total
    tile = last_at_most(start_ptr, tiles, tl.where(inside, place, 0), STEPS)
    zero = tl.load(start_ptr + tile) + overhead
    block = place - zero
    left = tl.load(blocks_ptr + tile) - block
    split = x - tl.cdiv(zero + min_blocks, share) + 1
    at_start = block < min_blocks
    at_end = left < min_blocks
    tile = tl.where(at_start, tile, tl.where(at_end, tile + 1, tile))
    tile = tl.where(inside, tile, end)
    keep = inside & (at_start == 0) & (at_end == 0)
    return tile, tl.where(keep, block, 0), tl.where(keep, split, 0)


@triton.jit(do_not_specialize=["tiles", "ctas", "overhead", "min_blocks"])
def split_plan_kernel(
    lengths_ptr,  # [tiles] tokens; negative: not there
    work_ptr,  # [ctas, 8]
    num_splits_ptr,  # [tiles + 1]
    scratch_ptr,  # [2, tiles]: where each tile starts on the line; its blocks
    tiles,
    ctas,
    overhead,
    min_blocks,
    BLOCK_T: tl.constexpr,
    BLOCK_CTAS: tl.constexpr,
    STEPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Grid: 1."""
    o_tile = tl.arange(0, BLOCK_T)
    m_tile = o_tile < tiles
    length = tl.load(lengths_ptr + o_tile, mask=m_tile, other=-1)
    there = length >= 0
    blocks = tl.cdiv(tl.maximum(length, 0), 64)
    cost = tl.where(there, overhead, 0)
    sum_blocks = tl.sum(blocks, 0)
    line = sum_blocks + tl.sum(cost, 0)
    share = tl.maximum(tl.maximum(min_blocks, 1), tl.cdiv(line, ctas))
    least = tl.maximum(tl.maximum(min_blocks, 1), tl.cdiv(sum_blocks, ctas))
    most = share + share // 32
    even = 0
    for i in tl.static_range(CANDIDATES):
        size = least + (i * (most - least) + CANDIDATES - 2) // (CANDIDATES - 1)
        splits = tl.sum(tl.where(there, tl.maximum(tl.cdiv(blocks, size), 1), 0), 0)
        fits = (even == 0) & (splits <= ctas)
        even = tl.where(fits, size, even)
    is_even = even > 0

    pieces = tl.where(there, tl.maximum(tl.cdiv(blocks, tl.maximum(even, 1)), 1), 0)
    extent = tl.where(is_even, pieces, cost + blocks)
    start = tl.cumsum(extent, 0) - extent
    total = tl.sum(extent, 0)
    zero = start + cost
    # boundaries inside a tile
    low = tl.cdiv(zero + min_blocks, share)
    high = (zero + blocks - min_blocks) // share
    cut = tl.where(there, 1 + tl.maximum(high - low + 1, 0), 0)
    count = tl.where(is_even, pieces, cut)
    slots = tl.cumsum(count, 0)
    tl.store(num_splits_ptr + o_tile, slots - count, mask=m_tile)
    tl.store(num_splits_ptr + tiles, tl.sum(count, 0))
    tl.store(scratch_ptr + o_tile, start, mask=m_tile)
    tl.store(scratch_ptr + tiles + o_tile, blocks, mask=m_tile)
    tl.debug_barrier()

    o_cta = tl.arange(0, BLOCK_CTAS)
    m_cta = o_cta < ctas
    end = tl.max(tl.where(there, o_tile + 1, 0), 0)
    blocks_ptr = scratch_ptr + tiles
    if is_even:
        busy = o_cta < total
        tile = last_at_most(scratch_ptr, tiles, tl.where(busy, o_cta, 0), STEPS)
        n = tl.load(blocks_ptr + tile)
        of = tl.maximum(tl.cdiv(n, even), 1)
        split = o_cta - tl.load(scratch_ptr + tile)
        first = tl.where(busy, tile, end)
        block = tl.where(busy, split * n // of, 0)
        last = tl.where(busy, tile, end - 1)
        stop = tl.where(busy, (split + 1) * n // of, 0)
        split = tl.where(busy, split, 0)
    else:
        first, block, split = boundary(
            o_cta,
            tiles,
            end,
            total,
            share,
            overhead,
            min_blocks,
            scratch_ptr,
            blocks_ptr,
            STEPS,
        )
        after, stop, _ = boundary(
            o_cta + 1,
            tiles,
            end,
            total,
            share,
            overhead,
            min_blocks,
            scratch_ptr,
            blocks_ptr,
            STEPS,
        )
        last = tl.where(stop > 0, after, after - 1)
        whole = tl.load(blocks_ptr + tl.maximum(after - 1, 0))
        stop = tl.where(stop > 0, stop, tl.where(after > 0, whole, 0))
    row = work_ptr + o_cta * 8
    tl.store(row, first, mask=m_cta)
    tl.store(row + 1, block, mask=m_cta)
    tl.store(row + 2, last, mask=m_cta)
    tl.store(row + 3, stop, mask=m_cta)
    tl.store(row + 4, split, mask=m_cta)
