"""The vector half of the wave64 interpreter: arithmetic, comparisons and lane movements."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

LANES = np.arange(64)
_INLINE = {"0.5": 0x3F000000, "1.0": 0x3F800000, "2.0": 0x40000000, "4.0": 0x40800000}
_SIGN = np.uint32(0x80000000)


class VectorUnit:
    """Vector registers of one wave and what works on them; the scalar side is in ``Wave``."""

    v: np.ndarray  # [512, 64] uint32
    s: np.ndarray  # [128] uint32

    def _s64(self, operand: str) -> int:
        raise NotImplementedError

    def _store_s64(self, operand: str, value: int) -> None:
        raise NotImplementedError

    def _mask(self) -> np.ndarray:
        return lanes_of(self._s64("exec"))

    def _read(self, operand: str, part: int = 0) -> np.ndarray:
        """Bits of a 32-bit source in all lanes; ``part`` is the register of a pair."""
        bare = operand.strip("-|") if operand[0] in "-|" and operand[1] in "vs|" else operand
        if bare[0] == "v" and bare != "vcc":
            value = self.v[register(bare)[0] + part]
        elif bare[0] == "s":
            value = np.full(64, self.s[register(bare)[0] + part])
        else:
            value = np.full(64, np.uint32(literal(bare, part)))
        if "|" in operand:
            value = value & ~_SIGN
        return value ^ _SIGN if bare is not operand and operand[0] == "-" else value

    def _read64(self, operand: str) -> np.ndarray:
        if operand[0] not in "vs":
            return np.full(64, np.uint64(int(operand, 0) % 2**64))
        high = self._read(operand, 1).astype(np.uint64) << np.uint64(32)
        return self._read(operand).astype(np.uint64) | high

    def _write(self, operand: str, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        lanes = self._mask() if mask is None else mask
        self.v[register(operand)[0], lanes] = value.astype(np.uint32, copy=False)[lanes]

    def _write64(self, operand: str, value: np.ndarray) -> None:
        first, lanes = register(operand)[0], self._mask()
        self.v[first, lanes] = value.astype(np.uint32)[lanes]
        self.v[first + 1, lanes] = (value >> np.uint64(32)).astype(np.uint32)[lanes]

    def _set_lanes(self, operand: str, result: np.ndarray) -> None:
        self._store_s64(operand, sum(1 << int(lane) for lane in LANES[result & self._mask()]))

    def _vector(self, name: str, o: list[str], modifiers: str) -> None:
        base = re.sub(r"_(e32|e64|dpp|sdwa)$", "", name)
        if base == "v_readlane_b32":
            self.s[register(o[0])[0]] = self.v[register(o[1])[0], int(o[2])]
        elif base == "v_readfirstlane_b32":
            self.s[register(o[0])[0]] = self.v[register(o[1])[0], LANES[self._mask()][0]]
        elif base == "v_permlane32_swap_b32":
            a, b = (self.v[register(x)[0]] for x in o)
            a[32:], b[:32] = b[:32].copy(), a[32:].copy()
        elif base == "ds_swizzle_b32":
            assert "swizzle(SWAP,16)" in modifiers
            self._write(o[0], self._read(o[1])[LANES ^ 16])
        elif base == "ds_bpermute_b32":
            self._write(o[0], self._read(o[2])[self._read(o[1]) >> 2 & 63])
        elif base.startswith("v_pk_"):
            self._packed(base, o, modifiers)
        elif base.startswith("v_cmp_"):
            self._compare(base, o)
        elif base == "v_cndmask_b32":
            a, b = self._source(o[1], modifiers, 0), self._source(o[2], modifiers, 1)
            self._write(o[0], np.where(lanes_of(self._s64(o[3])), b, a))
        elif base in ("v_addc_co_u32", "v_add_co_u32"):
            carry = lanes_of(self._s64(o[4])) if base == "v_addc_co_u32" else LANES < 0
            total = self._read(o[2]).astype(np.uint64) + self._read(o[3]) + carry.astype(np.uint64)
            self._write(o[0], total.astype(np.uint32))
            self._set_lanes(o[1], total >= 2**32)
        elif base in ("v_mad_u64_u32", "v_mad_i64_i32"):
            kind = np.int64 if base.endswith("i32") else np.uint64
            a, b = (self._read(x).astype(np.int64) for x in o[2:4])
            if kind is np.int64:
                a, b = (x.astype(np.uint32).view(np.int32).astype(np.int64) for x in (a, b))
            product = a.astype(np.uint64) * b.astype(np.uint64)
            self._write64(o[0], product + self._read64(o[4]))
        elif base == "v_lshl_add_u64":
            shifted = self._read64(o[1]) << self._read(o[2]).astype(np.uint64)
            self._write64(o[0], shifted + self._read64(o[3]))
        elif base == "v_lshlrev_b64":
            self._write64(o[0], self._read64(o[2]) << self._read(o[1]).astype(np.uint64))
        elif base == "v_div_scale_f32":  # only denormal results are scaled, and none is tested
            self._write(o[0], self._read(o[2]))
            self._set_lanes(o[1], LANES < 0)
        else:
            self._general(name, base, o, modifiers)

    def _general(self, name: str, base: str, o: list[str], modifiers: str) -> None:
        mask = self._mask()
        sources = [self._source(x, modifiers, i) for i, x in enumerate(o[1:])]
        if name.endswith("_dpp"):
            index, valid = _dpp(modifiers)
            mask = mask & _dpp_mask(modifiers)
            sources[0] = np.where(valid, sources[0][index], np.uint32(0))
            if "bound_ctrl:1" not in modifiers:
                mask = mask & valid
        if found := re.search(r"bitop3:(0x\w+)", modifiers):
            value = _bitop3(int(found.group(1), 0), sources)
        else:
            value = self._compute(base, o[0], sources)
        if base.endswith("16"):  # these write zero to the upper half
            value = value & np.uint32(0xFFFF)
        self._write(o[0], value, mask)

    def _source(self, operand: str, modifiers: str, index: int) -> np.ndarray:
        value = self._read(operand)
        if f"src{index}_sel:WORD_1" in modifiers:
            return value >> np.uint32(16)
        if f"src{index}_sel:BYTE_3" in modifiers:
            return value >> np.uint32(24)
        return value

    def _compute(self, base: str, target: str, x: list[np.ndarray]) -> np.ndarray:
        u = x + [x[0]] * (3 - len(x))
        f = [a.view(np.float32) for a in u]
        i = [a.view(np.int32) for a in u]
        wide = [a.astype(np.float64) for a in f]
        by = [a & np.uint32(31) for a in u]
        own = self.v[register(target)[0]].view(np.float32)
        # One rounding in the fused ones: the product of two fp32 is exact in fp64.
        operations: dict[str, Callable[[], np.ndarray]] = {
            "v_mov_b32": lambda: u[0],
            "v_add_f32": lambda: f[0] + f[1],
            "v_sub_f32": lambda: f[0] - f[1],
            "v_mul_f32": lambda: f[0] * f[1],
            "v_fma_f32": lambda: wide[0] * wide[1] + wide[2],
            "v_div_fmas_f32": lambda: wide[0] * wide[1] + wide[2],
            "v_fmamk_f32": lambda: wide[0] * wide[1] + wide[2],
            "v_fmac_f32": lambda: wide[0] * wide[1] + own,
            "v_rsq_f32": lambda: 1 / np.sqrt(wide[0]),
            "v_rcp_f32": lambda: 1 / wide[0],
            "v_exp_f32": lambda: np.exp2(wide[0]),
            "v_ldexp_f32": lambda: np.ldexp(wide[0], i[1]),
            # The exact quotient, which the sequence before it approaches.
            "v_div_fixup_f32": lambda: wide[2] / wide[1],
            "v_max_f32": lambda: np.fmax(f[0], f[1]),
            "v_max3_f32": lambda: np.fmax(np.fmax(f[0], f[1]), f[2]),
            "v_and_b32": lambda: u[0] & u[1],
            "v_or_b32": lambda: u[0] | u[1],
            "v_or3_b32": lambda: u[0] | u[1] | u[2],
            "v_xor_b32": lambda: u[0] ^ u[1],
            "v_not_b32": lambda: ~u[0],
            "v_and_or_b32": lambda: u[0] & u[1] | u[2],
            "v_add_u32": lambda: u[0] + u[1],
            "v_sub_u32": lambda: u[0] - u[1],
            "v_add3_u32": lambda: u[0] + u[1] + u[2],
            "v_min_u32": lambda: np.minimum(u[0], u[1]),
            "v_max_i32": lambda: np.maximum(i[0], i[1]),
            "v_max3_i32": lambda: np.maximum(np.maximum(i[0], i[1]), i[2]),
            "v_mul_lo_u32": lambda: u[0] * u[1],
            "v_add_lshl_u32": lambda: (u[0] + u[1]) << by[2],
            "v_lshl_add_u32": lambda: (u[0] << by[1]) + u[2],
            "v_lshl_or_b32": lambda: (u[0] << by[1]) | u[2],
            "v_lshlrev_b32": lambda: u[1] << by[0],
            "v_lshlrev_b16": lambda: u[1] << (u[0] & np.uint32(15)),
            "v_lshrrev_b32": lambda: u[1] >> by[0],
            "v_ashrrev_i32": lambda: i[1] >> by[0].view(np.int32),
            "v_alignbit_b32": lambda: _alignbit(u[0], u[1], by[2]),
            "v_bfe_u32": lambda: _bfe(u[0], by[1], by[2]),
            "v_bfe_i32": lambda: _sign_extend(_bfe(u[0], by[1], by[2]), by[2]),
            "v_bfrev_b32": lambda: np.array([int(f"{a:032b}"[::-1], 2) for a in u[0]], np.uint32),
            "v_cvt_pk_bf16_f32": lambda: _bf16(u[0]) | _bf16(u[1]) << np.uint32(16),
            "v_perm_b32": lambda: _perm(u[0], u[1], u[2]),
        }
        value = operations[base]()
        return (value.astype(np.float32) if value.dtype == np.float64 else value).view(np.uint32)

    def _compare(self, base: str, o: list[str]) -> None:
        _, _, kind, dtype = base.split("_")
        if dtype.endswith("64"):
            a, b = (self._read64(x) for x in o[1:])
        else:
            a, b = (self._read(x) for x in o[1:])
        types = {"f32": np.float32, "i32": np.int32, "i64": np.int64}
        a, b = (x.view(types.get(dtype, x.dtype)) for x in (a, b))
        operations = {
            "eq": lambda: a == b,
            "ne": lambda: a != b,
            "lt": lambda: a < b,
            "gt": lambda: a > b,
            "ge": lambda: a >= b,
            "le": lambda: a <= b,
            "o": lambda: ~(np.isnan(a) | np.isnan(b)),
        }
        self._set_lanes(o[0], operations[kind]())

    def _packed(self, base: str, o: list[str], modifiers: str) -> None:
        """Two 32-bit operations on register pairs; op_sel picks the half of each source."""
        halves = []
        for half, (select, negate) in enumerate((("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi"))):
            picks = _bits(modifiers, select, half, len(o) - 1)
            if base == "v_pk_mov_b32":  # the low result from source 0, the high one from source 1
                pick = _bits(modifiers, "op_sel", 0, 2)[half]
                halves.append(self._read(o[1 + half], pick))
                continue
            signs = _bits(modifiers, negate, 0, len(o) - 1)
            f = [
                (self._read(x, pick) ^ np.uint32(sign << 31)).view(np.float32)
                for x, pick, sign in zip(o[1:], picks, signs, strict=True)
            ]
            if base == "v_pk_add_f32":
                value = f[0] + f[1]
            elif base == "v_pk_mul_f32":
                value = f[0] * f[1]
            else:
                assert base == "v_pk_fma_f32", base
                value = (f[0].astype(np.float64) * f[1] + f[2]).astype(np.float32)
            halves.append(value.view(np.uint32))
        first, lanes = register(o[0])[0], self._mask()
        self.v[first, lanes], self.v[first + 1, lanes] = halves[0][lanes], halves[1][lanes]


def register(operand: str) -> tuple[int, int]:
    found = re.fullmatch(r"[sv](?:(\d+)|\[(\d+):(\d+)\])", operand)
    assert found is not None, operand
    one, first, last = found.groups()
    return (int(one), int(one)) if one else (int(first), int(last))


def literal(operand: str, part: int = 0) -> int:
    """Bits of an inline or literal constant; the high word of a pair is its sign extension."""
    value = _INLINE.get(operand.lstrip("-"))
    if value is not None:
        return value ^ (0x80000000 if operand[0] == "-" else 0)
    number = int(operand, 0)
    return (-1 if number < 0 else 0) % 2**32 if part else number % 2**32


def signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def lanes_of(bits: int) -> np.ndarray:
    return np.array([bits >> int(lane) & 1 for lane in LANES], bool)


def _bits(modifiers: str, name: str, default: int, count: int) -> list[int]:
    found = re.search(rf"(?<!\w){name}:\[([01,]+)\]", modifiers)
    return [int(x) for x in found.group(1).split(",")] if found else [default] * count


def _bf16(u: np.ndarray) -> np.ndarray:
    """To nearest, ties to even; the values here are exact already or finite."""
    return (u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


def _perm(high: np.ndarray, low: np.ndarray, select: np.ndarray) -> np.ndarray:
    """Bytes of {high, low} chosen by the selector's bytes 0 to 7."""
    pair = high.astype(np.uint64) << np.uint64(32) | low
    out = np.zeros(64, np.uint64)
    for byte in range(4):
        pick = (select >> np.uint32(8 * byte) & np.uint32(0xFF)).astype(np.uint64)
        assert (pick < 8).all()
        out |= (pair >> (np.uint64(8) * pick) & np.uint64(0xFF)) << np.uint64(8 * byte)
    return out.astype(np.uint32)


