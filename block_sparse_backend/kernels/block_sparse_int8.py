"""Block-sparse attention with INT8 q k^T, and P v in e4m3 or 16 bits.

    S = s_q s_k (q8 k8^T),   P = softmax(scale S),   O = s_v (P v8) + mean v

What smoothing the keys took from a query's logits is the same for all its keys, so only the LSE
gets it back (``shift``). With e4m3 values P is scaled to the format's range, and the tensor core's
short accumulator holds one key block's sum, which is added in fp32: the two levels of
SageAttention2. One program for each entry of the plan's ``work``; a plan of one batch of equal
sequences, or of packed ones, which are a batch of padded sequences here but for the output. LSE is
natural.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23, where fp32 counts in ones
ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _query_scales(scale_ptr, row, o_m, length, PER_THREAD: tl.constexpr):
    """The scale of each query: one for 16, or eight, of which queries r and r + 8 share one."""
    at = row * tl.cdiv(length, 16) + o_m // 16
    if PER_THREAD:
        at = at * 8 + o_m % 8
    return tl.load(scale_ptr + at, mask=o_m < length, other=1.0)


@triton.jit
def _scores(b_q, b_k, scale_ptr, block, PER_THREAD: tl.constexpr):
    """q8 k8^T in fp32, times the scales of keys where a block has several.

    One scale is left for the exponent, which multiplies anyway, and the accumulator begins at
    ``ROUNDER``, from where the bits of fp32 count upwards as an integer does: 127^2 D is below
    2^22, so the sum needs no conversion. What is rounded off the exponent is then a unit or two of
    q8 k8^T.
    """
    rows: tl.constexpr = b_q.shape[0]
    cols: tl.constexpr = b_k.shape[0]
    if PER_THREAD:
        # the reshape shows that the columns of one thread share a scale: one load, one register
        scales = tl.load(scale_ptr + block * 4 + tl.arange(0, 4))
        b_s = tl.reshape(tl.dot(b_q, b_k.T).to(tl.float32), (rows, cols // 8, 4, 2))
        b_s = tl.reshape(b_s * scales[None, None, :, None], (rows, cols))
    else:
        b_s = tl.full([rows, cols], ROUNDER_BITS, tl.int32)
        b_s = tl.dot(b_q, b_k.T, b_s, out_dtype=tl.int32).to(tl.float32, bitcast=True)
    return b_s


@triton.jit
def e4m3_values(acc, b_p, v_desc, batch, head, start, inside, MASKED: tl.constexpr):
    """acc + P v from [B, Hkv, D, N] with tokens permuted within 16; empty places hold 0."""
    rows: tl.constexpr = b_p.shape[0]
    cols: tl.constexpr = b_p.shape[1]
    b_v = tl.reshape(v_desc.load([batch, head, 0, start]), (acc.shape[1], cols))
    # the accumulator's registers in the order of the fp8 operand: no shuffle
    b_p = tl.permute(tl.reshape(b_p, (rows, cols // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    b_p = tl.reshape(b_p, (rows, cols)).to(tl.float8e4nv)
    return acc + tl.dot(b_p, b_v.T)


@triton.jit
def half_values(acc, b_p, v_desc, batch, head, start, inside, MASKED: tl.constexpr):
    """acc + P v from [B, Hkv, N, D] in 16 bits."""
    b_v = tl.reshape(v_desc.load([batch, head, start, 0]), (b_p.shape[1], acc.shape[1]))
    if MASKED:
        b_v = tl.where(inside[:, None], b_v, 0.0)
    return tl.dot(b_p.to(b_v.dtype), b_v, acc)


@triton.jit
def _walk(
    state,
    b_q,
    row,
    place,
    scales,
    sources,
    plan,
    hooks: tl.constexpr,
    P_LOG2: tl.constexpr,
    PER_THREAD: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add one run of the row's blocks to (acc, high, total); ``high`` is before ``factor``."""
    acc, high, total = state
    begin, end = row
    batch, kv_head, kv_len, q_pos = place
    factor, k_scale_ptr, first_block = scales
    k_desc, v_desc = sources
    cols_ptr, mask_aux_ptr = plan
    values: tl.constexpr = hooks[0]
    mask: tl.constexpr = hooks[1]
    for j in tl.range(begin, end, num_stages=STAGES):
        col = tl.load(cols_ptr + j)
        start = col * BLOCK_N
        k_pos = start + tl.arange(0, BLOCK_N)
        b_k = tl.reshape(k_desc.load([batch, kv_head, start, 0]), (BLOCK_N, b_q.shape[1]))
        b_s = _scores(b_q, b_k, k_scale_ptr, first_block + col, PER_THREAD)
        inside = k_pos < kv_len
        if IS_PARTIAL:
            seen = mask(q_pos, k_pos[None, :], col, mask_aux_ptr)
            b_s = tl.where(seen & inside[None, :], b_s, -float("inf"))
        top, slope = tl.max(b_s, 1), factor
        if not PER_THREAD:
            unit = tl.load(k_scale_ptr + first_block + col)
            top, slope = (top - ROUNDER) * unit, factor * unit
        new = tl.maximum(high, top)
        shift = new
        if IS_PARTIAL:
            shift = tl.where(new == -float("inf"), 0.0, new)
        alpha = tl.exp2((high - shift) * factor)
        down = shift * factor - P_LOG2
        if not PER_THREAD:
            down += ROUNDER * slope
        b_p = tl.exp2(b_s * slope[:, None] - down[:, None])
        total = total * alpha + tl.sum(b_p, 1)
        high = new
        acc = values(acc * alpha[:, None], b_p, v_desc, batch, kv_head, start, inside, IS_PARTIAL)
    return acc, high, total


