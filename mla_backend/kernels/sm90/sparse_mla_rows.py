# ruff: noqa: RUF059  Gluon needs tuples taken apart whole
"""Sparse MLA for Hopper in Gluon over rows of bf16: some warps copy rows, the others compute.

The walk and the products are those of ``sparse_mla.py``; rows are copied into the ring as they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from backend_core.kernels.gluon_names import pointer_load, thread_barrier
from mla_backend.kernels.sm90.sparse_mla_compute import (
    STAGES,
    allocate,
    compute,
    in_turns,
    load_names,
    piece,
)


@gluon.jit
def _gather(
    buffers,
    work,
    lists_of,
    kv_ptr,
    stride_kv,
    WARPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
):
    """The fetching warps of rows of bf16: copies to the ring, as many in flight as it has room.

    ``full`` of a stage takes an arrival of every thread, when its copies are there, and one more.
    """
    k_s, seen_s, full, empty = buffers
    first, lengths, sizes = work
    number, skip, left = first
    indices_ptr, extra_indices_ptr, stride_indices, stride_extra_indices, rows_in = lists_of
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    layout: gl.constexpr = gl.SliceLayout(1, copy)
    o_channel = gl.arange(0, 512, layout=gl.SliceLayout(0, copy))
    filled = 0
    while left > 0:
        i_token, i_rows, i_split, count, extra_count, own_blocks, begin, end, take, is_whole = (
            piece(number, skip, left, lengths, sizes, 0, False, ROW_TILES)
        )
        names = indices_ptr + i_token * stride_indices
        lists = (names, names)
        counts = (count, extra_count, own_blocks)
        index = load_names(begin, 0, end, lists, counts, 64, layout)
        for i in range(begin, end):
            next_index = load_names(i + 1, 0, end, lists, counts, 64, layout)
            stage = filled % STAGES
            m_key = (index >= 0) & (index < rows_in[0])
            row = gl.where(m_key, index, 0).to(gl.int64) * stride_kv
            mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
            pointer_load(
                k_s.index(stage),
                kv_ptr + (gl.multiple_of(row, 8)[:, None] + o_channel[None, :]),
                mask=m_key[:, None],
            )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            seen_s.index(stage).store(gl.where(m_key, 0.0, -float("inf")))
            thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            filled += 1
            index = next_index
        number += gl.num_programs(0)
        left -= take


@gluon.jit(do_not_specialize=["topk", "rows", "query_tokens", "heads", "items"])
def sparse_mla_rows_sm90_kernel(
    q_ptr,  # [tokens, heads, 512]
    kv_ptr,  # [rows, 512] bf16
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
    items,
    HEADS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    WARPS: gl.constexpr,
    FETCH_WARPS: gl.constexpr,
):
    """Grid: CTAs, which take the items (query tokens x ROW_TILES) in turns; keys are plain rows."""
    buffers = allocate(HEADS, 32 * FETCH_WARPS + 1)
    lengths, sizes = (lengths_ptr, None), (topk, 0, query_tokens, 1)
    work = (in_turns(items), lengths, sizes)
    lists_of = (indices_ptr, indices_ptr, stride_indices, stride_indices, (rows, rows))
    queries = (q_ptr, stride_q_t, stride_q_h, heads)
    outputs = (sinks_ptr, out_ptr, lse_ptr, None, None)
    ring = (buffers[0], buffers[1], buffers[2], buffers[3])
    gl.warp_specialize(
        [
            (
                compute,
                (
                    buffers,
                    work,
                    queries,
                    outputs,
                    scale,
                    WARPS,
                    ROW_TILES,
                    HEADS,
                    0,
                    False,
                    False,
                ),
            ),
            (
                _gather,
                (
                    ring,
                    work,
                    lists_of,
                    kv_ptr,
                    stride_kv,
                    FETCH_WARPS,
                    ROW_TILES,
                ),
            ),
        ],
        [FETCH_WARPS],
        [80],
    )
