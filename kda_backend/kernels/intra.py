"""Intra-chunk stage of KDA prefill: gates, decayed rows, causal scores and the triangular solve.

For one chunk of C = 64 tokens of one value head, with G[r] the running sum of log2 decays,
``q_r, k_r`` the normalised rows and ``beta_r`` the step sizes:

    A_x[r, c] = sum_d x[r, d] k[c, d] 2^(G[r, d] - G[c, d])       for c < r, x = q or k
    T    = (I + diag(beta) A_kk)^-1
    w    = T diag(beta) (k * 2^G)           u     = T diag(beta) v
    q_in = q * 2^G                          k_out = k * 2^(G[C-1] - G)         total = 2^G[C-1]

Decays never appear as 2^-G, which overflows: a chunk spans up to 6e4 in the released
Kimi-Linear checkpoint. The chunk is four blocks of 16 tokens.

- Within a block, scores come from a binary tree. At the level of half-width h, rows of the upper
  half of each 2h tokens meet columns of its lower half, both scaled relative to the token between
  the halves. The sums of decays are a 0/1 matrix times the gates, so nothing cancels.
- Between blocks, a row is scaled from the start of its block, a column to the end of its own, and
  the decays of the blocks between are factors of the row: from one distance to the next one more.

Every factor is thus a decay <= 1, and what is rounded into row r depends on tokens up to r alone: a
prefix has the same bits whatever follows it.

Each of the four warps keeps its block of 16 rows in registers through all levels: products of
``[4, 16, x]`` tensors give a warp a block, and the result of one is an operand of the next as it
stands. What other warps need (a block's columns and its total decay) goes through the tile in
memory, which the caches hold.

Operands of the tensor cores are fp16 for 16-bit inputs: all of them are at most 1 in magnitude
after normalisation, and fp16 carries three more bits than bf16. So are the gates in the sums: a
decay of 2^-x is off by x 2^-11 of itself at most, so by less than 2^-11 (docs/kda.md).

Grid: (HV * chunk capacity,): one axis, since the others stop at 65,535.
"""

import torch
import triton
import triton.language as tl

from kda_backend.kernels.elementwise import ex2, log2_decay, step_size
from kda_backend.kernels.solve import in_level, invert_blocks, merge_blocks, multiply_rows

CHUNK = 64
_PREFIX, _SUFFIX = tl.constexpr(4), tl.constexpr(5)


