"""SpargeAttn's prediction (arXiv 2502.18137): pooled blocks, their likeness, the blocks to keep."""

import triton
import triton.language as tl


@triton.jit
def pool_kernel(
    x_ptr,
    mean_ptr,
    pooled_ptr,
    likeness_ptr,
    length,
    stride_b,
    stride_h,
    stride_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean token of each block of [B, H, L, D], and the block's mean pairwise cosine.

    pooled float32 [B, H, blocks, D], of x - mean; likeness [B, H, blocks] = |mean of x / |x||^2,
    which is the mean of the Gram matrix without forming it. Grid: (blocks, B * H).
    """
    i_n, i_bh = tl.program_id(0), tl.program_id(1)
    o_n, o_d = i_n * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    m_n = o_n[:, None] < length
    at = (i_bh // HEADS).to(tl.int64) * stride_b + (i_bh % HEADS).to(tl.int64) * stride_h
    rows = x_ptr + at + o_n.to(tl.int64)[:, None] * stride_n + o_d[None, :]
    b_x = tl.load(rows, mask=m_n, other=0.0).to(tl.float32)
    b_x = tl.where(m_n, b_x - tl.load(mean_ptr + i_bh * D + o_d)[None, :], 0.0)
    count = tl.minimum(length - i_n * BLOCK, BLOCK).to(tl.float32)
    unit = b_x * tl.rsqrt(tl.maximum(tl.sum(b_x * b_x, 1), 1e-20))[:, None]
    centre = tl.sum(unit, 0) / count
    block = i_bh.to(tl.int64) * tl.num_programs(0) + i_n
    tl.store(likeness_ptr + block, tl.sum(centre * centre, 0))
    tl.store(pooled_ptr + block * D + o_d, tl.sum(b_x, 0) / count)


@triton.jit
def select_blocks_kernel(
    scores_ptr,
    q_likeness_ptr,
    k_likeness_ptr,
    rows_ptr,
    cols_ptr,
    tiles,
    blocks,
    kv_len,
    q_position,
    scale_log2,
    min_likeness,
    amount,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_CDF: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One row of a plan: the blocks to keep, found by bisecting a threshold on P, no sort.

    P = softmax(scale scores) over the blocks that resemble themselves. Kept: the largest of P up
    to a sum of ``amount`` (or a share ``amount`` of all blocks), and every block of a tile or of
    keys that do not resemble themselves, and what the causal mask cuts. Grid: (tiles, B * H).
    """
    i_m, i_bh = tl.program_id(0), tl.program_id(1)
    row = i_bh.to(tl.int64) * tiles + i_m
    kv_row = (i_bh // HEADS) * (HEADS // GROUP) + (i_bh % HEADS) // GROUP
    o_c = tl.arange(0, WIDTH)
    exists = o_c < blocks
    whole = (o_c + 1) * BLOCK_N <= kv_len
    if IS_CAUSAL:
        first = i_m * BLOCK_M + q_position
        exists = exists & (o_c * BLOCK_N < first + BLOCK_M)
        cut = (o_c + 1) * BLOCK_N - 1 > first
        whole = whole & (cut == 0)
    likeness = tl.load(k_likeness_ptr + kv_row * blocks + o_c, mask=o_c < blocks, other=1.0)
    trusted = exists & (likeness > min_likeness)
    s = tl.load(scores_ptr + row * blocks + o_c, mask=trusted, other=-float("inf")) * scale_log2
    top = tl.max(s, 0)
    b_p = tl.where(trusted, tl.exp2(s - tl.where(top == -float("inf"), 0.0, top)), 0.0)
    b_p = b_p / tl.maximum(tl.sum(b_p, 0), 1e-20)
    goal = amount
    if not IS_CDF:
        goal = tl.maximum(amount * tl.sum(exists.to(tl.float32), 0), 1.0)
    low, high = 0.0, 1.0  # low keeps enough, high may not
    for _ in range(26):
        middle = 0.5 * (low + high)
        held = tl.sum(tl.where(b_p >= middle, b_p if IS_CDF else 1.0, 0.0), 0)
        low, high = tl.where(held >= goal, middle, low), tl.where(held >= goal, high, middle)
    keep = (b_p >= low) & (b_p > 0.0)
    unlike_tile = tl.load(q_likeness_ptr + row + o_c * 0) <= min_likeness
    keep = keep | (trusted == 0) | unlike_tile
    if HAS_SINK:
        keep = keep | (o_c == 0)
    if IS_CAUSAL:
        keep = keep | cut
    keep = keep & exists
    full, partial = (keep & whole).to(tl.int32), (keep & (whole == 0)).to(tl.int32)
    n_full, n_partial = tl.sum(full, 0), tl.sum(partial, 0)
    begin = row * blocks
    tl.store(cols_ptr + begin + tl.cumsum(full, 0) - 1, o_c, mask=full == 1)
    tl.store(cols_ptr + begin + n_full + tl.cumsum(partial, 0) - 1, o_c, mask=partial == 1)
    tl.store(rows_ptr + 4 * row, begin.to(tl.int32))
    tl.store(rows_ptr + 4 * row + 1, (begin + n_full).to(tl.int32))
    tl.store(rows_ptr + 4 * row + 2, (begin + n_full + n_partial).to(tl.int32))
    tl.store(rows_ptr + 4 * row + 3, 0)
