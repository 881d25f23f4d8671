"""INT8 queries and keys and e4m3 values for 8-bit attention (SageAttention2, arXiv 2411.10958).

    k8 = round((k - mean k) / s_k)
    q8 = round(q / s_q)
    v8 = e4m3((v - mean v) / s_v)

A scale is the largest magnitude of its group over 127. Each query has its own; of a span of keys,
keys 8 i + 2 t and 8 i + 2 t + 1 share one, for t of 0 to 3, which is what one thread holds of an
MMA accumulator.

Inputs are [B, H, L, D] views with any strides of batch, head and token. Grids have one axis, B * H
times the number of blocks of tokens, block after block of a head, where a kernel does not say
otherwise.

Keys of packed sequences come in the blocks of ``spans_ptr``, int32 [blocks, 3]: first token, number
of tokens, and sequence (``BlockPlan.key_blocks``); it is ``None`` where a sequence is a whole batch
entry. Of such keys means have one row for each head of a sequence.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added, it leaves an integer in the mantissa
TINY = tl.constexpr(1e-35)  # over 448 it is normal, and so are reciprocals
LEVELS = tl.constexpr(127.0)


@triton.jit
def _span(spans_ptr, i_n, length, BLOCK: tl.constexpr):
    """First token, number of tokens and sequence of a block."""
    first, count, sequence = i_n * BLOCK, tl.minimum(length - i_n * BLOCK, BLOCK), 0
    if spans_ptr is not None:
        span = spans_ptr + 3 * i_n
        first, count, sequence = tl.load(span), tl.load(span + 1), tl.load(span + 2)
    return first, count, sequence


@triton.jit
def _tile(
    x_ptr, i_bh, o_n, m_n, stride_b, stride_h, stride_n, HEADS: tl.constexpr, D: tl.constexpr
):
    """Tokens ``o_n`` of one head in fp32, 0 where there is none: [BLOCK, D]."""
    at = (i_bh // HEADS).to(tl.int64) * stride_b + (i_bh % HEADS).to(tl.int64) * stride_h
    rows = x_ptr + at + o_n.to(tl.int64)[:, None] * stride_n + tl.arange(0, D)[None, :]
    return tl.load(rows, mask=m_n[:, None], other=0.0).to(tl.float32)


@triton.jit
def _to_int8(x):
    """Nearest integer, ties to even: the lowest byte of the sum's bits, two's complement."""
    return (x + ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def column_stats_kernel(
    x_ptr,
    stats_ptr,
    spans_ptr,
    length,
    parts,
    stride_x_b,
    stride_x_h,
    stride_x_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RANGE: tl.constexpr,
):
    """Sum, and minimum and maximum where HAS_RANGE, of each channel over CHUNK tokens.

    stats [B * H, 3 or 1, parts, D].
    """
    i_c, i_bh = tl.program_id(0) % parts, tl.program_id(0) // parts
    first, count, _ = _span(spans_ptr, i_c, length, CHUNK)
    # one accumulator for each place of the tile: a reduction over rows costs a barrier each
    total = tl.zeros([BLOCK, D], tl.float32)
    low = tl.full([BLOCK, D], float("inf"), tl.float32)
    high = tl.full([BLOCK, D], -float("inf"), tl.float32)
    for start in tl.range(0, CHUNK, BLOCK, num_stages=2):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < count
        b_x = _tile(x_ptr, i_bh, first + o_n, m_n, stride_x_b, stride_x_h, stride_x_n, HEADS, D)
        total += b_x
        if HAS_RANGE:
            low = tl.minimum(low, tl.where(m_n[:, None], b_x, float("inf")))
            high = tl.maximum(high, tl.where(m_n[:, None], b_x, -float("inf")))
    step = parts * D
    kinds: tl.constexpr = 3 if HAS_RANGE else 1
    out = stats_ptr + i_bh.to(tl.int64) * kinds * step + i_c * D + tl.arange(0, D)
    tl.store(out, tl.sum(total, 0))
    if HAS_RANGE:
        tl.store(out + step, tl.min(low, 0))
        tl.store(out + 2 * step, tl.max(high, 0))


@triton.jit
def _sum_of_parts(sums_ptr, row, begin, end, parts, D: tl.constexpr, STEP: tl.constexpr):
    """The sum of sums [rows, parts, D] over parts ``begin`` to ``end`` of a row: [D]."""
    o_d = tl.arange(0, D)
    total = tl.zeros([STEP, D], tl.float32)
    for start in range(begin, end, STEP):
        o_p = start + tl.arange(0, STEP)
        at = sums_ptr + (row * parts + o_p)[:, None] * D + o_d[None, :]
        total += tl.load(at, mask=o_p[:, None] < end, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def mean_kernel(
    sums_ptr,
    mean_ptr,
    tops_ptr,
    first_blocks_ptr,
    sequences_ptr,
    parts,
    length,
    tops,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
):
    """mean [rows, D] = the sum of sums [rows, parts, D] over its parts, over ``length``.

    Of packed sequences sums are [H, parts, D], mean is [S, H, D], and those of sequence i are parts
    ``first_blocks[i]`` to ``first_blocks[i + 1]``. Grid: (rows of mean,).

    tops [tops], if there are any, are set to 0 for the kernels that follow.
    """
    row = tl.program_id(0).to(tl.int64)
    if tops_ptr is not None:
        for i in range(tl.program_id(0), tops, tl.num_programs(0)):
            tl.store(tops_ptr + i, 0.0)
    source, begin, end = row, 0, parts
    if first_blocks_ptr is not None:
        i_s = row // HEADS
        source = row % HEADS
        begin, end = tl.load(first_blocks_ptr + i_s), tl.load(first_blocks_ptr + i_s + 1)
        length = tl.maximum(tl.load(sequences_ptr + 6 * i_s + 4), 1)
    total = _sum_of_parts(sums_ptr, source, begin, end, parts, D, STEP)
    tl.store(mean_ptr + row * D + tl.arange(0, D), total / length)


@triton.jit
def value_scales_kernel(
    stats_ptr,
    mean_ptr,
    scale_ptr,
    inverse_ptr,
    parts,
    length,
    D: tl.constexpr,
    STEP: tl.constexpr,
    E4M3_MAX: tl.constexpr,
):
    """From stats [rows, 3, parts, D] of ``column_stats_kernel``: the mean, the
    scale of what it leaves, and the scale's reciprocal, [rows, D] each. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, D)
    total = tl.zeros([STEP, D], tl.float32)
    low = tl.full([STEP, D], float("inf"), tl.float32)
    high = tl.full([STEP, D], -float("inf"), tl.float32)
    for start in range(0, parts, STEP):
        o_p = start + tl.arange(0, STEP)
        inside = o_p[:, None] < parts
        at = stats_ptr + (row * 3 * parts + o_p)[:, None] * D + o_d[None, :]
        total += tl.load(at, mask=inside, other=0.0)
        low = tl.minimum(low, tl.load(at + parts * D, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(at + 2 * parts * D, mask=inside, other=-float("inf")))
    mean = tl.sum(total, 0) / length
    top = tl.maximum(tl.max(high, 0) - mean, mean - tl.min(low, 0))
    scale = tl.maximum(top, TINY) / E4M3_MAX
    tl.store(mean_ptr + row * D + o_d, mean)
    tl.store(scale_ptr + row * D + o_d, scale)
    tl.store(inverse_ptr + row * D + o_d, 1.0 / scale)


@triton.jit
def value_offset_kernel(
    sums_ptr,
    mean_ptr,
    scale_ptr,
    offset_ptr,
    parts,
    length,
    D: tl.constexpr,
    STEP: tl.constexpr,
):
    """offset [rows, D] = mean(v - scale v8), from sums [rows, parts, D] of v8. Grid: (rows,).

    Rounding leaves errors with a mean of their own, which many keys do not average away.
    """
    row = tl.program_id(0).to(tl.int64)
    at = row * D + tl.arange(0, D)
    rounded = _sum_of_parts(sums_ptr, row, 0, parts, parts, D, STEP) / length
    tl.store(offset_ptr + at, tl.load(mean_ptr + at) - tl.load(scale_ptr + at) * rounded)


@triton.jit
def add_to_pool(total, centre, b_x, HAS_LIKENESS: tl.constexpr):
    """Add the tokens of b_x [rows, D] (0 where there is none) to a block's sum [D], and their
    directions to ``centre`` [D]."""
    total += tl.sum(b_x, 0)
    if HAS_LIKENESS:
        centre += tl.sum(b_x * tl.rsqrt(tl.maximum(tl.sum(b_x * b_x, 1), 1e-20))[:, None], 0)
    return total, centre


@triton.jit
def store_pool(sums_ptr, likeness_ptr, block, total, centre, count, HAS_LIKENESS: tl.constexpr):
    """A block's sum of tokens, and |mean direction|^2, the mean of the Gram matrix of directions
    without forming it."""
    o_d = tl.arange(0, total.shape[0])
    tl.store(sums_ptr + block * total.shape[0] + o_d, total)
    if HAS_LIKENESS:
        centre = centre / count
        tl.store(likeness_ptr + block, tl.sum(centre * centre, 0))


@triton.jit
def _places(top, m_n, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """The place of each key of a block whose keys are sorted by their largest magnitude ``top``,
    keys that are not there behind them; and the group of sorted keys that it is in, as
    [BLOCK, 4 BLOCK / SPAN]. No two keys have one place, also if they hold NaN.

    Keys of a group share a scale. They take the places that one thread holds in a span.
    """
    o_b = tl.arange(0, BLOCK)
    key = tl.where(m_n & (top == top), top, float("inf"))
    before = key[None, :] < key[:, None]
    before |= (key[None, :] == key[:, None]) & (o_b[None, :] < o_b[:, None])
    rank = tl.sum(before.to(tl.int32), 1)
    group, w = rank // (SPAN // 4), rank % (SPAN // 4)
    place = group // 4 * SPAN + 8 * (w // 2) + group % 4 * 2 + w % 2
    return place, group[:, None] == tl.arange(0, 4 * (BLOCK // SPAN))[None, :]


@triton.jit
def _keep_largest(ptr, x):
    """The larger of a float32 in memory and ``x``, both 0 or more, takes its place. Their bits are
    in the order of integers, so the one instruction for integers serves; a NaN leaves it as it is.
    """
    bits = tl.maximum(x, 0.0).to(tl.int32, bitcast=True)
    tl.atomic_max(ptr.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def quantise_keys_kernel(
    k_ptr,
    k_mean_ptr,
    out_ptr,
    scale_ptr,
    top_ptr,
    order_ptr,
    sums_ptr,
    likeness_ptr,
    spans_ptr,
    length,
    blocks,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
    HAS_POOL: tl.constexpr,
    HAS_LIKENESS: tl.constexpr,
):
    """out int8 [B, Hkv, N, D]; scale [B, Hkv, blocks, 4 BLOCK / SPAN]; top [B, Hkv], of packed
    sequences [S, Hkv], 0 before and the largest scale after it; where there is an order,
    int8 [B, Hkv, blocks, BLOCK], the keys of a block are sorted, it has the token of a block in
    each place, and out is [B, Hkv, blocks * BLOCK, D], 0 beyond the end; and where HAS_POOL the
    sums [B, Hkv, blocks, D] of a block's smoothed keys and their likeness [B, Hkv, blocks]."""
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    first, count, sequence = _span(spans_ptr, i_n, length, BLOCK)
    o_b, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    m_n = o_b < count
    b_k = _tile(k_ptr, i_bh, first + o_b, m_n, stride_k_b, stride_k_h, stride_k_n, HEADS, D)
    mean = tl.load(k_mean_ptr + (sequence * HEADS + i_bh) * D + o_d)
    b_k = tl.where(m_n[:, None], b_k - mean[None, :], 0.0)
    block = i_bh.to(tl.int64) * blocks + i_n
    if HAS_POOL:
        none = tl.zeros([D], tl.float32)
        total, centre = add_to_pool(none, none, b_k, HAS_LIKENESS)
        count = count.to(tl.float32)
        store_pool(sums_ptr, likeness_ptr, block, total, centre, count, HAS_LIKENESS)
    spans: tl.constexpr = BLOCK // SPAN
    top = tl.max(tl.abs(b_k), 1)
    _keep_largest(top_ptr + sequence * HEADS + i_bh, tl.max(top) / LEVELS)
    if order_ptr is not None:
        place, of_group = _places(top, m_n, BLOCK, SPAN)
        groups = tl.maximum(tl.max(tl.where(of_group, top[:, None], 0.0), 0) / LEVELS, TINY)
        tl.store(scale_ptr + block * (4 * spans) + tl.arange(0, 4 * spans), groups)
        tl.store(order_ptr + block * BLOCK + place, o_b.to(tl.int8))
        scale = tl.sum(tl.where(of_group, groups[None, :], 0.0), 1)
        at = out_ptr + (block * BLOCK + place)[:, None] * D + o_d[None, :]
        tl.store(at, _to_int8(b_k * (1.0 / scale)[:, None]))
    else:
        top = tl.reshape(top, (spans, SPAN // 8, 4, 2))
        groups = tl.maximum(tl.max(tl.max(top, 3), 1) / LEVELS, TINY)
        o_g = tl.reshape(tl.arange(0, 4 * spans), (spans, 4))
        tl.store(scale_ptr + block * (4 * spans) + o_g, groups)
        scale = tl.broadcast_to(groups[:, None, :, None], (spans, SPAN // 8, 4, 2))
        b_k = b_k * (1.0 / tl.reshape(scale, (BLOCK,)))[:, None]
        at = out_ptr + (i_bh.to(tl.int64) * length + first + o_b)[:, None] * D + o_d[None, :]
        tl.store(at, _to_int8(b_k), mask=m_n[:, None])


@triton.jit
def quantise_queries_kernel(
    q_ptr,
    k_mean_ptr,
    out_ptr,
    scale_ptr,
    top_ptr,
    shift_ptr,
    sums_ptr,
    likeness_ptr,
    softmax_scale,
    length,
    blocks,
    stride_q_b,
    stride_q_h,
    stride_q_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_POOL: tl.constexpr,
    HAS_LIKENESS: tl.constexpr,
):
    """out int8 [B, H, M, D]; scale [B, H, M]; top [B, H], 0 before and the largest scale after it;
    shift [B, H, M], what smooth keys took from a query's logits: softmax_scale q . mean k; and
    where HAS_POOL the sums [B, H, blocks, D] of a tile's queries and their likeness [B, H, blocks].
    No LSE is asked for where ``shift_ptr`` is ``None``.

    A tile is walked in slices of 16 queries: a program of one warp needs no barrier.
    """
    i_m, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    o_d = tl.arange(0, D)
    row = i_bh.to(tl.int64) * length
    total, centre = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    count = tl.minimum(length - i_m * BLOCK, BLOCK)
    largest = 0.0
    for start in range(0, count, 16):
        o_m = i_m * BLOCK + start + tl.arange(0, 16)
        m_m = o_m < length
        b_q = _tile(q_ptr, i_bh, o_m, m_m, stride_q_b, stride_q_h, stride_q_n, HEADS, D)
        if shift_ptr is not None:
            k_mean = tl.load(k_mean_ptr + (i_bh // GROUP) * D + o_d)
            shift = tl.sum(b_q * k_mean[None, :], 1) * softmax_scale
            tl.store(shift_ptr + row + o_m, shift, mask=m_m)
        if HAS_POOL:
            total, centre = add_to_pool(total, centre, b_q, HAS_LIKENESS)
        scale = tl.maximum(tl.max(tl.abs(b_q), 1) / LEVELS, TINY)
        tl.store(scale_ptr + row + o_m, scale, mask=m_m)
        largest = tl.maximum(largest, tl.max(scale))
        at = out_ptr + (row + o_m)[:, None] * D + o_d[None, :]
        tl.store(at, _to_int8(b_q * (1.0 / scale)[:, None]), mask=m_m[:, None])
    _keep_largest(top_ptr + i_bh, largest)
    if HAS_POOL:
        block = i_bh.to(tl.int64) * blocks + i_m
        count = count.to(tl.float32)
        store_pool(sums_ptr, likeness_ptr, block, total, centre, count, HAS_LIKENESS)


@triton.jit
def _to_e4m3(b_x):
    """b_x [tokens, D] in e4m3, with sums over tokens that are closer to b_x's than nearest values'.

    Where many keys weigh alike the errors of single values average away, and that of their sum does
    not. So the values that lie nearest the middle between two of e4m3 are rounded the other way, as
    many as make up that error if they lie anywhere alike; where that leaves a larger error, as it
    may of a few tokens, all stay nearest. Denormals have the step of 2^-6.
    """
    nearest = b_x.to(tl.float8e4nv).to(tl.float32)
    left = b_x - nearest
    power = tl.maximum(tl.abs(nearest), 0.015625).to(tl.int32, bitcast=True) & 0x7F800000
    step = power.to(tl.float32, bitcast=True) * 0.125
    error = tl.sum(left, 0)
    sign = tl.where(error > 0.0, 1.0, -1.0)
    least = 0.5 - tl.abs(error) / tl.sum(step, 0)
    step = tl.where(left * sign[None, :] > least[None, :] * step, step, 0.0)
    made_up = tl.sum(step, 0) < 2.0 * tl.abs(error)
    step = tl.where(made_up[None, :], step, 0.0)
    return (nearest + sign[None, :] * step).to(tl.float8e4nv)


@triton.jit
def quantise_values_kernel(
    v_ptr,
    order_ptr,
    inverse_ptr,
    mean_ptr,
    out_ptr,
    sums_ptr,
    length,
    blocks,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out e4m3 [B, Hkv, D, blocks * BLOCK], 0 beyond the end; sums [B, Hkv, blocks, D] of it.

    Tokens come in the order of keys and are permuted within 16, place 4 t + 2 h + b holding that of
    key 8 h + 2 t + b: then the fp8 operand of P v takes the accumulator of q k^T as registers lie.
    """
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    place = tl.arange(0, BLOCK)
    r = place % 16
    o_n = place - r + 8 * (r // 2 % 2) + 2 * (r // 4) + r % 2
    row = i_bh.to(tl.int64)
    o_n = i_n * BLOCK + tl.load(order_ptr + (row * blocks + i_n) * BLOCK + o_n).to(tl.int32)
    m_n = o_n < length
    for first in tl.static_range(0, D, 64):  # as many channels as registers hold
        o_d = first + tl.arange(0, 64)
        x_ptr = v_ptr + first
        b_v = _tile(x_ptr, i_bh, o_n, m_n, stride_v_b, stride_v_h, stride_v_n, HEADS, 64)
        mean = tl.load(mean_ptr + row * D + o_d)
        b_v = tl.where(m_n[:, None], b_v - mean[None, :], 0.0)
        b_v = _to_e4m3(b_v * tl.load(inverse_ptr + row * D + o_d)[None, :])
        rounded = tl.sum(b_v.to(tl.float32), 0)
        tl.store(sums_ptr + (row * blocks + i_n) * D + o_d, rounded)
        at = (row * D + o_d[:, None]) * (blocks * BLOCK) + (i_n * BLOCK + place)[None, :]
        tl.store(out_ptr + at, tl.trans(b_v))
