"""Short convolution of a prefill: SiLU of a causal depthwise convolution, its state kept in a pool.

    y_t[c] = silu(sum_j weight[c, j] x_{t - (WIDTH - 1) + j}[c])

Tokens before a sequence come from its slot, which afterwards holds the last WIDTH - 1 tokens,
oldest first. The program of a sequence's first chunk alone touches the slot, so nothing races.

Grid: (cdiv(C, BLOCK_C) * capacity of the chunk table,).
"""

import triton
import triton.language as tl

from backend_core.kernels.math import sigmoid


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=[
        "state_indices_ptr",
        "has_initial_state_ptr",
        "cu_seqlens_ptr",
        "chunk_start_ptr",
        "chunk_len_ptr",
        "chunk_offsets_ptr",
    ],
)
def short_conv_kernel(
    x_ptr,  # [T, C]
    conv_weight_ptr,  # [C, WIDTH] contiguous
    o_ptr,  # [T, C]
    conv_state_ptr,  # [slots, C, WIDTH - 1] by strides
    state_indices_ptr,  # [N] int32, -1: no state
    has_initial_state_ptr,  # [N] bool, or None
    cu_seqlens_ptr,  # [N + 1]
    chunk_start_ptr,  # [capacity] int32
    chunk_len_ptr,  # [capacity] int32
    chunk_offsets_ptr,  # [N + 1] int32
    num_sequences,
    C,
    stride_x_t,
    stride_o_t,
    stride_conv_state_n,
    stride_conv_state_c,
    stride_conv_state_w,
    WIDTH: tl.constexpr,  # 4
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    num_blocks = tl.cdiv(C, BLOCK_C)
    i_chunk = tl.program_id(0) // num_blocks
    i_block = tl.program_id(0) % num_blocks
    chunk_len = tl.load(chunk_len_ptr + i_chunk)
    if chunk_len == 0:
        return
    # the sequence of a chunk is the last one whose first chunk does not come after it
    i_n = -1
    for n0 in range(0, num_sequences, BLOCK_N):
        o_n = n0 + tl.arange(0, BLOCK_N)
        b_first = tl.load(chunk_offsets_ptr + o_n, mask=o_n < num_sequences, other=2147483647)
        i_n += tl.sum((b_first <= i_chunk).to(tl.int32), 0)
    start = tl.load(chunk_start_ptr + i_chunk).to(tl.int64)
    bos = tl.load(cu_seqlens_ptr + i_n).to(tl.int64)
    eos = tl.load(cu_seqlens_ptr + i_n + 1).to(tl.int64)
    slot = tl.load(state_indices_ptr + i_n).to(tl.int64)
    is_first = start == bos
    reads = is_first & (slot >= 0)
    if has_initial_state_ptr is not None:
        reads &= tl.load(has_initial_state_ptr + i_n).to(tl.int1)

    o_c = i_block * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    conv_state_ptr += slot * stride_conv_state_n + o_c * stride_conv_state_c
    # the four taps of a channel in one load: [BLOCK_C, 4], then a vector per tap
    o_w = o_c[:, None] * 4 + tl.arange(0, 4)[None, :]
    b_taps = tl.load(conv_weight_ptr + o_w, mask=m_c[:, None], other=0.0).to(tl.float32)
    b_even, b_odd = tl.split(tl.reshape(b_taps, [BLOCK_C, 2, 2]))
    b_w0, b_w2 = tl.split(b_even)
    b_w1, b_w3 = tl.split(b_odd)
    b_w = (b_w0, b_w1, b_w2, b_w3)
    for i_t in tl.static_range(CHUNK // BLOCK_T):
        o_i = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_i < chunk_len
        o_t = start + o_i
        b_o = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        for j in tl.static_range(WIDTH):
            o_s = o_t - (WIDTH - 1) + j
            m_x = (m_t & (o_s >= bos))[:, None] & m_c[None, :]
            b_x = tl.load(x_ptr + o_s[:, None] * stride_x_t + o_c[None, :], mask=m_x, other=0.0)
            b_x = b_x.to(tl.float32)
            if i_t == 0:  # noqa: SIM102 (the outer one is decided by the compiler)
                if is_first:
                    o_p = (WIDTH - 1 + o_s - bos)[:, None] * stride_conv_state_w
                    m_p = (m_t & (o_s < bos) & reads)[:, None] & m_c[None, :]
                    b_p = tl.load(conv_state_ptr[None, :] + o_p, mask=m_p, other=0.0)
                    b_x += b_p.to(tl.float32)
            b_o += b_x * b_w[j][None, :]
        b_o *= sigmoid(b_o, FAST_MATH)
        o_ptrs = o_ptr + o_t[:, None] * stride_o_t + o_c[None, :]
        tl.store(o_ptrs, b_o.to(o_ptr.dtype.element_ty), mask=m_t[:, None] & m_c[None, :])

    if is_first & (slot >= 0):
        # A later j reads slot entries after those already written, but other threads may still be
        # reading for the convolution above what the first store overwrites.
        tl.debug_barrier()
        for j in tl.static_range(WIDTH - 1):
            last = eos - (WIDTH - 1) + j
            b_new = tl.load(x_ptr + last * stride_x_t + o_c, mask=m_c & (last >= bos), other=0.0)
            m_old = m_c & (last < bos) & reads
            o_old = (WIDTH - 1 + last - bos) * stride_conv_state_w
            b_old = tl.load(conv_state_ptr + o_old, mask=m_old, other=0.0)
            b_new = b_new.to(tl.float32) + b_old.to(tl.float32)
            tl.store(
                conv_state_ptr + j * stride_conv_state_w,
                b_new.to(conv_state_ptr.dtype.element_ty),
                mask=m_c,
            )
