"""SpargeAttn's prediction (arXiv 2502.18137): pooled blocks, their scores, the blocks to keep.

    P = softmax(scale (mean of a tile's queries) (mean of a block's keys))

over the blocks of keys that resemble themselves. Sums of blocks come from ``pool_kernel``, or from
the quantisers, which read the same tokens.
"""

import triton
import triton.language as tl

from block_sparse_backend.kernels.plans import store_row
from block_sparse_backend.kernels.quantise import add_to_pool, store_pool

LEAST = tl.constexpr(-126.0)  # log2 of a weight that is not 0, over the largest of its row
STEPS = tl.constexpr(32)  # bisections from there to 1, to fp32's resolution


@triton.jit
def pool_kernel(
    x_ptr,
    mean_ptr,
    sums_ptr,
    likeness_ptr,
    length,
    blocks,
    stride_x_b,
    stride_x_h,
    stride_x_n,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_LIKENESS: tl.constexpr,
):
    """The sum of each block of [B, H, L, D], and the block's mean pairwise cosine.

    sums float32 [B, H, blocks, D], of x - mean (of x without HAS_MEAN); likeness [B, H, blocks]. A
    program of one warp walks a block STEP tokens at a time, without a barrier.
    Grid: (blocks * B * H,).
    """
    i_n, i_bh = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    o_d = tl.arange(0, D)
    at = (i_bh // HEADS).to(tl.int64) * stride_x_b + (i_bh % HEADS).to(tl.int64) * stride_x_h
    total, centre = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    if HAS_MEAN:
        mean = tl.load(mean_ptr + i_bh * D + o_d)[None, :]
    for start in range(0, BLOCK, STEP):
        o_n = i_n * BLOCK + start + tl.arange(0, STEP)
        m_n = o_n[:, None] < length
        rows = x_ptr + at + o_n.to(tl.int64)[:, None] * stride_x_n + o_d[None, :]
        b_x = tl.load(rows, mask=m_n, other=0.0).to(tl.float32)
        if HAS_MEAN:
            b_x = tl.where(m_n, b_x - mean, 0.0)
        total, centre = add_to_pool(total, centre, b_x, HAS_LIKENESS)
    count = tl.minimum(length - i_n * BLOCK, BLOCK).to(tl.float32)
    block = i_bh.to(tl.int64) * blocks + i_n
    store_pool(sums_ptr, likeness_ptr, block, total, centre, count, HAS_LIKENESS)


@triton.jit
def score_kernel(
    q_sums_ptr,
    k_sums_ptr,
    scores_ptr,
    tiles,
    blocks,
    pitch,
    q_len,
    kv_len,
    q_position,
    scale_log2,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_CENTRED: tl.constexpr,
):
    """scores float32 [B, H, tiles, pitch] of mean queries and mean keys, base 2.

    Without IS_CENTRED the mean of the block in the middle is taken out of all keys, which changes
    all scores of a row alike. Factors, the queries' with the scale in them, have 22 bits in three
    products of fp16; with one of 65,504 or more there is no score.
    Grid: (tiles over ROWS * blocks over COLS * B * H,); what no query of a tile sees is not
    written.
    """
    i_r, i_c = tl.program_id(0) % tl.cdiv(tiles, ROWS), tl.program_id(0) // tl.cdiv(tiles, ROWS)
    i_c, i_bh = i_c % tl.cdiv(blocks, COLS), i_c // tl.cdiv(blocks, COLS)
    if IS_CAUSAL and i_c * COLS * BLOCK_N >= (i_r + 1) * ROWS * BLOCK_M + q_position:
        return
    kv_row = (i_bh // HEADS) * (HEADS // GROUP) + (i_bh % HEADS) // GROUP
    o_r, o_c = i_r * ROWS + tl.arange(0, ROWS), i_c * COLS + tl.arange(0, COLS)
    m_r, m_c = o_r < tiles, o_c < blocks
    # a tile has BLOCK_M queries but for the last
    q_count = tl.where(m_r, tl.minimum(q_len - o_r * BLOCK_M, BLOCK_M), 1).to(tl.float32)
    k_count = tl.where(m_c, tl.minimum(kv_len - o_c * BLOCK_N, BLOCK_N), 1).to(tl.float32)
    q_factor, k_factor = scale_log2 / q_count, 1.0 / k_count  # of rows that are there
    q_rows = q_sums_ptr + (i_bh.to(tl.int64) * tiles + o_r)[:, None] * D
    k_rows = k_sums_ptr + (kv_row.to(tl.int64) * blocks + o_c)[:, None] * D
    middle = blocks // 2
    middle_factor = 1.0 / tl.minimum(kv_len - middle * BLOCK_N, BLOCK_N).to(tl.float32)
    middle_row = k_sums_ptr + (kv_row.to(tl.int64) * blocks + middle) * D
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, D, STEP):
        o_d = start + tl.arange(0, STEP)
        b_q = tl.load(q_rows + o_d[None, :], mask=m_r[:, None], other=0.0) * q_factor[:, None]
        b_k = tl.load(k_rows + o_d[None, :], mask=m_c[:, None], other=0.0) * k_factor[:, None]
        if not IS_CENTRED:
            b_k -= (tl.load(middle_row + o_d) * middle_factor)[None, :]
        q_high, k_high = b_q.to(tl.float16), tl.trans(b_k.to(tl.float16))
        acc = tl.dot(q_high, k_high, acc)
        # what the first rounding left, but for its own product
        q_low = (b_q - q_high.to(tl.float32)).to(tl.float16)
        k_low = (b_k - tl.trans(k_high).to(tl.float32)).to(tl.float16)
        acc = tl.dot(q_low, k_high, acc)
        acc = tl.dot(q_high, tl.trans(k_low), acc)
    at = scores_ptr + (i_bh.to(tl.int64) * tiles + o_r)[:, None] * pitch + o_c[None, :]
    tl.store(at, acc, mask=m_r[:, None] & m_c[None, :])


@triton.jit
def _threshold(b_p, amount, count, IS_CDF: tl.constexpr):
    """The least of the largest weights that are to be kept: those that make up a share ``amount``
    of their sum, or a share of ``count`` in number, at least 1.

    b_p is log2 of weights of 0 to 1, or NaN, and so is the threshold. Bisection until the bounds
    have one value between them or none.
    """
    positive = b_p >= LEAST
    n_low = tl.sum(positive.to(tl.int32))  # kept by the low bound, which keeps enough
    n_high = 0  # kept by the high one, which does not
    weight = b_p
    if IS_CDF:
        weight = tl.exp2(b_p)
        total = tl.sum(tl.where(positive, weight, 0.0))
        goal = amount * total
        is_open = (goal <= total) & (n_low > 1)
    else:
        goal = tl.maximum(tl.ceil(amount * count.to(tl.float32)), 1.0)
        is_open = n_low.to(tl.float32) > goal
    low, high = tl.min(tl.where(positive, b_p, 0.0)), 0.001
    left = tl.where(is_open, STEPS, 0)
    while left > 0:
        middle = 0.5 * (low + high)
        is_in = b_p >= middle
        if IS_CDF:
            n = tl.sum(is_in.to(tl.int32))
            enough = tl.sum(tl.where(is_in, weight, 0.0)) >= goal
        else:  # comparison and addition in fp32 are one instruction each
            n = tl.sum(tl.where(is_in, 1.0, 0.0)).to(tl.int32)
            enough = n.to(tl.float32) >= goal
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        n_low, n_high = tl.where(enough, n, n_low), tl.where(enough, n_high, n)
        left = tl.where(n_low - n_high > 1, left - 1, 0)
        if not IS_CDF:
            left = tl.where(n_low.to(tl.float32) == goal, 0, left)
    return tl.where(is_open, low, LEAST)


@triton.jit
def select_blocks_kernel(
    scores_ptr,
    q_likeness_ptr,
    k_likeness_ptr,
    of_heads_ptr,
    rows_ptr,
    cols_ptr,
    tiles,
    blocks,
    pitch,
    kv_len,
    q_position,
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
    HAS_LIKENESS: tl.constexpr,
    PER_HEAD: tl.constexpr,
):
    """One row of a plan: the blocks to keep, found by bisecting a threshold on log2 P, no sort.

    P = softmax(scores) over the blocks that resemble themselves. Kept: the largest of P up to a
    sum of ``amount`` (or a share ``amount`` of all blocks), and every block of a tile or of keys
    that do not resemble themselves or have no score (NaN), and what the causal mask cuts. Without
    HAS_LIKENESS all resemble themselves. PER_HEAD: ``min_likeness`` and ``amount`` are those of
    ``of_heads`` [2, H].
    Grid: (tiles * B * H,).
    """
    i_m, i_bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = i_bh.to(tl.int64) * tiles + i_m
    if PER_HEAD:
        min_likeness = tl.load(of_heads_ptr + i_bh % HEADS)
        amount = tl.load(of_heads_ptr + HEADS + i_bh % HEADS)
    o_c = tl.arange(0, WIDTH // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    end, whole_end = blocks, kv_len // BLOCK_N
    if IS_CAUSAL:
        first = i_m * BLOCK_M + q_position
        end = tl.maximum(tl.minimum(end, (first + BLOCK_M + BLOCK_N - 1) // BLOCK_N), 0)
        cut = tl.maximum(first + 1, 0) // BLOCK_N  # from here on the diagonal cuts
        whole_end = tl.minimum(whole_end, cut)
    exists = o_c < end
    b_s = tl.load(scores_ptr + row * pitch + o_c, mask=exists, other=-float("inf"))
    if HAS_LIKENESS:
        kv_row = (i_bh // HEADS) * (HEADS // GROUP) + (i_bh % HEADS) // GROUP
        likeness = tl.load(k_likeness_ptr + kv_row * blocks + o_c, mask=exists, other=1.0)
        likeness = tl.minimum(likeness, tl.load(q_likeness_ptr + row))
        top = tl.max(tl.where(likeness > min_likeness, b_s, -float("inf")))
        b_s = tl.where(likeness > min_likeness, b_s, float("nan"))
    else:
        top = tl.max(b_s)
    # log2 of P over its largest value, which is all that comparisons need; NaN where there is none
    b_p = b_s - top
    low = _threshold(b_p, amount, end, IS_CDF)
    keep = (b_p < low) == 0
    if HAS_SINK:
        keep = keep | (o_c == 0)
    if IS_CAUSAL:
        keep = keep | (o_c >= cut)
    keep = (keep & exists).to(tl.int32)
    store_row(keep, o_c, whole_end, row, rows_ptr, cols_ptr, blocks)


@triton.jit
def order_rows_kernel(
    rows_ptr,
    work_ptr,
    sequences_ptr,
    tiles,
    q_len,
    kv_len,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """work [B * H * tiles, 4] of a plan with a row for each tile, as ``block_plan.work_list`` makes
    it: head after head, the longest rows first and of equals the first; and sequences [B, 6].

    A row's place is the number of rows before it. Grid: (tiles over BLOCK * B * H,).
    """
    i_c, i_bh = tl.program_id(0) % tl.cdiv(tiles, BLOCK), tl.program_id(0) // tl.cdiv(tiles, BLOCK)
    base = i_bh.to(tl.int64) * tiles
    o_m = i_c * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < tiles
    at = rows_ptr + 4 * (base + o_m)
    mine = tl.load(at + 2, mask=m_m, other=0) - tl.load(at, mask=m_m, other=0)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tiles, BLOCK):
        o_o = start + tl.arange(0, BLOCK)
        ends = rows_ptr + 4 * (base + o_o)
        inside = o_o < tiles
        other = tl.load(ends + 2, mask=inside, other=-1) - tl.load(ends, mask=inside, other=0)
        is_first = o_o[None, :] < o_m[:, None]
        longer = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & is_first)
        place += tl.sum(longer.to(tl.int32), 1)
    work = work_ptr + 4 * (base + place)
    tl.store(work, tl.zeros([BLOCK], tl.int32) + i_bh // HEADS, mask=m_m)
    tl.store(work + 1, tl.zeros([BLOCK], tl.int32) + i_bh % HEADS, mask=m_m)
    tl.store(work + 2, o_m, mask=m_m)
    tl.store(work + 3, (base + o_m).to(tl.int32), mask=m_m)
    if (i_c == 0) & (i_bh % HEADS == 0):
        entry = sequences_ptr + 6 * (i_bh // HEADS)
        tl.store(entry, i_bh // HEADS)
        tl.store(entry + 1, 0)
        tl.store(entry + 2, q_len)
        tl.store(entry + 3, 0)
        tl.store(entry + 4, kv_len)
        tl.store(entry + 5, kv_len - q_len)
