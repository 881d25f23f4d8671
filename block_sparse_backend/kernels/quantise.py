"""INT8 queries and keys and e4m3 values for 8-bit attention (SageAttention2, arXiv 2411.10958).

    k8 = round((k - mean k) / s_k)
    q8 = round(q / s_q)
    v8 = e4m3((v - mean v) / s_v)

A scale is the largest magnitude of its group over 127. Groups *per warp*: 16
queries; one key block. Groups *per thread*: queries r and r + 8 of 16; keys 8 i + 2 t and
8 i + 2 t + 1 of a block, for t of 0 to 3, which is what one thread holds of an MMA accumulator.

Inputs are [B, H, L, D] views with any strides of batch, head and token. Grid: (blocks of tokens,
B * H) where a kernel does not say otherwise.

Of packed sequences ``spans_ptr`` points to the first token and the number of tokens of each, in
rows of six (``BlockPlan.sequences``), and results are padded to ``length`` tokens; it is ``None``
where a sequence is a whole batch entry.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added, it leaves an integer in the mantissa
TINY = tl.constexpr(1e-7)
LEVELS = tl.constexpr(127.0)


@triton.jit
def _span(x_ptr, spans_ptr, batch, stride_n):
    """Where a packed sequence begins, and its number of tokens."""
    span = spans_ptr + 6 * batch
    return x_ptr + tl.load(span).to(tl.int64) * stride_n, tl.load(span + 1)


@triton.jit
def _tile(
    x_ptr, i_bh, o_n, length, stride_b, stride_h, stride_n, HEADS: tl.constexpr, D: tl.constexpr
):
    """Tokens ``o_n`` of one head in fp32, 0 beyond the end: [BLOCK, D]."""
    at = (i_bh // HEADS).to(tl.int64) * stride_b + (i_bh % HEADS).to(tl.int64) * stride_h
    rows = x_ptr + at + o_n.to(tl.int64)[:, None] * stride_n + tl.arange(0, D)[None, :]
    return tl.load(rows, mask=o_n[:, None] < length, other=0.0).to(tl.float32)


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

    stats [B * H, 3 or 1, chunks, D].
    """
    i_c, i_bh = tl.program_id(0), tl.program_id(1)
    if spans_ptr is not None:
        x_ptr, length = _span(x_ptr, spans_ptr, i_bh // HEADS, stride_x_n)
    # one accumulator for each place of the tile: a reduction over rows costs a barrier each
    total = tl.zeros([BLOCK, D], tl.float32)
    low = tl.full([BLOCK, D], float("inf"), tl.float32)
    high = tl.full([BLOCK, D], -float("inf"), tl.float32)
    for start in tl.range(0, CHUNK, BLOCK, num_stages=2):
        o_n = i_c * CHUNK + start + tl.arange(0, BLOCK)
        b_x = _tile(x_ptr, i_bh, o_n, length, stride_x_b, stride_x_h, stride_x_n, HEADS, D)
        total += b_x
        if HAS_RANGE:
            inside = o_n[:, None] < length
            low = tl.minimum(low, tl.where(inside, b_x, float("inf")))
            high = tl.maximum(high, tl.where(inside, b_x, -float("inf")))
    step = tl.num_programs(0) * D
    kinds: tl.constexpr = 3 if HAS_RANGE else 1
    out = stats_ptr + i_bh.to(tl.int64) * kinds * step + i_c * D + tl.arange(0, D)
    tl.store(out, tl.sum(total, 0))
    if HAS_RANGE:
        tl.store(out + step, tl.min(low, 0))
        tl.store(out + 2 * step, tl.max(high, 0))


@triton.jit
def mean_kernel(
    sums_ptr,
    mean_ptr,
    spans_ptr,
    parts,
    length,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
):
    """mean [rows, D] = the sum of sums [rows, parts, D] over its parts, over ``length``.

    Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, D)
    total = tl.zeros([STEP, D], tl.float32)
    for start in range(0, parts, STEP):
        o_p = start + tl.arange(0, STEP)
        at = sums_ptr + (row * parts + o_p)[:, None] * D + o_d[None, :]
        total += tl.load(at, mask=o_p[:, None] < parts, other=0.0)
    if spans_ptr is not None:
        length = tl.maximum(tl.load(spans_ptr + 6 * (row // HEADS) + 1), 1)
    tl.store(mean_ptr + row * D + o_d, tl.sum(total, 0) / length)


@triton.jit
def value_scales_kernel(
    stats_ptr,
    mean_ptr,
    scale_ptr,
    inverse_ptr,
    spans_ptr,
    parts,
    length,
    HEADS: tl.constexpr,
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
    if spans_ptr is not None:
        length = tl.maximum(tl.load(spans_ptr + 6 * (row // HEADS) + 1), 1)
    mean = tl.sum(total, 0) / length
    top = tl.maximum(tl.max(high, 0) - mean, mean - tl.min(low, 0))
    scale = tl.maximum(top, 1e-12) / E4M3_MAX
    tl.store(mean_ptr + row * D + o_d, mean)
    tl.store(scale_ptr + row * D + o_d, scale)
    tl.store(inverse_ptr + row * D + o_d, 1.0 / scale)


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
def quantise_keys_kernel(
    k_ptr,
    k_mean_ptr,
    out_ptr,
    scale_ptr,
    sums_ptr,
    likeness_ptr,
    spans_ptr,
    length,
    stride_k_b,
    stride_k_h,
    stride_k_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_THREAD: tl.constexpr,
    HAS_POOL: tl.constexpr,
    HAS_LIKENESS: tl.constexpr,
):
    """out int8 [B, Hkv, N, D]; scale [B, Hkv, blocks, 1 or 4]; and where HAS_POOL the sums [B, Hkv,
    blocks, D] of a block's smoothed keys and their likeness [B, Hkv, blocks]."""
    i_n, i_bh = tl.program_id(0), tl.program_id(1)
    o_n, o_d = i_n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    pitch = length
    if spans_ptr is not None:
        k_ptr, length = _span(k_ptr, spans_ptr, i_bh // HEADS, stride_k_n)
    m_n = o_n < length
    b_k = _tile(k_ptr, i_bh, o_n, length, stride_k_b, stride_k_h, stride_k_n, HEADS, D)
    b_k = tl.where(m_n[:, None], b_k - tl.load(k_mean_ptr + i_bh * D + o_d)[None, :], 0.0)
    block = i_bh.to(tl.int64) * tl.num_programs(0) + i_n
    if HAS_POOL:
        none = tl.zeros([D], tl.float32)
        total, centre = add_to_pool(none, none, b_k, HAS_LIKENESS)
        count = tl.minimum(length - i_n * BLOCK, BLOCK).to(tl.float32)
        store_pool(sums_ptr, likeness_ptr, block, total, centre, count, HAS_LIKENESS)
    at = out_ptr + (i_bh.to(tl.int64) * pitch + o_n)[:, None] * D + o_d[None, :]
    if PER_THREAD:
        top = tl.max(tl.abs(b_k), 1)
        groups = tl.max(tl.max(tl.reshape(top, (BLOCK // 8, 4, 2)), 2), 0) / LEVELS + TINY
        tl.store(scale_ptr + block * 4 + tl.arange(0, 4), groups)
        scale = tl.broadcast_to(groups[None, :, None], (BLOCK // 8, 4, 2))
        tl.store(
            at, _to_int8(b_k * (1.0 / tl.reshape(scale, (BLOCK,)))[:, None]), mask=m_n[:, None]
        )
    else:
        # over all at once: the values of a thread, then a warp's, then the warps'
        scale = tl.max(tl.abs(b_k)) / LEVELS + TINY
        tl.store(scale_ptr + block, scale)
        tl.store(at, _to_int8(b_k * (1.0 / scale)), mask=m_n[:, None])


@triton.jit
def quantise_queries_kernel(
    q_ptr,
    k_mean_ptr,
    out_ptr,
    scale_ptr,
    shift_ptr,
    sums_ptr,
    likeness_ptr,
    spans_ptr,
    softmax_scale,
    length,
    stride_q_b,
    stride_q_h,
    stride_q_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_THREAD: tl.constexpr,
    HAS_POOL: tl.constexpr,
    HAS_LIKENESS: tl.constexpr,
):
    """out int8 [B, H, M, D]; scale [B, H, M / 16, 1 or 8]; shift [B, H, M], what smooth keys took
    from a query's logits: softmax_scale q . mean k; and where HAS_POOL the sums [B, H, tiles, D] of
    a tile's queries and their likeness [B, H, tiles].

    A tile is walked in slices of 16 queries, what shares scales: a program of one warp needs no
    barrier.
    """
    i_m, i_bh = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, D)
    row = i_bh.to(tl.int64)
    pitch, slices = length, tl.cdiv(length, 16)
    if spans_ptr is not None:
        q_ptr, length = _span(q_ptr, spans_ptr, i_bh // HEADS, stride_q_n)
    k_mean = tl.load(k_mean_ptr + (i_bh // GROUP) * D + o_d)
    total, centre = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for i_s in range(i_m * (BLOCK // 16), tl.minimum((i_m + 1) * (BLOCK // 16), slices)):
        o_m = i_s * 16 + tl.arange(0, 16)
        m_m = o_m < length
        b_q = _tile(q_ptr, i_bh, o_m, length, stride_q_b, stride_q_h, stride_q_n, HEADS, D)
        shift = tl.sum(b_q * k_mean[None, :], 1) * softmax_scale
        tl.store(shift_ptr + row * pitch + o_m, shift, mask=m_m)
        if HAS_POOL:
            total, centre = add_to_pool(total, centre, b_q, HAS_LIKENESS)
        at = out_ptr + (row * pitch + o_m)[:, None] * D + o_d[None, :]
        if PER_THREAD:
            groups = tl.max(tl.reshape(tl.max(tl.abs(b_q), 1), (2, 8)), 0) / LEVELS + TINY
            tl.store(scale_ptr + (row * slices + i_s) * 8 + tl.arange(0, 8), groups)
            scale = tl.reshape(tl.broadcast_to(groups[None, :], (2, 8)), (16,))
            tl.store(at, _to_int8(b_q * (1.0 / scale)[:, None]), mask=m_m[:, None])
        else:
            scale = tl.max(tl.abs(b_q)) / LEVELS + TINY
            tl.store(scale_ptr + row * slices + i_s, scale)
            tl.store(at, _to_int8(b_q * (1.0 / scale)), mask=m_m[:, None])
    if HAS_POOL:
        count = tl.minimum(length - i_m * BLOCK, BLOCK).to(tl.float32)
        block = row * tl.num_programs(0) + i_m
        store_pool(sums_ptr, likeness_ptr, block, total, centre, count, HAS_LIKENESS)


@triton.jit
def quantise_values_kernel(
    v_ptr,
    inverse_ptr,
    mean_ptr,
    out_ptr,
    spans_ptr,
    length,
    padded,
    stride_v_b,
    stride_v_h,
    stride_v_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out e4m3 [B, Hkv, D, padded], 0 beyond the end.

    Tokens are permuted within 16, place 4 t + 2 h + b holding token 8 h + 2 t + b: then the fp8
    operand of P v takes the accumulator of q k^T as the registers lie.
    """
    i_n, i_bh = tl.program_id(0), tl.program_id(1)
    place, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    r = place % 16
    o_n = i_n * BLOCK + place - r + 8 * (r // 2 % 2) + 2 * (r // 4) + r % 2
    if spans_ptr is not None:
        v_ptr, length = _span(v_ptr, spans_ptr, i_bh // HEADS, stride_v_n)
    b_v = _tile(v_ptr, i_bh, o_n, length, stride_v_b, stride_v_h, stride_v_n, HEADS, D)
    mean = tl.load(mean_ptr + i_bh * D + o_d)
    b_v = tl.where(o_n[:, None] < length, b_v - mean[None, :], 0.0)
    b_v = (b_v * tl.load(inverse_ptr + i_bh * D + o_d)[None, :]).to(tl.float8e4nv)
    row = (i_bh.to(tl.int64) * D + o_d[:, None]) * padded
    tl.store(out_ptr + row + (i_n * BLOCK + place)[None, :], tl.trans(b_v))
