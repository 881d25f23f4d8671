"""INT8 queries and keys and e4m3 values for 8-bit attention (SageAttention2, arXiv 2411.10958).

    k8 = round((k - mean k) / s_k)
    q8 = round((q - mean q) / s_q)
    v8 = e4m3((v - mean v) / s_v)

A scale is the largest magnitude of its group over the number of levels. Groups *per warp*: 16
queries; one key block. Groups *per thread*: queries r and r + 8 of 16; keys 8 i + 2 t and
8 i + 2 t + 1 of a block, for t of 0 to 3, which is what one thread holds of an MMA accumulator.

Inputs are [B, H, L, D] views with any strides of batch, head and token. Grid: (blocks of tokens,
B * H) in every kernel.
"""

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: added, it leaves an integer in the mantissa
TINY = tl.constexpr(1e-7)


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
    """Nearest integer, ties to even."""
    return ((x + ROUNDER) - ROUNDER).to(tl.int8)


@triton.jit
def column_stats_kernel(
    x_ptr,
    stats_ptr,
    length,
    stride_b,
    stride_h,
    stride_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RANGE: tl.constexpr,
):
    """Sum, and minimum and maximum where HAS_RANGE, of each channel over CHUNK tokens.

    stats [3 or 1, B * H, chunks, D].
    """
    i_c, i_bh = tl.program_id(0), tl.program_id(1)
    # one accumulator for each place of the tile: a reduction over rows costs a barrier each
    total = tl.zeros([BLOCK, D], tl.float32)
    low = tl.full([BLOCK, D], float("inf"), tl.float32)
    high = tl.full([BLOCK, D], -float("inf"), tl.float32)
    for start in tl.range(0, CHUNK, BLOCK, num_stages=2):
        o_n = i_c * CHUNK + start + tl.arange(0, BLOCK)
        b_x = _tile(x_ptr, i_bh, o_n, length, stride_b, stride_h, stride_n, HEADS, D)
        total += b_x
        if HAS_RANGE:
            inside = o_n[:, None] < length
            low = tl.minimum(low, tl.where(inside, b_x, float("inf")))
            high = tl.maximum(high, tl.where(inside, b_x, -float("inf")))
    step = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * D
    out = stats_ptr + (i_bh.to(tl.int64) * tl.num_programs(0) + i_c) * D + tl.arange(0, D)
    tl.store(out, tl.sum(total, 0))
    if HAS_RANGE:
        tl.store(out + step, tl.min(low, 0))
        tl.store(out + 2 * step, tl.max(high, 0))


