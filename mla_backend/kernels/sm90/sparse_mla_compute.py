# ruff: noqa: RUF059  Gluon needs lists added and tuples taken apart whole
"""Common parts of both Hopper kernels of sparse MLA: work, shared memory, computing warps.

Fetching warps put blocks of 64 keys into a ring of shared memory; the computing warpgroups take
them out. ``sparse_mla.py`` fetches records, ``sparse_mla_rows.py`` rows of bf16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from backend_core.kernels.gluon_names import thread_barrier

BLOCK = gl.constexpr(64)
STAGES = gl.constexpr(2)
"""Blocks that the ring has room for."""
OVERHEAD = gl.constexpr(2)
"""Cost of a piece of work beside its blocks, in blocks."""
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
KEY_SCALE = gl.constexpr(1048576.0)
"""Ratio of a number to its value in the ring, where it comes from a record: 2^20."""


@gluon.constexpr_function
def _logits(heads, warps):
    """[64, heads] of a product: warpgroups share the heads."""
    groups = warps // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, heads // groups, 16])


@gluon.constexpr_function
def _output(heads, warps):
    """[512, heads] of a product: warpgroups share the channels."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, heads, 16])


@gluon.jit
def release():
    """Let the kernel after this one start, which waits where it needs what this one writes."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _blocks(entries):
    return (entries + BLOCK - 1) // BLOCK


@gluon.jit
def _entries(request, m_request, lengths, sizes):
    """Entries of both lists that count, of requests or of one."""
    lengths_ptr, extra_lengths_ptr = lengths
    topk, extra_topk, query_tokens, splits = sizes
    count = request * 0 + topk
    if lengths_ptr is not None:
        count = gl.load(lengths_ptr + request, mask=m_request, other=0)
        count = gl.minimum(gl.maximum(count, 0), topk)
    extra_count = request * 0 + extra_topk
    if extra_lengths_ptr is not None:
        extra_count = gl.load(extra_lengths_ptr + request, mask=m_request, other=0)
        extra_count = gl.minimum(gl.maximum(extra_count, 0), extra_topk)
    return count, extra_count


@gluon.jit
def in_turns(items):
    """Where a CTA's work begins, and how many items it has, if all take whole items in turns."""
    i_cta = gl.program_id(0)
    ctas = gl.num_programs(0)
    return i_cta, i_cta * 0, (items - i_cta + ctas - 1) // ctas


