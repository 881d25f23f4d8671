"""Roundings and number formats of caches, exactly, in integers.

The result is then one and the same in Triton's interpreter, on CUDA and on HIP, and fp8 codes do
not depend on which conversions an architecture has.
"""

import triton
import triton.language as tl


@triton.jit
def round_bf16(x):
    """fp32 to the nearest bf16, ties to even, kept in fp32."""
    u = x.to(tl.uint32, bitcast=True)
    u = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return u.to(tl.float32, bitcast=True)


@triton.jit
def ceil_log2_ratio(amax, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """Smallest k with amax <= (1 + MANTISSA/2^23)·2^(EXPONENT + k), exactly; amax fp32 normal.

    This is ceil(log2(amax / max_code)) without the division and the logarithm.
    """
    u = amax.to(tl.int32, bitcast=True)
    return (u >> 23) - (127 + EXPONENT) + ((u & 0x7FFFFF) > MANTISSA).to(tl.int32)


@triton.jit
def exp2_int(k):
    """2^k in fp32 for an int32 k, -126 <= k <= 127."""
    return ((k + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(y, IS_FNUZ: tl.constexpr):
    """e4m3 codes (uint8) of fp32 values already scaled into ±448 (OCP) or ±240 (FNUZ)."""
    BIAS: tl.constexpr = 8 if IS_FNUZ else 7
    u = y.to(tl.uint32, bitcast=True)
    a = u & 0x7FFFFFFF
    # Normal codes: keep 3 mantissa bits, ties to even, and move the exponent to the new bias.
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    # Below 2^(1-BIAS) codes count units of 2^(-2-BIAS): in 2^(21-BIAS) + |y| one unit is one ulp.
    MAGIC: tl.constexpr = 2.0 ** (21 - BIAS)
    MAGIC_BITS: tl.constexpr = (127 + 21 - BIAS) << 23
    small = (a.to(tl.float32, bitcast=True) + MAGIC).to(tl.uint32, bitcast=True) - MAGIC_BITS
    code = tl.where(a < ((128 - BIAS) << 23), small, normal)
    sign = (u >> 24) & 0x80
    # What does not fit (only inf and NaN, after scaling) becomes NaN: 0x80 in FNUZ, where zero has
    # no sign, 0x7F and 0xFF in OCP.
    if IS_FNUZ:
        return tl.where(code > 0x7F, 0x80, tl.where(code == 0, 0, code | sign)).to(tl.uint8)
    return (tl.minimum(code, 0x7F) | sign).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """fp32 values of e4m3 codes (uint8, OCP) that have no sign and are finite."""
    u = code.to(tl.uint32)
    normal = ((u + ((127 - 7) << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(u < 8, u.to(tl.float32) * 2.0**-9, normal)


@triton.jit
def encode_e2m1(y, IS_TIES_EVEN: tl.constexpr):
    """e2m1 codes (uint8, 0 to 15) of fp32 values; magnitudes above 6 saturate.

    Ties go to the even code with a signed zero (as the hardware's cvt does), or, if not
    IS_TIES_EVEN, to the smaller magnitude with an unsigned zero (as sglang does).
    """
    a = tl.abs(y)
    code = (a > 0.25).to(tl.uint32) + (a > 1.25).to(tl.uint32)
    code += (a > 2.5).to(tl.uint32) + (a > 5.0).to(tl.uint32)
    if IS_TIES_EVEN:
        code += (a >= 0.75).to(tl.uint32) + (a >= 1.75).to(tl.uint32) + (a >= 3.5).to(tl.uint32)
    else:
        code += (a > 0.75).to(tl.uint32) + (a > 1.75).to(tl.uint32) + (a > 3.5).to(tl.uint32)
    sign = (y.to(tl.uint32, bitcast=True) >> 28) & 8
    if not IS_TIES_EVEN:
        sign = tl.where(code == 0, 0, sign)
    return (code | sign).to(tl.uint8)
