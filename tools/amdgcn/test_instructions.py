"""Single instructions against what the instruction set says of them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tools.amdgcn import matrix
from tools.amdgcn.errors import FaultError, HazardError, UnmodelledError
from tools.amdgcn.isa import step_of
from tools.amdgcn.memory import GlobalMemory
from tools.amdgcn.operands import ACC
from tools.amdgcn.program import parse
from tools.amdgcn.wave import LANES, Wave
from tools.amdgcn.workgroup import Kernel, Workgroup

_TEXT = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
\t.globl\tkernel
kernel:
{body}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_user_sgpr_count 2
\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.amdhsa_tg_split {tg_split}
\t.kernarg_segment_size: 8
\t.private_segment_fixed_size: {scratch}
"""


def text_of(*lines: str, scratch: int = 0, tg_split: int = 0) -> str:
    body = "\n".join(line if line.endswith(":") else f"\t{line}" for line in lines)
    return _TEXT.format(body=body, scratch=scratch, tg_split=tg_split)


def kernel(*lines: str, num_waves: int = 1, lds: int = 1024, scratch: int = 0) -> Kernel:
    return Kernel(parse(text_of(*lines, scratch=scratch)), num_waves, lds)


def run(*lines: str, scratch: int = 0, **registers: Any) -> Wave:
    """One wave after the lines; ``v3`` or ``s4`` give a register before."""
    built = kernel(*lines, scratch=scratch)
    wave = Workgroup(built, 0, (0, 0, 0), GlobalMemory(), 0).waves[0]
    for name, value in registers.items():
        if name[0] == "s":
            wave.s[int(name[1:])] = value
        else:
            wave.u[int(name[1:])] = np.asarray(value).view(np.uint32)
    with np.errstate(all="ignore"):
        wave.run(built.steps, built.counts)
    return wave


def f32(*values: float) -> np.ndarray:
    return np.resize(np.array(values, np.float32), 64)


def test_a_division_is_rounded_to_nearest() -> None:
    """The sequence that the compiler makes of 1 / x, over the whole range of fp32."""
    rng = np.random.default_rng(0)
    x = rng.integers(0x00800000, 0x7F7FFFFF, 64, dtype=np.uint32)
    x[:6] = [0x7F7FFFFF, 0x7F000000, 0x7E800001, 0x00800000, 0x00000001, 0x3F800000]
    wave = run(
        "v_div_scale_f32 v2, s[4:5], v1, v1, 1.0",
        "v_rcp_f32_e32 v3, v2",
        "v_fma_f32 v4, -v2, v3, 1.0",
        "v_fmac_f32_e32 v3, v4, v3",
        "v_div_scale_f32 v4, vcc, 1.0, v1, 1.0",
        "v_mul_f32_e32 v5, v4, v3",
        "v_fma_f32 v6, -v2, v5, v4",
        "v_fmac_f32_e32 v5, v6, v3",
        "v_fma_f32 v2, -v2, v5, v4",
        "s_nop 1",
        "v_div_fmas_f32 v2, v2, v3, v5",
        "v_div_fixup_f32 v1, v2, v1, 1.0",
        v1=x,
    )
    with np.errstate(all="ignore"):
        want = (1.0 / x.view(np.float32).astype(np.float64)).astype(np.float32)
    usual = np.abs(want) >= 2.0**-126  # a denormal quotient is rounded twice
    np.testing.assert_array_equal(wave.f[1][usual], want[usual])
    np.testing.assert_allclose(wave.f[1], want, rtol=1e-6, atol=2.0**-149)


