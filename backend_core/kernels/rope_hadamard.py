"""Rotations of a row that a program holds in registers: RoPE of its last 64 channels, Hadamard."""

import triton
import triton.language as tl


@triton.jit
def hadamard(b_x, D: tl.constexpr):
    """H_D b_x / sqrt(D), H in natural (Sylvester) order, for a register row b_x [D] fp32.

    The partner at distance h is found as (x_o ^ x_p) ^ x_o on the bit patterns: the xor of a pair
    is a reduction over an axis of two, which compiles to shuffles inside a wave (DPP and permlane
    on CDNA, SHFL on NVIDIA) and leaves the layout as it is, so no stage touches shared memory.
    """
    LOG2_D: tl.constexpr = 7 if D == 128 else 9
    o_d = tl.arange(0, D)
    for i_s in tl.static_range(LOG2_D):
        u = tl.reshape(b_x.to(tl.int32, bitcast=True), (D >> (i_s + 1), 2, 1 << i_s))
        u_partner = tl.reshape(tl.xor_sum(u, axis=1, keep_dims=True) ^ u, (D,))
        b_partner = u_partner.to(tl.float32, bitcast=True)
        b_x = tl.where((o_d >> i_s) & 1 == 0, b_x + b_partner, b_partner - b_x)
    return b_x * (1.0 / D**0.5)


@triton.jit
def load_angles(table, position, D: tl.constexpr, IS_SPLIT: tl.constexpr):
    """(cos, sin) of position's 32 angles in the last 64 of [D] fp32; the others are undefined.

    table: (ptr, stride_p) of rows, which hold 32 (cos, sin) pairs, or, if IS_SPLIT, 32 cosines and
    then 32 sines.
    """
    o_t = tl.arange(0, D) - (D - 64)
    o_entry = (o_t >> 1) + 32 * (o_t & 1) if IS_SPLIT else o_t
    row_ptr = table.ptr + position.to(tl.int64) * table.stride_p
    return tl.load(row_ptr + o_entry, mask=o_t >= 0).to(tl.float32)


@triton.jit
def rope_tail(b_x, b_angles, D: tl.constexpr):
    """Rotate the pairs (2j, 2j+1) of the last 64 channels of b_x [D] fp32.

    The angles come in the order of the channels: split then gives cosines and sines in b_x's own
    layout, and the rotation moves nothing between lanes.
    """
    b_cos, b_sin = tl.split(tl.reshape(b_angles, (D // 2, 2)))
    m_tail = tl.arange(0, D // 2) >= D // 2 - 32
    b_cos = tl.where(m_tail, b_cos, 1.0)
    b_sin = tl.where(m_tail, b_sin, 0.0)
    return rotate_pairs(b_x, b_cos, b_sin, D)


@triton.jit
def rotate_pairs(b_x, b_cos, b_sin, D: tl.constexpr):
    """Rotate the pairs (2j, 2j+1) of b_x [D] fp32 by angles [D/2]."""
    b_re, b_im = tl.split(tl.reshape(b_x, (D // 2, 2)))
    b_out = tl.join(b_re * b_cos - b_im * b_sin, b_re * b_sin + b_im * b_cos)
    return tl.reshape(b_out, (D,))