@triton.jit
def quantise_keys_kernel(
    k_ptr,
    k_mean_ptr,
    q_mean_ptr,
    out_ptr,
    scale_ptr,
    bias_ptr,
    length,
    levels,
    stride_b,
    stride_h,
    stride_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_THREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """out int8 [B, Hkv, N, D]; scale [B, Hkv, blocks, 1 or 4]; bias [B, H, N], the mean query's
    product with every smoothed key."""
    i_n, i_bh = tl.program_id(0), tl.program_id(1)
    o_n, o_d = i_n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    m_n = o_n < length
    b_k = _tile(k_ptr, i_bh, o_n, length, stride_b, stride_h, stride_n, HEADS, D)
    b_k = tl.where(m_n[:, None], b_k - tl.load(k_mean_ptr + i_bh * D + o_d)[None, :], 0.0)
    if HAS_BIAS:
        for i_g in range(GROUP):
            row = (i_bh * GROUP + i_g).to(tl.int64)
            mean = tl.load(q_mean_ptr + row * D + o_d)
            tl.store(bias_ptr + row * length + o_n, tl.sum(b_k * mean[None, :], 1), mask=m_n)
    top = tl.max(tl.abs(b_k), 1)
    block = i_bh * tl.num_programs(0) + i_n
    at = out_ptr + (i_bh.to(tl.int64) * length + o_n)[:, None] * D + o_d[None, :]
    if PER_THREAD:
        groups = tl.max(tl.max(tl.reshape(top, (BLOCK // 8, 4, 2)), 2), 0) / levels + TINY
        tl.store(scale_ptr + block * 4 + tl.arange(0, 4), groups)
        scale = tl.broadcast_to(groups[None, :, None], (BLOCK // 8, 4, 2))
        tl.store(
            at, _to_int8(b_k * (1.0 / tl.reshape(scale, (BLOCK,)))[:, None]), mask=m_n[:, None]
        )
    else:
        scale = tl.max(top, 0) / levels + TINY
        tl.store(scale_ptr + block, scale)
        tl.store(at, _to_int8(b_k * (1.0 / scale)), mask=m_n[:, None])


@triton.jit
def quantise_queries_kernel(
    q_ptr,
    q_mean_ptr,
    k_mean_ptr,
    out_ptr,
    scale_ptr,
    shift_ptr,
    softmax_scale,
    length,
    levels,
    stride_b,
    stride_h,
    stride_n,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_THREAD: tl.constexpr,
    HAS_MEAN: tl.constexpr,
):
    """out int8 [B, H, M, D]; scale [B, H, M / 16, 1 or 8]; shift [B, H, M], what smooth keys took
    from a query's logits: softmax_scale q . mean k."""
    i_m, i_bh = tl.program_id(0), tl.program_id(1)
    o_m, o_d = i_m * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    m_m = o_m < length
    b_q = _tile(q_ptr, i_bh, o_m, length, stride_b, stride_h, stride_n, HEADS, D)
    row = i_bh.to(tl.int64)
    k_mean = tl.load(k_mean_ptr + (i_bh // GROUP) * D + o_d)
    shift = tl.sum(b_q * k_mean[None, :], 1) * softmax_scale
    tl.store(shift_ptr + row * length + o_m, shift, mask=m_m)
    if HAS_MEAN:
        b_q = tl.where(m_m[:, None], b_q - tl.load(q_mean_ptr + row * D + o_d)[None, :], 0.0)
    top = tl.reshape(tl.max(tl.abs(b_q), 1), (BLOCK // 16, 2, 8))
    at = out_ptr + (row * length + o_m)[:, None] * D + o_d[None, :]
    slices = tl.cdiv(length, 16)
    o_s = i_m * (BLOCK // 16) + tl.arange(0, BLOCK // 16)
    if PER_THREAD:
        groups = tl.max(top, 1) / levels + TINY
        place = (row * slices + o_s)[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(scale_ptr + place, groups, mask=(o_s < slices)[:, None])
        scale = tl.broadcast_to(groups[:, None, :], (BLOCK // 16, 2, 8))
    else:
        groups = tl.max(tl.max(top, 2), 1) / levels + TINY
        tl.store(scale_ptr + row * slices + o_s, groups, mask=o_s < slices)
        scale = tl.broadcast_to(groups[:, None, None], (BLOCK // 16, 2, 8))
    tl.store(at, _to_int8(b_q * (1.0 / tl.reshape(scale, (BLOCK,)))[:, None]), mask=m_m[:, None])


@triton.jit
def quantise_values_kernel(
    v_ptr,
    inverse_ptr,
    mean_ptr,
    out_ptr,
    length,
    padded,
    stride_b,
    stride_h,
    stride_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_MEAN: tl.constexpr,
):
    """out e4m3 [B, Hkv, D, padded], 0 beyond the end.

    Tokens are permuted within 16, place 4 t + 2 h + b holding token 8 h + 2 t + b: then the fp8
    operand of P v takes the accumulator of q k^T as the registers lie.
    """
    i_n, i_bh = tl.program_id(0), tl.program_id(1)
    place, o_d = tl.arange(0, BLOCK), tl.arange(0, D)
    r = place % 16
    o_n = i_n * BLOCK + place - r + 8 * (r // 2 % 2) + 2 * (r // 4) + r % 2
    b_v = _tile(v_ptr, i_bh, o_n, length, stride_b, stride_h, stride_n, HEADS, D)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + i_bh * D + o_d)
        b_v = tl.where(o_n[:, None] < length, b_v - mean[None, :], 0.0)
    b_v = (b_v * tl.load(inverse_ptr + i_bh * D + o_d)[None, :]).to(tl.float8e4nv)
    row = (i_bh.to(tl.int64) * D + o_d[:, None]) * padded
    tl.store(out_ptr + row + (i_n * BLOCK + place)[None, :], tl.trans(b_v))
