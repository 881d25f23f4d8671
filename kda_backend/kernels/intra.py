"""Intra-chunk stage of KDA prefill: gates, decayed rows, causal scores and the triangular solve.

For one chunk of C = 64 tokens of one value head, with G[r] the running sum of log2 decays,
``q_r, k_r`` the normalised rows and ``beta_r`` the step sizes:

    A_x[r, c] = sum_d x[r, d] k[c, d] 2^(G[r, d] - G[c, d])       for c < r, x = q or k
    T    = (I + diag(beta) A_kk)^-1 diag(beta)
    w    = T (k * 2^G)                      u     = T v
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
memory, which the first-level cache holds.

Operands of the tensor cores are fp16 for 16-bit inputs: all of them are at most 1 in magnitude
after normalisation, and fp16 carries three more bits than bf16. So are the gates in the sums: a
decay of 2^-x is off by x 2^-11 of itself at most, so by less than 2^-11 (docs/families/kda.md).

Grid: (HV * chunk capacity,): one axis, since the others stop at 65,535.
"""

import triton
import triton.language as tl

from backend_core.kernels.math import ex2
from backend_core.kernels.pdl import pdl_begin
from kda_backend.kernels.functions.gate import log2_decay
from kda_backend.kernels.functions.solve import in_level, solve_chunk

_PREFIX, _SUFFIX = tl.constexpr(4), tl.constexpr(5)
_BLOCK_K = tl.constexpr(16)  # channels at a time: each warp loads its own 16 rows


@triton.jit
def _sum_mask(LEVEL: tl.constexpr, DOT: tl.constexpr):
    """0/1 matrix [4, 16, 16], the same for each block: times the gates, the sum each row needs.

    Row r of an upper half of 2^LEVEL sums the tokens from its half's start through r; row c of a
    lower half sums the tokens after c through its half's end. _PREFIX: all through r. _SUFFIX: all
    after c.
    """
    o_r = tl.arange(0, 16)[:, None]
    o_c = tl.arange(0, 16)[None, :]
    if LEVEL == _PREFIX:
        m_sum = o_c <= o_r
    elif LEVEL == _SUFFIX:
        m_sum = o_c > o_r
    else:
        m_upper = ((o_r >> LEVEL) & 1) == 1
        m_sum = ((o_r >> LEVEL) == (o_c >> LEVEL)) & ((o_c <= o_r) == m_upper)
    # two axes until here: Triton then builds the operand in registers, in its own layout
    return tl.broadcast_to(tl.where(m_sum, 1.0, 0.0).to(DOT)[None, :, :], [4, 16, 16])


@triton.jit
def _block_decay(decay_ptr, m_d, SHIFT: tl.constexpr, ROW: tl.constexpr):
    """[4, 1, _BLOCK_K]: total decay of block b - SHIFT, 1 where there is none."""
    o_b = tl.arange(0, 4)[:, None]
    m_bd = (o_b >= SHIFT) & (o_b < 4 + SHIFT) & m_d
    return tl.load(decay_ptr - SHIFT * ROW, mask=m_bd, other=1.0)[:, None, :]


@triton.jit
def _scores(b_x, b_y, b_acc, PRECISION: tl.constexpr):
    """``b_acc`` + rows of x times rows of y, block by block: [4, 16, 16]."""
    return tl.dot(b_x, tl.trans(b_y, 0, 2, 1), acc=b_acc, input_precision=PRECISION)


