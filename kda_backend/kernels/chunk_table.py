"""Chunk table: which tokens each 64-token chunk of a ragged batch covers.

Chunks do not cross sequences. Sequence n contributes ceil(len_n / 64) chunks, numbered
consecutively: ``chunk_offsets[n]`` is its first. Chunks past the last one have length 0, so a
launch can be sized from a static capacity and no device value is read on the host.
``chunk_order`` lists the chunks in the order in which scans over all sequences at once need them:
every sequence's first, then every sequence's second.

Grid: (cdiv(capacity, BLOCK),). Each program finds the sequences of BLOCK chunks.
"""

import torch
import triton
import triton.language as tl

CHUNK = 64
_BLOCK = 128


@triton.jit(
    do_not_specialize=["num_sequences", "capacity"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_ptr",
        "chunk_start_ptr",
        "chunk_len_ptr",
        "chunk_offsets_ptr",
        "chunk_order_ptr",
    ],
)
def chunk_table_kernel(
    cu_seqlens_ptr,  # [N + 1] int32 or int64
    chunk_start_ptr,  # [capacity] int32: first token
    chunk_len_ptr,  # [capacity] int32: number of tokens, 0 behind the last chunk
    chunk_offsets_ptr,  # [N + 1] int32
    chunk_order_ptr,  # [capacity] int32
    num_sequences,
    capacity,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_block = tl.program_id(0)
    o_chunk = i_block * BLOCK + tl.arange(0, BLOCK)
    b_start = tl.zeros([BLOCK], tl.int32)
    b_len = tl.zeros([BLOCK], tl.int32)
    b_owner = tl.zeros([BLOCK], tl.int32)  # the chunk's sequence
    b_depth = tl.zeros([BLOCK], tl.int32)  # the chunks before it there
    first = tl.zeros([], tl.int32)
    for n0 in range(0, num_sequences, BLOCK):
        o_n = n0 + tl.arange(0, BLOCK)
        m_n = o_n < num_sequences
        b_bos = tl.load(cu_seqlens_ptr + o_n, mask=m_n, other=0).to(tl.int32)
        b_eos = tl.load(cu_seqlens_ptr + o_n + 1, mask=m_n, other=0).to(tl.int32)
        b_count = (b_eos - b_bos + CHUNK - 1) // CHUNK
        b_first = first + tl.cumsum(b_count, 0) - b_count
        if i_block == 0:
            tl.store(chunk_offsets_ptr + o_n, b_first, mask=m_n)
        # [sequences, chunks]: at most one sequence owns a chunk
        m_own = (o_chunk[None, :] >= b_first[:, None]) & (
            o_chunk[None, :] < (b_first + b_count)[:, None]
        )
        b_before = o_chunk[None, :] - b_first[:, None]
        b_t0 = b_bos[:, None] + b_before * CHUNK
        b_owner += tl.sum(tl.where(m_own, o_n[:, None], 0), 0)
        b_depth += tl.sum(tl.where(m_own, b_before, 0), 0)
        b_start += tl.sum(tl.where(m_own, b_t0, 0), 0)
        b_len += tl.sum(tl.where(m_own, tl.minimum(b_eos[:, None] - b_t0, CHUNK), 0), 0)
        first += tl.sum(b_count, 0)
    if i_block == 0:
        tl.store(chunk_offsets_ptr + num_sequences, first)
    m_chunk = o_chunk < capacity
    # place in the order: all chunks of smaller depth, and those of this depth in earlier sequences
    b_place = tl.zeros([BLOCK], tl.int32)
    for n0 in range(0, num_sequences, BLOCK):
        o_n = n0 + tl.arange(0, BLOCK)
        m_n = o_n < num_sequences
        b_bos = tl.load(cu_seqlens_ptr + o_n, mask=m_n, other=0).to(tl.int32)
        b_eos = tl.load(cu_seqlens_ptr + o_n + 1, mask=m_n, other=0).to(tl.int32)
        b_count = ((b_eos - b_bos + CHUNK - 1) // CHUNK)[:, None]
        m_earlier = (o_n[:, None] < b_owner[None, :]) & (b_count > b_depth[None, :])
        b_place += tl.sum(tl.minimum(b_count, b_depth[None, :]) + m_earlier.to(tl.int32), 0)
    b_place = tl.where(b_len > 0, b_place, o_chunk)
    tl.store(chunk_order_ptr + b_place, o_chunk, mask=m_chunk)
    tl.store(chunk_start_ptr + o_chunk, b_start, mask=m_chunk)
    tl.store(chunk_len_ptr + o_chunk, b_len, mask=m_chunk)


def build_chunk_table(
    cu_seqlens: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """chunk_start, chunk_len, chunk_order [capacity], chunk_offsets [N + 1]: int32, no sync.

    Each begins on 16 bytes, whatever the capacity: kernels are compiled for what is aligned.
    """
    n = cu_seqlens.numel() - 1
    row = -(-capacity // 4) * 4
    table = torch.empty(3 * row + n + 1, dtype=torch.int32, device=cu_seqlens.device)
    start, length, order = table[: 3 * row].view(3, row)[:, :capacity].unbind(0)
    offsets = table[3 * row :]
    grid = (max(1, triton.cdiv(capacity, _BLOCK)),)
    chunk_table_kernel[grid](
        cu_seqlens,
        start,
        length,
        offsets,
        order,
        n,
        capacity,
        CHUNK=CHUNK,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return start, length, order, offsets