@gluon.jit
def equal_share(items, lengths, sizes, REQUESTS: gl.constexpr, ROW_TILES: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """(item, what of its weight lies before, how much follows) of this CTA's share.

    An item is a query token's tile of heads; it weighs its blocks and `OVERHEAD`. All items lie
    behind one another, and each CTA takes an equal share of the line. Weights are counted in parts,
    of which a block has as many as there are CTAs, so that every cut is a whole number.
    """
    layout: gl.constexpr = gl.BlockedLayout([REQUESTS // 32], [32], [WARPS], [0])
    shares = gl.num_programs(0)
    each = sizes[2] * ROW_TILES
    o_request = gl.arange(0, REQUESTS, layout=layout)
    m_request = o_request < items // each
    b_count, b_extra = _entries(o_request, m_request, lengths, sizes)
    b_item = gl.where(m_request, _blocks(b_count) + _blocks(b_extra) + OVERHEAD, 0)
    b_end = gl.associative_scan(b_item, 0, _add) * each
    total = gl.sum(b_item, 0) * each
    start = gl.program_id(0) * total
    m_before = (b_end * shares <= start) & m_request
    request = gl.sum(m_before.to(gl.int32), 0)
    inside = start - gl.sum(gl.where(m_before, b_item, 0), 0) * each * shares
    weight = gl.sum(gl.where(o_request == request, b_item, 0), 0) * shares
    return request * each + inside // weight, inside % weight, total


@gluon.jit
def piece(number, skip, left, lengths, sizes, REQUESTS: gl.constexpr, IS_SPLIT: gl.constexpr,
          ROW_TILES: gl.constexpr):  # fmt: skip
    """(token, tile of heads, split, entries of both lists, blocks of the first list, first block,
    end block, what is taken of what is left, whether the item is whole) of an item."""
    i_rows = number % ROW_TILES
    i_token = number // ROW_TILES
    i_split = i_token * 0
    if IS_SPLIT:
        i_split = i_token % sizes[3]
        i_token = i_token // sizes[3]
    count, extra_count = _entries(i_token // sizes[2], True, lengths, sizes)
    own_blocks = _blocks(count)
    blocks = own_blocks + _blocks(extra_count)
    begin = blocks * 0
    end = blocks
    take = left * 0 + 1
    is_whole = left > 0
    if IS_SPLIT:
        begin = i_split * blocks // sizes[3]
        end = (i_split + 1) * blocks // sizes[3]
    if REQUESTS > 0:
        weight = (blocks + OVERHEAD) * gl.num_programs(0)
        take = gl.minimum(weight - skip, left)
        is_whole = take == weight
        begin = (skip.to(gl.int64) * blocks // weight).to(gl.int32)
        end = ((skip + take).to(gl.int64) * blocks // weight).to(gl.int32)
    token = i_token.to(gl.int64)
    return token, i_rows, i_split, count, extra_count, own_blocks, begin, end, take, is_whole


@gluon.jit
def load_names(i, first, end, lists, counts, ROWS: gl.constexpr, layout: gl.constexpr):
    """Entries ``first`` and on of block i, as they are; -1 beyond a list and of blocks beyond end.

    Nothing is made of them here: their first use waits for them, a block later.
    """
    list_ptr, extra_list_ptr = lists
    count, extra_count, own_blocks = counts
    is_own = i < own_blocks
    position = gl.where(is_own, i, i - own_blocks) * BLOCK + first
    position += gl.arange(0, ROWS, layout=layout)
    names = gl.where(is_own, list_ptr, extra_list_ptr)
    m_listed = (position < gl.where(is_own, count, extra_count)) & (i < end)
    return gl.load(names + position, mask=m_listed, other=-1)


@gluon.jit
def allocate(HEADS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Shared memory of a CTA: (ring of keys, whether each key is seen, full, empty, queries, p).

    Barriers: ``full`` of a stage completes with ARRIVALS, ``empty`` when both products read it.
    """
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 512], gl.bfloat16)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEADS, 512], gl.bfloat16)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEADS], gl.bfloat16)
    seen_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 512], k_layout)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [HEADS, 512], q_layout)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [64, HEADS], p_layout)
    seen_s = gl.allocate_shared_memory(gl.float32, [STAGES, 64], seen_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=ARRIVALS)
        mbarrier.init(empty.index(i), count=1)
    return k_s, seen_s, full, empty, q_s, p_s


@gluon.jit
def _store_part(b_o, weight, to_ptr, heads_left, layout: gl.constexpr, RECORDS: gl.constexpr):
    """[512, HEADS] times a weight per head, to rows of 512 at ``to_ptr``."""
    HEADS: gl.constexpr = b_o.shape[1]
    o_channel = gl.arange(0, 512, layout=gl.SliceLayout(1, layout))
    o_head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, layout))
    weight = gl.convert_layout(weight, gl.SliceLayout(0, layout))
    if RECORDS:  # the ring's scale and order of channels
        weight *= KEY_SCALE
        o_channel = (o_channel & ~3) | ((o_channel & 1) << 1) | ((o_channel >> 1) & 1)
    at = o_head[None, :] * 512 + o_channel[:, None]
    gl.store(to_ptr + at, b_o * weight[None, :], mask=(o_head < heads_left)[None, :])


@gluon.jit
def _store_whole(b_o, weight, out, heads_left, q_s, layout: gl.constexpr, RECORDS: gl.constexpr):
    """[512, HEADS] times a weight per head, to rows of 512 at ``out``.

    It goes through the queries' memory: a thread has channels of one head far apart.
    """
    HEADS: gl.constexpr = b_o.shape[1]
    weight = gl.convert_layout(weight, gl.SliceLayout(0, b_o.type.layout))
    if RECORDS:  # the ring's scale
        weight *= KEY_SCALE
    value = (b_o * weight[None, :]).to(gl.bfloat16)
    q_s.permute((1, 0)).store(value)
    thread_barrier()
    b_out = q_s.load(layout)
    thread_barrier()
    if RECORDS:  # the ring's order of channels
        b_four = gl.permute(gl.reshape(b_out, [HEADS, 128, 2, 2]), (0, 1, 3, 2))
        b_out = gl.convert_layout(gl.reshape(b_four, [HEADS, 512]), layout)
    o_head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, layout))
    o_channel = gl.arange(0, 512, layout=gl.SliceLayout(0, layout))
    at = o_head[:, None] * 512 + o_channel[None, :]
    gl.store(out + at, b_out, mask=(o_head < heads_left)[:, None])


@gluon.jit
def compute(buffers, work, queries, outputs, scale, WARPS: gl.constexpr,
            ROW_TILES: gl.constexpr, HEADS: gl.constexpr, REQUESTS: gl.constexpr,
            IS_SPLIT: gl.constexpr, RECORDS: gl.constexpr):  # fmt: skip
    """The computing warpgroups: logits, softmax and output of every piece of the CTA's work."""
    k_s, seen_s, full, empty, q_s, p_s = buffers
    first, lengths, sizes = work
    number, skip, left = first
    q_ptr, stride_q_t, stride_q_h, heads = queries
    sinks_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr = outputs
    s_layout: gl.constexpr = _logits(HEADS, WARPS)
    o_layout: gl.constexpr = _output(HEADS, WARPS)
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    o_head = gl.arange(0, HEADS, layout=head_layout)
    q_head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, q_layout))
    q_channel = gl.arange(0, 512, layout=gl.SliceLayout(0, q_layout))
    scale_log2 = scale * LOG2_E
    if RECORDS:
        scale_log2 *= KEY_SCALE
    read = 0
    while left > 0:
        i_token, i_rows, i_split, count, extra_count, own_blocks, begin, end, take, is_whole = (
            piece(number, skip, left, lengths, sizes, REQUESTS, IS_SPLIT, ROW_TILES)
        )
        heads_left = heads - i_rows * HEADS
        q = q_ptr + i_token * stride_q_t + i_rows * HEADS * stride_q_h
        b_q = gl.load(
            q + q_head[:, None] * stride_q_h + q_channel[None, :],
            mask=(q_head < heads_left)[:, None],
            other=0.0,
        )
        if RECORDS:
            b_four = gl.permute(gl.reshape(b_q, [HEADS, 128, 2, 2]), (0, 1, 3, 2))
            q_s.store(gl.reshape(b_four, [HEADS, 512]))
        else:
            q_s.store(b_q)
        fence_async_shared()
        thread_barrier()
        b_top = gl.full([HEADS], -float("inf"), gl.float32, layout=head_layout)
        b_sums = gl.zeros([64, HEADS], gl.float32, layout=s_layout)
        b_o = gl.zeros([512, HEADS], gl.float32, layout=o_layout)
        for _i in range(begin, end):
            stage = read % STAGES
            mbarrier.wait(full.index(stage), (read // STAGES) & 1)
            fence_async_shared()
            k = k_s.index(stage)
            b_seen = seen_s.index(stage).load(key_layout)
            b_s = gl.zeros([64, HEADS], gl.float32, layout=s_layout)
            b_s = warpgroup_mma(k, q_s.permute((1, 0)), b_s, use_acc=False)
            b_s = b_s * scale_log2 + b_seen[:, None]
            b_now = gl.maximum(b_top, gl.max(b_s, 0))
            shift = gl.where(b_now == -float("inf"), 0.0, b_now)
            keep = gl.exp2(b_top - shift)
            b_p = gl.exp2(b_s - shift[None, :])
            b_sums = b_sums * keep[None, :] + b_p
            p_s.store(b_p.to(gl.bfloat16))
            fence_async_shared()
            b_o = b_o * gl.convert_layout(keep, gl.SliceLayout(0, o_layout))[None, :]
            thread_barrier()
            b_o = warpgroup_mma(k.permute((1, 0)), p_s, b_o)
            thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            b_top = b_now
            read += 1
        b_sum = gl.sum(b_sums, 0)
        none = b_sum == 0.0
        top = gl.where(none, 0.0, b_top)
        l2 = gl.where(none, -float("inf"), top + gl.log2(b_sum))
        m_head = o_head < heads_left
        row = i_token * heads + i_rows * HEADS
        slot_row = (i_token * sizes[3] + i_split) * heads + i_rows * HEADS
        if REQUESTS > 0:
            slot_row = (gl.program_id(0) * 2 + gl.where(skip == 0, 1, 0)).to(gl.int64) * HEADS
        if not IS_SPLIT:  # noqa: SIM102  the first is known to the compiler
            if is_whole:
                total = b_sum
                if sinks_ptr is not None:
                    sinks = sinks_ptr + i_rows * HEADS + o_head
                    total += gl.exp2(gl.load(sinks, mask=m_head, other=0.0) * LOG2_E - top)
                bad = none | (b_sum != b_sum)
                lse = gl.where(bad, float("inf"), l2 * LN_2)
                gl.store(lse_ptr + row + o_head, lse, mask=m_head)
                weight = gl.where(none, 0.0, 1.0 / total)
                out = out_ptr + row * 512
                _store_whole(b_o, weight, out, heads_left, q_s, q_layout, RECORDS)
        if IS_SPLIT or REQUESTS > 0:  # noqa: SIM102
            if IS_SPLIT or not is_whole:
                gl.store(partial_lse_ptr + slot_row + o_head, l2, mask=m_head)
                weight = gl.where(none, 0.0, 1.0 / b_sum)
                to_ptr = partial_out_ptr + slot_row * 512
                _store_part(b_o, weight, to_ptr, heads_left, o_layout, RECORDS)
        if REQUESTS > 0:
            number += 1
        else:
            number += gl.num_programs(0)
        left -= take
        skip = skip * 0