@triton.jit
def _level(
    b_aq,
    b_ak,
    b_q,
    b_k,
    b_g,
    LEVEL: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """Adds the scores of one level of the tree."""
    b_sum = tl.dot(_sum_mask(LEVEL, b_g.dtype), b_g, input_precision=PRECISION)
    b_decay = ex2(b_sum, FAST_MATH).to(b_k.dtype)
    b_y = b_k * b_decay
    b_none = tl.zeros([4, 16, 16], tl.float32)
    m_level = in_level(LEVEL, 16)[None, :, :]
    b_aq += tl.where(m_level, _scores(b_q * b_decay, b_y, b_none, PRECISION), 0.0)
    b_ak += tl.where(m_level, _scores(b_y, b_y, b_none, PRECISION), 0.0)
    return b_aq, b_ak


@triton.jit
def _norms_and_gates(
    rows,  # [4, 16, 1] pointers to q, k and g
    gate,  # A_log, pointer to dt_bias or None, lower bound
    k_in_ptr,
    block_sum_ptr,  # [4, ROW_K] fp32
    i_hv,
    length,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    FAST_MATH: tl.constexpr,
):
    """Factors that normalise q and k, and the diagonal of A_qk, which no decay touches: [4, 16].

    Leaves the gates in k_in's place and their sums over each block.
    """
    q_rows, k_rows, g_rows = rows
    a_log, dt_bias_ptr, lower_bound = gate
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    DOT: tl.constexpr = k_in_ptr.dtype.element_ty
    o_b = tl.arange(0, 4)
    o_t = o_b[:, None] * 16 + tl.arange(0, 16)[None, :]
    m_t = o_t < length
    b_qq = tl.zeros([4, 16, BLOCK], tl.float32)
    b_kk = tl.zeros([4, 16, BLOCK], tl.float32)
    b_qk = tl.zeros([4, 16, BLOCK], tl.float32)
    for d0 in tl.range(0, K, BLOCK, num_stages=1):
        o_d = d0 + tl.arange(0, BLOCK)
        m_d = o_d < K
        m_td = m_t[:, :, None] & m_d[None, None, :]
        b_qf = tl.load(q_rows + o_d[None, None, :], mask=m_td, other=0.0).to(tl.float32)
        b_kf = tl.load(k_rows + o_d[None, None, :], mask=m_td, other=0.0).to(tl.float32)
        b_gf = tl.load(g_rows + o_d[None, None, :], mask=m_td, other=0.0).to(tl.float32)
        b_qq += b_qf * b_qf
        b_kk += b_kf * b_kf
        b_qk += b_qf * b_kf
        b_bias = tl.zeros([1, 1, BLOCK], tl.float32)
        if dt_bias_ptr is not None:
            b_bias = tl.load(dt_bias_ptr + i_hv * K + o_d, mask=m_d, other=0.0)[None, None, :]
        b_gf = log2_decay(b_gf, a_log, b_bias.to(tl.float32), lower_bound, GATE, FAST_MATH)
        # 2^-1024 is zero, so the bound only keeps fp16 finite
        b_gf = tl.where(m_td, tl.maximum(b_gf, -1024.0), 0.0)
        m_row = o_d < ROW_K
        o_td = o_t[:, :, None] * ROW_K + o_d[None, None, :]
        tl.store(k_in_ptr + o_td, b_gf.to(DOT), mask=m_row[None, None, :])
        o_bd = o_b[:, None] * ROW_K + o_d[None, :]
        tl.store(block_sum_ptr + o_bd, tl.sum(b_gf, 1), mask=m_row[None, :])
    b_diag = tl.sum(b_qk, 2)
    b_q_norm = tl.full([4, 16], 1.0, tl.float32)
    b_k_norm = tl.full([4, 16], 1.0, tl.float32)
    if L2NORM:
        b_q_norm = tl.rsqrt(tl.sum(b_qq, 2) + 1e-6)
        b_k_norm = tl.rsqrt(tl.sum(b_kk, 2) + 1e-6)
    b_diag *= b_q_norm * b_k_norm
    return b_q_norm, b_k_norm, b_diag


@triton.jit
def _block_decays(block_sum_ptr, decay_ptr, total_ptr, K: tl.constexpr, FAST_MATH: tl.constexpr):
    """The blocks' total decays [4, ROW_K], and the chunk's [K], from the sums of the gates."""
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    DOT: tl.constexpr = decay_ptr.dtype.element_ty
    for d0 in tl.static_range(0, K, 128):
        o_d = d0 + tl.arange(0, 128)
        o_bd = tl.arange(0, 4)[:, None] * ROW_K + o_d[None, :]
        m_row = (o_d < ROW_K)[None, :]
        b_total = tl.load(block_sum_ptr + o_bd, mask=m_row, other=0.0)
        tl.store(decay_ptr + o_bd, ex2(b_total, FAST_MATH).to(DOT), mask=m_row)
        tl.store(total_ptr + o_d, ex2(tl.sum(b_total, 0), FAST_MATH), mask=o_d < K)


@triton.jit
def _scores_before(b_aq, b_ak, b_q, b_k, b_y, PRECISION: tl.constexpr):
    """Adds those of q and k with the columns [C, x] of a block before each row's."""
    b_y = tl.reshape(b_y, [4, 16, b_y.shape[1]])
    return _scores(b_q, b_y, b_aq, PRECISION), _scores(b_k, b_y, b_ak, PRECISION)


@triton.jit
def _decayed_rows(
    q_ptr,
    k_ptr,
    strides,  # token strides of q and k
    norms,  # factors [4, 16] of q and k
    tile,  # pointers to k_in, q_in, k_out, A_qk, scratch
    length,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_MATH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scores of q and of k [4, 16, 16], by distance of the blocks; q_in, k_in and k_out."""
    stride_q_t, stride_k_t = strides
    b_q_norm, b_k_norm = norms
    k_in_ptr, q_in_ptr, k_out_ptr, a_qk_ptr, low_ptr = tile
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    DOT: tl.constexpr = k_in_ptr.dtype.element_ty
    o_b = tl.arange(0, 4)
    # scores within a block, and with the blocks 1, 2 and 3 before it
    b_aq0 = tl.zeros([4, 16, 16], tl.float32)
    b_ak0 = tl.zeros([4, 16, 16], tl.float32)
    b_aq1 = tl.zeros([4, 16, 16], tl.float32)
    b_ak1 = tl.zeros([4, 16, 16], tl.float32)
    b_aq2 = tl.zeros([4, 16, 16], tl.float32)
    b_ak2 = tl.zeros([4, 16, 16], tl.float32)
    b_aq3 = tl.zeros([4, 16, 16], tl.float32)
    b_ak3 = tl.zeros([4, 16, 16], tl.float32)
    o_r = tl.arange(0, CHUNK)
    m_r = o_r < length
    # a slice of channels is loaded while the one before it is worked on
    o_e = tl.arange(0, _BLOCK_K)[None, :]
    m_re = m_r[:, None] & (o_e < K)
    b_g_next = tl.load(k_in_ptr + o_r[:, None] * ROW_K + o_e, mask=o_e < ROW_K, other=0.0)
    b_q_next = tl.load(q_ptr + o_r[:, None] * stride_q_t + o_e, mask=m_re, other=0.0)
    b_k_next = tl.load(k_ptr + o_r[:, None] * stride_k_t + o_e, mask=m_re, other=0.0)
    for d0 in tl.range(0, K, _BLOCK_K, num_stages=1):
        o_e = d0 + tl.arange(0, _BLOCK_K)[None, :]
        m_row = o_e < ROW_K
        o_re = o_r[:, None] * ROW_K + o_e
        b_g = tl.reshape(b_g_next, [4, 16, _BLOCK_K])
        b_q = tl.reshape(b_q_next, [4, 16, _BLOCK_K]).to(tl.float32) * b_q_norm[:, :, None]
        b_k = tl.reshape(b_k_next, [4, 16, _BLOCK_K]).to(tl.float32) * b_k_norm[:, :, None]
        o_n = o_e + _BLOCK_K
        m_n = m_r[:, None] & (o_n < K)
        b_g_next = tl.load(k_in_ptr + o_re + _BLOCK_K, mask=o_n < ROW_K, other=0.0)
        b_q_next = tl.load(q_ptr + o_r[:, None] * stride_q_t + o_n, mask=m_n, other=0.0)
        b_k_next = tl.load(k_ptr + o_r[:, None] * stride_k_t + o_n, mask=m_n, other=0.0)
        b_q = b_q.to(DOT)
        b_k = b_k.to(DOT)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 0, PRECISION, FAST_MATH)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 1, PRECISION, FAST_MATH)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 2, PRECISION, FAST_MATH)
        b_aq0, b_ak0 = _level(b_aq0, b_ak0, b_q, b_k, b_g, 3, PRECISION, FAST_MATH)
        # columns, to the end of their block: what other warps read, by turns in two places, so that
        # one barrier is enough
        b_sum = tl.dot(_sum_mask(_SUFFIX, DOT), b_g, input_precision=PRECISION)
        b_y = b_k * ex2(b_sum, FAST_MATH).to(DOT)
        y_ptr = a_qk_ptr + d0 // _BLOCK_K % 2 * (CHUNK * _BLOCK_K)
        y_ptr += o_r[:, None] * _BLOCK_K + tl.arange(0, _BLOCK_K)[None, :]
        tl.store(y_ptr, tl.reshape(b_y, [CHUNK, _BLOCK_K]))
        decay_ptr = low_ptr + o_b[:, None] * ROW_K + o_e
        b_y *= _block_decay(decay_ptr, m_row, -1, ROW_K)
        b_y *= _block_decay(decay_ptr, m_row, -2, ROW_K)
        b_y *= _block_decay(decay_ptr, m_row, -3, ROW_K)
        tl.store(k_out_ptr + o_re, tl.reshape(b_y, [CHUNK, _BLOCK_K]), mask=m_row)
        tl.debug_barrier()
        b_y1 = tl.load(y_ptr - 16 * _BLOCK_K, mask=o_r[:, None] >= 16, other=0.0)
        b_y2 = tl.load(y_ptr - 32 * _BLOCK_K, mask=o_r[:, None] >= 32, other=0.0)
        b_y3 = tl.load(y_ptr - 48 * _BLOCK_K, mask=o_r[:, None] >= 48, other=0.0)
        b_decay1 = _block_decay(decay_ptr, m_row, 1, ROW_K)
        b_decay2 = _block_decay(decay_ptr, m_row, 2, ROW_K)
        b_decay3 = _block_decay(decay_ptr, m_row, 3, ROW_K)
        # rows, from the start of their block, then of the blocks before it
        b_sum = tl.dot(_sum_mask(_PREFIX, DOT), b_g, input_precision=PRECISION)
        b_decay = ex2(b_sum, FAST_MATH).to(DOT)
        b_q *= b_decay
        b_k *= b_decay
        b_aq1, b_ak1 = _scores_before(b_aq1, b_ak1, b_q, b_k, b_y1, PRECISION)
        b_q *= b_decay1
        b_k *= b_decay1
        b_aq2, b_ak2 = _scores_before(b_aq2, b_ak2, b_q, b_k, b_y2, PRECISION)
        b_q *= b_decay2
        b_k *= b_decay2
        b_aq3, b_ak3 = _scores_before(b_aq3, b_ak3, b_q, b_k, b_y3, PRECISION)
        b_q *= b_decay3
        b_k *= b_decay3
        tl.store(q_in_ptr + o_re, tl.reshape(b_q, [CHUNK, _BLOCK_K]), mask=m_row)
        tl.store(k_in_ptr + o_re, tl.reshape(b_k, [CHUNK, _BLOCK_K]), mask=m_row)
    return (b_aq0, b_aq1, b_aq2, b_aq3), (b_ak0, b_ak1, b_ak2, b_ak3)


@triton.jit
def _tile_parts(tile_ptr, i_tile, CHUNK: tl.constexpr, ROW_K: tl.constexpr, ROW_V: tl.constexpr):
    """Where a tile has w (k_in before), q_in, k_out, u, A_qk and its scratch (L)."""
    k_in_ptr = tile_ptr + i_tile * (CHUNK * (3 * ROW_K + ROW_V + 2 * CHUNK))
    q_in_ptr = k_in_ptr + CHUNK * ROW_K
    k_out_ptr = q_in_ptr + CHUNK * ROW_K
    u_ptr = k_out_ptr + CHUNK * ROW_K
    a_qk_ptr = u_ptr + CHUNK * ROW_V
    return k_in_ptr, q_in_ptr, k_out_ptr, u_ptr, a_qk_ptr, a_qk_ptr + CHUNK * CHUNK


@triton.jit(do_not_specialize=["stride_beta_t"])
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
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST_MATH: tl.constexpr,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    pdl_begin(PDL)  # the scan may start; it waits for all that is written here
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
    # rows of at least 16 bytes, with zeros after K and V: on Hopper, operands that loads of two
    # bytes bring into a product come out wrong
    ROW_K: tl.constexpr = (K + 7) // 8 * 8
    ROW_V: tl.constexpr = (V + 7) // 8 * 8
    parts = _tile_parts(tile_ptr, i_tile, CHUNK, ROW_K, ROW_V)
    k_in_ptr, q_in_ptr, k_out_ptr, u_ptr, a_qk_ptr, low_ptr = parts
    DOT: tl.constexpr = tile_ptr.dtype.element_ty

    o_b = tl.arange(0, 4)
    o_t = o_b[:, None] * 16 + tl.arange(0, 16)[None, :]  # token of a block's row
    m_t = o_t < length
    a_log = tl.full([], 0.0, tl.float32)
    if a_log_ptr is not None:
        a_log = tl.load(a_log_ptr + i_hv).to(tl.float32)

    # gates wait in k_in's place, their sums in A_qk's; then block decays and the diagonal in L's
    BLOCK_G: tl.constexpr = 32 if DOT.is_fp32() or K > 128 else (64 if K <= 64 else 128)
    block_sum_ptr = a_qk_ptr.to(tl.pointer_type(tl.float32))
    diag_ptr = (low_ptr + 4 * ROW_K).to(tl.pointer_type(tl.float32))
    b_q_norm, b_k_norm, b_diag = _norms_and_gates(
        rows=(
            q_ptr + o_t[:, :, None] * stride_q_t,
            k_ptr + o_t[:, :, None] * stride_k_t,
            g_ptr + o_t[:, :, None] * stride_g_t,
        ),
        gate=(a_log, dt_bias_ptr, lower_bound),
        k_in_ptr=k_in_ptr,
        block_sum_ptr=block_sum_ptr,
        i_hv=i_hv,
        length=length,
        K=K,
        BLOCK=BLOCK_G,
        GATE=GATE,
        L2NORM=L2NORM,
        FAST_MATH=FAST_MATH,
    )
    tl.store(diag_ptr + o_t, b_diag)
    tl.debug_barrier()
    _block_decays(block_sum_ptr, low_ptr, total_ptr + i_tile * K, K, FAST_MATH)
    tl.debug_barrier()

    scores_q, scores_k = _decayed_rows(
        q_ptr=q_ptr,
        k_ptr=k_ptr,
        strides=(stride_q_t, stride_k_t),
        norms=(b_q_norm, b_k_norm),
        tile=(k_in_ptr, q_in_ptr, k_out_ptr, a_qk_ptr, low_ptr),
        length=length,
        K=K,
        PRECISION=PRECISION,
        FAST_MATH=FAST_MATH,
        CHUNK=CHUNK,
    )
    solve_chunk(
        tile=(a_qk_ptr, low_ptr, k_in_ptr, u_ptr),
        inputs=(v_ptr, beta_ptr),
        strides=(stride_v_t, stride_beta_t),
        diag_ptr=diag_ptr,
        scores_q=scores_q,
        scores_k=scores_k,
        m_t=m_t,
        length=length,
        V=V,
        ROW_K=ROW_K,
        ROW_V=ROW_V,
        BETA=BETA,
        PRECISION=PRECISION,
        FAST_MATH=FAST_MATH,
        CHUNK=CHUNK,
    )
