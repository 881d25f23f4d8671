# ruff: noqa: RUF059  Gluon needs lists added and tuples taken apart whole
"""The walk of block-sparse attention for Hopper in Gluon: one warp loads, two warpgroups compute.

The same walk as ``kernels/block_sparse.py``. Each computing warpgroup owns 64 queries of a tile of
128 and shares the blocks of keys and values with the other, so that a block is read from L2 once
for 128 queries. Over FULL blocks the product of the next block's keys and the product of this
block's weights are issued together, and the softmax of the next block may begin when the first is
there. ptxas lets only its maxima do so: the exponentials stand behind the wait for the second.
PARTIAL blocks take one step after the other.

Sequences are unpacked, and end where the tensors do, or packed, one after another. There a block
may hold what is beyond its sequence's end. Its logits are masked like any other; its values are set
to zero, for 0 times NaN is NaN.

Barriers: ``full`` of a stage completes when TMA has filled it, ``empty`` when both warpgroups have
read it. Blocks are counted from the row's first block, which is 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from block_sparse_backend.kernels.hooks import softmax_update

LN_2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _accumulator(columns):
    """A warpgroup's [64, columns] accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _left_operand(columns):
    """The operand of a product that gives ``_accumulator(columns)``, in registers."""
    return gl.DotOperandLayout(0, _accumulator(columns), 2)


@gluon.jit
def _keys(k_s, stage):
    """A block of keys as the right operand: [D, BLOCK_N]."""
    k = k_s.index(stage)
    return k.reshape([k.shape[2], k.shape[3]]).permute((1, 0))


@gluon.jit
def _values(v_s, stage):
    """A block of values: [BLOCK_N, D]."""
    v = v_s.index(stage)
    return v.reshape([v.shape[2], v.shape[3]])


