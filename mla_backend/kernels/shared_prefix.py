"""Finding requests that share their first pages, from the block table, in Triton.

Two kernels: each request's leader and how far it agrees with it; then the query tiles of both
levels. ``plan/shared_prefix.py`` describes the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

ALWAYS_PARTIAL = tl.constexpr(1)
NO_CAUSAL_MASK = tl.constexpr(2)


@triton.jit(do_not_specialize=["requests", "stride_block_table_r", "query_tokens"])
def find_leaders_kernel(
    block_table_ptr,  # [requests, pages]
    lengths_ptr,  # [requests]
    leader_ptr,  # [requests] out
    shared_ptr,  # [requests] out: tokens that agree with the leader's, whole pages
    requests,
    stride_block_table_r,
    query_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_PAGES: tl.constexpr,
):
    """Grid: requests. The leader is the first request with the same first page."""
    i = tl.program_id(0)
    o_request = tl.arange(0, BLOCK_T)
    m_request = o_request < requests
    length = tl.load(lengths_ptr + i)
    lengths = tl.load(lengths_ptr + o_request, mask=m_request, other=0)
    own = tl.load(block_table_ptr + i.to(tl.int64) * stride_block_table_r)
    at = block_table_ptr + o_request.to(tl.int64) * stride_block_table_r
    has_page = m_request & (lengths >= PAGE_SIZE)
    firsts = tl.load(at, mask=has_page, other=-1)
    same = has_page & (firsts == own) & (length >= PAGE_SIZE)
    leader = tl.min(tl.where(same, o_request, requests), 0)
    leader = tl.where(leader == requests, i, leader)
    # tokens before the query's own, in whole pages of both
    most = tl.minimum(length, tl.load(lengths_ptr + leader)) - query_tokens
    pages = tl.maximum(most, 0) // PAGE_SIZE
    agree = pages
    mine = block_table_ptr + i.to(tl.int64) * stride_block_table_r
    other = block_table_ptr + leader.to(tl.int64) * stride_block_table_r
    start = pages * 0
    while start < agree:
        o_page = start + tl.arange(0, BLOCK_PAGES)
        m_page = o_page < pages
        a = tl.load(mine + o_page, mask=m_page, other=0)
        b = tl.load(other + o_page, mask=m_page, other=0)
        agree = tl.minimum(agree, tl.min(tl.where(m_page & (a != b), o_page, agree), 0))
        start += BLOCK_PAGES
    tl.store(leader_ptr + i, leader)
    tl.store(shared_ptr + i, agree * PAGE_SIZE)


@triton.jit(
    do_not_specialize=[
        *("requests", "query_rows", "prefix_tiles", "first_prefix_tile"),
        *("min_tokens", "min_requests"),
    ]
)
def two_level_tiles_kernel(
    lengths_ptr,  # [requests]
    leader_ptr,  # [requests]
    shared_ptr,  # [requests]
    tiles_ptr,  # [requests + prefix_tiles, 8] out
    tile_lengths_ptr,  # [requests + prefix_tiles] out: tokens, or -1 where no tile is
    members_ptr,  # [2, requests] out: requests by group, then in order
    prefix_tile_ptr,  # [requests] out: first tile of the request's prefix, or -1
    prefix_row_ptr,  # [requests] out: the request's first row among its group's
    requests,
    query_rows,
    prefix_tiles,
    first_prefix_tile,  # the number by which the first of them is known in prefix_tile
    min_tokens,
    min_requests,
    BLOCK_T: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Grid: 1."""
    o = tl.arange(0, BLOCK_T)
    m = o < requests
    leader = tl.load(leader_ptr + o, mask=m, other=-1)
    shared = tl.load(shared_ptr + o, mask=m, other=0)
    length = tl.load(lengths_ptr + o, mask=m, other=0)
    # a group: those that share enough with one leader; how many, and the tokens that all share
    able = m & (shared // 64 * 64 >= min_tokens)
    same = (leader[:, None] == leader[None, :]) & able[:, None] & able[None, :]
    count = tl.sum(same.to(tl.int32), 1)
    tokens = tl.min(tl.where(same, shared[None, :], 2147483647), 1) // 64 * 64
    grouped = able & (count >= min_requests)
    is_leader = grouped & (leader == o)
    # members lie group by group; groups follow their leaders
    before = (o[None, :] < leader[:, None]) & is_leader[None, :]
    first = tl.sum(tl.where(before, count[None, :], 0), 1)
    rank = tl.sum((same & (o[None, :] < o[:, None])).to(tl.int32), 1)
    tl.store(members_ptr + first + rank, o, mask=grouped)
    tl.store(members_ptr + requests + o, o, mask=m)
    tiles = tl.cdiv(count * query_rows, 64)
    first_tile = tl.sum(tl.where(before, tiles[None, :], 0), 1)
    tl.store(prefix_tile_ptr + o, tl.where(grouped, first_prefix_tile + first_tile, -1), mask=m)
    tl.store(prefix_row_ptr + o, rank * query_rows, mask=m)

    # a request's own tile: what follows the prefix
    prefix = tl.where(grouped, tokens, 0)
    at = tiles_ptr + o * 8
    tl.store(at, requests + o, mask=m)
    tl.store(at + 1, o * 0, mask=m)
    tl.store(at + 2, o * 0 + query_rows, mask=m)
    tl.store(at + 3, prefix, mask=m)
    tl.store(at + 4, length, mask=m)
    tl.store(at + 5, tl.where(grouped, ALWAYS_PARTIAL, 0), mask=m)
    tl.store(tile_lengths_ptr + o, length - prefix, mask=m)

    # the prefixes' tiles: number t is the (t - first)-th of the last group that starts at or before
    t = tl.arange(0, BLOCK_TILES)
    m_t = t < prefix_tiles
    mine = is_leader[None, :] & (first_tile[None, :] <= t[:, None])
    mine = mine & (t[:, None] < (first_tile + tiles)[None, :])
    there = tl.sum(mine.to(tl.int32), 1) > 0
    row = (t - tl.sum(tl.where(mine, first_tile[None, :], 0), 1)) * 64
    rows = tl.sum(tl.where(mine, count[None, :], 0), 1) * query_rows - row
    end = tl.sum(tl.where(mine, tokens[None, :], 0), 1)
    at = tiles_ptr + (requests + t) * 8
    tl.store(at, tl.sum(tl.where(mine, first[None, :], 0), 1), mask=m_t)
    tl.store(at + 1, tl.where(there, row, 0), mask=m_t)
    tl.store(at + 2, tl.where(there, tl.minimum(rows, 64), 0), mask=m_t)
    tl.store(at + 3, t * 0, mask=m_t)
    tl.store(at + 4, end, mask=m_t)
    tl.store(at + 5, t * 0 + (ALWAYS_PARTIAL | NO_CAUSAL_MASK), mask=m_t)
    tl.store(tile_lengths_ptr + requests + t, tl.where(there, end, -1), mask=m_t)