def sum_masks(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """0/1 matrices [6, 16, 16]; ``mask @ gates`` is the sum of gates each row of a block needs.

    Level i: row r of an upper half of 2^i sums the tokens from its half's start through r; row c of
    a lower half sums the tokens after c through its half's end. Then inclusive prefix and exclusive
    suffix of the block.
    """
    r, c = torch.arange(16)[:, None], torch.arange(16)[None, :]
    levels = []
    for i in range(4):
        same_half = (r >> i) == (c >> i)
        upper = ((r >> i) & 1) == 1
        levels.append(same_half & torch.where(upper, c <= r, c > r))
    return torch.stack([*levels, c <= r, c > r]).to(device=device, dtype=dtype)


@triton.jit
def _sum_mask(mask_ptr, i_mask):
    """[4, 16, 16], the same for each block."""
    o_s = tl.arange(0, 16)
    b_mask = tl.load(mask_ptr + i_mask * 256 + o_s[:, None] * 16 + o_s[None, :])
    return tl.broadcast_to(b_mask[None, :, :], [4, 16, 16])


@triton.jit
def _block_decay(decay_ptr, o_b, SHIFT: tl.constexpr, d0, ROW: tl.constexpr, BLOCK_K: tl.constexpr):
    """[4, 1, BLOCK_K]: total decay of block b - SHIFT, 1 where there is none."""
    o_i = o_b[:, None] - SHIFT
    m_i = (o_i >= 0) & (o_i < 4)
    if BLOCK_K == 32 and decay_ptr.dtype.element_ty == tl.float16:
        # in pairs: a load of fewer elements than threads is made in whatever layout it is used
        o_d = tl.arange(0, 16)[None, :]
        pair_ptr = (decay_ptr + o_i * ROW + d0).to(tl.pointer_type(tl.uint32)) + o_d
        b_pair = tl.load(pair_ptr, mask=m_i & (d0 + 2 * o_d < ROW), other=0x3C003C00)
        b_first = (b_pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        b_second = (b_pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        b_decay = tl.reshape(tl.join(b_first, b_second), [4, 32])
    else:
        o_d = d0 + tl.arange(0, BLOCK_K)[None, :]
        b_decay = tl.load(decay_ptr + o_i * ROW + o_d, mask=m_i & (o_d < ROW), other=1.0)
    return b_decay[:, None, :]


@triton.jit
def _dot_rows(b_x, b_y, PRECISION: tl.constexpr):
    """Rows of x times rows of y, block by block: [4, 16, 16]."""
    return tl.dot(b_x, tl.trans(b_y, 0, 2, 1), input_precision=PRECISION)


@triton.jit
def _norms_and_gates(
    q_rows,  # [4, 16, 1] pointers
    k_rows,
    g_rows,
    dt_bias_ptr,
    k_in_ptr,
    low_ptr,
    total_ptr,  # [K]
    i_hv,
    rate,
    lower_bound,
    length,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """Factors that normalise q and k, and the diagonal of A_qk, which no decay touches: [4, 16].

    Leaves the gates in k_in's place, the total decays of the blocks in L's.
    """
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    DOT: tl.constexpr = k_in_ptr.dtype.element_ty
    o_b = tl.arange(0, 4)
    o_t = o_b[:, None] * 16 + tl.arange(0, 16)[None, :]
    m_t = o_t < length
    b_qq = tl.zeros([4, 16, BLOCK_K], tl.float32)
    b_kk = tl.zeros([4, 16, BLOCK_K], tl.float32)
    b_qk = tl.zeros([4, 16, BLOCK_K], tl.float32)
    for d0 in tl.range(0, K, BLOCK_K, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK_K)
        m_d = o_d < K
        m_td = m_t[:, :, None] & m_d[None, None, :]
        b_qf = tl.load(q_rows + o_d[None, None, :], mask=m_td, other=0.0).to(tl.float32)
        b_kf = tl.load(k_rows + o_d[None, None, :], mask=m_td, other=0.0).to(tl.float32)
        b_qq += b_qf * b_qf
        b_kk += b_kf * b_kf
        b_qk += b_qf * b_kf
        b_gf = tl.load(g_rows + o_d[None, None, :], mask=m_td, other=0.0).to(tl.float32)
        b_bias = tl.zeros([1, 1, BLOCK_K], tl.float32)
        if dt_bias_ptr is not None:
            b_bias = tl.load(dt_bias_ptr + i_hv * K + o_d, mask=m_d, other=0.0)[None, None, :]
        b_gf = log2_decay(b_gf, rate, b_bias.to(tl.float32), lower_bound, GATE, FAST_MATH)
        # 2^-1024 is zero, so the bound only keeps fp16 finite
        b_gf = tl.where(m_td, tl.maximum(b_gf, -1024.0), 0.0)
        m_row = o_d < ROW_K
        k_in_rows = k_in_ptr + o_t[:, :, None] * ROW_K
        tl.store(
            k_in_rows + o_d[None, None, :],
            b_gf.to(DOT),
            mask=m_row[None, None, :],
        )
        b_sum = tl.sum(b_gf, 1)  # [4, BLOCK_K]
        tl.store(
            low_ptr + o_b[:, None] * ROW_K + o_d[None, :],
            ex2(b_sum, FAST_MATH).to(DOT),
            mask=m_row[None, :],
        )
        tl.store(total_ptr + o_d, ex2(tl.sum(b_sum, 0), FAST_MATH), mask=m_d)
    b_diag = tl.sum(b_qk, 2)
    b_q_norm = tl.full([4, 16], 1.0, tl.float32)
    b_k_norm = tl.full([4, 16], 1.0, tl.float32)
    if L2NORM:
        b_q_norm = tl.rsqrt(tl.sum(b_qq, 2) + 1e-6)
        b_k_norm = tl.rsqrt(tl.sum(b_kk, 2) + 1e-6)
    b_diag *= b_q_norm * b_k_norm
    return b_q_norm, b_k_norm, b_diag


@triton.jit
def _store_beside_diagonal(matrix_ptr, b_1, b_2, b_3, CHUNK: tl.constexpr):
    """Blocks 1, 2 and 3 left of the diagonal ones, and zeros right of them."""
    DTYPE: tl.constexpr = matrix_ptr.dtype.element_ty
    o_b = tl.arange(0, 4)
    o_s = tl.arange(0, 16)
    o_r = (o_b[:, None] * 16 + o_s[None, :])[:, :, None]
    p_rc = matrix_ptr + o_r * CHUNK + (o_b * 16)[:, None, None] + o_s[None, None, :]
    tl.store(p_rc - 16, b_1.to(DTYPE), mask=(o_b >= 1)[:, None, None])
    tl.store(p_rc - 32, b_2.to(DTYPE), mask=(o_b >= 2)[:, None, None])
    tl.store(p_rc - 48, b_3.to(DTYPE), mask=(o_b >= 3)[:, None, None])
    for i in tl.static_range(1, 4):
        m_i = (o_b + i < 4)[:, None, None]
        tl.store(p_rc + 16 * i, tl.zeros([4, 16, 16], DTYPE), mask=m_i)


@triton.jit
def intra_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,  # [T, H, K]
    v_ptr,  # [T, HV, V]
    g_ptr,  # [T, HV, K]
    beta_ptr,  # [T, HV]
    a_log_ptr,  # [HV] fp32 or None
    dt_bias_ptr,  # [HV, K] fp32 or None
    tile_ptr,  # [capacity, HV, C * (3 ROW_K + ROW_V + 2 C)]: w, q_in, k_out, u, A_qk, scratch
    total_ptr,  # [capacity, HV, K] fp32
    mask_ptr,  # sum_masks
    chunk_start_ptr,
    chunk_len_ptr,
    lower_bound,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_g_t,
    stride_g_h,
    stride_beta_t,
    stride_beta_h,
    HV,
    HEADS_PER_KEY: tl.constexpr,  # HV / H
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_MATH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_hv = (tl.program_id(0) % HV).to(tl.int64)  # heads may lie 2^31 elements apart
    i_chunk = tl.program_id(0) // HV
    length = tl.load(chunk_len_ptr + i_chunk)
    if length == 0:
        return
    t0 = tl.load(chunk_start_ptr + i_chunk).to(tl.int64)
    i_h = i_hv // HEADS_PER_KEY
    q_ptr += t0 * stride_q_t + i_h * stride_q_h
    k_ptr += t0 * stride_k_t + i_h * stride_k_h
    v_ptr += t0 * stride_v_t + i_hv * stride_v_h
    g_ptr += t0 * stride_g_t + i_hv * stride_g_h
    beta_ptr += t0 * stride_beta_t + i_hv * stride_beta_h
    i_tile = i_chunk.to(tl.int64) * HV + i_hv
    # rows of 16 bytes at least, zeros behind K and V: what two bytes wide loads bring into a
    # product comes out wrong on Hopper
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    ROW_V: tl.constexpr = (V + 7) // 8 * 8
    k_in_ptr = tile_ptr + i_tile * (CHUNK * (3 * ROW_K + ROW_V + 2 * CHUNK))
    q_in_ptr = k_in_ptr + CHUNK * ROW_K
    k_out_ptr = q_in_ptr + CHUNK * ROW_K
    u_ptr = k_out_ptr + CHUNK * ROW_K
    a_qk_ptr = u_ptr + CHUNK * ROW_V
    low_ptr = a_qk_ptr + CHUNK * CHUNK
    DOT: tl.constexpr = tile_ptr.dtype.element_ty

    o_b = tl.arange(0, 4)
    o_s = tl.arange(0, 16)
    o_t = o_b[:, None] * 16 + o_s[None, :]  # token of a block's row
    m_t = o_t < length
    b_beta = tl.load(beta_ptr + o_t * stride_beta_t, mask=m_t, other=0.0)
    b_beta = tl.where(m_t, step_size(b_beta, BETA, FAST_MATH), 0.0)
    rate = 1.0
    if a_log_ptr is not None:
        rate = tl.exp(tl.load(a_log_ptr + i_hv).to(tl.float32))

    q_rows = q_ptr + o_t[:, :, None] * stride_q_t
    k_rows = k_ptr + o_t[:, :, None] * stride_k_t
    g_rows = g_ptr + o_t[:, :, None] * stride_g_t
    b_q_norm, b_k_norm, b_diag = _norms_and_gates(
        q_rows,
        k_rows,
        g_rows,
        dt_bias_ptr,
        k_in_ptr,
        low_ptr,
        total_ptr + i_tile * K,
        i_hv,
        rate,
        lower_bound,
        length,
        K,
        BLOCK_K,
        GATE,
        L2NORM,
        FAST_MATH,
    )
    tl.debug_barrier()

    # scores within a block, and with the blocks 1, 2 and 3 before it
    b_aq0 = tl.zeros([4, 16, 16], tl.float32)
    b_ak0 = tl.zeros([4, 16, 16], tl.float32)
    b_aq1 = tl.zeros([4, 16, 16], tl.float32)
    b_ak1 = tl.zeros([4, 16, 16], tl.float32)
    b_aq2 = tl.zeros([4, 16, 16], tl.float32)
    b_ak2 = tl.zeros([4, 16, 16], tl.float32)
    b_aq3 = tl.zeros([4, 16, 16], tl.float32)
    b_ak3 = tl.zeros([4, 16, 16], tl.float32)
    m_1 = (o_b >= 1)[:, None, None]
    m_2 = (o_b >= 2)[:, None, None]
    m_3 = (o_b >= 3)[:, None, None]
    for d0 in tl.range(0, K, BLOCK_K, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK_K)
        m_td = m_t[:, :, None] & (o_d < K)[None, None, :]
        m_row = (o_d < ROW_K)[None, None, :]
        o_td = o_t[:, :, None] * ROW_K + o_d[None, None, :]
        b_g = tl.load(k_in_ptr + o_td, mask=m_row, other=0.0)
        b_q = tl.load(q_rows + o_d[None, None, :], mask=m_td, other=0.0)
        b_k = tl.load(k_rows + o_d[None, None, :], mask=m_td, other=0.0)
        b_q = (b_q.to(tl.float32) * b_q_norm[:, :, None]).to(DOT)
        b_k = (b_k.to(tl.float32) * b_k_norm[:, :, None]).to(DOT)
        for level in tl.range(0, 4, num_stages=1):
            b_sums = tl.dot(_sum_mask(mask_ptr, level), b_g, input_precision=PRECISION)
            b_decay = ex2(b_sums, FAST_MATH).to(DOT)
            b_y = b_k * b_decay
            m_level = in_level(level, 16)[None, :, :]
            b_aq0 += tl.where(m_level, _dot_rows(b_q * b_decay, b_y, PRECISION), 0.0)
            b_ak0 += tl.where(m_level, _dot_rows(b_y, b_y, PRECISION), 0.0)
        # columns, to the end of their block: what other warps read, by turns in two places, so that
        # one barrier is enough
        b_sums = tl.dot(_sum_mask(mask_ptr, _SUFFIX), b_g, input_precision=PRECISION)
        b_y = b_k * ex2(b_sums, FAST_MATH).to(DOT)
        y_ptr = a_qk_ptr + (d0 // BLOCK_K % 2) * (CHUNK * BLOCK_K)
        o_y = o_t[:, :, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
        tl.store(y_ptr + o_y, b_y)
        # rows, from the start of their block, then of the blocks before it
        b_sums = tl.dot(_sum_mask(mask_ptr, _PREFIX), b_g, input_precision=PRECISION)
        b_decay = ex2(b_sums, FAST_MATH).to(DOT)
        b_q *= b_decay
        b_k *= b_decay
        tl.debug_barrier()
        b_y *= _block_decay(low_ptr, o_b, -1, d0, ROW_K, BLOCK_K)
        b_y *= _block_decay(low_ptr, o_b, -2, d0, ROW_K, BLOCK_K)
        b_y *= _block_decay(low_ptr, o_b, -3, d0, ROW_K, BLOCK_K)
        tl.store(k_out_ptr + o_td, b_y, mask=m_row)
        b_y = tl.trans(tl.load(y_ptr + o_y - 16 * BLOCK_K, mask=m_1, other=0.0), 0, 2, 1)
        b_aq1 = tl.dot(b_q, b_y, acc=b_aq1, input_precision=PRECISION)
        b_ak1 = tl.dot(b_k, b_y, acc=b_ak1, input_precision=PRECISION)
        b_decay = _block_decay(low_ptr, o_b, 1, d0, ROW_K, BLOCK_K)
        b_q *= b_decay
        b_k *= b_decay
        b_y = tl.trans(tl.load(y_ptr + o_y - 32 * BLOCK_K, mask=m_2, other=0.0), 0, 2, 1)
        b_aq2 = tl.dot(b_q, b_y, acc=b_aq2, input_precision=PRECISION)
        b_ak2 = tl.dot(b_k, b_y, acc=b_ak2, input_precision=PRECISION)
        b_decay = _block_decay(low_ptr, o_b, 2, d0, ROW_K, BLOCK_K)
        b_q *= b_decay
        b_k *= b_decay
        b_y = tl.trans(tl.load(y_ptr + o_y - 48 * BLOCK_K, mask=m_3, other=0.0), 0, 2, 1)
        b_aq3 = tl.dot(b_q, b_y, acc=b_aq3, input_precision=PRECISION)
        b_ak3 = tl.dot(b_k, b_y, acc=b_ak3, input_precision=PRECISION)
        b_decay = _block_decay(low_ptr, o_b, 3, d0, ROW_K, BLOCK_K)
        tl.store(q_in_ptr + o_td, b_q * b_decay, mask=m_row)
        tl.store(k_in_ptr + o_td, b_k * b_decay, mask=m_row)

    o_rc = o_t[:, :, None] * CHUNK + (o_b * 16)[:, None, None] + o_s[None, None, :]
    m_diag = (o_s[:, None] == o_s[None, :])[None, :, :]
    tl.debug_barrier()  # A_qk and L replace what the loop has read
    tl.store(a_qk_ptr + o_rc, tl.where(m_diag, b_diag[:, :, None], b_aq0).to(DOT))
    _store_beside_diagonal(a_qk_ptr, b_aq1, b_aq2, b_aq3, CHUNK)
    b_step = b_beta[:, :, None]
    _store_beside_diagonal(low_ptr, b_ak1 * b_step, b_ak2 * b_step, b_ak3 * b_step, CHUNK)
    tl.store(low_ptr + o_rc, invert_blocks(b_ak0 * b_step, DOT, PRECISION).to(DOT))
    tl.debug_barrier()
    o_r = tl.arange(0, CHUNK)
    m_r = o_r < length
    b_steps = tl.load(beta_ptr + o_r * stride_beta_t, mask=m_r, other=0.0)
    b_steps = tl.where(m_r, step_size(b_steps, BETA, FAST_MATH), 0.0)
    b_low = tl.load(low_ptr + o_r[:, None] * CHUNK + o_r[None, :])
    b_inv = (merge_blocks(b_low, DOT, PRECISION, CHUNK) * b_steps[None, :]).to(DOT)
    multiply_rows(b_inv, v_ptr, stride_v_t, length, V, u_ptr, ROW_V, False, PRECISION, CHUNK)
    w_ptr = k_in_ptr
    multiply_rows(b_inv, k_in_ptr, ROW_K, CHUNK, ROW_K, w_ptr, ROW_K, True, PRECISION, CHUNK)
