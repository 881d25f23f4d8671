"""Block-sparse attention with INT8 q k^T, and P v in e4m3 or 16 bits.

    S = s_q s_k (q8 k8^T),   P = softmax(scale S),   O = s_v (P v8) + mean(v - s_v v8)

What smoothing the keys took from a query's logits is the same for all its keys, so only the LSE
gets it back (``shift``). With e4m3 values P is scaled to the format's range, beyond which no weight
may come, and the tensor core's short accumulator holds one key block's sum, which is added in fp32:
the two levels of SageAttention2. One program for each entry of the plan's ``work``; a plan of one
batch of equal sequences, or of packed ones. LSE is natural.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LARGEST_PRODUCT = tl.constexpr(127.0 * 127.0)  # of an int8 and an int8
LARGEST_LOGIT = tl.constexpr(22713.0)  # 2^15 to base 2, where fp32 counts in 1/256


@triton.jit
def _weights(b_s, units, high, factor, P_LOG2: tl.constexpr, IS_CAREFUL: tl.constexpr):
    """exp2 of the logits of q8 k8^T below the row's largest so far, that one, and what scales the
    sums before.

    b_s [rows, spans, keys / 8, 4, 2] are integers in fp32; units [spans, 4] are the scales of keys.
    One multiply-add subtracts the row's largest logit, which fp32 has rounded. Where IS_CAREFUL the
    difference to the group's largest is made first, exactly, for logits of any size.
    """
    top = tl.max(tl.max(b_s, 4), 2)
    new = tl.maximum(high, tl.max(tl.max(top * units[None], 1), 1))
    slope = factor[:, None, None] * units[None]
    if IS_CAREFUL:
        shift = tl.where(new == -float("inf"), 0.0, new)  # a row may have seen nothing yet
        top = tl.where(top == -float("inf"), 0.0, top)
        up = (top * units[None] - shift[:, None, None]) * factor[:, None, None]
        # a fused multiply-add makes the largest logit exceed its own rounded value
        up = tl.minimum(up, 0.0) + P_LOG2
        b_e = b_s - top[:, :, None, :, None]
        b_e = b_e * slope[:, :, None, :, None] + up[:, :, None, :, None]
        b_e = tl.where(b_s == -float("inf"), b_s, b_e)  # of keys that are 0 a slope may be 0
    else:
        shift = new
        down = shift * factor - P_LOG2
        b_e = b_s * slope[:, :, None, :, None] - down[:, None, None, None, None]
    return tl.exp2(b_e), tl.exp2((high - shift) * factor), new


@triton.jit
def _partial_sums(b_p):
    """Sums [rows, 4] of weights [rows, spans, keys / 8, 4, 2] over what a thread holds of a row,
    which are added once, at the end."""
    return tl.sum(tl.sum(tl.sum(b_p, 4), 2), 1)


@triton.jit
def e4m3_values(acc, b_p, v_desc, at, inside, MASKED: tl.constexpr):
    """acc + P v from [B, Hkv, D, N] with tokens permuted within 16; empty places hold 0."""
    batch, head, start = at
    rows: tl.constexpr = b_p.shape[0]
    cols: tl.constexpr = b_p.shape[1]
    b_v = tl.reshape(v_desc.load([batch, head, 0, start]), (acc.shape[1], cols))
    # the accumulator's registers in the order of the fp8 operand: no shuffle
    b_p = tl.permute(tl.reshape(b_p, (rows, cols // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    b_p = tl.reshape(b_p, (rows, cols)).to(tl.float8e4nv)
    return acc + tl.dot(b_p, b_v.T)


@triton.jit
def half_values(acc, b_p, v_desc, at, inside, MASKED: tl.constexpr):
    """acc + P v from [B, Hkv, N, D] in 16 bits."""
    batch, head, start = at
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
    IS_CAREFUL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add one run of the row's blocks to (acc, high, total); ``high`` is before ``factor``.

    IS_CAREFUL: blocks from ``full_end`` on are PARTIAL, and logits have any size.
    """
    acc, high, total = state
    begin, end, full_end = row
    batch, kv_head, k_begin, kv_len, q_pos = place
    factor, k_scale_ptr, first_block = scales
    k_desc, v_desc = sources
    cols_ptr, order_ptr, mask_aux_ptr = plan
    values: tl.constexpr = hooks[0]
    mask: tl.constexpr = hooks[1]
    rows: tl.constexpr = b_q.shape[0]
    spans: tl.constexpr = BLOCK_N // SPAN
    for j in tl.range(begin, end, num_stages=STAGES):
        col = tl.load(cols_ptr + j)
        start = col * BLOCK_N
        b_k = tl.reshape(k_desc.load([batch, kv_head, k_begin + start, 0]), (BLOCK_N, b_q.shape[1]))
        b_s = tl.dot(b_q, b_k.T, out_dtype=tl.int32).to(tl.float32)
        o_n = tl.arange(0, BLOCK_N)
        if IS_CAREFUL:  # noqa: SIM102  both are decided when the kernel is compiled
            if order_ptr is not None:
                o_n = tl.load(order_ptr + (first_block + col) * BLOCK_N + o_n).to(tl.int32)
        k_pos = start + o_n
        inside = k_pos < kv_len
        if IS_CAREFUL:  # noqa: SIM102  a walk over FULL blocks alone has no branch
            if j >= full_end:
                seen = mask(q_pos, k_pos[None, :], col, mask_aux_ptr) & inside[None, :]
                b_s = tl.where(seen, b_s, -float("inf"))
        # the columns that a thread holds share a scale within a span
        of_block = k_scale_ptr + (first_block + col) * (4 * spans)
        units = tl.load(of_block + tl.reshape(tl.arange(0, 4 * spans), (spans, 4)))
        b_s = tl.reshape(b_s, (rows, spans, BLOCK_N // (8 * spans), 4, 2))
        b_p, alpha, high = _weights(b_s, units, high, factor, P_LOG2, IS_CAREFUL)
        total = total * alpha[:, None] + _partial_sums(b_p)
        b_p = tl.reshape(b_p, (rows, BLOCK_N))
        at = (batch, kv_head, k_begin + start)
        acc = values(acc * alpha[:, None], b_p, v_desc, at, inside, IS_CAREFUL)
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
    q_top_ptr,
    k_top_ptr,
    order_ptr,
    v_scale_ptr,
    v_offset_ptr,
    shift_ptr,
    rows_ptr,
    cols_ptr,
    work_ptr,
    sequences_ptr,
    first_blocks_ptr,
    mask_aux_ptr,
    softmax_scale,
    q_len,
    kv_len,
    key_blocks,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    P_LOG2: tl.constexpr,
    values: tl.constexpr,
    mask: tl.constexpr,
):
    """q_scale [B, H, M]; k_scale [B, Hkv, key_blocks, 4 BLOCK_N / SPAN]; order [B, Hkv, key_blocks,
    BLOCK_N], absent where keys are in their own; q_top [B, H] and k_top [B, Hkv], of packed
    sequences [S, Hkv], the largest scales; v_scale and v_offset [B, Hkv, D], absent with 16-bit
    values; lse and shift [B, H, M]. ``sequences``, ``first_blocks`` are those of a plan of packed
    sequences, else absent. P_LOG2: what P is scaled up by, log2(448) for e4m3, 0 for 16 bits."""
    work = work_ptr + 4 * tl.program_id(0)
    batch = tl.load(work)
    if batch < 0:
        return
    head, tile, i_r = tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    row = rows_ptr + 4 * i_r.to(tl.int64)
    begin, full_end, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    kv_head = head // GROUP
    top_row = batch * (HEADS // GROUP) + kv_head
    first_block, q_begin, k_begin, q_position, last = 0, 0, 0, kv_len - q_len, q_len
    if sequences_ptr is not None:
        sequence = sequences_ptr + 6 * batch
        first_block = tl.load(first_blocks_ptr + batch)
        q_begin, last = tl.load(sequence + 1), tl.load(sequence + 2)
        k_begin, kv_len = tl.load(sequence + 3), tl.load(sequence + 4)
        q_position, batch = tl.load(sequence + 5), tl.load(sequence)
    q_row = (batch * HEADS + head).to(tl.int64)
    kv_row = (batch * (HEADS // GROUP) + kv_head).to(tl.int64)
    o_m, o_d = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D)
    m_m = o_m < last
    at_m = q_row * q_len + q_begin + o_m
    b_q = tl.reshape(q_desc.load([batch, head, q_begin + tile * BLOCK_M, 0]), (BLOCK_M, D))
    factor = tl.full([BLOCK_M], 1.4426950408889634, tl.float32) * softmax_scale
    factor *= tl.load(q_scale_ptr + at_m, mask=m_m, other=0.0)
    place = (batch, kv_head, k_begin, kv_len, (o_m + q_position)[:, None])
    scales = (factor, k_scale_ptr, kv_row * key_blocks + first_block)
    hooks: tl.constexpr = (values, mask)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M, 4], tl.float32)
    # bounds that follow from scalars in memory stay in uniform registers; others' loops would spill
    largest = tl.load(q_top_ptr + q_row) * tl.load(k_top_ptr + top_row) * softmax_scale
    fast_end = begin
    if largest * (LARGEST_PRODUCT * D) <= LARGEST_LOGIT:
        fast_end = full_end
    for IS_CAREFUL in tl.static_range(2):
        acc, high, total = _walk(
            (acc, high, total),
            b_q,
            (fast_end, end, full_end) if IS_CAREFUL else (begin, fast_end, full_end),
            place,
            scales,
            (k_desc, v_desc),
            (cols_ptr, order_ptr, mask_aux_ptr),
            hooks=hooks,
            P_LOG2=P_LOG2,
            IS_CAREFUL=IS_CAREFUL,
            BLOCK_N=BLOCK_N,
            SPAN=SPAN,
            STAGES=1 if IS_CAREFUL else STAGES,
        )
    total = tl.sum(total, 1)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    if lse_ptr is not None:
        shift = tl.load(shift_ptr + at_m, mask=m_m, other=0.0)
        natural = (high * factor + tl.log2(total) - P_LOG2) * LN_2 + shift
        tl.store(lse_ptr + at_m, tl.where(empty, -float("inf"), natural), mask=m_m)
        # integers have no NaN, so that one in a query or in the keys' mean shows here alone
        total = tl.where(shift == shift, total, shift)
    acc = acc / total[:, None]
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + kv_row * D + o_d)[None, :]
        offset = tl.load(v_offset_ptr + kv_row * D + o_d)
        acc += tl.where(empty[:, None], 0.0, offset[None, :])
    out = out_ptr + batch.to(tl.int64) * stride_out_b + head.to(tl.int64) * stride_out_h
    at = (q_begin + o_m).to(tl.int64)[:, None] * stride_out_m + o_d[None, :]
    tl.store(out + at, acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None])