@gluon.constexpr_function
def _rows_of_values(columns):
    """16 rows of values over a warpgroup, 16 bytes a thread at a time."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _clear_beyond(v, count, BLOCK_N: gl.constexpr, D: gl.constexpr):
    """Set the values of a block from row ``count`` on to zero.

    Both warpgroups do so, each before it multiplies: what one reads, the other can only write again
    as it is.
    """
    layout: gl.constexpr = _rows_of_values(D)
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    for i in gl.static_range(BLOCK_N // 16):
        if 16 * i + 16 > count:
            rows = v.slice(16 * i, 16, dim=0)
            b_v = rows.load(layout)
            rows.store(gl.where((16 * i + o_n < count)[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()


@gluon.jit
def _rescaled(acc, alpha, o_layout: gl.constexpr):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]


@gluon.jit
def _full_blocks(
    state,
    q,
    buffers,
    barriers,
    row,
    factor,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Add the FULL blocks to (acc, high, total), products and softmax overlapped."""
    acc, high, total = state
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    cols_ptr, begin, full_end, end = row
    o_layout: gl.constexpr = _accumulator(D)
    p_layout: gl.constexpr = _left_operand(D)
    if full_end > begin:
        s = gl.zeros([64, BLOCK_N], gl.float32, layout=_accumulator(BLOCK_N))
        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(q, _keys(k_s, 0), s, use_acc=False)
        mbarrier.arrive(k_empty.index(0), count=1)
        p, alpha, high, total = softmax_update(s, high, total, factor, False)
        p = gl.convert_layout(p.to(v_s.dtype), p_layout)
        for j in range(begin + 1, full_end):
            i = j - begin
            stage = i % STAGES
            before = (i - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
            s = warpgroup_mma(q, _keys(k_s, stage), s, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
            acc = warpgroup_mma(p, _values(v_s, before), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            next_p, alpha, high, total = softmax_update(s, high, total, factor, False)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = _rescaled(acc, alpha, o_layout)
            p = gl.convert_layout(next_p.to(v_s.dtype), p_layout)
        i = full_end - 1 - begin
        mbarrier.wait(v_full.index(i % STAGES), (i // STAGES) & 1)
        acc = warpgroup_mma(p, _values(v_s, i % STAGES), acc)
        mbarrier.arrive(v_empty.index(i % STAGES), count=1)
    return acc, high, total


@gluon.jit
def _partial_blocks(
    state,
    q,
    buffers,
    barriers,
    row,
    place,
    factor,
    mask: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """Add the PARTIAL blocks, with the plan's mask."""
    acc, high, total = state
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    cols_ptr, begin, full_end, end = row
    q_pos, kv_len, mask_aux_ptr = place
    s_layout: gl.constexpr = _accumulator(BLOCK_N)
    o_layout: gl.constexpr = _accumulator(D)
    p_layout: gl.constexpr = _left_operand(D)
    o_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    for j in range(full_end, end):
        i = j - begin
        stage = i % STAGES
        phase = (i // STAGES) & 1
        col = gl.load(cols_ptr + j)
        k_pos = (col * BLOCK_N + o_n)[None, :]
        mbarrier.wait(k_full.index(stage), phase)
        s = gl.zeros([64, BLOCK_N], gl.float32, layout=s_layout)
        s = warpgroup_mma(q, _keys(k_s, stage), s, use_acc=False)
        mbarrier.arrive(k_empty.index(stage), count=1)
        seen = mask(q_pos, k_pos, col, mask_aux_ptr)
        s = gl.where(seen & (k_pos < kv_len), s, -float("inf"))
        p, alpha, high, total = softmax_update(s, high, total, factor, True)
        acc = _rescaled(acc, alpha, o_layout)
        p = gl.convert_layout(p.to(v_s.dtype), p_layout)
        mbarrier.wait(v_full.index(stage), phase)
        if IS_PACKED:  # noqa: SIM102  the outer is decided when the kernel is compiled
            if (col + 1) * BLOCK_N > kv_len:
                _clear_beyond(_values(v_s, stage), kv_len - col * BLOCK_N, BLOCK_N, D)
        acc = warpgroup_mma(p, _values(v_s, stage), acc)
        mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, high, total


@gluon.jit
def compute_row(
    buffers,
    barriers,
    row,
    place,
    outputs,
    factor,
    mask: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    WARPGROUP: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """One computing warpgroup: its 64 queries over the whole row, then output and LSE."""
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    batch, head, first, q_begin, q_len, kv_len, q_position, mask_aux_ptr = place
    s_layout: gl.constexpr = _accumulator(BLOCK_N)
    mbarrier.wait(q_full, 0)
    o_m = first + 64 * WARPGROUP + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    acc = gl.zeros([64, D], gl.float32, layout=_accumulator(D))
    high = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, s_layout))
    q = q_s.index(WARPGROUP)
    q = q.reshape([64, q.shape[3]])
    state = _full_blocks(
        (acc, high, total),
        q,
        buffers,
        barriers,
        row,
        factor,
        BLOCK_N=BLOCK_N,
        D=D,
        STAGES=STAGES,
        WARPGROUP=WARPGROUP,
    )
    state = _partial_blocks(
        state,
        q,
        buffers,
        barriers,
        row,
        ((o_m + q_position)[:, None], kv_len, mask_aux_ptr),
        factor,
        mask=mask,
        BLOCK_N=BLOCK_N,
        D=D,
        STAGES=STAGES,
        IS_PACKED=IS_PACKED,
    )
    _write_tile(state, place, outputs, factor, BLOCK_N, D, WARPGROUP, IS_PACKED)


@gluon.jit
def _write_tile(
    state,
    place,
    outputs,
    factor,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    WARPGROUP: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """Output and LSE of a warpgroup's 64 queries."""
    acc, high, total = state
    batch, head, first, q_begin, q_len, kv_len, q_position, mask_aux_ptr = place
    out_ptr, lse_ptr, stride_out_b, stride_out_h, stride_out_m, stride_lse_b, stride_lse_h = outputs
    o_layout: gl.constexpr = _accumulator(D)
    o_m = first + 64 * WARPGROUP
    o_m += gl.arange(0, 64, layout=gl.SliceLayout(1, _accumulator(BLOCK_N)))
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    natural = gl.where(empty, -float("inf"), (high * factor + gl.log2(total)) * LN_2)
    lse = lse_ptr + batch.to(gl.int64) * stride_lse_b + head.to(gl.int64) * stride_lse_h
    if IS_PACKED:
        lse += q_begin
    gl.store(lse + o_m, natural, mask=o_m < q_len)
    acc = _rescaled(acc, 1.0 / total, o_layout)
    o_m = first + 64 * WARPGROUP + gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    out = out_ptr + batch.to(gl.int64) * stride_out_b + head.to(gl.int64) * stride_out_h
    if IS_PACKED:
        out += q_begin.to(gl.int64) * stride_out_m
    at = o_m.to(gl.int64)[:, None] * stride_out_m + o_d[None, :]
    gl.store(out + at, acc.to(out_ptr.dtype.element_ty), mask=(o_m < q_len)[:, None])
