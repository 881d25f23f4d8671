"""Intra-chunk stage of KDA prefill: everything that does not need the recurrent state.

For one chunk of C = 64 tokens of one value head, with G[r] the running sum of log2 decays,
``k_r, q_r`` normalised rows and ``beta_r`` the step sizes:

    A[r, c]  = sum_d x[r, d] k[c, d] 2^(G[r, d] - G[c, d])       for c < r, x = q or k
    T        = (I + diag(beta) A_kk)^-1                          unit lower triangular
    w        = T diag(beta) (k * 2^G)      u = T diag(beta) v
    q_in     = q * 2^G                     k_out = k * 2^(G[C-1] - G)
    total    = 2^G[C-1]

Decays never appear as 2^-G, which overflows: a chunk spans up to 6e4 in the released
Kimi-Linear checkpoint. Scores come from a binary tree. At the level of half-width h, rows of the
upper half of each 2h block meet columns of its lower half, both scaled relative to the token
between the halves. Every exponent is then a sum of decays <= 0, each sum is formed on its own
(a 0/1 matrix times the gates, so nothing cancels), and what is rounded into row r depends on
tokens up to r alone: a prefix has the same bits whatever follows it.

Operands of the tensor cores are fp16 for 16-bit inputs: all of them but v are at most 1 in
magnitude after normalisation, and fp16 carries three more bits than bf16 (docs/kda.md).

Grid: (HV * chunk capacity,): one axis, since the others stop at 65,535.
"""

import torch
import triton
import triton.language as tl

from kda_backend.kernels.elementwise import ex2, log2_decay, step_size

CHUNK = 64
_LEVELS = 6  # half-widths 1, 2, 4, ..., 32
MASK_PREFIX, MASK_SUFFIX = _LEVELS, _LEVELS + 1


