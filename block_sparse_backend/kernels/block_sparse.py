"""Block-sparse attention: a query tile walks its row of a plan.

    S = scale q k^T,  P = softmax(S) over the row's FULL blocks, then its PARTIAL ones,  O = P v

q [B, H, M, D], k [B, Hkv, N, D], v [B, Hkv, N, DV]; O in q's dtype, LSE float32 [B, H, M], natural.
Softmax in base 2 and fp32. One program for each entry of the plan's ``work``. The mask is a
function handed in as a constexpr: see ``kernels/hooks.py`` and ``variants/masks.py``.
"""

import triton
import triton.language as tl

from block_sparse_backend.kernels.hooks import softmax_update

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _walk(
    state,
    b_q,
    row,
    place,
    sources,
    plan,
    factor,
    mask: tl.constexpr,
    shapes: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add one run of the row's blocks to (acc, high, total)."""
    acc, high, total = state
    begin, end = row
    batch, kv_head, k_begin, kv_len, q_pos = place
    k_desc, v_desc = sources
    cols_ptr, mask_aux_ptr = plan
    k_shape: tl.constexpr = shapes[0]
    v_shape: tl.constexpr = shapes[1]
    for j in tl.range(begin, end, num_stages=STAGES):
        col = tl.load(cols_ptr + j)
        start = col * k_shape[0]
        k_pos = start + tl.arange(0, k_shape[0])
        b_k = tl.reshape(k_desc.load([batch, kv_head, k_begin + start, 0]), k_shape)
        b_s = tl.dot(b_q, b_k.T)
        b_v = tl.reshape(v_desc.load([batch, kv_head, k_begin + start, 0]), v_shape)
        if IS_PARTIAL:
            inside = k_pos < kv_len
            seen = mask(q_pos, k_pos[None, :], col, mask_aux_ptr)
            b_s = tl.where(seen & inside[None, :], b_s, -float("inf"))
            # what lies beyond the sequence may be anything, and 0 times NaN is NaN
            b_v = tl.where(inside[:, None], b_v, 0.0)
        b_p, alpha, high, total = softmax_update(b_s, high, total, factor, IS_PARTIAL)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * alpha[:, None])
    return acc, high, total


@triton.jit
def block_sparse_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    rows_ptr,
    cols_ptr,
    work_ptr,
    sequences_ptr,
    mask_aux_ptr,
    factor,
    stride_out_b,
    stride_out_h,
    stride_out_m,
    stride_lse_b,
    stride_lse_h,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    mask: tl.constexpr,
):
    """``row``: begin, full_end, end; ``sequence``: see ``BlockPlan.sequences``."""
    work = work_ptr + 4 * tl.program_id(0)
    i_s = tl.load(work)
    if i_s < 0:
        return
    head, tile, i_r = tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    sequence = sequences_ptr + 6 * i_s
    batch, q_begin, q_len = tl.load(sequence), tl.load(sequence + 1), tl.load(sequence + 2)
    k_begin, kv_len = tl.load(sequence + 3), tl.load(sequence + 4)
    row = rows_ptr + 4 * i_r.to(tl.int64)
    begin, full_end, end = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    kv_head = head // GROUP
    o_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    b_q = q_desc.load([batch, head, q_begin + tile * BLOCK_M, 0])
    b_q = tl.reshape(b_q, (BLOCK_M, BLOCK_D))
    q_pos = (o_m + tl.load(sequence + 5))[:, None]

    place = (batch, kv_head, k_begin, kv_len, q_pos)
    plan = (cols_ptr, mask_aux_ptr)
    shapes: tl.constexpr = ((BLOCK_N, BLOCK_D), (BLOCK_N, DV))
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    high = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for IS_PARTIAL in tl.static_range(2 if HAS_PARTIAL else 1):
        acc, high, total = _walk(
            (acc, high, total),
            b_q,
            (full_end, end) if IS_PARTIAL else (begin, full_end),
            place,
            (k_desc, v_desc),
            plan,
            factor,
            mask=mask,
            shapes=shapes,
            IS_PARTIAL=IS_PARTIAL,
            STAGES=1 if IS_PARTIAL else STAGES,
        )
    empty = total == 0.0
    b_o = acc / tl.where(empty, 1.0, total)[:, None]
    natural = (high * factor + tl.log2(tl.where(empty, 1.0, total))) * LN_2
    natural = tl.where(empty, -float("inf"), natural)
    m_m = o_m < q_len
    at = q_begin + o_m
    lse = lse_ptr + batch.to(tl.int64) * stride_lse_b + head.to(tl.int64) * stride_lse_h
    tl.store(lse + at, natural, mask=m_m)
    out = out_ptr + batch.to(tl.int64) * stride_out_b + head.to(tl.int64) * stride_out_h
    at = at.to(tl.int64)[:, None] * stride_out_m + tl.arange(0, DV)[None, :]
    tl.store(out + at, b_o.to(out_ptr.dtype.element_ty), mask=m_m[:, None])
