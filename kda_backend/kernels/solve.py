"""Second intra-chunk stage of KDA prefill: the triangular inverse and what it multiplies.

For one chunk of one value head, with L and k_in from the first stage and the step sizes beta:

    T = (I + L)^-1        w = T diag(beta) k_in        u = T diag(beta) v

The inverse is forward substitution on pairs of rows, in fp32, then merges of inverted diagonal
blocks, 2 to 64 wide. (A Neumann series in half precision turns near-collinear keys into NaN.)

Grid: (HV * chunk capacity,).
"""

import triton
import triton.language as tl

from kda_backend.kernels.elementwise import step_size
from kda_backend.kernels.scores import in_level


@triton.jit
def invert_unit_lower(b_low, DOT: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """(I + L)^-1, kept in fp32: the inverse X of diagonal blocks of 2^i rows gives that of 2^(i+1).

    With L_i the part of L between the two halves of each larger block: X - X L_i X.
    """
    o_r = tl.arange(0, CHUNK)[:, None]
    o_c = tl.arange(0, CHUNK)[None, :]
    b_inv = tl.where(o_r == o_c, 1.0, tl.where(in_level(0, CHUNK), -b_low, 0.0))
    for level in tl.range(1, 6, num_stages=1):
        b_off = tl.where(in_level(level, CHUNK), b_low, 0.0).to(DOT)
        b_x = b_inv.to(DOT)
        b_off = tl.dot(b_off, b_x, input_precision=PRECISION).to(DOT)
        b_inv -= tl.dot(b_x, b_off, input_precision=PRECISION)
    return b_inv


@triton.jit
def solve_kernel(
    v_ptr,  # [T, HV, V]
    beta_ptr,  # [T, HV]
    tile_ptr,  # [capacity, HV, C * (3 ROW_K + ROW_V + 2 C)]: k_in -> w, q_in, k_out, u, A_qk, L
    chunk_start_ptr,
    chunk_len_ptr,
    stride_v_t,
    stride_v_h,
    stride_beta_t,
    stride_beta_h,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BETA: tl.constexpr,
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
    v_ptr += t0 * stride_v_t + i_hv * stride_v_h
    beta_ptr += t0 * stride_beta_t + i_hv * stride_beta_h
    i_tile = i_chunk.to(tl.int64) * HV + i_hv
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    ROW_V: tl.constexpr = (V + 7) // 8 * 8
    w_ptr = tile_ptr + i_tile * (CHUNK * (3 * ROW_K + ROW_V + 2 * CHUNK))
    u_ptr = w_ptr + CHUNK * 3 * ROW_K
    low_ptr = u_ptr + CHUNK * (ROW_V + CHUNK)
    DOT: tl.constexpr = tile_ptr.dtype.element_ty

    o_r = tl.arange(0, CHUNK)
    m_r = o_r < length
    b_beta = tl.load(beta_ptr + o_r * stride_beta_t, mask=m_r, other=0.0)
    b_beta = tl.where(m_r, step_size(b_beta, BETA, FAST_MATH), 0.0)
    b_low = tl.load(low_ptr + o_r[:, None] * CHUNK + o_r[None, :]).to(tl.float32)
    b_inv = invert_unit_lower(b_low, DOT, PRECISION, CHUNK)
    b_inv = (b_inv * b_beta[None, :]).to(DOT)
    for d0 in tl.range(0, V, BLOCK_V, num_stages=1):
        o_v = d0 + tl.arange(0, BLOCK_V)
        m_v = o_v < V
        m_rv = m_r[:, None] & m_v[None, :]
        b_v = tl.load(v_ptr + o_r[:, None] * stride_v_t + o_v[None, :], mask=m_rv, other=0.0)
        b_u = tl.dot(b_inv, b_v.to(DOT), input_precision=PRECISION)
        m_u = (o_v < ROW_V)[None, :]
        tl.store(u_ptr + o_r[:, None] * ROW_V + o_v[None, :], b_u.to(DOT), mask=m_u)
    for d0 in tl.range(0, K, BLOCK_K, num_stages=1):
        o_k = d0 + tl.arange(0, BLOCK_K)
        m_k = (o_k < ROW_K)[None, :]
        o_rk = o_r[:, None] * ROW_K + o_k[None, :]
        b_w = tl.load(w_ptr + o_rk, mask=m_k, other=0.0)
        b_w = tl.dot(b_inv, b_w, input_precision=PRECISION)
        tl.debug_barrier()  # w replaces k_in: every warp must have read it
        tl.store(w_ptr + o_rk, b_w.to(DOT), mask=m_k)
