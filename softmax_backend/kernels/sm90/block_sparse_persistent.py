# ruff: noqa: RUF005, RUF059  Gluon needs lists added and tuples taken apart whole
"""Block-sparse attention for Hopper in Gluon by CTAs that stay: each takes the next entry of the
plan's ``work`` when it has loaded the last.

What the warps do for a tile is in ``block_walk.py``. The loading warp counts entries off a word in
global memory, and runs ahead into the next tile while the computing ones finish theirs: queries
have two buffers, and the ring of keys and values goes on over the tiles. ``q_full`` of a buffer
completes when its queries are there and ``tile_s`` says of which entry they are (-1: there are no
more), ``q_empty`` when both warpgroups need neither.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from softmax_backend.kernels.sm90.block_forms import close_turns, open_turns
from softmax_backend.kernels.sm90.block_load import (
    allocate_ring,
    allocate_turn,
    load_keys_ahead,
    load_queries,
)
from softmax_backend.kernels.sm90.block_walk import walk_tile, write_tile
from softmax_backend.kernels.sm90.gluon_names import thread_barrier


@gluon.jit
def _tile_of(work, i_s, plan):
    """(row, sequence, head, first query) of an entry with work."""
    rows_ptr, cols_ptr, work_ptr, sequences_ptr, mask_aux_ptr = plan
    head, tile, i_r = gl.load(work + 1), gl.load(work + 2), gl.load(work + 3)
    at = rows_ptr + 4 * i_r.to(gl.int64)
    begin, full_end = gl.load(at), gl.load(at + 1)
    end, slot = gl.load(at + 2), gl.load(at + 3)
    return (cols_ptr, begin, full_end, end, slot), sequences_ptr + 6 * i_s, head, tile * 128


@gluon.jit
def _write_word(word_s, value):
    """One int32 of shared memory, by a warp, before what it does next."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    word_s.store(gl.full([1], value, gl.int32, layout=layout))
    thread_barrier()


@gluon.jit
def _read_word(word_s):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(word_s.load(layout), 0)