def _operand(
    rng: np.random.Generator, shape: tuple[int, int], kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as it is held, and its values in fp64."""
    if kind == "i8":
        held = rng.integers(-128, 128, shape, dtype=np.int8)
        return held, held.astype(np.float64)
    if kind == "bf16":  # fp32 whose lower halves are zero
        wide = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
        return (wide >> 16).astype(np.uint16), wide.view(np.float32).astype(np.float64)
    held = rng.standard_normal(shape).astype(np.float32 if kind == "f32" else np.float16)
    return held, held.astype(np.float64)


def test_mfma_cuts_small_products_off() -> None:
    """24 bits below the largest product of eight (arXiv:2511.10909): 2^-20 stays, 2^-30 does not;
    exponents as wide as bf16's, and integer sums that wrap around."""
    ones = np.full(64, 0x3F803F80, "u4")  # pairs of 1.0
    for small, want in ((0x3580, 1 + 2.0**-20), (0x3080, 1.0), (0x0080, 1.0)):
        pair = np.where(LANES < 32, 0x3F80 | small << 16, 0).astype("u4")
        wave = run("v_mfma_f32_32x32x8_bf16 a[0:15], v[1:2], v[3:4], 0",
                   v1=pair, v2=np.zeros(64, "u4"), v3=ones, v4=ones)  # fmt: skip
        assert (wave.f[ACC : ACC + 16] == np.float32(want)).all()
    registers = {f"v{n}": np.full(64, 0x80808080, "u4") for n in range(1, 5)}  # -128 four times
    registers |= {f"v{ACC + n}": np.full(64, 0x7FFFFFFF, "u4") for n in range(16)}
    wave = run("v_mfma_i32_32x32x16_i8 a[0:15], v[1:2], v[3:4], a[0:15]", **registers)
    assert (wave.i[ACC : ACC + 16] == -(2**31) - 1 + 16 * 128 * 128).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v_mfma_f32_16x16x16_f16", 2), ("v_mfma_f32_16x16x32_f16", 4),
        ("v_mfma_f32_32x32x8_f16", 2), ("v_mfma_f32_32x32x16_f16", 4),
        ("v_mfma_f32_16x16x4_f32", 1), ("v_mfma_f32_32x32x2_f32", 1),
        ("v_mfma_f32_16x16x16_bf16", 2), ("v_mfma_f32_16x16x32_bf16", 4),
        ("v_mfma_f32_32x32x8_bf16", 2), ("v_mfma_f32_32x32x16_bf16", 4),
        ("v_mfma_i32_32x32x16_i8", 2), ("v_mfma_i32_32x32x32_i8", 4),
    ],
)  # fmt: skip
def test_mfma_is_the_product_of_its_matrices(name: str, words: int) -> None:
    size, depth = (int(x) for x in re.findall(r"(\d+)x\d+x(\d+)", name)[0])
    sums, kind = name.split("_")[2], name.split("_")[-1]
    rng = np.random.default_rng(size + depth)
    (a, values_a), (b, values_b) = (_operand(rng, (size, depth), kind) for _ in range(2))
    c = 100 * rng.standard_normal((size, size))
    c = c.astype(np.float32 if sums == "f32" else np.int32)
    elements = depth * size // 64
    registers: dict[str, Any] = {}
    row, column = matrix.result_layout(size)
    for first, held in ((0, a), (words, b)):
        lanes = np.stack([held[n % size, elements * (n // size) :][:elements] for n in LANES])
        packed = np.ascontiguousarray(lanes).view(np.uint32)
        registers |= {f"v{first + n}": np.ascontiguousarray(packed[:, n]) for n in range(words)}
    registers |= {f"v{ACC + n}": c[row[n], column[n]] for n in range(len(row))}
    ranges = [f"v[0:{words - 1}]", f"v[{words}:{2 * words - 1}]"] if words > 1 else ["v0", "v1"]
    accumulators = f"a[0:{len(row) - 1}]"
    wave = run(f"{name} {accumulators}, {ranges[0]}, {ranges[1]}, {accumulators}", **registers)
    got = np.empty((size, size))
    got[row, column] = (wave.f if sums == "f32" else wave.i)[ACC : ACC + len(row)]
    want = values_a @ values_b.T + c
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    assert sums == "f32" or np.array_equal(got, want)
    assert sorted(zip(row.ravel(), column.ravel(), strict=True)) == [
        (i, j) for i in range(size) for j in range(size)
    ]


def test_lane_movements() -> None:
    wave = run(
        "v_permlane16_swap_b32_e32 v1, v2", v1=LANES.astype("u4"), v2=LANES.astype("u4") + 64
    )
    assert wave.u[1][16] == 64 and wave.u[2][0] == 16 and wave.u[1][0] == 0
    wave = run(
        "v_permlane32_swap_b32_e32 v1, v2", v1=LANES.astype("u4"), v2=LANES.astype("u4") + 64
    )
    assert wave.u[1][32] == 64 and wave.u[2][0] == 32 and wave.u[2][63] == 127
    ones = "row_mask:0xf bank_mask:0xf"
    for control, lane, source in (
        ("quad_perm:[1,0,3,2]", 5, 4), ("row_shr:2", 18, 16), ("row_shl:3", 1, 4),
        ("row_ror:8", 20, 28), ("row_bcast:15", 40, 31), ("row_bcast:31", 50, 31),
        ("row_mirror", 3, 12), ("row_half_mirror", 9, 14),
    ):  # fmt: skip
        wave = run(f"v_mov_b32_dpp v2, v1 {control} {ones}", v1=LANES.astype("u4"), v2=f32(0))
        assert wave.u[2][lane] == source, control
    # without bound_ctrl a lane that has no source keeps its value
    wave = run(
        f"v_mov_b32_dpp v2, v1 row_shr:1 {ones}", v1=LANES.astype("u4"), v2=LANES.astype("u4")
    )
    assert wave.u[2][16] == 16 and wave.u[2][17] == 16


def test_transposed_read() -> None:
    """Four rows of sixteen, two bytes each: each lane gets a column."""
    held = np.arange(256, dtype=np.uint16)
    wave = run(
        "v_lshlrev_b32_e32 v3, 3, v0",
        "ds_write_b64 v3, v[4:5]",
        "s_waitcnt lgkmcnt(0)",
        "ds_read_b64_tr_b16 v[6:7], v3",
        "s_waitcnt lgkmcnt(0)",
        v4=held.view(np.uint32)[0::2].copy(),
        v5=held.view(np.uint32)[1::2].copy(),
    )
    got = np.stack([wave.u[6], wave.u[7]], 1).copy().view(np.uint16)
    blocks = held.reshape(4, 4, 16)  # [16 lanes' block, row, column]
    np.testing.assert_array_equal(got.reshape(4, 16, 4), blocks.transpose(0, 2, 1))


def test_transposed_read_of_bytes() -> None:
    """Eight rows of sixteen bytes: two lanes hold a row, and each lane gets a column."""
    held = np.arange(512, dtype=np.uint16).astype(np.uint8)
    words = held.view(np.uint32)
    wave = run(
        "v_lshlrev_b32_e32 v3, 3, v0",
        "ds_write_b64 v3, v[4:5]",
        "s_waitcnt lgkmcnt(0)",
        "ds_read_b64_tr_b8 v[6:7], v3",
        "s_waitcnt lgkmcnt(0)",
        v4=words[0::2].copy(),
        v5=words[1::2].copy(),
    )
    got = np.stack([wave.u[6], wave.u[7]], 1).copy().view(np.uint8)
    blocks = held.reshape(4, 8, 16)  # [16 lanes' block, row, column]
    np.testing.assert_array_equal(got.reshape(4, 16, 8), blocks.transpose(0, 2, 1))


def test_bytes_from_the_upper_half() -> None:
    wave = run(
        "v_lshlrev_b32_e32 v3, 1, v0",
        "ds_write_b8_d16_hi v3, v4",
        "ds_write_b8 v3, v4 offset:1",
        "s_waitcnt lgkmcnt(0)",
        "ds_read_u16 v5, v3",
        "s_waitcnt lgkmcnt(0)",
        v4=np.full(64, 0x11223344, "u4"),
    )
    assert (wave.u[5] == 0x4422).all()


def test_a_store_of_the_upper_half() -> None:
    memory = GlobalMemory()
    data = np.zeros(256, np.uint8)
    address = memory.add(data, "x")
    lines = (
        f"s_mov_b32 s6, {address & 0xFFFFFFFF:#x}",
        f"s_mov_b32 s7, {address >> 32:#x}",
        "v_lshlrev_b32_e32 v2, 2, v0",
        "v_mov_b32_e32 v3, 0x11223344",
        "global_store_short_d16_hi v2, v3, s[6:7]",
        "global_store_short v2, v3, s[6:7] offset:2",
    )
    kernel(*lines).launch((1, 1, 1), [], memory)
    assert (data.view(np.uint32) == 0x33441122).all()


def test_spilled_registers_come_back() -> None:
    """To each lane its own; lanes outside EXEC keep what is there; too late is a hazard."""
    lines = (
        "scratch_store_dwordx2 off, v[2:3], off offset:8",
        "s_mov_b64 exec, 3",
        "scratch_store_dword off, v4, off offset:12 ; 4-byte Folded Spill",
        "s_mov_b64 exec, -1",
        "scratch_load_dwordx2 v[5:6], off, off offset:8 ; 8-byte Folded Reload",
    )
    values = {"v2": LANES.astype("u4"), "v3": f32(2), "v4": f32(4)}
    wave = run(*lines, "s_waitcnt vmcnt(0)", "v_mov_b32_e32 v7, v6", scratch=16, **values)
    assert wave.u[5].tolist() == list(range(64))
    assert wave.f[7].tolist() == [4.0, 4.0] + [2.0] * 62
    with pytest.raises(HazardError, match="v6 is in flight"):
        run(*lines, "v_mov_b32_e32 v7, v6", scratch=16, **values)
    with pytest.raises(FaultError, match="8 bytes of scratch memory end before 8"):
        run(lines[0], scratch=8, **values)


def test_scalar_arithmetic() -> None:
    lines = [
        *("s_add_u32 s4, s2, s3", "s_addc_u32 s5, 0, 0"),
        *("s_sub_u32 s6, s3, s2", "s_subb_u32 s7, 0, 0"),
        *("s_bfe_i32 s8, s2, 0x10000", "s_abs_i32 s9, s2", "s_mul_hi_u32 s10, s2, s3"),
        "s_ashr_i64 s[12:13], s[2:3], 4",
        *("s_cmpk_gt_u32 s3, 0xffff", "s_cselect_b32 s14, 1, 2", "s_not_b32 s15, s3"),
        *("s_not_b32 s16, s2", "s_cselect_b32 s17, 1, 2"),  # zero, so SCC is 0
        *("s_bitcmp1_b32 s3, 2", "s_cselect_b32 s18, 1, 2"),
        # the lower five bits count: bit 3
        *("s_bitcmp0_b32 s3, 35", "s_cselect_b32 s19, 1, 2"),
    ]
    wave = run(*lines, s2=0xFFFFFFFF, s3=0x80000005)
    assert [wave.s[n] for n in range(4, 11)] == [
        0x80000004, 1, 0x80000006, 0xFFFFFFFF, 0xFFFFFFFF, 1, 0x80000004,
    ]  # fmt: skip
    assert wave.s64(12) == 0xF80000005FFFFFFF and wave.s[14] == 1
    assert wave.s[15:20] == [0x7FFFFFFA, 0, 2, 1, 1]


def test_packed_and_narrow_arithmetic() -> None:
    values = {"v2": f32(1.0), "v3": f32(2.0), "v4": f32(3.0), "v5": f32(5.0)}
    wave = run(
        "v_pk_fma_f32 v[6:7], v[2:3], v[4:5], v[2:3] op_sel:[0,1,0] op_sel_hi:[1,0,1]", **values
    )
    assert (wave.f[6][0], wave.f[7][0]) == (6.0, 8.0)
    wave = run("v_pk_add_f32 v[6:7], v[2:3], v[4:5] neg_lo:[0,1] neg_hi:[0,1]", **values)
    assert (wave.f[6][0], wave.f[7][0]) == (-2.0, -3.0)
    parts = "dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:DWORD"
    values = {"v3": np.full(64, 0x41000000, "u4"), "v4": np.full(64, 2, "u4")}
    wave = run(f"v_or_b32_sdwa v2, v3, v4 {parts}", **values)
    assert wave.u[2][0] == 0x4300
    vcc = "s_mov_b64 vcc, 1"  # the first lane takes the second source
    wave = run(vcc, f"v_cndmask_b32_sdwa v2, v3, v4, vcc {parts}", **values)
    assert (wave.u[2][0], wave.u[2][1]) == (0x200, 0x4100)
    wave = run("v_cvt_pk_bf16_f32 v2, v3, v4", v3=f32(1.00390625), v4=f32(float("nan")))
    assert wave.u[2][0] & 0xFFFF == 0x3F80 and wave.u[2][0] >> 16 & 0x7FFF > 0x7F80
    wave = run("v_sub_u32_e64 v2, v3, 5 clamp", v3=np.full(64, 3, "u4"))
    assert wave.u[2][0] == 0


def test_extremes_and_rounding_up() -> None:
    """A NaN among the sources of an extreme is left out, but of IEEE 754-2019's, which are it."""
    a, b, c = f32(1.0, np.nan, -2.0), f32(3.0, 2.0, -2.5), f32(2.0, 4.0, np.nan)
    wave = run("v_min3_f32 v4, v1, v2, v3", "v_max3_f32 v5, v1, -v2, v3", v1=a, v2=b, v3=c)
    np.testing.assert_array_equal(wave.f[4][:3], [1.0, 2.0, -2.5])
    np.testing.assert_array_equal(wave.f[5][:3], [2.0, 4.0, 2.5])
    wave = run("v_minimum3_f32 v4, v1, v2, v3", "v_maximum3_f32 v5, v1, v2, v3", v1=a, v2=b, v3=c)
    np.testing.assert_array_equal(wave.f[4][:3], [1.0, np.nan, np.nan])
    np.testing.assert_array_equal(wave.f[5][:3], [3.0, np.nan, np.nan])
    wave = run("v_ceil_f32_e32 v2, v1", v1=f32(1.25, -1.25, 7.0, 2.0**30))
    np.testing.assert_array_equal(wave.f[2][:4], [2.0, -1.0, 7.0, 2.0**30])


def test_the_middle_of_three_and_bytes_as_floats() -> None:
    a, b, c = f32(1.0, 7.0, -2.0), f32(3.0, 2.0, -2.5), f32(2.0, 4.0, -2.0)
    wave = run("v_med3_f32 v4, v1, v2, v3", v1=a, v2=b, v3=c)
    np.testing.assert_array_equal(wave.f[4][:3], [2.0, 4.0, -2.0])
    wave = run("v_cvt_f32_ubyte0_e32 v2, v1", v1=np.full(64, 0x123456F8, "u4"))
    assert (wave.f[2] == 248.0).all()


def test_a_subtraction_from_the_second_source_borrows() -> None:
    wave = run("v_subrev_co_u32_e32 v2, vcc, 5, v1", v1=np.arange(64, dtype="u4"))
    np.testing.assert_array_equal(wave.u[2], np.arange(64, dtype="u4") - np.uint32(5))
    assert wave.s64(106) == 0b11111
    lines = "v_subrev_co_u32_e32 v2, vcc, 5, v1", "v_subbrev_co_u32_e32 v3, vcc, 0, v1, vcc"
    wave = run(*lines, v1=np.arange(64, dtype="u4"))
    borrows = (np.arange(64) < 5).astype("u4")
    np.testing.assert_array_equal(wave.u[3], np.arange(64, dtype="u4") - borrows)
    assert wave.s64(106) == 1


def test_halves_of_registers() -> None:
    halves = np.full(64, 0x8101FF03, "u4")
    wave = run("v_pk_lshlrev_b16 v2, 7, v3 op_sel_hi:[0,1]", v3=halves)
    assert wave.u[2][0] == 0x80808180
    shifts = np.full(64, 0x00010008, "u4")
    wave = run("v_pk_lshlrev_b16 v2, v4, v3", v3=halves, v4=shifts)
    assert wave.u[2][0] == 0x02020300
    with pytest.raises(UnmodelledError, match="the high half of a constant"):
        kernel("v_pk_lshlrev_b16 v2, 7, v3")
    wave = run("v_ashrrev_i16_e32 v2, 4, v3", v3=halves)
    assert wave.u[2][0] == 0xFFF0
    wave = run("v_fma_mixhi_f16 v2, v3, v4, -v5", v2=np.full(64, 0xABCD1234, "u4"),
               v3=f32(3), v4=f32(2), v5=f32(5))  # fmt: skip
    assert wave.u[2][0] == 0x3C001234
    wave = run("v_fma_mixlo_f16 v2, v3, v4, -v5", v2=np.full(64, 0xABCD1234, "u4"),
               v3=f32(3), v4=f32(2), v5=f32(5))  # fmt: skip
    assert wave.u[2][0] == 0xABCD3C00
    pair = np.full(64, 0x44003C00, "u4")  # 4 and 1
    wave = run("v_fma_mix_f32 v2, v3, v4, v5 op_sel_hi:[0,1,0]", v3=f32(3), v4=pair, v5=f32(5))
    assert wave.f[2][0] == 8.0
    wave = run("v_fma_mix_f32 v2, v4, -v4, v5 op_sel:[1,1,0] op_sel_hi:[1,1,0]", v4=pair, v5=f32(5))
    assert wave.f[2][0] == -11.0


def test_comparisons_of_parts() -> None:
    bytes_ = np.where(LANES < 5, 0xAB0000, 0xAB0001).astype("u4")
    wave = run("v_cmp_eq_u16_e64 s[4:5], 0, v3", v3=bytes_)
    assert wave.s64(4) == 0b11111
    wave = run("v_cmp_eq_u16_sdwa s[4:5], v3, v4 src0_sel:BYTE_2 src1_sel:DWORD",
               v3=bytes_, v4=np.where(LANES == 7, 0x500AB, 0xAC).astype("u4"))  # fmt: skip
    assert wave.s64(4) == 1 << 7
    values = np.resize(np.array([0.0, 1.0, np.nan, -0.0], np.float32), 64)
    wave = run("v_cmp_nlg_f32_e32 vcc, 0, v3", v3=values)
    assert wave.s64(106) & 0xF == 0b1101


def test_exec_masks_what_is_written() -> None:
    wave = run("s_mov_b64 exec, 3", "v_mov_b32_e32 v1, 7", v1=np.zeros(64, "u4"))
    assert wave.u[1].tolist() == [7, 7] + [0] * 62
    wave = run("s_mov_b64 exec, 3", "v_cmp_eq_u32_e64 s[4:5], 0, v1", v1=np.zeros(64, "u4"))
    assert wave.s64(4) == 3


@pytest.mark.parametrize(
    "line",
    [
        "v_frobnicate_b32 v0, v1", "v_mul_f32_e64 v0, v1, v2 clamp",
        "v_add_f32_e64 v0, v1, v2 mul:2",
        "v_mfma_f32_4x4x4_16b_f16 a[0:3], v[0:1], v[2:3], 0", "ds_add_u32 v0, v1",
        "global_atomic_add v0, v1, s[2:3]", "buffer_load_dword v0, v1, s[4:7], 0 idxen",
        "v_mov_b32_dpp v0, v1 wave_shr:1 row_mask:0xf bank_mask:0xf", "s_getreg_b32 s0, 1",
        "v_perm_b32 v0, v1, v2", "flat_load_dword v0, v[2:3]",
        "scratch_load_dword v0, v1, off", "scratch_load_ubyte v0, off, off",
        "v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[0:1], v[2:3], 0",
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_its_text(line: str) -> None:
    with pytest.raises(UnmodelledError, match=re.escape(line.split(" ")[0])):
        kernel(line)


def test_an_access_outside_every_tensor_is_refused() -> None:
    with pytest.raises(FaultError, match="outside every tensor"):
        run("global_load_dword v1, v[2:3], off", v2=np.zeros(64, "u4"), v3=np.zeros(64, "u4"))
    with pytest.raises(FaultError, match="outside the 1024 bytes of LDS"):
        run("ds_write_b32 v1, v2", v1=np.full(64, 1024, "u4"), v2=f32(0))


def test_every_form_names_its_line() -> None:
    found = parse(text_of(".loc 1 5 3 ; some.py:5:3", "v_mov_b32_e32 v0, v1"))
    step = step_of(found.instructions[0], {}, "gfx950")
    assert step.instruction.source == "some.py:5"


def test_waves_on_several_compute_units_are_refused() -> None:
    """The trackers of memory take one L1 for the waves of a workgroup, as LLVM's memory model does
    outside of this mode."""
    with pytest.raises(UnmodelledError, match="different compute units"):
        parse(text_of("s_nop 0", tg_split=1))


def test_lanes_below_are_counted_by_halves_of_a_mask() -> None:
    lines = ("v_mbcnt_lo_u32_b32 v2, exec_lo, 0", "v_mbcnt_hi_u32_b32 v2, exec_hi, v2")
    assert run(*lines).u[2].tolist() == list(range(64))
    found = run("v_mbcnt_lo_u32_b32 v2, s4, v1", s4=0b1010, v1=np.full(64, 7, "u4")).u[2]
    assert found[:5].tolist() == [7, 7, 8, 8, 9] and set(found[5:].tolist()) == {9}


def test_the_lowest_bit_and_a_lane_named_by_a_register() -> None:
    wave = run("s_ff1_i32_b64 s6, s[4:5]", "s_ff1_i32_b64 s7, s[8:9]", s4=0, s5=0b100, s8=0, s9=0)
    assert wave.s[6] == 34 and wave.s[7] == 0xFFFFFFFF
    assert run("v_readlane_b32 s6, v1, s4", s4=5, v1=np.arange(64, dtype="u4")).s[6] == 5


def test_an_atomic_maximum_counts_all_lanes() -> None:
    memory = GlobalMemory()
    given = np.resize(np.array([-5, 9, 4], np.int32), 64)
    data = np.array([3, 7], np.int32)
    address = memory.add(data.view(np.uint8), "a word and another")
    built = kernel("global_atomic_smax v0, v1, s[2:3]")
    wave = Workgroup(built, 0, (0, 0, 0), memory, 0).waves[0]
    wave.u[0], wave.u[1] = 0, given.view(np.uint32)
    wave.s[2], wave.s[3] = address & 0xFFFFFFFF, address >> 32
    wave.run(built.steps, built.counts)
    assert data.tolist() == [9, 7]
