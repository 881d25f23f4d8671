"""The triangular solve of KDA prefill, as functions of the intra-chunk kernel.

    T = (I + L)^-1 diag(beta)        rows y = T x

(I + L)^-1 is forward substitution on pairs of rows, in fp32, then merges of inverted diagonal
blocks, 2 to 64 wide: with L_i the part of L between the two halves of each larger block and X the
inverse of the smaller ones, X - X L_i X is that of the larger. (A Neumann series in half precision
turns near-collinear keys into NaN.)
"""

import triton
import triton.language as tl

from kda_backend.kernels.functions.gate import step_size


@triton.jit
def in_level(level, SIZE: tl.constexpr):
    """[SIZE, SIZE]: row in the upper, column in the lower half of one block of 2^(level + 1)."""
    b_block = tl.arange(0, SIZE) >> level
    b_upper = tl.where((b_block & 1) == 1, b_block, -1)
    b_lower = tl.where((b_block & 1) == 0, b_block + 1, -2)
    return b_upper[:, None] == b_lower[None, :]


@triton.jit
def invert_blocks(b_low, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of each block of ``b_low`` [4, 16, 16], in fp32."""
    o_s = tl.arange(0, 16)
    m_diag = (o_s[:, None] == o_s[None, :])[None, :, :]
    b_inv = tl.where(m_diag, 1.0, tl.where(in_level(0, 16)[None, :, :], -b_low, 0.0))
    for level in tl.static_range(1, 4):
        b_off = tl.where(in_level(level, 16)[None, :, :], b_low, 0.0).to(DOT)
        b_x = b_inv.to(DOT)
        b_off = tl.dot(b_off, b_x, input_precision=PRECISION).to(DOT)
        b_inv -= tl.dot(b_x, b_off, input_precision=PRECISION)
    return b_inv


@triton.jit
def merge_blocks(b_low, DOT: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """(I + L)^-1 of the chunk, in fp32, from [C, C]: L with its diagonal blocks inverted."""
    o_block = tl.arange(0, CHUNK) // 16
    b_inv = tl.where(o_block[:, None] == o_block[None, :], b_low, 0.0).to(tl.float32)
    for level in tl.static_range(4, 6):
        b_off = tl.where(in_level(level, CHUNK), b_low, 0.0).to(DOT)
        b_x = b_inv.to(DOT)
        b_off = tl.dot(b_off, b_x, input_precision=PRECISION).to(DOT)
        b_inv -= tl.dot(b_x, b_off, input_precision=PRECISION)
    return b_inv


@triton.jit
def multiply_rows(
    b_inv,
    x_ptr,
    stride_x_t,
    length,
    WIDTH: tl.constexpr,
    y_ptr,
    ROW: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """y [C, ROW] = ``b_inv`` [C, C] x, of which ``length`` rows of WIDTH exist; y may replace x."""
    # narrower ones come out wrong on Hopper (docs/studies/kda.md)
    BLOCK: tl.constexpr = 64 if ROW <= 64 else 128
    o_r = tl.arange(0, CHUNK)
    for d0 in tl.range(0, ROW, BLOCK, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK)
        m_x = (o_r < length)[:, None] & (o_d < WIDTH)[None, :]
        b_x = tl.load(x_ptr + o_r[:, None] * stride_x_t + o_d[None, :], mask=m_x, other=0.0)
        b_y = tl.dot(b_inv, b_x.to(b_inv.dtype), input_precision=PRECISION)
        tl.debug_barrier()  # every warp must have read x
        b_y = b_y.to(b_inv.dtype)
        tl.store(y_ptr + o_r[:, None] * ROW + o_d[None, :], b_y, mask=(o_d < ROW)[None, :])


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
def solve_chunk(
    tile,  # pointers to A_qk [C, C], scratch [C, C], k_in [C, ROW_K] (w takes its place), u
    inputs,  # pointers to v and beta
    strides,  # token strides of v and beta
    diag_ptr,  # [C], of A_qk; where A_qk or L will be
    scores_q,  # of q, by distance of the blocks
    scores_k,
    m_t,  # [4, 16]: tokens that the chunk has
    length,
    V: tl.constexpr,
    ROW_K: tl.constexpr,
    ROW_V: tl.constexpr,
    BETA: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_MATH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A_qk, and from L = diag(beta) A_kk the rows u of v and w of k_in."""
    a_qk_ptr, low_ptr, k_in_ptr, u_ptr = tile
    v_ptr, beta_ptr = inputs
    stride_v_t, stride_beta_t = strides
    b_aq0, b_aq1, b_aq2, b_aq3 = scores_q
    b_ak0, b_ak1, b_ak2, b_ak3 = scores_k
    DOT: tl.constexpr = low_ptr.dtype.element_ty
    o_b = tl.arange(0, 4)
    o_s = tl.arange(0, 16)
    o_t = o_b[:, None] * 16 + o_s[None, :]
    o_r = tl.arange(0, CHUNK)
    m_r = o_r < length
    b_diag = tl.load(diag_ptr + o_t)
    tl.debug_barrier()  # A_qk and L replace what the loop has read
    b_beta = tl.load(beta_ptr + o_t * stride_beta_t, mask=m_t, other=0.0)
    b_beta = tl.where(m_t, step_size(b_beta, BETA, FAST_MATH), 0.0)[:, :, None]
    o_rc = o_t[:, :, None] * CHUNK + (o_b * 16)[:, None, None] + o_s[None, None, :]
    m_diag = (o_s[:, None] == o_s[None, :])[None, :, :]
    tl.store(a_qk_ptr + o_rc, tl.where(m_diag, b_diag[:, :, None], b_aq0).to(DOT))
    _store_beside_diagonal(a_qk_ptr, b_aq1, b_aq2, b_aq3, CHUNK)
    b_inv = invert_blocks(b_ak0 * b_beta, DOT, PRECISION)
    tl.store(low_ptr + o_rc, b_inv.to(DOT))
    _store_beside_diagonal(low_ptr, b_ak1 * b_beta, b_ak2 * b_beta, b_ak3 * b_beta, CHUNK)
    tl.debug_barrier()
    b_step = tl.load(beta_ptr + o_r * stride_beta_t, mask=m_r, other=0.0)
    b_step = tl.where(m_r, step_size(b_step, BETA, FAST_MATH), 0.0)
    b_low = tl.load(low_ptr + o_r[:, None] * CHUNK + o_r[None, :])
    b_inv = (merge_blocks(b_low, DOT, PRECISION, CHUNK) * b_step[None, :]).to(DOT)
    multiply_rows(b_inv, v_ptr, stride_v_t, length, V, u_ptr, ROW_V, PRECISION, CHUNK)
    multiply_rows(b_inv, k_in_ptr, ROW_K, CHUNK, ROW_K, k_in_ptr, ROW_K, PRECISION, CHUNK)
