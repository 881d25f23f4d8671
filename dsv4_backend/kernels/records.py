"""One compressed row in each record format (`backend_core.formats`), written to its slot of a page.

A page is PAGE rows of data followed by the rows' scales; slots count rows over all pages.
"""

import triton
import triton.language as tl

from backend_core.kernels.codecs import (
    ceil_log2_ratio,
    encode_e2m1,
    encode_e4m3,
    exp2_int,
    round_bf16,
)


@triton.jit
def store_record(
    b_x,  # [D] fp32, finished row
    cache_ptr,  # uint8 [pages, page bytes]
    slot,
    stride_cache_p,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
):
    page_ptr = cache_ptr + (slot // PAGE).to(tl.int64) * stride_cache_p
    i_slot = (slot % PAGE).to(tl.int32)
    # Every engine quantises the main rows from bf16; the indexer's rows sglang takes in fp32.
    if D == 512 or ROUNDING != "sglang":
        b_x = round_bf16(b_x)
    if FORMAT == "fp8_ds_mla":
        store_fp8_ds_mla(b_x, page_ptr, i_slot, D, PAGE, IS_FNUZ)
    elif FORMAT == "bf16_rows":
        row_ptr = (page_ptr + i_slot * (2 * D)).to(tl.pointer_type(tl.bfloat16))
        tl.store(row_ptr + tl.arange(0, D), b_x.to(tl.bfloat16))
    elif FORMAT == "indexer_fp8":
        store_indexer_fp8(b_x, page_ptr, i_slot, D, PAGE, ROUNDING, IS_FNUZ)
    else:
        tl.static_assert(FORMAT == "indexer_mxfp4", "unknown cache format")
        store_indexer_mxfp4(b_x, page_ptr, i_slot, D, PAGE, ROUNDING)


@triton.jit
def store_fp8_ds_mla(
    b_x, page_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr, IS_FNUZ: tl.constexpr
):
    """448 e4m3 with one power-of-two scale per 64, then 64 bf16; 7 UE8M0 bytes and a zero."""
    TOP: tl.constexpr = 7 if IS_FNUZ else 8  # the largest code used is 1.75 · 2^TOP
    G: tl.constexpr = D // 64
    row_ptr = page_ptr + i_slot * 576
    o_d = tl.arange(0, D)
    b_g = tl.reshape(b_x, (G, 64))
    b_amax = tl.maximum(tl.max(tl.abs(b_g), axis=1), 1e-4)
    b_k = ceil_log2_ratio(b_amax, 0x600000, TOP)  # [G]
    b_y = tl.reshape(b_g * exp2_int(-b_k)[:, None], (D,))
    tl.store(row_ptr + o_d, encode_e4m3(b_y, IS_FNUZ), mask=o_d < D - 64)
    tail_ptr = (row_ptr + (D - 64)).to(tl.pointer_type(tl.bfloat16))
    tl.store(tail_ptr + (o_d - (D - 64)), b_x.to(tl.bfloat16), mask=o_d >= D - 64)
    o_g = tl.arange(0, G)
    b_scale = tl.where(o_g < G - 1, b_k + 127, 0).to(tl.uint8)
    tl.store(page_ptr + PAGE * 576 + i_slot * 8 + o_g, b_scale)


@triton.jit
def quantise_indexer_fp8(b_x, ROUNDING: tl.constexpr, IS_FNUZ: tl.constexpr):
    """(e4m3 codes, fp32 scale): amax / max code, which all but sglang round up to 2^k."""
    # magnitudes compare as their bits do, and integers have a reduction of the warp (redux.sync)
    amax = tl.max(tl.abs(b_x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, 1e-4)
    if ROUNDING == "sglang":
        scale = tl.div_rn(amax, 224.0 if IS_FNUZ else 448.0)
        inv = tl.div_rn(1.0, scale)
    else:
        k = ceil_log2_ratio(amax, 0x600000, 7 if IS_FNUZ else 8)
        scale = exp2_int(k)
        inv = exp2_int(-k)
    return encode_e4m3(b_x * inv, IS_FNUZ), scale


@triton.jit
def store_indexer_fp8(
    b_x,
    page_ptr,
    i_slot,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
):
    """D e4m3 and one fp32 scale."""
    b_code, scale = quantise_indexer_fp8(b_x, ROUNDING, IS_FNUZ)
    tl.store(page_ptr + i_slot * D + tl.arange(0, D), b_code)
    tl.store((page_ptr + PAGE * D + i_slot * 4).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def quantise_indexer_mxfp4(b_x, D: tl.constexpr, ROUNDING: tl.constexpr):
    """D/2 bytes of e2m1 pairs, the even channel in the low nibble, and one UE8M0 byte per 32."""
    G: tl.constexpr = D // 32
    FLOOR: tl.constexpr = 1e-4 if ROUNDING == "sglang" else 6.0 * 2.0**-126
    b_g = tl.reshape(b_x, (G, 32))
    b_amax = tl.maximum(tl.max(tl.abs(b_g), axis=1), FLOOR)
    b_k = ceil_log2_ratio(b_amax, 0x400000, 2)  # [G]; the largest magnitude is 1.5 · 2^2
    b_code = encode_e2m1(b_g * exp2_int(-b_k)[:, None], ROUNDING != "sglang")
    b_low, b_high = tl.split(tl.reshape(b_code, (D // 2, 2)))
    return b_low | (b_high << 4), (b_k + 127).to(tl.uint8)


@triton.jit
def store_indexer_mxfp4(
    b_x, page_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr, ROUNDING: tl.constexpr
):
    """D/2 bytes of codes and D/32 of scales."""
    b_code, b_scale = quantise_indexer_mxfp4(b_x, D, ROUNDING)
    tl.store(page_ptr + i_slot * (D // 2) + tl.arange(0, D // 2), b_code)
    scale_ptr = page_ptr + PAGE * (D // 2) + i_slot * (D // 32)
    tl.store(scale_ptr + tl.arange(0, D // 32), b_scale)