def sum_masks(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """0/1 matrices [8, 64, 64]; ``mask @ gates`` is the sum of gates each row needs.

    Level i: row r of an upper half sums the tokens from its half's start through r; row c of a
    lower half sums the tokens after c through its half's end. Then inclusive prefix and exclusive
    suffix of the chunk.
    """
    r, c = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
    levels = []
    for i in range(_LEVELS):
        same_half = (r >> i) == (c >> i)
        upper = ((r >> i) & 1) == 1
        levels.append(same_half & torch.where(upper, c <= r, c > r))
    return torch.stack([*levels, c <= r, c > r]).to(device=device, dtype=dtype)


@triton.jit
def _sum_mask(mask_ptr, i_mask, CHUNK: tl.constexpr):
    o_r = tl.arange(0, CHUNK)
    return tl.load(mask_ptr + i_mask * CHUNK * CHUNK + o_r[:, None] * CHUNK + o_r[None, :])


@triton.jit
def _in_level(level, CHUNK: tl.constexpr):
    """[C, C]: row in the upper, column in the lower half of one block of 2^(level + 1) tokens."""
    o_r = tl.arange(0, CHUNK)[:, None]
    o_c = tl.arange(0, CHUNK)[None, :]
    return (tl.where(o_c < o_r, o_r ^ o_c, 4 * CHUNK) >> level) == 1


@triton.jit
def _decay_sum(mask_ptr, i_mask, b_hi, b_lo, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of log2 decays to fp32 accuracy: the gates are split into two operands."""
    b_mask = _sum_mask(mask_ptr, i_mask, CHUNK)
    b_sum = tl.dot(b_mask, b_hi, input_precision=PRECISION)
    return tl.dot(b_mask, b_lo, acc=b_sum, input_precision=PRECISION)


@triton.jit
def _invert_unit_lower(b_low, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """(I + L)^-1 in fp32 by doubling: the inverse of 2^i blocks gives that of 2^(i+1) blocks.

    The first doubling is forward substitution itself (1 - L on pairs); each later one is
    X - X (L restricted to the level) X, two products.
    """
    o_r = tl.arange(0, CHUNK)[:, None]
    o_c = tl.arange(0, CHUNK)[None, :]
    b_inv = tl.where(o_r == o_c, 1.0, tl.where(_in_level(0, CHUNK), -b_low, 0.0))
    for level in tl.range(1, 6, num_stages=1):
        b_off = tl.where(_in_level(level, CHUNK), b_low, 0.0)
        b_off = tl.dot(b_off, b_inv, input_precision=PRECISION)
        b_inv -= tl.dot(b_inv, b_off, input_precision=PRECISION)
    return b_inv


@triton.jit
def intra_chunk_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,  # [T, H, K]
    v_ptr,  # [T, HV, V]
    g_ptr,  # [T, HV, K]
    beta_ptr,  # [T, HV]
    a_log_ptr,  # [HV] fp32 or None
    dt_bias_ptr,  # [HV, K] fp32 or None
    tile_ptr,  # [capacity, HV, 3 * C * K + C * V + C * C]: w, q_in, k_out, u, A_qk
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
    BLOCK_V: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_MATH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_hv = tl.program_id(0) % HV
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
    w_ptr = tile_ptr + i_tile * (CHUNK * (3 * K + V + CHUNK))
    q_in_ptr = w_ptr + CHUNK * K
    k_out_ptr = q_in_ptr + CHUNK * K
    u_ptr = k_out_ptr + CHUNK * K
    a_qk_ptr = u_ptr + CHUNK * V
    DOT: tl.constexpr = tile_ptr.dtype.element_ty

    o_r = tl.arange(0, CHUNK)
    m_r = o_r < length
    b_beta = tl.load(beta_ptr + o_r * stride_beta_t, mask=m_r, other=0.0)
    b_beta = tl.where(m_r, step_size(b_beta, BETA, FAST_MATH), 0.0)
    rate = 1.0
    if a_log_ptr is not None:
        rate = tl.exp(tl.load(a_log_ptr + i_hv).to(tl.float32))

    b_q_norm = tl.full([CHUNK], 1.0, tl.float32)
    b_k_norm = tl.full([CHUNK], 1.0, tl.float32)
    if L2NORM:
        b_qq = tl.zeros([CHUNK], tl.float32)
        b_kk = tl.zeros([CHUNK], tl.float32)
        for d0 in tl.static_range(0, K, BLOCK_K):
            o_d = d0 + tl.arange(0, BLOCK_K)
            m_rd = m_r[:, None] & (o_d < K)[None, :]
            o_q = o_r[:, None] * stride_q_t + o_d[None, :]
            o_k = o_r[:, None] * stride_k_t + o_d[None, :]
            b_q = tl.load(q_ptr + o_q, mask=m_rd, other=0.0).to(tl.float32)
            b_k = tl.load(k_ptr + o_k, mask=m_rd, other=0.0).to(tl.float32)
            b_qq += tl.sum(b_q * b_q, 1)
            b_kk += tl.sum(b_k * b_k, 1)
        b_q_norm = tl.rsqrt(b_qq + 1e-6)
        b_k_norm = tl.rsqrt(b_kk + 1e-6)

    b_aqk = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_akk = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_diag = tl.zeros([CHUNK], tl.float32)
    for d0 in tl.range(0, K, BLOCK_K, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK_K)
        m_d = o_d < K
        m_rd = m_r[:, None] & m_d[None, :]
        b_g = tl.load(g_ptr + o_r[:, None] * stride_g_t + o_d[None, :], mask=m_rd, other=0.0)
        b_q = tl.load(q_ptr + o_r[:, None] * stride_q_t + o_d[None, :], mask=m_rd, other=0.0)
        b_k = tl.load(k_ptr + o_r[:, None] * stride_k_t + o_d[None, :], mask=m_rd, other=0.0)
        b_bias = tl.zeros([1, BLOCK_K], tl.float32)
        if dt_bias_ptr is not None:
            b_bias = tl.load(dt_bias_ptr + i_hv * K + o_d, mask=m_d, other=0.0)[None, :]
        b_g = log2_decay(
            b_g.to(tl.float32), rate, b_bias.to(tl.float32), lower_bound, GATE, FAST_MATH
        )
        # 2^-32768 is zero, so the bound only keeps the fp16 halves of the split finite
        b_g = tl.where(m_rd, tl.maximum(b_g, -32768.0), 0.0)
        b_hi = b_g.to(DOT)
        b_lo = (b_g - b_hi.to(tl.float32)).to(DOT)
        tl.store(total_ptr + i_tile * K + o_d, ex2(tl.sum(b_g, 0), FAST_MATH), mask=m_d)
        b_q = b_q.to(tl.float32) * b_q_norm[:, None]
        b_k = b_k.to(tl.float32) * b_k_norm[:, None]
        b_diag += tl.sum(b_q * b_k, 1)
        b_q = b_q.to(DOT)
        b_k = b_k.to(DOT)
        for level in tl.range(0, 6, num_stages=1):
            b_sum = _decay_sum(mask_ptr, level, b_hi, b_lo, CHUNK, PRECISION)
            b_decay = ex2(b_sum, FAST_MATH).to(DOT)
            b_kd = b_k * b_decay
            m_level = _in_level(level, CHUNK)
            b_s = tl.dot(b_q * b_decay, tl.trans(b_kd), input_precision=PRECISION)
            b_aqk += tl.where(m_level, b_s, 0.0)
            b_s = tl.dot(b_kd, tl.trans(b_kd), input_precision=PRECISION)
            b_akk += tl.where(m_level, b_s, 0.0)
        o_rd = o_r[:, None] * K + o_d[None, :]
        b_sum = _decay_sum(mask_ptr, 6, b_hi, b_lo, CHUNK, PRECISION)
        b_decay = ex2(b_sum, FAST_MATH)
        tl.store(q_in_ptr + o_rd, (b_q * b_decay).to(DOT), mask=m_d[None, :])
        # k 2^G waits in w's place until T is known
        tl.store(w_ptr + o_rd, (b_k * b_decay).to(DOT), mask=m_d[None, :])
        b_sum = _decay_sum(mask_ptr, 7, b_hi, b_lo, CHUNK, PRECISION)
        b_decay = ex2(b_sum, FAST_MATH)
        tl.store(k_out_ptr + o_rd, (b_k * b_decay).to(DOT), mask=m_d[None, :])

    o_rc = o_r[:, None] * CHUNK + o_r[None, :]
    b_aqk = tl.where(o_r[:, None] == o_r[None, :], b_diag[:, None], b_aqk)
    tl.store(a_qk_ptr + o_rc, b_aqk.to(DOT))
    b_inv = _invert_unit_lower(b_akk * b_beta[:, None], PRECISION, CHUNK)
    b_inv = (b_inv * b_beta[None, :]).to(DOT)
    tl.debug_barrier()  # k 2^G was written with another layout than the one it is read in
    for d0 in tl.range(0, K, BLOCK_K, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK_K)
        m_d = (o_d < K)[None, :]
        o_rd = o_r[:, None] * K + o_d[None, :]
        b_w = tl.load(w_ptr + o_rd, mask=m_d, other=0.0)
        b_w = tl.dot(b_inv, b_w, input_precision=PRECISION)
        tl.debug_barrier()  # w replaces k 2^G, which every warp has read by now
        tl.store(w_ptr + o_rd, b_w.to(DOT), mask=m_d)
    for d0 in tl.range(0, V, BLOCK_V, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK_V)
        m_rd = m_r[:, None] & (o_d < V)[None, :]
        b_v = tl.load(v_ptr + o_r[:, None] * stride_v_t + o_d[None, :], mask=m_rd, other=0.0)
        b_u = tl.dot(b_inv, b_v.to(DOT), input_precision=PRECISION)
        tl.store(u_ptr + o_r[:, None] * V + o_d[None, :], b_u.to(DOT), mask=(o_d < V)[None, :])
