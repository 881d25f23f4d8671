"""One compressed row in each record format (`backend_core.formats`), written to its slot of a page.

Slots count rows over all pages of PAGE rows.
"""

import triton
import triton.language as tl

from backend_core.kernels.codecs import (
    ceil_log2_ratio,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    exp2_int,
    round_bf16,
)


@triton.jit
def store_record(
    b_x,  # [D] fp32, finished row
    cache,
    slot,
    D: tl.constexpr,
    RECORD: tl.constexpr,  # arguments.Record
):
    PAGE: tl.constexpr = RECORD.page
    FORMAT: tl.constexpr = RECORD.format
    ROUNDING: tl.constexpr = RECORD.rounding
    IS_FNUZ: tl.constexpr = RECORD.is_fnuz
    i_page = (slot // PAGE).to(tl.int64)
    page_ptr = cache.ptr + i_page * cache.stride_p
    i_slot = (slot % PAGE).to(tl.int32)
    # Every engine quantises V4's main rows from bf16; the indexer's rows sglang takes in fp32. The
    # two formats of V4.1 alone are taken from fp32, behind a latent of bf16. The main rows of
    # sglang's V4.1 have been NVFP4 before they become fp8.
    IS_FP32: tl.constexpr = FORMAT == "mxfp8_rows" or FORMAT == "nvfp4_rows"
    IS_V41: tl.constexpr = ROUNDING == "sglang_v41"
    if not IS_FP32 and (D == 512 or ROUNDING == "vllm" or IS_V41):
        b_x = round_bf16(b_x)
    if IS_V41 and D == 512:
        b_x = round_nvfp4(b_x, D)
    if FORMAT == "mxfp8_rows":
        store_mxfp8_row(b_x, page_ptr + i_slot * (D + D // 32), D)
    elif FORMAT == "nvfp4_rows":
        store_nvfp4_row(b_x, page_ptr + i_slot * (D // 2 + D // 16), D)
    elif FORMAT == "fp8_ds_mla":
        store_fp8_ds_mla(b_x, page_ptr, i_slot, D, PAGE, IS_FNUZ)
    elif FORMAT == "fp8_two_pools":
        second_ptr = cache.second_ptr + i_page * cache.stride_second_p
        store_fp8_two_pools(b_x, page_ptr, second_ptr, i_slot, D, IS_FNUZ)
    elif FORMAT == "bf16_rows":
        row_ptr = (page_ptr + i_slot * (2 * D)).to(tl.pointer_type(tl.bfloat16))
        tl.store(row_ptr + tl.arange(0, D), b_x.to(tl.bfloat16))
    elif FORMAT == "indexer_fp8_ue8m0":
        store_indexer_fp8_ue8m0(b_x, page_ptr, i_slot, D, PAGE)
    elif FORMAT == "indexer_fp8":
        store_indexer_fp8(b_x, page_ptr, i_slot, D, PAGE, 1, ROUNDING, IS_FNUZ)
    elif FORMAT == "indexer_fp8_tiles":
        store_indexer_fp8(b_x, page_ptr, i_slot, D, PAGE, 16, ROUNDING, IS_FNUZ)
    elif FORMAT == "indexer_mxfp4":
        store_indexer_mxfp4(b_x, page_ptr, i_slot, D, PAGE, ROUNDING)
    elif FORMAT == "indexer_mxfp4_tiles":
        store_indexer_mxfp4_tiles(b_x, page_ptr, i_slot, D, PAGE, ROUNDING)
    else:
        tl.static_assert(FORMAT == "indexer_mxfp4_planes", "unknown cache format")
        second_ptr = cache.second_ptr + i_page * cache.stride_second_p
        store_indexer_mxfp4_planes(b_x, page_ptr, second_ptr, i_slot, D, PAGE, ROUNDING)


@triton.jit
def row_ptrs(page_ptr, i_slot, BYTES: tl.constexpr, TILE: tl.constexpr):
    """[BYTES] pointers to a row's bytes in a page; of TILE > 1 rows [BYTES/16, TILE, 16] lie
    together."""
    o_b = tl.arange(0, BYTES)
    if TILE == 1:
        return page_ptr + i_slot * BYTES + o_b
    i_tile, i_row = i_slot // TILE, i_slot % TILE
    return page_ptr + i_tile * (TILE * BYTES) + i_row * 16 + (o_b // 16) * (TILE * 16) + o_b % 16


@triton.jit
def scale_main_fp8(b_x, D: tl.constexpr, IS_FNUZ: tl.constexpr):
    """(rows in e4m3's range [D], k [D/64]): 64 channels divided by a power of two 2^k each."""
    TOP: tl.constexpr = 7 if IS_FNUZ else 8  # the largest code used is 1.75 · 2^TOP
    b_g = tl.reshape(b_x, (D // 64, 64))
    b_amax = tl.maximum(tl.max(tl.abs(b_g), axis=1), 1e-4)
    b_k = ceil_log2_ratio(b_amax, 0x600000, TOP)
    return tl.reshape(b_g * exp2_int(-b_k)[:, None], (D,)), b_k


@triton.jit
def store_fp8_ds_mla(
    b_x, page_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr, IS_FNUZ: tl.constexpr
):
    """448 e4m3 with one power-of-two scale per 64, then 64 bf16; 7 UE8M0 bytes and a zero."""
    G: tl.constexpr = D // 64
    row_ptr = page_ptr + i_slot * 576
    o_d = tl.arange(0, D)
    b_y, b_k = scale_main_fp8(b_x, D, IS_FNUZ)
    tl.store(row_ptr + o_d, encode_e4m3(b_y, IS_FNUZ), mask=o_d < D - 64)
    tail_ptr = (row_ptr + (D - 64)).to(tl.pointer_type(tl.bfloat16))
    tl.store(tail_ptr + (o_d - (D - 64)), b_x.to(tl.bfloat16), mask=o_d >= D - 64)
    o_g = tl.arange(0, G)
    b_scale = tl.where(o_g < G - 1, b_k + 127, 0).to(tl.uint8)
    tl.store(page_ptr + PAGE * 576 + i_slot * 8 + o_g, b_scale)


@triton.jit
def store_mxfp8_row(b_x, row_ptr, D: tl.constexpr):
    """D e4m3, then one UE8M0 byte per 32 of them."""
    b_g = tl.reshape(b_x, (D // 32, 32))
    b_k = ceil_log2_ratio(tl.maximum(tl.max(tl.abs(b_g), axis=1), 1e-4), 0x600000, 8)
    b_y = tl.reshape(b_g * exp2_int(-b_k)[:, None], (D,))
    tl.store(row_ptr + tl.arange(0, D), encode_e4m3(b_y, False))
    tl.store(row_ptr + D + tl.arange(0, D // 32), (b_k + 127).to(tl.uint8))


@triton.jit
def scale_nvfp4(b_x, D: tl.constexpr):
    """(values in units [D/16, 16], units as wide, their e4m3 codes [D/16])."""
    b_g = tl.reshape(b_x, (D // 16, 16))
    b_scale = tl.max(tl.abs(b_g), axis=1) * (1.0 / 6.0)
    b_scale = encode_e4m3(tl.minimum(tl.maximum(b_scale, 2.0**-9), 448.0), False)
    b_unit = tl.broadcast_to(decode_e4m3(b_scale)[:, None], (D // 16, 16))
    return tl.div_rn(b_g, b_unit), b_unit, b_scale


@triton.jit
def round_e2m1(b_y):
    """fp32 values as e2m1 has them, ties to the even code; magnitudes above 6 saturate, and a zero
    keeps the sign of another value alone."""
    b_a = tl.minimum(tl.abs(b_y), 6.0)
    # where one unit of the last place is the step between codes
    b_big = tl.where(b_a < 2.0, 1.5 * 2.0**22, tl.where(b_a < 4.0, 1.5 * 2.0**23, 1.5 * 2.0**24))
    b_a = (b_a + b_big) - b_big
    return b_a * tl.where(b_y < 0.0, -1.0, 1.0)


@triton.jit
def round_nvfp4(b_x, D: tl.constexpr):
    """A row's values as NVFP4 has them, in fp32; each is one of bf16 too."""
    b_y, b_unit, _ = scale_nvfp4(b_x, D)
    return tl.reshape(round_e2m1(b_y) * b_unit, (D,))


@triton.jit
def store_nvfp4_row(b_x, row_ptr, D: tl.constexpr):
    """D/2 bytes of e2m1 pairs, then one e4m3 scale per 16 channels: amax / 6 within e4m3's range,
    with no scale of the row."""
    b_y, _, b_scale = scale_nvfp4(b_x, D)
    b_code = encode_e2m1(tl.reshape(b_y, (D,)), True)
    b_low, b_high = tl.split(tl.reshape(b_code, (D // 2, 2)))
    tl.store(row_ptr + tl.arange(0, D // 2), b_low | (b_high << 4))
    tl.store(row_ptr + D // 2 + tl.arange(0, D // 16), b_scale)


@triton.jit
def store_fp8_two_pools(b_x, page_ptr, second_ptr, i_slot, D: tl.constexpr, IS_FNUZ: tl.constexpr):
    """Rows of 512 bytes: 448 e4m3, 7 UE8M0 bytes of which each is stored twice, 50 bytes that are
    left alone. 64 bf16 in the second tensor."""
    G: tl.constexpr = D // 64
    row_ptr = page_ptr + i_slot * 512
    o_d = tl.arange(0, D)
    b_y, b_k = scale_main_fp8(b_x, D, IS_FNUZ)
    tl.store(row_ptr + o_d, encode_e4m3(b_y, IS_FNUZ), mask=o_d < D - 64)
    tail_ptr = (second_ptr + i_slot * 128).to(tl.pointer_type(tl.bfloat16))
    tl.store(tail_ptr + (o_d - (D - 64)), b_x.to(tl.bfloat16), mask=o_d >= D - 64)
    o_g = tl.arange(0, G)
    scale_ptr = (row_ptr + (D - 64)).to(tl.pointer_type(tl.uint16))
    b_scale = b_k + 127
    tl.store(scale_ptr + o_g, (b_scale | b_scale << 8).to(tl.uint16), mask=o_g < G - 1)


@triton.jit
def quantise_indexer_fp8(b_x, ROUNDING: tl.constexpr, IS_FNUZ: tl.constexpr):
    """(e4m3 codes, fp32 scale): amax / max code, which all but sglang round up to 2^k."""
    # magnitudes compare as their bits do, and integers have a reduction of the warp (redux.sync)
    amax = tl.max(tl.abs(b_x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    scale, inv = indexer_fp8_scale(amax, ROUNDING, IS_FNUZ)
    return encode_e4m3(b_x * inv, IS_FNUZ), scale


@triton.jit
def indexer_fp8_scale(amax, ROUNDING: tl.constexpr, IS_FNUZ: tl.constexpr):
    """(scale, its inverse) of rows whose largest magnitude is amax."""
    amax = tl.maximum(amax, 1e-4)
    if ROUNDING == "sglang":
        scale = tl.div_rn(amax, 224.0 if IS_FNUZ else 448.0)
        inv = tl.div_rn(1.0, scale)
    else:
        k = ceil_log2_ratio(amax, 0x600000, 7 if IS_FNUZ else 8)
        scale = exp2_int(k)
        inv = exp2_int(-k)
    return scale, inv


@triton.jit
def store_indexer_fp8(
    b_x,
    page_ptr,
    i_slot,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    ROUNDING: tl.constexpr,
    IS_FNUZ: tl.constexpr,
):
    """D e4m3, TILE rows together, and one fp32 scale."""
    b_code, scale = quantise_indexer_fp8(b_x, ROUNDING, IS_FNUZ)
    tl.store(row_ptrs(page_ptr, i_slot, D, TILE), b_code)
    tl.store((page_ptr + PAGE * D + i_slot * 4).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def four_ue8m0(scale):
    """The byte k + 127 of a scale 2^k, four times in an int32."""
    return (scale.to(tl.int32, bitcast=True) >> 23) * 0x01010101


@triton.jit
def store_indexer_fp8_ue8m0(b_x, page_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr):
    """D e4m3, and four equal UE8M0 bytes."""
    b_code, scale = quantise_indexer_fp8(b_x, "vllm", False)
    tl.store(row_ptrs(page_ptr, i_slot, D, 1), b_code)
    tl.store((page_ptr + PAGE * D + i_slot * 4).to(tl.pointer_type(tl.int32)), four_ue8m0(scale))


@triton.jit
def quantise_indexer_mxfp4(b_x, D: tl.constexpr, ROUNDING: tl.constexpr):
    """D/2 bytes of e2m1 pairs, the even channel in the low nibble, and one UE8M0 byte per 32.

    Those of sglang's V4.1 are quantised twice, the second time with scales of at least 2^-13.
    """
    G: tl.constexpr = D // 32
    FLOOR: tl.constexpr = 1e-4 if ROUNDING == "sglang" else 6.0 * 2.0**-126
    b_g = tl.reshape(b_x, (G, 32))
    b_amax = tl.maximum(tl.max(tl.abs(b_g), axis=1), FLOOR)
    b_k = ceil_log2_ratio(b_amax, 0x400000, 2)  # [G]; the largest magnitude is 1.5 · 2^2
    b_y = b_g * exp2_int(-b_k)[:, None]
    if ROUNDING == "sglang_v41":
        # a largest magnitude of 3 steps is 6 of the smaller scale
        b_k2 = tl.maximum(b_k - (b_amax * exp2_int(-b_k) < 3.5).to(tl.int32), -13)
        b_y = round_e2m1(b_y) * exp2_int(b_k - b_k2)[:, None]
        b_y = tl.where(tl.abs(b_y) > 0.25, b_y, 0.0)  # whose zeros have no sign
        b_k = b_k2
    b_code = encode_e2m1(b_y, ROUNDING != "sglang")
    b_low, b_high = tl.split(tl.reshape(b_code, (D // 2, 2)))
    return b_low | (b_high << 4), (b_k + 127).to(tl.uint8)


@triton.jit
def store_indexer_mxfp4(
    b_x, page_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr, ROUNDING: tl.constexpr
):
    """D/2 bytes of codes and D/32 of scales."""
    b_code, b_scale = quantise_indexer_mxfp4(b_x, D, ROUNDING)
    tl.store(row_ptrs(page_ptr, i_slot, D // 2, 1), b_code)
    scale_ptr = page_ptr + PAGE * (D // 2) + i_slot * (D // 32)
    tl.store(scale_ptr + tl.arange(0, D // 32), b_scale)


@triton.jit
def store_indexer_mxfp4_tiles(
    b_x, page_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr, ROUNDING: tl.constexpr
):
    """The codes of 32 rows together, and their scales [2, 32, D/64]: even groups, then odd ones."""
    b_code, b_scale = quantise_indexer_mxfp4(b_x, D, ROUNDING)
    tl.store(row_ptrs(page_ptr, i_slot, D // 2, 32), b_code)
    o_g = tl.arange(0, D // 32)
    scale_ptr = page_ptr + PAGE * (D // 2) + (i_slot // 32) * D + (i_slot % 32) * (D // 64)
    tl.store(scale_ptr + (o_g % 2) * (D // 2) + o_g // 2, b_scale)


@triton.jit
def store_indexer_mxfp4_planes(
    b_x, page_ptr, second_ptr, i_slot, D: tl.constexpr, PAGE: tl.constexpr, ROUNDING: tl.constexpr
):
    """The codes of a page's 64 rows together; in the second tensor their scales [D/32, 16, 4], row
    16·j + i at [:, i, j]."""
    tl.static_assert(PAGE == 64)
    b_code, b_scale = quantise_indexer_mxfp4(b_x, D, ROUNDING)
    tl.store(row_ptrs(page_ptr, i_slot, D // 2, PAGE), b_code)
    scale_ptr = second_ptr + (i_slot % 16) * 4 + i_slot // 16
    tl.store(scale_ptr + tl.arange(0, D // 32) * PAGE, b_scale)
