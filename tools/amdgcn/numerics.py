"""The arithmetic of the vector unit's instructions: arrays of lanes in, arrays of lanes out.

The denormals of fp32 are kept (the kernels' mode says so) but for the approximations of ``exp2``,
``log2``, ``rcp`` and ``rsq``, whose instructions flush them; these are rounded to nearest here, the
GPU's may be 1 ulp off. A fused multiply-add is one rounding: the product of two fp32 is exact in
fp64, whose own rounding before the last one is too fine to matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tools.amdgcn.errors import UnmodelledError

Function = Callable[..., Any]
_TINY = 2.0**-126


def flushed(x: Any) -> Any:
    """fp32 denormals, and what underflows to them, as zero of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(0.0, x), x)


def bf16(x: Any) -> Any:
    """Bits of fp32 to those of bf16, to nearest, ties to even; a NaN stays one."""
    rounded = (x + np.uint32(0x7FFF) + (x >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, x >> np.uint32(16) | np.uint32(0x40), rounded)


def f16_bits(x: Any) -> Any:
    """fp32 values as bits of fp16, to nearest, ties to even, denormals kept."""
    return np.asarray(x, np.float16).view(np.uint16).astype(np.uint32)


def perm(high: Any, low: Any, select: Any) -> Any:
    """Bytes of {high, low} chosen by the selector's bytes 0 to 7; 12 is zero."""
    pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    out: Any = np.uint64(0)
    for byte in range(4):
        pick = select >> np.uint32(8 * byte) & np.uint32(0xFF)
        if ((pick > 7) & (pick != 12)).any():
            raise UnmodelledError("v_perm_b32 with a selector that is neither 0 to 7 nor 12")
        chosen = pair >> (np.uint64(8) * (pick & np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)
        out = out | np.where(pick == 12, np.uint64(0), chosen) << np.uint64(8 * byte)
    return out.astype(np.uint32)


def bitop3(table: int, a: Any, b: Any, c: Any) -> Any:
    """Each bit of the result is the table's entry at the three sources' bits (a, b, c)."""
    out: Any = np.uint32(0)
    for entry in range(8):
        if table >> entry & 1:
            terms = (x if entry >> (2 - n) & 1 else ~x for n, x in enumerate((a, b, c)))
            first, second, third = terms
            out = out | (first & second & third)
    return out


def alignbit(high: Any, low: Any, by: Any) -> Any:
    pair = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    return (pair >> (by & np.uint32(31)).astype(np.uint64)).astype(np.uint32)


def bfe_u(value: Any, first: Any, width: Any) -> Any:
    width = width & np.uint32(31)
    return value >> (first & np.uint32(31)) & ((np.uint32(1) << width) - np.uint32(1))


def bfe_i(value: Any, first: Any, width: Any) -> Any:
    width = width & np.uint32(31)
    if np.any(width == 0):
        raise UnmodelledError("v_bfe_i32 of no bits")
    top = np.uint32(1) << (width - np.uint32(1))
    return (bfe_u(value, first, width) ^ top) - top


def ashr_i16(by: Any, value: Any) -> Any:
    """The lower half, shifted with its sign; the upper half becomes zero."""
    wide = (value << np.uint32(16)).view(np.int32) >> np.int32(16)
    return (wide >> (by & np.uint32(15)).view(np.int32)).view(np.uint32) & np.uint32(0xFFFF)


def bfrev(value: Any) -> Any:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        by, keep = np.uint32(shift), np.uint32(mask)
        value = (value >> by & keep) | (value & keep) << by
    return value >> np.uint32(16) | value << np.uint32(16)


def _exponent(x: Any) -> Any:
    """The biased exponent field."""
    return (x.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int32)


def div_scale(value: Any, denominator: Any, numerator: Any) -> tuple[Any, Any]:
    """(scaled value, whether the quotient has to be scaled back) of ``v_div_scale_f32``.

    Moves numerator and denominator to where the steps of a division neither overflow nor meet a
    denormal. Where the inverse and the quotient are denormal the instruction set's text scales a
    denominator of up to 2^127 up, which would overflow; scaling it down is what gives the quotient.
    """
    value, denominator, numerator = np.broadcast_arrays(
        np.asarray(value, np.float32),
        np.asarray(denominator, np.float32),
        np.asarray(numerator, np.float32),
    )
    value, denominator, numerator = (
        np.ascontiguousarray(x) for x in (value, denominator, numerator)
    )
    e1, e2 = _exponent(denominator), _exponent(numerator)
    is_denominator = value.view(np.uint32) == denominator.view(np.uint32)
    is_numerator = value.view(np.uint32) == numerator.view(np.uint32)
    up, down = np.float32(2.0**64), np.float32(2.0**-64)
    wide = np.abs(denominator.astype(np.float64))
    inverse_denormal = 1.0 / wide < _TINY
    quotient_denormal = np.abs(numerator.astype(np.float64)) / wide < _TINY
    is_zero = (denominator == 0) | (numerator == 0)
    far, denormal = e2 - e1 >= 96, e1 == 0
    both = inverse_denormal & quotient_denormal
    conditions = [is_zero, far, denormal, both, inverse_denormal, quotient_denormal, e2 <= 23]
    up_denominator = np.where(is_denominator, value * up, value)
    up_numerator = np.where(is_numerator, value * up, value)
    results = [
        np.full_like(value, np.nan),
        up_denominator,
        value * up,
        np.where(is_denominator, value * down, value),
        value * down,
        up_numerator,
        value * up,
    ]
    flag = np.select([is_zero, far, denormal, quotient_denormal], [False, True, False, True], False)
    return np.select(conditions, results, value), flag


def div_fmas(a: Any, b: Any, c: Any, scales: Any) -> Any:
    """A fused multiply-add whose result is scaled back where ``v_div_scale_f32`` said so."""
    factor = np.where(np.abs(c) >= 2.0, 2.0**64, 2.0**-64)
    return (a * b + c) * np.where(scales, factor, 1.0)


def div_fixup(quotient: Any, denominator: Any, numerator: Any) -> Any:
    """The quotient, or what the special cases of a division are."""
    exact = numerator / denominator
    special = (denominator == 0) | (numerator == 0) | ~np.isfinite(denominator)
    special = special | ~np.isfinite(numerator)
    return np.where(special, exact, np.copysign(np.abs(quotient), exact))


def _shift(x: Any) -> Any:
    return x & np.uint32(31)


def _signed24(x: Any) -> Any:
    return (x << np.int32(8)) >> np.int32(8)


def _u24(x: Any) -> Any:
    return x & np.uint32(0xFFFFFF)


def _saturate(low: float, high: float) -> Function:
    return lambda x: np.clip(np.nan_to_num(np.trunc(x), nan=0.0), low, high).astype(np.int64)


def _middle(a: Any, b: Any, c: Any) -> Any:
    """The second largest of three."""
    return np.fmax(np.fmin(a, b), np.fmin(np.fmax(a, b), c))


# name: (types of the sources, view that takes the result, function). A result for view "u" is
# bits; one for "f" is rounded to fp32.
ARITHMETIC: dict[str, tuple[str, str, Function]] = {
    "v_mov_b32": ("u", "u", lambda a: a),
    "v_accvgpr_read_b32": ("u", "u", lambda a: a),
    "v_accvgpr_write_b32": ("u", "u", lambda a: a),
    "v_accvgpr_mov_b32": ("u", "u", lambda a: a),
    "v_not_b32": ("u", "u", lambda a: ~a),
    "v_bfrev_b32": ("u", "u", bfrev),
    "v_add_f32": ("ff", "f", lambda a, b: a + b),
    "v_sub_f32": ("ff", "f", lambda a, b: a - b),
    "v_subrev_f32": ("ff", "f", lambda a, b: b - a),
    "v_mul_f32": ("ff", "f", lambda a, b: a * b),
    "v_max_f32": ("ff", "f", np.fmax),
    "v_min_f32": ("ff", "f", np.fmin),
    "v_max3_f32": ("fff", "f", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    # those of IEEE 754-2019, which keep a NaN
    "v_maximum3_f32": ("fff", "f", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_minimum3_f32": ("fff", "f", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_min3_f32": ("fff", "f", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "v_med3_f32": ("fff", "f", _middle),
    "v_ceil_f32": ("f", "f", np.ceil),
    "v_cvt_f32_ubyte0": ("u", "f", lambda a: a & np.uint32(0xFF)),
    "v_fma_f32": ("ddd", "f", lambda a, b, c: a * b + c),
    "v_fmamk_f32": ("ddd", "f", lambda a, b, c: a * b + c),
    "v_fmaak_f32": ("ddd", "f", lambda a, b, c: a * b + c),
    "v_rcp_f32": ("d", "f", lambda a: flushed(1.0 / flushed(a))),
    "v_rcp_iflag_f32": ("d", "f", lambda a: flushed(1.0 / flushed(a))),
    "v_rsq_f32": ("d", "f", lambda a: flushed(1.0 / np.sqrt(flushed(a)))),
    "v_exp_f32": ("d", "f", lambda a: flushed(np.exp2(flushed(a)))),
    "v_log_f32": ("d", "f", lambda a: np.log2(flushed(a))),
    "v_ldexp_f32": ("di", "f", lambda a, b: np.ldexp(a, np.clip(b, -1000, 1000))),
    "v_div_fixup_f32": ("ddd", "f", div_fixup),
    "v_cvt_f32_u32": ("u", "f", lambda a: a),
    "v_cvt_f32_i32": ("i", "f", lambda a: a),
    "v_cvt_u32_f32": ("d", "u", _saturate(0, 2.0**32 - 1)),
    "v_cvt_i32_f32": ("d", "i", _saturate(-(2.0**31), 2.0**31 - 1)),
    "v_cvt_f32_f16": ("h", "f", lambda a: a),
    "v_cvt_f16_f32": ("f", "u", f16_bits),
    "v_cvt_pk_f16_f32": ("ff", "u", lambda a, b: f16_bits(a) | f16_bits(b) << np.uint32(16)),
    "v_cvt_pk_bf16_f32": ("uu", "u", lambda a, b: bf16(a) | bf16(b) << np.uint32(16)),
    "v_mul_f16": ("ww", "u", lambda a, b: f16_bits(a * b)),
    "v_and_b32": ("uu", "u", lambda a, b: a & b),
    "v_or_b32": ("uu", "u", lambda a, b: a | b),
    "v_xor_b32": ("uu", "u", lambda a, b: a ^ b),
    "v_or3_b32": ("uuu", "u", lambda a, b, c: a | b | c),
    "v_and_or_b32": ("uuu", "u", lambda a, b, c: a & b | c),
    "v_bfi_b32": ("uuu", "u", lambda a, b, c: (a & b) | (~a & c)),
    "v_xad_u32": ("uuu", "u", lambda a, b, c: (a ^ b) + c),
    "v_add_u32": ("uu", "u", lambda a, b: a + b),
    "v_sub_u32": ("uu", "u", lambda a, b: a - b),
    "v_subrev_u32": ("uu", "u", lambda a, b: b - a),
    "v_add3_u32": ("uuu", "u", lambda a, b, c: a + b + c),
    "v_add_lshl_u32": ("uuu", "u", lambda a, b, c: (a + b) << _shift(c)),
    "v_lshl_add_u32": ("uuu", "u", lambda a, b, c: (a << _shift(b)) + c),
    "v_lshl_or_b32": ("uuu", "u", lambda a, b, c: (a << _shift(b)) | c),
    "v_lshlrev_b32": ("uu", "u", lambda a, b: b << _shift(a)),
    "v_lshrrev_b32": ("uu", "u", lambda a, b: b >> _shift(a)),
    "v_ashrrev_i32": ("ui", "i", lambda a, b: b >> _shift(a).view(np.int32)),
    "v_min_u32": ("uu", "u", np.minimum),
    "v_max_u32": ("uu", "u", np.maximum),
    "v_min_i32": ("ii", "i", np.minimum),
    "v_max_i32": ("ii", "i", np.maximum),
    "v_min3_i32": ("iii", "i", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "v_max3_i32": ("iii", "i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_mul_lo_u32": ("uu", "u", lambda a, b: a * b),
    "v_mul_hi_u32": (
        "uu", "u", lambda a, b: a.astype(np.uint64) * b.astype(np.uint64) >> np.uint64(32)
    ),
    "v_mul_hi_i32": (
        "ii", "i", lambda a, b: a.astype(np.int64) * b.astype(np.int64) >> np.int64(32)
    ),
    "v_mul_i32_i24": ("ii", "i", lambda a, b: _signed24(a) * _signed24(b)),
    "v_mul_u32_u24": ("uu", "u", lambda a, b: _u24(a) * _u24(b)),
    "v_mad_i32_i24": ("iii", "i", lambda a, b, c: _signed24(a) * _signed24(b) + c),
    "v_mad_u32_u24": ("uuu", "u", lambda a, b, c: _u24(a) * _u24(b) + c),
    "v_alignbit_b32": ("uuu", "u", alignbit),
    "v_perm_b32": ("uuu", "u", perm),
    "v_bfe_u32": ("uuu", "u", bfe_u),
    "v_bfe_i32": ("uuu", "u", bfe_i),
    # the 16-bit ones write zero to the upper half
    "v_add_u16": ("uu", "u", lambda a, b: (a + b) & np.uint32(0xFFFF)),
    "v_sub_u16": ("uu", "u", lambda a, b: (a - b) & np.uint32(0xFFFF)),
    "v_lshlrev_b16": ("uu", "u", lambda a, b: b << (a & np.uint32(15)) & np.uint32(0xFFFF)),
    "v_lshrrev_b16": ("uu", "u", lambda a, b: (b & np.uint32(0xFFFF)) >> (a & np.uint32(15))),
    "v_ashrrev_i16": ("uu", "u", ashr_i16),
    "v_pack_b32_f16": (
        "uu", "u", lambda a, b: (a & np.uint32(0xFFFF)) | (b & np.uint32(0xFFFF)) << np.uint32(16)
    ),
}  # fmt: skip
# With "clamp"; in int64.
SATURATED: dict[str, Function] = {
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
}
# With two sources of 64 bits, or a shift of one: the result fills two registers.
WIDE: dict[str, tuple[str, Function]] = {
    "v_mov_b64": ("q", lambda a: a),
    "v_lshl_add_u64": ("quq", lambda a, b, c: (a << (b.astype(np.uint64) & np.uint64(7))) + c),
    "v_lshlrev_b64": ("uq", lambda a, b: b << (a.astype(np.uint64) & np.uint64(63))),
    "v_lshrrev_b64": ("uq", lambda a, b: b >> (a.astype(np.uint64) & np.uint64(63))),
    "v_ashrrev_i64": ("up", lambda a, b: b >> (a.astype(np.int64) & np.int64(63))),
}
COMPARISONS: dict[str, Function] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: (a < b) | (a > b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "lt": lambda a, b: a < b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "le": lambda a, b: a <= b,
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nle": lambda a, b: ~(a <= b),
}
TYPES = {"f32": "f", "u16": "s", "u32": "u", "i32": "i", "u64": "q", "i64": "p"}
