"""First intra-chunk stage of KDA prefill: gates, decayed rows and causal scores.

For one chunk of C = 64 tokens of one value head, with G[r] the running sum of log2 decays,
``q_r, k_r`` the normalised rows and ``beta_r`` the step sizes:

    A_x[r, c] = sum_d x[r, d] k[c, d] 2^(G[r, d] - G[c, d])       for c < r, x = q or k
    L         = diag(beta) A_kk                                   strictly lower triangular
    q_in      = q * 2^G           k_in  = k * 2^G
    k_out     = k * 2^(G[C-1] - G)      total = 2^G[C-1]

Decays never appear as 2^-G, which overflows: a chunk spans up to 6e4 in the released
Kimi-Linear checkpoint. Scores come from a binary tree. At the level of half-width h, rows of the
upper half of each 2h block meet columns of its lower half, both scaled relative to the token
between the halves. Every exponent is then a sum of decays <= 0, each sum is formed on its own
(a 0/1 matrix times the gates, so nothing cancels), and what is rounded into row r depends on
tokens up to r alone: a prefix has the same bits whatever follows it.

Operands of the tensor cores are fp16 for 16-bit inputs: all of them are at most 1 in magnitude
after normalisation, and fp16 carries three more bits than bf16 (docs/kda.md).

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
def in_level(level, CHUNK: tl.constexpr):
    """[C, C]: row in the upper, column in the lower half of one block of 2^(level + 1) tokens."""
    b_block = tl.arange(0, CHUNK) >> level
    b_upper = tl.where((b_block & 1) == 1, b_block, -1)
    b_lower = tl.where((b_block & 1) == 0, b_block + 1, -2)
    return b_upper[:, None] == b_lower[None, :]


@triton.jit
def _decay_sum(mask_ptr, i_mask, b_hi, b_lo, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of log2 decays to fp32 accuracy: the gates are split into two operands."""
    b_mask = _sum_mask(mask_ptr, i_mask, CHUNK)
    b_sum = tl.dot(b_mask, b_hi, input_precision=PRECISION)
    return tl.dot(b_mask, b_lo, acc=b_sum, input_precision=PRECISION)


@triton.jit
def scores_kernel(
    q_ptr,  # [T, H, K]
    k_ptr,  # [T, H, K]
    g_ptr,  # [T, HV, K]
    beta_ptr,  # [T, HV]
    a_log_ptr,  # [HV] fp32 or None
    dt_bias_ptr,  # [HV, K] fp32 or None
    tile_ptr,  # [capacity, HV, C * (3 ROW_K + ROW_V + 2 C)]: k_in, q_in, k_out, -, A_qk, L
    total_ptr,  # [capacity, HV, K] fp32
    mask_ptr,  # sum_masks
    chunk_start_ptr,
    chunk_len_ptr,
    lower_bound,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
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
    a_qk_ptr = k_out_ptr + CHUNK * (ROW_K + ROW_V)
    low_ptr = a_qk_ptr + CHUNK * CHUNK
    DOT: tl.constexpr = tile_ptr.dtype.element_ty

    o_r = tl.arange(0, CHUNK)
    m_r = o_r < length
    b_beta = tl.load(beta_ptr + o_r * stride_beta_t, mask=m_r, other=0.0)
    b_beta = tl.where(m_r, step_size(b_beta, BETA, FAST_MATH), 0.0)
    rate = 1.0
    if a_log_ptr is not None:
        rate = tl.exp(tl.load(a_log_ptr + i_hv).to(tl.float32))

    # norms, and the diagonal of A_qk, which no decay touches
    b_qq = tl.zeros([CHUNK], tl.float32)
    b_kk = tl.zeros([CHUNK], tl.float32)
    b_diag = tl.zeros([CHUNK], tl.float32)
    for d0 in tl.static_range(0, K, BLOCK_K):
        o_d = d0 + tl.arange(0, BLOCK_K)
        m_rd = m_r[:, None] & (o_d < K)[None, :]
        o_q = o_r[:, None] * stride_q_t + o_d[None, :]
        o_k = o_r[:, None] * stride_k_t + o_d[None, :]
        b_q = tl.load(q_ptr + o_q, mask=m_rd, other=0.0).to(tl.float32)
        b_k = tl.load(k_ptr + o_k, mask=m_rd, other=0.0).to(tl.float32)
        b_qq += tl.sum(b_q * b_q, 1)
        b_kk += tl.sum(b_k * b_k, 1)
        b_diag += tl.sum(b_q * b_k, 1)
    b_q_norm = tl.full([CHUNK], 1.0, tl.float32)
    b_k_norm = tl.full([CHUNK], 1.0, tl.float32)
    if L2NORM:
        b_q_norm = tl.rsqrt(b_qq + 1e-6)
        b_k_norm = tl.rsqrt(b_kk + 1e-6)
    b_diag *= b_q_norm * b_k_norm

    b_aqk = tl.zeros([CHUNK, CHUNK], tl.float32)
    b_akk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for d0 in tl.range(0, K, BLOCK_K, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK_K)
        m_d = o_d < K
        m_rd = m_r[:, None] & m_d[None, :]
        b_g = tl.load(g_ptr + o_r[:, None] * stride_g_t + o_d[None, :], mask=m_rd, other=0.0)
        b_qr = tl.load(q_ptr + o_r[:, None] * stride_q_t + o_d[None, :], mask=m_rd, other=0.0)
        b_kr = tl.load(k_ptr + o_r[:, None] * stride_k_t + o_d[None, :], mask=m_rd, other=0.0)
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
        b_qh = (b_qr.to(tl.float32) * b_q_norm[:, None]).to(DOT)
        b_kh = (b_kr.to(tl.float32) * b_k_norm[:, None]).to(DOT)
        for level in tl.range(0, 6, num_stages=1):
            b_sum = _decay_sum(mask_ptr, level, b_hi, b_lo, CHUNK, PRECISION)
            b_decay = ex2(b_sum, FAST_MATH).to(DOT)
            b_kd = b_kh * b_decay
            m_level = in_level(level, CHUNK)
            b_s = tl.dot(b_qh * b_decay, tl.trans(b_kd), input_precision=PRECISION)
            b_aqk += tl.where(m_level, b_s, 0.0)
            b_s = tl.dot(b_kd, tl.trans(b_kd), input_precision=PRECISION)
            b_akk += tl.where(m_level, b_s, 0.0)
        o_rd = o_r[:, None] * ROW_K + o_d[None, :]
        m_row = (o_d < ROW_K)[None, :]
        b_sum = _decay_sum(mask_ptr, 6, b_hi, b_lo, CHUNK, PRECISION)
        b_decay = ex2(b_sum, FAST_MATH)
        tl.store(q_in_ptr + o_rd, (b_qh * b_decay).to(DOT), mask=m_row)
        tl.store(k_in_ptr + o_rd, (b_kh * b_decay).to(DOT), mask=m_row)
        b_sum = _decay_sum(mask_ptr, 7, b_hi, b_lo, CHUNK, PRECISION)
        b_decay = ex2(b_sum, FAST_MATH)
        tl.store(k_out_ptr + o_rd, (b_kh * b_decay).to(DOT), mask=m_row)

    o_rc = o_r[:, None] * CHUNK + o_r[None, :]
    b_aqk = tl.where(o_r[:, None] == o_r[None, :], b_diag[:, None], b_aqk)
    tl.store(a_qk_ptr + o_rc, b_aqk.to(DOT))
    tl.store(low_ptr + o_rc, (b_akk * b_beta[:, None]).to(DOT))