@gluon.jit
def _load_tiles(
    loads,
    at_keys: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """The loading warp."""
    descs, buffers, barriers, handed, plan, pages, queue = loads
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty, turn = barriers
    tile_s, q_empty = handed
    rows_ptr, cols_ptr, work_ptr, sequences_ptr, mask_aux_ptr = plan
    pages_ptr, page_size = pages
    taken_ptr, items = queue
    filled = 0
    count = 0
    item = gl.program_id(0)
    while item < items:
        work = work_ptr + 4 * item
        i_s = gl.load(work)
        if i_s >= 0:
            row, sequence, head, first = _tile_of(work, i_s, plan)
            batch, k_begin = gl.load(sequence), gl.load(sequence + 3)
            if IS_PACKED:
                first += gl.load(sequence + 1)
            place = (batch, head, head // GROUP, first)
            buffer = count & 1
            mbarrier.wait(q_empty.index(buffer), ((count >> 1) & 1) ^ 1)
            _write_word(tile_s.index(buffer), item)
            load_queries(q_desc, q_s, q_full.index(buffer), place, 2 * buffer)
            keys = (k_begin, pages_ptr, page_size)
            load_keys_ahead(
                descs,
                buffers,
                barriers,
                row,
                place,
                keys,
                filled,
                at_keys,
                STAGES=STAGES,
                BLOCK_N=BLOCK_N,
            )
            filled += row[3] - row[1]
            count += 1
        item = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1)
    buffer = count & 1
    mbarrier.wait(q_empty.index(buffer), ((count >> 1) & 1) ^ 1)
    _write_word(tile_s.index(buffer), -1)
    mbarrier.arrive(q_full.index(buffer), count=1)


@gluon.jit
def _compute_tiles(
    tiles,
    update: gl.constexpr,
    mask: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WARPGROUP: gl.constexpr,
    IS_PACKED: gl.constexpr,
    FORM: gl.constexpr,
):
    """A computing warpgroup: its 64 queries of each tile."""
    buffers, barriers, handed, plan, outputs, factor = tiles
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty, turn = barriers
    tile_s, q_empty = handed
    rows_ptr, cols_ptr, work_ptr, sequences_ptr, mask_aux_ptr = plan
    filled = 0
    taken = 0
    count = 0
    open_turns(WARPGROUP, FORM)
    mbarrier.wait(q_full.index(0), 0)
    item = _read_word(tile_s.index(0))
    while item >= 0:
        work = work_ptr + 4 * item
        row, sequence, head, first = _tile_of(work, gl.load(work), plan)
        batch, q_begin, q_len = gl.load(sequence), gl.load(sequence + 1), gl.load(sequence + 2)
        kv_len, q_position = gl.load(sequence + 4), gl.load(sequence + 5)
        place = (batch, head, first, q_begin, q_len, kv_len, q_position, mask_aux_ptr)
        buffer = count & 1
        state = walk_tile(
            q_s.index(2 * buffer + WARPGROUP),
            buffers,
            barriers,
            row,
            place,
            filled,
            taken,
            factor,
            update=update,
            mask=mask,
            BLOCK_N=BLOCK_N,
            D=D,
            STAGES=STAGES,
            WARPGROUP=WARPGROUP,
            IS_PACKED=IS_PACKED,
            FORM=FORM,
        )
        mbarrier.arrive(q_empty.index(buffer), count=1)
        write_tile(state, place, outputs, factor, BLOCK_N, D, WARPGROUP, IS_PACKED)
        filled += row[3] - row[1]
        taken += gl.maximum(row[2] - row[1] - 1, 0)
        count += 1
        mbarrier.wait(q_full.index(count & 1), (count >> 1) & 1)
        item = _read_word(tile_s.index(count & 1))
    close_turns(WARPGROUP, FORM)


@gluon.jit(do_not_specialize=["items"])
def block_sparse_persistent_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    rows_ptr,
    cols_ptr,
    work_ptr,
    sequences_ptr,
    pages_ptr,
    mask_aux_ptr,
    factor,
    page_size,
    taken_ptr,
    items,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    stride_lse_b,
    stride_lse_h,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    FORM: gl.constexpr,
    at_keys: gl.constexpr,
    IS_PACKED: gl.constexpr,
    update: gl.constexpr,
    mask: gl.constexpr,
):
    """The arguments of both kernels of ``block_sparse.py``; entries of ``work`` that were taken
    beyond the first of each CTA, which is 0 at the start, and how many there are."""
    q_s = gl.allocate_shared_memory(q_desc.dtype, [4] + q_desc.block_type.shape, q_desc.layout)
    tile_s = gl.allocate_shared_memory(gl.int32, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    k_s, v_s, k_full, k_empty, v_full, v_empty = allocate_ring(k_desc, v_desc, STAGES)
    turn = allocate_turn(q_full, FORM)
    descs = (q_desc, k_desc, v_desc)
    buffers = (q_s, k_s, v_s)
    barriers = (q_full, k_full, k_empty, v_full, v_empty, turn)
    plan = (rows_ptr, cols_ptr, work_ptr, sequences_ptr, mask_aux_ptr)
    strides = (stride_out_b, stride_out_h, stride_out_m, stride_lse_b, stride_lse_h)
    outputs = (out_ptr, lse_ptr) + strides
    handed = (tile_s, q_empty)
    tiles = (buffers, barriers, handed, plan, outputs, factor)
    loads = (descs, buffers, barriers, handed, plan, (pages_ptr, page_size), (taken_ptr, items))
    # constexprs must be written in the call: a variable's would become tensors
    gl.warp_specialize(
        [
            (_compute_tiles, (tiles, update, mask, BLOCK_N, D, STAGES, 0, IS_PACKED, FORM)),
            (_compute_tiles, (tiles, update, mask, BLOCK_N, D, STAGES, 1, IS_PACKED, FORM)),
            (_load_tiles, (loads, at_keys, GROUP, STAGES, BLOCK_N, IS_PACKED)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
