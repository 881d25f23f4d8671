"""Run the `amdgcn` text that Triton emits for a one-wave kernel: 64 lanes, in numpy.

It covers the instructions of the in-place kernel on gfx942 and gfx950, with the lane movements
(DPP, permlane swaps, swizzle, bpermute) that Triton's interpreter knows nothing of. It models
neither time, wait states nor the order of memory operations. An unknown instruction raises.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

LANES = np.arange(64)
_INLINE = {"0.5": 0x3F000000, "1.0": 0x3F800000, "2.0": 0x40000000, "4.0": 0x40800000}
_VCC, _EXEC = 106, 126
_IGNORED = ("s_waitcnt", "s_nop", "s_setprio", "s_code_end")


@dataclass
class Memory:
    """Named byte arrays far apart in one 64-bit address space; no access may leave its array."""

    regions: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def add(self, data: np.ndarray) -> int:
        base = 0x1_0000_0000 * (len(self.regions) + 1)
        self.regions.append((base, data))
        return base

    def at(self, address: int, size: int) -> np.ndarray:
        for base, data in self.regions:
            if base <= address and address + size <= base + data.size:
                return data[address - base : address - base + size]
        raise IndexError(f"{size} bytes at {address:#x} are outside every tensor")


class Wave:
    """One wave's registers, and a step for each instruction."""

    def __init__(self, text: str, memory: Memory) -> None:
        self.memory = memory
        self.lines, self.labels = _parse(text)
        found = re.search(r"\.amdhsa_user_sgpr_count (\d+)", text)
        assert found is not None
        self.workgroup_sgpr = int(found.group(1))
        self.arguments = [
            (int(offset), int(size))
            for offset, size in re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)", text)
        ]

    def run(self, workgroup: int, arguments: list[int | float]) -> None:
        """Execute one workgroup; tensors are addresses in memory, hidden arguments are zero."""
        self.s = np.zeros(128, np.uint32)
        self.v = np.zeros((512, 64), np.uint32)
        self.v[0] = LANES
        self.scc = 0
        self._set_s64(_EXEC, 2**64 - 1)
        last, width = self.arguments[-1]
        block = np.zeros(last + width, np.uint8)
        for (offset, size), value in zip(self.arguments, arguments, strict=False):
            code = "<f" if isinstance(value, float) else "<i" if size == 4 else "<Q"
            block[offset : offset + size] = np.frombuffer(struct.pack(code, value), np.uint8)
        self._set_s64(0, self.memory.add(block))
        self.s[self.workgroup_sgpr] = workgroup
        self.pc = 0
        while True:
            name, operands, modifiers = self.lines[self.pc]
            self.pc += 1
            if name == "s_endpgm":
                break
            if not name.startswith(_IGNORED):
                self._step(name, operands, modifiers)
        self.memory.regions.pop()

    def _step(self, name: str, operands: list[str], modifiers: str) -> None:
        with np.errstate(all="ignore"):
            if name.startswith("s_load_"):
                self._scalar_load(name, operands)
            elif name.startswith("s_"):
                self._scalar(name, operands)
            elif name.startswith(("global_", "buffer_")):
                self._vector_memory(name, operands, modifiers)
            else:
                self._vector(name, operands, modifiers)

    # Scalar instructions.

    def _s64(self, operand: str) -> int:
        if operand in ("vcc", "exec"):
            at = _VCC if operand == "vcc" else _EXEC
        elif operand.startswith("s["):
            at = _range(operand)[0]
        else:
            return int(operand, 0) % 2**64
        return int(self.s[at]) | int(self.s[at + 1]) << 32

    def _set_s64(self, at: int, value: int) -> None:
        self.s[at], self.s[at + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF

    def _store_s64(self, operand: str, value: int) -> None:
        at = {"vcc": _VCC, "exec": _EXEC}.get(operand)
        self._set_s64(_range(operand)[0] if at is None else at, value)

    def _scalar_load(self, name: str, operands: list[str]) -> None:
        first, last = _range(operands[0])
        address = self._s64(operands[1]) + int(operands[2], 0)
        data = self.memory.at(address, 4 * (last - first + 1))
        self.s[first : last + 1] = data.copy().view(np.uint32)

    def _scalar(self, name: str, o: list[str]) -> None:
        if name in ("s_branch", "s_cbranch_execz", "s_cbranch_vccz", "s_cbranch_vccnz"):
            taken = {
                "s_branch": True,
                "s_cbranch_execz": self._s64("exec") == 0,
                "s_cbranch_vccz": self._s64("vcc") == 0,
                "s_cbranch_vccnz": self._s64("vcc") != 0,
            }
            if taken[name]:
                self.pc = self.labels[o[0]]
        elif name.startswith("s_cmp_"):
            a, b = (int(self._s32(x)) for x in o)
            if name.endswith("i32"):
                a, b = _signed(a), _signed(b)
            kind = name.split("_")[2]
            self.scc = int({"eq": a == b, "lg": a != b, "gt": a > b, "lt": a < b}[kind])
        elif name == "s_and_saveexec_b64":
            saved = self._s64("exec")
            self._store_s64("exec", saved & self._s64(o[1]))
            self._store_s64(o[0], saved)
        elif name.endswith("_b64"):
            a = self._s64(o[1])
            b = self._s64(o[2]) if len(o) > 2 else 0
            kind = name.removeprefix("s_").removesuffix("_b64")
            value = {
                "mov": a,
                "and": a & b,
                "or": a | b,
                "lshl": a << (b & 63),
                "cselect": a if self.scc else b,
            }[kind]
            self._store_s64(o[0], value % 2**64)
            if kind in ("and", "or"):
                self.scc = int(value != 0)
        else:
            a = int(self._s32(o[1]))
            b = int(self._s32(o[2])) if len(o) > 2 else 0
            value = {
                "s_mov_b32": lambda: a,
                "s_movk_i32": lambda: a,
                "s_and_b32": lambda: a & b,
                "s_lshl_b32": lambda: a << (b & 31),
                "s_ashr_i32": lambda: _signed(a) >> (b & 31),
                "s_add_i32": lambda: a + b,
                "s_add_u32": lambda: a + b,
                "s_addc_u32": lambda: a + b + self.scc,
                "s_mul_i32": lambda: a * b,
                "s_mul_hi_u32": lambda: a * b >> 32,
                "s_mul_hi_i32": lambda: _signed(a) * _signed(b) >> 32,
            }[name]()
            if name in ("s_add_u32", "s_addc_u32"):
                self.scc = int(value >= 2**32)
            elif name == "s_and_b32":
                self.scc = int(value != 0)
            self.s[_range(o[0])[0]] = value % 2**32

    def _s32(self, operand: str) -> np.uint32:
        return self.s[_range(operand)[0]] if operand[0] == "s" else np.uint32(_literal(operand))

    # Memory.

    def _vector_memory(self, name: str, o: list[str], modifiers: str) -> None:
        words = int(name.rsplit("x", 1)[1]) if name[-1].isdigit() else 1
        found = re.search(r"offset:(-?\d+)", modifiers)
        offset = int(found.group(1)) if found else 0
        is_store = "_store_" in name
        if name.startswith("buffer_"):
            data, index, descriptor = o[0], o[1], _range(o[2])[0]
            assert o[3] == "0" and "offen" in modifiers
            low, high, limit = (int(x) for x in self.s[descriptor : descriptor + 3])
            base = low | (high & 0xFFFF) << 32
            relative = self.v[_range(index)[0]].astype(np.int64) + offset
        else:
            data, index = (o[1], o[0]) if is_store else (o[0], o[1])
            base, limit = (self._s64(o[2]) if o[2] != "off" else 0), None
            first, last = _range(index)
            relative = self.v[first].astype(np.int64)
            if last > first:
                relative = relative | self.v[last].astype(np.int64) << 32
            relative = relative + offset
        first = _range(data)[0]
        for lane in LANES[self._mask()]:
            if limit is not None and relative[lane] + 4 * words > limit:
                if not is_store:  # out of the descriptor's range: zero, or no store
                    self.v[first : first + words, lane] = 0
                continue
            place = self.memory.at(base + int(relative[lane]), 4 * words)
            if is_store:
                place[:] = self.v[first : first + words, lane].copy().view(np.uint8)
            else:
                self.v[first : first + words, lane] = place.copy().view(np.uint32)

    # Vector instructions.

    def _mask(self) -> np.ndarray:
        return _lanes(self._s64("exec"))

    def _read(self, operand: str, part: int = 0) -> np.ndarray:
        """Bits of a 32-bit source in all lanes; ``part`` is the register of a pair."""
        negative, operand = operand[0] == "-" and operand[1] in "vs|", operand.lstrip("-")
        if operand[0] == "v" and operand != "vcc":
            value = self.v[_range(operand)[0] + part]
        elif operand[0] == "s":
            value = np.full(64, self.s[_range(operand)[0] + part])
        else:
            value = np.full(64, np.uint32(_literal(operand)))
        return value ^ np.uint32(0x80000000) if negative else value

    def _write(self, operand: str, value: np.ndarray, mask: np.ndarray | None = None) -> None:
        lanes = self._mask() if mask is None else mask
        self.v[_range(operand)[0], lanes] = value.astype(np.uint32, copy=False)[lanes]

    def _vector(self, name: str, o: list[str], modifiers: str) -> None:
        base = re.sub(r"_(e32|e64|dpp|sdwa)$", "", name)
        if base == "v_readlane_b32":
            self.s[_range(o[0])[0]] = self.v[_range(o[1])[0], int(o[2])]
        elif base == "v_permlane32_swap_b32":
            a, b = (self.v[_range(x)[0]] for x in o)
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
            self._write(o[0], np.where(_lanes(self._s64(o[3])), b, a))
        else:
            mask = self._mask()
            sources = [self._source(x, modifiers, i) for i, x in enumerate(o[1:])]
            if name.endswith("_dpp"):
                index, valid = _dpp(modifiers)
                enabled = mask & _dpp_mask(modifiers)
                zeroes = "bound_ctrl:1" in modifiers
                sources[0] = np.where(valid, sources[0][index], np.uint32(0))
                mask = enabled if zeroes else enabled & valid
            self._write(o[0], self._compute(base, o[0], sources), mask)

    def _source(self, operand: str, modifiers: str, index: int) -> np.ndarray:
        value = self._read(operand)
        return value >> np.uint32(16) if f"src{index}_sel:WORD_1" in modifiers else value

    def _compute(self, base: str, target: str, x: list[np.ndarray]) -> np.ndarray:
        u = x + [x[0]] * (3 - len(x))
        f = [a.view(np.float32) for a in u]
        shift = u[0] & np.uint32(31)
        fused = f[0].astype(np.float64) * f[1]
        own = self.v[_range(target)[0]].view(np.float32)
        operations = {
            "v_mov_b32": lambda: u[0],
            "v_add_f32": lambda: f[0] + f[1],
            "v_sub_f32": lambda: f[0] - f[1],
            "v_mul_f32": lambda: f[0] * f[1],
            # One rounding: the product of two fp32 is exact in fp64.
            "v_fma_f32": lambda: (fused + f[2]).astype(np.float32),
            "v_fmac_f32": lambda: (fused + own).astype(np.float32),
            "v_rsq_f32": lambda: (1 / np.sqrt(f[0].astype(np.float64))).astype(np.float32),
            "v_and_b32": lambda: u[0] & u[1],
            "v_or_b32": lambda: u[0] | u[1],
            "v_xor_b32": lambda: u[0] ^ u[1],
            "v_add_u32": lambda: u[0] + u[1],
            "v_add3_u32": lambda: u[0] + u[1] + u[2],
            "v_add_lshl_u32": lambda: (u[0] + u[1]) << (u[2] & np.uint32(31)),
            "v_lshl_add_u32": lambda: (u[0] << (u[1] & np.uint32(31))) + u[2],
            "v_lshlrev_b32": lambda: u[1] << shift,
            "v_bfrev_b32": lambda: np.array([int(f"{a:032b}"[::-1], 2) for a in u[0]], np.uint32),
            "v_cvt_pk_bf16_f32": lambda: _bf16(u[0]) | _bf16(u[1]) << np.uint32(16),
            "v_perm_b32": lambda: _perm(u[0], u[1], u[2]),
        }
        return operations[base]().view(np.uint32)

    def _compare(self, base: str, o: list[str]) -> None:
        _, _, kind, dtype = base.split("_")
        a, b = self._read(o[1]), self._read(o[2])
        if dtype == "f32":
            a, b = a.view(np.float32), b.view(np.float32)
        result = {
            "eq": lambda: a == b,
            "lt": lambda: a < b,
            "o": lambda: ~(np.isnan(a) | np.isnan(b)),
        }[kind]() & self._mask()
        self._store_s64(o[0], int(sum(1 << int(lane) for lane in LANES[result])))

    def _packed(self, base: str, o: list[str], modifiers: str) -> None:
        """Two fp32 operations on register pairs; op_sel picks the half of each source."""
        halves = []
        for half, (select, negate) in enumerate((("op_sel", "neg_lo"), ("op_sel_hi", "neg_hi"))):
            picks = _bits(modifiers, select, half, len(o) - 1)
            signs = _bits(modifiers, negate, 0, len(o) - 1)
            f = [
                (self._read(x, pick) ^ np.uint32(sign << 31)).view(np.float32)
                for x, pick, sign in zip(o[1:], picks, signs, strict=True)
            ]
            value = {
                "v_pk_add_f32": lambda f=f: f[0] + f[1],
                "v_pk_mul_f32": lambda f=f: f[0] * f[1],
                "v_pk_fma_f32": lambda f=f: f[0].astype(np.float64) * f[1] + f[2],
            }[base]()
            halves.append(value.astype(np.float32).view(np.uint32))
        first, lanes = _range(o[0])[0], self._mask()
        self.v[first, lanes], self.v[first + 1, lanes] = halves[0][lanes], halves[1][lanes]


def _parse(text: str) -> tuple[list[tuple[str, list[str], str]], dict[str, int]]:
    lines: list[tuple[str, list[str], str]] = []
    labels: dict[str, int] = {}
    for raw in text.split(".Lfunc_end0")[0].split("\n"):
        line = raw.split(";")[0].strip()
        if label := re.match(r"(\.\w+):", line):
            labels[label.group(1)] = len(lines)
        elif found := re.match(r"([sv]_\w+|ds_\w+|global_\w+|buffer_\w+)\s*(.*)", line):
            name, rest = found.groups()
            parts = [part.strip() for part in re.split(r",\s*(?![^\[]*\])(?![^(]*\))", rest)]
            # Modifiers follow the last operand, after a space.
            last, _, modifiers = parts[-1].partition(" ") if parts[-1] else ("", "", "")
            lines.append((name, [*parts[:-1], last], modifiers))
    return lines, labels


def _range(operand: str) -> tuple[int, int]:
    found = re.fullmatch(r"[sv](?:(\d+)|\[(\d+):(\d+)\])", operand)
    assert found is not None, operand
    one, first, last = found.groups()
    return (int(one), int(one)) if one else (int(first), int(last))


def _literal(operand: str) -> int:
    value = _INLINE.get(operand.lstrip("-"))
    if value is not None:
        return value ^ (0x80000000 if operand[0] == "-" else 0)
    return int(operand, 0) % 2**32


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _lanes(bits: int) -> np.ndarray:
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