# One key, folded as a constant, left rows of NaN on Hopper with e4m3 values (Triton 3.6).
@triton.jit(do_not_specialize=["kv_len"])
def block_sparse_int8_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    v_mean_ptr,
    shift_ptr,
    rows_ptr,
    cols_ptr,
    work_ptr,
    sequences_ptr,
    mask_aux_ptr,
    softmax_scale,
    q_len,
    kv_len,
    q_position,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    P_LOG2: tl.constexpr,
    PER_THREAD: tl.constexpr,
    values: tl.constexpr,
    mask: tl.constexpr,
):
    """P_LOG2: what P is scaled up by, log2(448) for e4m3 and 0 for 16 bits. PER_THREAD: 16 queries
    have eight scales and a block of keys four, else one each."""
    work = work_ptr + 4 * tl.program_id(0)
    batch = tl.load(work)
    if batch < 0:
        return
    head, tile, i_r = tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    row = rows_ptr + 4 * i_r.to(tl.int64)
    begin, full_end, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    kv_head = head // GROUP
    q_row = (batch * HEADS + head).to(tl.int64)
    kv_row = (batch * (HEADS // GROUP) + kv_head).to(tl.int64)
    o_m, o_d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    m_m = o_m < q_len
    first_block = kv_row * tl.cdiv(kv_len, BLOCK_N)
    if sequences_ptr is not None:
        sequence = sequences_ptr + 6 * batch
        out_ptr += tl.load(sequence + 1).to(tl.int64) * stride_out_m
        m_m = o_m < tl.load(sequence + 2)
        kv_len, q_position = tl.load(sequence + 4), tl.load(sequence + 5)
    b_q = tl.reshape(q_desc.load([batch, head, tile * BLOCK_M, 0]), (BLOCK_M, D))
    factor = tl.full([BLOCK_M], 1.4426950408889634, tl.float32) * softmax_scale
    factor *= _query_scales(q_scale_ptr, q_row, o_m, q_len, PER_THREAD)
    place = (batch, kv_head, kv_len, (o_m + q_position)[:, None])
    scales = (factor, k_scale_ptr, first_block)
    hooks: tl.constexpr = (values, mask)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for IS_PARTIAL in tl.static_range(2 if HAS_PARTIAL else 1):
        acc, high, total = _walk(
            (acc, high, total),
            b_q,
            (full_end, end) if IS_PARTIAL else (begin, full_end),
            place,
            scales,
            (k_desc, v_desc),
            (cols_ptr, mask_aux_ptr),
            hooks=hooks,
            P_LOG2=P_LOG2,
            PER_THREAD=PER_THREAD,
            IS_PARTIAL=IS_PARTIAL,
            BLOCK_N=BLOCK_N,
            STAGES=1 if IS_PARTIAL else STAGES,
        )
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    natural = (high * factor + tl.log2(total) - P_LOG2) * LN_2
    natural += tl.load(shift_ptr + q_row * q_len + o_m, mask=m_m, other=0.0)
    tl.store(lse_ptr + q_row * q_len + o_m, tl.where(empty, -float("inf"), natural), mask=m_m)
    acc = acc / total[:, None] * tl.load(v_scale_ptr + kv_row * D + o_d)[None, :]
    mean = tl.load(v_mean_ptr + kv_row * D + o_d)
    acc += tl.where(empty[:, None], 0.0, mean[None, :])
    out = out_ptr + batch.to(tl.int64) * stride_out_b + head.to(tl.int64) * stride_out_h
    at = o_m.to(tl.int64)[:, None] * stride_out_m + o_d[None, :]
    tl.store(out + at, acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None])