def _dpp(modifiers: str) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the lane it reads, and whether there is one."""
    if found := re.search(r"quad_perm:\[(\d),(\d),(\d),(\d)\]", modifiers):
        return LANES & ~3 | np.array([int(x) for x in found.groups()])[LANES & 3], LANES >= 0
    found = re.search(r"(row_\w+):(\d+)", modifiers)
    assert found is not None, modifiers
    kind, amount = found.group(1), int(found.group(2))
    row, within = LANES & ~15, LANES & 15
    if kind == "row_shr":
        return np.maximum(LANES - amount, 0), within >= amount
    if kind == "row_shl":
        return np.minimum(LANES + amount, 63), within + amount < 16
    if kind == "row_ror":
        return row | (within - amount) % 16, LANES >= 0
    if kind == "row_bcast" and amount == 15:
        return np.maximum(row - 1, 0), row > 0
    assert kind == "row_bcast" and amount == 31, modifiers
    return np.full(64, 31), LANES > 31


def _dpp_mask(modifiers: str) -> np.ndarray:
    """Lanes whose row of 16 and bank of 4 are enabled."""
    rows = int(re.search(r"row_mask:(0x\w+)", modifiers).group(1), 0)  # type: ignore[union-attr]
    banks = int(re.search(r"bank_mask:(0x\w+)", modifiers).group(1), 0)  # type: ignore[union-attr]
    return (rows >> (LANES >> 4) & 1 & (banks >> (LANES >> 2 & 3))).astype(bool)


def _bitop3(table: int, x: list[np.ndarray]) -> np.ndarray:
    """Each bit of the result is the table's entry at the three sources' bits (a, b, c)."""
    out = np.zeros(64, np.uint32)
    for entry in range(8):
        if table >> entry & 1:
            a, b, c = (x[k] if entry >> (2 - k) & 1 else ~x[k] for k in range(3))
            out |= a & b & c
    return out


def _alignbit(high: np.ndarray, low: np.ndarray, by: np.ndarray) -> np.ndarray:
    pair = high.astype(np.uint64) << np.uint64(32) | low
    return (pair >> by.astype(np.uint64)).astype(np.uint32)


def _bfe(value: np.ndarray, first: np.ndarray, width: np.ndarray) -> np.ndarray:
    return value >> first & ((np.uint32(1) << width) - np.uint32(1))


def _sign_extend(value: np.ndarray, width: np.ndarray) -> np.ndarray:
    top = np.uint32(1) << (width - np.uint32(1))
    return (value ^ top) - top
