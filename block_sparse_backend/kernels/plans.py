"""Plans of packed sequences and of maps of blocks, made on the GPU in one launch each."""

import triton
import triton.language as tl


@triton.jit
def store_row(keep, o_c, whole_end, row, rows_ptr, cols_ptr, blocks):
    """Row ``row`` of a plan of capacity ``blocks``: the columns that ``keep`` has, ascending.

    Blocks that are not whole are the last ones, so that FULL stand before PARTIAL.
    keep, o_c: int32 [columns / 32, 32], columns 32 by 32, whose running count takes a fifth of the
    shuffles of one long row's.
    """
    of_row = tl.sum(keep, 1)
    place = tl.cumsum(keep, 1) + (tl.cumsum(of_row, 0) - of_row)[:, None]
    n_full, n_kept = tl.sum(tl.where(o_c < whole_end, keep, 0)), tl.sum(keep)
    begin = row * blocks
    tl.store(cols_ptr + begin - 1 + place, o_c, mask=keep == 1)
    tl.store(rows_ptr + 4 * row, begin.to(tl.int32))
    tl.store(rows_ptr + 4 * row + 1, (begin + n_full).to(tl.int32))
    tl.store(rows_ptr + 4 * row + 2, (begin + n_kept).to(tl.int32))
    tl.store(rows_ptr + 4 * row + 3, 0)


@triton.jit
def map_rows_kernel(
    map_ptr,
    rows_ptr,
    cols_ptr,
    blocks,
    kv_len,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """Rows and columns of a plan from a map [rows, blocks], kept where it is not 0. Grid: (rows,).

    HAS_SINK: the first block is kept in any case.
    """
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, WIDTH // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    keep = tl.load(map_ptr + row * blocks + o_c, mask=o_c < blocks, other=0) != 0
    if HAS_SINK:
        keep = keep | (o_c == 0)
    whole_end = kv_len // BLOCK_N
    store_row(keep.to(tl.int32), o_c, whole_end, row, rows_ptr, cols_ptr, blocks)


@triton.jit
def _length(cu_ptr, o_s, m_s, longest):
    begin = tl.load(cu_ptr + o_s, mask=m_s, other=0).to(tl.int32)
    end = tl.load(cu_ptr + o_s + 1, mask=m_s, other=0).to(tl.int32)
    return begin, tl.minimum(end - begin, longest)


@triton.jit
def _place(cu_ptr, longest, count, number, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """The sequence of block ``number``, blocks of all sequences counted one after another, -1
    beyond the last; and the block's number in the sequence, or 0."""
    sequence, first = number * 0, number * 0
    end = 0
    for start in range(0, count, STEP):
        o_s = start + tl.arange(0, STEP)
        _, length = _length(cu_ptr, o_s, o_s < count, longest)
        blocks = (length + BLOCK - 1) // BLOCK
        ends = end + tl.cumsum(blocks, 0)
        is_before = (ends[None, :] <= number[:, None]) & (o_s < count)[None, :]
        sequence += tl.sum(is_before.to(tl.int32), 1)
        first = tl.maximum(first, tl.max(tl.where(is_before, ends[None, :], 0), 1))
        end += tl.sum(blocks)
    inside = number < end
    return tl.where(inside, sequence, -1), tl.where(inside, number - first, 0)


@triton.jit
def packed_plan_kernel(
    cu_q_ptr,
    cu_k_ptr,
    rows_ptr,
    work_ptr,
    sequences_ptr,
    key_blocks_ptr,
    first_blocks_ptr,
    count,
    tiles,
    blocks,
    longest_q,
    longest_k,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    STEP: tl.constexpr,
):
    """``BlockPlan`` of ``count`` packed sequences, with room for ``tiles`` tiles and ``blocks``
    blocks of keys. Grid: (tiles, blocks and count + 1, each over STEP,).

    Work is head after head, each from the last tile to the first: causal rows grow.
    """
    pid, o_i = tl.program_id(0), tl.arange(0, STEP)
    of_tiles, of_blocks = tl.cdiv(tiles, STEP), tl.cdiv(blocks, STEP)
    if pid < of_tiles:
        number = pid * STEP + o_i
        sequence, tile = _place(cu_q_ptr, longest_q, count, number, BLOCK_M, STEP)
        m_s, own = sequence >= 0, tl.maximum(sequence, 0)
        _, q_len = _length(cu_q_ptr, own, m_s, longest_q)
        _, kv_len = _length(cu_k_ptr, own, m_s, longest_k)
        position = kv_len - q_len
        full, end = kv_len // BLOCK_N, (kv_len + BLOCK_N - 1) // BLOCK_N
        if IS_CAUSAL:
            first = tl.maximum(tile * BLOCK_M + position + 1, 0)
            last = tl.maximum(tl.minimum((tile + 1) * BLOCK_M, q_len) + position, 0)
            full = tl.minimum(first // BLOCK_N, full)
            end = tl.minimum((last + BLOCK_N - 1) // BLOCK_N, end)
        inside = number < tiles
        row = rows_ptr + 4 * number
        tl.store(row, number * 0, mask=inside)
        tl.store(row + 1, tl.minimum(full, end), mask=inside)
        tl.store(row + 2, end, mask=inside)
        tl.store(row + 3, number * 0, mask=inside)
        work = work_ptr + 4 * (tiles - 1 - number)
        for head in range(HEADS):
            tl.store(work, sequence, mask=inside)
            tl.store(work + 1, number * 0 + head, mask=inside)
            tl.store(work + 2, tile, mask=inside)
            tl.store(work + 3, number, mask=inside)
            work += 4 * tiles
    elif pid < of_tiles + of_blocks:
        number = (pid - of_tiles) * STEP + o_i
        sequence, block = _place(cu_k_ptr, longest_k, count, number, BLOCK_N, STEP)
        own = tl.maximum(sequence, 0)
        begin, kv_len = _length(cu_k_ptr, own, sequence >= 0, longest_k)
        at, inside = key_blocks_ptr + 3 * number, number < blocks
        keys = tl.minimum(kv_len - block * BLOCK_N, BLOCK_N)
        tl.store(at, begin + block * BLOCK_N, mask=inside)
        tl.store(at + 1, keys, mask=inside)
        tl.store(at + 2, own, mask=inside)
    else:
        number = (pid - of_tiles - of_blocks) * STEP + o_i
        inside = number < count
        q_begin, q_len = _length(cu_q_ptr, number, inside, longest_q)
        k_begin, kv_len = _length(cu_k_ptr, number, inside, longest_k)
        at = sequences_ptr + 6 * number
        tl.store(at, number * 0, mask=inside)
        tl.store(at + 1, q_begin, mask=inside)
        tl.store(at + 2, q_len, mask=inside)
        tl.store(at + 3, k_begin, mask=inside)
        tl.store(at + 4, kv_len, mask=inside)
        tl.store(at + 5, kv_len - q_len, mask=inside)
        before = number * 0
        for start in range(0, count, STEP):
            o_s = start + tl.arange(0, STEP)
            _, length = _length(cu_k_ptr, o_s, o_s < count, longest_k)
            here = ((length + BLOCK_N - 1) // BLOCK_N)[None, :]
            before += tl.sum(tl.where(o_s[None, :] < number[:, None], here, 0), 1)
        tl.store(first_blocks_ptr + number, before, mask=number <= count)
