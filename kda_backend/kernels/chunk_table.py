"""Chunk table: which tokens each 64-token chunk of a ragged batch covers, and orders of the chunks.

Chunks do not cross sequences. Sequence n contributes ceil(len_n / 64) chunks, numbered
consecutively: ``chunk_offsets[n]`` is its first. Chunks after the last one have length 0, so a
launch can be sized from a static capacity and no device value is read on the host.

- ``sequence_order`` lists the sequences, those with the most chunks first, so that a launch in this
  order does not end with the longest scan alone.
- ``chunk_major`` lists the chunks in the order in which scans of all sequences at once need them:
  every sequence's first chunk, then every sequence's second.
- ``sequence_major`` lists them in the order in which scans of one sequence after the other need
  them, the sequences in ``sequence_order``.

Grid: (cdiv(capacity, BLOCK),). Each program finds the sequences of BLOCK chunks,
BLOCK_N sequences at a time: what it compares is [BLOCK_N, BLOCK], in registers.
"""

import triton
import triton.language as tl


@triton.jit
def _chunks_of(cu_seqlens_ptr, o_n, num_sequences, CHUNK: tl.constexpr):
    """Chunks of sequences o_n."""
    m_n = o_n < num_sequences
    b_bos = tl.load(cu_seqlens_ptr + o_n, mask=m_n, other=0).to(tl.int32)
    b_eos = tl.load(cu_seqlens_ptr + o_n + 1, mask=m_n, other=0).to(tl.int32)
    return (b_eos - b_bos + CHUNK - 1) // CHUNK


@triton.jit(
    do_not_specialize=["num_sequences", "capacity"],
    do_not_specialize_on_alignment=[
        "cu_seqlens_ptr",
        "chunk_start_ptr",
        "chunk_len_ptr",
        "chunk_offsets_ptr",
        "chunk_major_ptr",
        "sequence_major_ptr",
        "sequence_order_ptr",
    ],
)
def chunk_table_kernel(
    cu_seqlens_ptr,  # [N + 1] int32 or int64
    chunk_start_ptr,  # [capacity] int32: first token
    chunk_len_ptr,  # [capacity] int32: number of tokens, 0 after the last chunk
    chunk_offsets_ptr,  # [N + 1] int32
    chunk_major_ptr,  # [capacity] int32
    sequence_major_ptr,  # [capacity] int32
    sequence_order_ptr,  # [N] int32
    num_sequences,
    capacity,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    i_block = tl.program_id(0)
    o_chunk = i_block * BLOCK + tl.arange(0, BLOCK)
    b_owner = tl.zeros([BLOCK], tl.int32)  # the chunk's sequence: so many end at or before it
    b_first = tl.zeros([BLOCK], tl.int32)  # its first chunk: the last of their ends
    first = tl.zeros([], tl.int32)
    for n0 in range(0, num_sequences, BLOCK_N):
        o_n = n0 + tl.arange(0, BLOCK_N)
        m_n = o_n < num_sequences
        b_count = _chunks_of(cu_seqlens_ptr, o_n, num_sequences, CHUNK)
        b_end = first + tl.cumsum(b_count, 0)
        if i_block == 0:
            tl.store(chunk_offsets_ptr + o_n, b_end - b_count, mask=m_n)
        m_before = m_n[:, None] & (b_end[:, None] <= o_chunk[None, :])  # [sequences, chunks]
        b_owner += tl.sum(m_before.to(tl.int32), 0)
        b_first = tl.maximum(b_first, tl.max(tl.where(m_before, b_end[:, None], 0), 0))
        first += tl.sum(b_count, 0)
    if i_block == 0:
        tl.store(chunk_offsets_ptr + num_sequences, first)
    m_chunk = o_chunk < capacity
    m_owned = b_owner < num_sequences
    b_bos = tl.load(cu_seqlens_ptr + b_owner, mask=m_owned, other=0).to(tl.int32)
    b_eos = tl.load(cu_seqlens_ptr + b_owner + 1, mask=m_owned, other=0).to(tl.int32)
    b_total = (b_eos - b_bos + CHUNK - 1) // CHUNK  # all chunks of that sequence
    b_depth = tl.where(m_owned, o_chunk - b_first, 0)  # those of it before this one
    b_start = b_bos + b_depth * CHUNK
    b_len = tl.minimum(b_eos - b_start, CHUNK)
    # chunk-major: after all chunks of smaller depth, and those of this depth in earlier sequences
    # sequence-major: after all chunks of sequences with more chunks, or with as many and a smaller
    # number
    b_chunk_major = tl.zeros([BLOCK], tl.int32)
    b_sequence_major = b_depth
    for n0 in range(0, num_sequences, BLOCK_N):
        o_n = n0 + tl.arange(0, BLOCK_N)
        b_count = _chunks_of(cu_seqlens_ptr, o_n, num_sequences, CHUNK)[:, None]
        m_earlier = o_n[:, None] < b_owner[None, :]
        m_deeper = m_earlier & (b_count > b_depth[None, :])
        b_chunk_major += tl.sum(tl.minimum(b_count, b_depth[None, :]) + m_deeper.to(tl.int32), 0)
        m_before = (b_count > b_total[None, :]) | ((b_count == b_total[None, :]) & m_earlier)
        b_sequence_major += tl.sum(tl.where(m_before, b_count, 0), 0)
    tl.store(chunk_major_ptr + tl.where(m_owned, b_chunk_major, o_chunk), o_chunk, mask=m_chunk)
    tl.store(
        sequence_major_ptr + tl.where(m_owned, b_sequence_major, o_chunk), o_chunk, mask=m_chunk
    )
    tl.store(chunk_start_ptr + o_chunk, b_start, mask=m_chunk)
    tl.store(chunk_len_ptr + o_chunk, b_len, mask=m_chunk)
    # before a sequence come those with more chunks, and those with as many and a smaller number
    for n0 in range(i_block * BLOCK, num_sequences, tl.num_programs(0) * BLOCK):
        o_n = n0 + tl.arange(0, BLOCK)
        b_count = _chunks_of(cu_seqlens_ptr, o_n, num_sequences, CHUNK)
        b_rank = tl.zeros([BLOCK], tl.int32)
        for m0 in range(0, num_sequences, BLOCK_N):
            o_m = m0 + tl.arange(0, BLOCK_N)
            b_other = _chunks_of(cu_seqlens_ptr, o_m, num_sequences, CHUNK)[:, None]
            m_before = (b_other > b_count[None, :]) | (
                (b_other == b_count[None, :]) & (o_m[:, None] < o_n[None, :])
            )
            m_before &= o_m[:, None] < num_sequences
            b_rank += tl.sum(m_before.to(tl.int32), 0)
        tl.store(sequence_order_ptr + b_rank, o_n, mask=o_n < num_sequences)
