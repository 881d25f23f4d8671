"""The triangular solve of KDA prefill, as functions of the intra-chunk kernel.

    T = (I + L)^-1 diag(beta)        rows y = T x

(I + L)^-1 is forward substitution on pairs of rows, in fp32, then merges of inverted diagonal
blocks, 2 to 64 wide: with L_i the part of L between the two halves of each larger block and X the
inverse of the smaller ones, X - X L_i X is that of the larger. (A Neumann series in half precision
turns near-collinear keys into NaN.)
"""

import triton
import triton.language as tl


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
    # narrower ones come out wrong on Hopper (docs/studies/kda-prefill.md)
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
