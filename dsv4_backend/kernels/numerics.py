"""Exact bit arithmetic and the row-wise mathematics shared by the compressor's kernels.

Roundings are written in integers: the result is then one and the same under Triton's interpreter,
on CUDA and on HIP, and the fp8 codes do not depend on which conversions an architecture has.
"""

import triton
import triton.language as tl


@triton.jit
def start_next(PDL: tl.constexpr):
    """PDL 3: the launch after this one may start as soon as all programs of this one have."""
    if PDL == 3:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Before the first access to anything that an earlier kernel wrote or reads.

    PDL 1: this kernel starts while the previous one ends (programmatic dependent launch, sm_90 and
    newer), and waits here until that one's memory is visible. PDL 2: it also lets its successor
    start early, which must wait in its turn. PDL 3: it has done so before (``start_next``). PDL 0:
    the launch itself waits.
    """
    if PDL >= 1:
        tl.extra.cuda.gdc_wait()
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def made_by_now(b_x, b_y, b_z):
    """b_x, for CUDA; the three are computed before what follows in the program.

    Without it compilers move the arithmetic behind a wait, into the branch that uses its result.
    They do not move it over a vote of the warp: on a NaN here that no addition gives.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .f32 s; .reg .pred p, q;
        add.f32 s, $4, $5; add.f32 s, s, $6; add.f32 s, s, $7; add.f32 s, s, $8;
        add.f32 s, s, $9; add.f32 s, s, $10; add.f32 s, s, $11; add.f32 s, s, $12;
        add.f32 s, s, $13; add.f32 s, s, $14; add.f32 s, s, $15;
        setp.eq.b32 p, s, 0x7FBADBAD; vote.sync.any.pred q, p, 0xFFFFFFFF; @q trap;
        mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }""",
        "=f,=f,=f,=f,f,f,f,f,f,f,f,f,f,f,f,f",
        [b_x, b_y, b_z],
        dtype=tl.float32,
        is_pure=False,
        pack=4,
    )


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
def rms_norm(b_x, b_w, eps, D: tl.constexpr):
    """w · x / sqrt(mean(x²) + eps) for rows b_x and b_w [D] fp32."""
    return b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / D + eps) * b_w


@triton.jit
def load_angles(table_ptr, position, stride_table_p, D: tl.constexpr, IS_SPLIT: tl.constexpr):
    """(cos, sin) of position's 32 angles in the last 64 of [D] fp32; the others are undefined.

    A table row holds 32 (cos, sin) pairs, or, if IS_SPLIT, 32 cosines and then 32 sines.
    """
    o_t = tl.arange(0, D) - (D - 64)
    o_entry = (o_t >> 1) + 32 * (o_t & 1) if IS_SPLIT else o_t
    row_ptr = table_ptr + position.to(tl.int64) * stride_table_p
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
    b_re, b_im = tl.split(tl.reshape(b_x, (D // 2, 2)))
    b_out = tl.join(b_re * b_cos - b_im * b_sin, b_re * b_sin + b_im * b_cos)
    return tl.reshape(b_out, (D,))
