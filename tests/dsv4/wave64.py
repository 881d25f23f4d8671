"""Run the `amdgcn` text that Triton emits for a one-wave kernel: 64 lanes, in numpy.

It covers the instructions of the one-wave kernels on gfx942 and gfx950, with the lane movements
(DPP, permlane swaps, swizzle, bpermute) that Triton's interpreter knows nothing of. It models
neither time, wait states nor the order of memory operations. An unknown instruction raises.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

from tests.dsv4.wave64_vector import LANES, VectorUnit, literal, register, signed

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


class Wave(VectorUnit):
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
            at = register(operand)[0]
        else:
            return int(operand, 0) % 2**64
        return int(self.s[at]) | int(self.s[at + 1]) << 32

    def _set_s64(self, at: int, value: int) -> None:
        self.s[at], self.s[at + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF

    def _store_s64(self, operand: str, value: int) -> None:
        at = {"vcc": _VCC, "exec": _EXEC}.get(operand)
        self._set_s64(register(operand)[0] if at is None else at, value)

    def _scalar_load(self, name: str, operands: list[str]) -> None:
        first, last = register(operands[0])
        address = self._s64(operands[1]) + int(self._s32(operands[2]))
        data = self.memory.at(address, 4 * (last - first + 1))
        self.s[first : last + 1] = data.copy().view(np.uint32)

    def _scalar(self, name: str, o: list[str]) -> None:
        if name in (
            "s_branch",
            "s_cbranch_execz",
            "s_cbranch_execnz",
            "s_cbranch_vccz",
            "s_cbranch_vccnz",
            "s_cbranch_scc0",
            "s_cbranch_scc1",
        ):
            taken = {
                "s_branch": True,
                "s_cbranch_execz": self._s64("exec") == 0,
                "s_cbranch_execnz": self._s64("exec") != 0,
                "s_cbranch_scc0": not self.scc,
                "s_cbranch_scc1": bool(self.scc),
                "s_cbranch_vccz": self._s64("vcc") == 0,
                "s_cbranch_vccnz": self._s64("vcc") != 0,
            }
            if taken[name]:
                self.pc = self.labels[o[0]]
        elif name.startswith("s_cmp_"):
            wide = name.endswith("64")
            a, b = (self._s64(x) if wide else int(self._s32(x)) for x in o)
            if name.endswith("i32"):
                a, b = signed(a), signed(b)
            kind = name.split("_")[2]
            self.scc = int(
                {"eq": a == b, "lg": a != b, "gt": a > b, "lt": a < b, "ge": a >= b}[kind]
            )
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
                "xor": a ^ b,
                "andn2": a & ~b,
                "lshl": a << (b & 63),
                "cselect": a if self.scc else b,
            }[kind]
            self._store_s64(o[0], value % 2**64)
            if kind in ("and", "or", "xor", "andn2"):
                self.scc = int(value != 0)
        else:
            a = int(self._s32(o[1]))
            b = int(self._s32(o[2])) if len(o) > 2 else 0
            value = {
                "s_mov_b32": lambda: a,
                "s_movk_i32": lambda: a,
                "s_and_b32": lambda: a & b,
                "s_or_b32": lambda: a | b,
                "s_addk_i32": lambda: int(self._s32(o[0])) + a,
                "s_sub_i32": lambda: a - b,
                "s_lshr_b32": lambda: a >> (b & 31),
                "s_cselect_b32": lambda: a if self.scc else b,
                "s_lshl_b32": lambda: a << (b & 31),
                "s_ashr_i32": lambda: signed(a) >> (b & 31),
                "s_add_i32": lambda: a + b,
                "s_add_u32": lambda: a + b,
                "s_addc_u32": lambda: a + b + self.scc,
                "s_mul_i32": lambda: a * b,
                "s_mul_hi_u32": lambda: a * b >> 32,
                "s_mul_hi_i32": lambda: signed(a) * signed(b) >> 32,
            }[name]()
            if name in ("s_add_u32", "s_addc_u32"):
                self.scc = int(value >= 2**32)
            elif name in ("s_and_b32", "s_or_b32"):
                self.scc = int(value != 0)
            self.s[register(o[0])[0]] = value % 2**32

    def _s32(self, operand: str) -> np.uint32:
        return self.s[register(operand)[0]] if operand[0] == "s" else np.uint32(literal(operand))

    # Memory.

    def _vector_memory(self, name: str, o: list[str], modifiers: str) -> None:
        size = {"byte": 1, "short": 2}.get(name.rsplit("_", 1)[1], 4)
        if name[-1].isdigit():
            size *= int(name[-1])
        words = (size + 3) // 4
        found = re.search(r"offset:(-?\d+)", modifiers)
        offset = int(found.group(1)) if found else 0
        is_store = "_store_" in name
        if name.startswith("buffer_"):
            data, index, descriptor = o[0], o[1], register(o[2])[0]
            assert o[3] == "0" and "offen" in modifiers
            low, high, limit = (int(x) for x in self.s[descriptor : descriptor + 3])
            base = low | (high & 0xFFFF) << 32
            relative = self.v[register(index)[0]].astype(np.int64) + offset
        else:
            data, index = (o[1], o[0]) if is_store else (o[0], o[1])
            base, limit = (self._s64(o[2]) if o[2] != "off" else 0), None
            first, last = register(index)
            relative = self.v[first].astype(np.int64)
            if last > first:
                relative = relative | self.v[last].astype(np.int64) << 32
            relative = relative + offset
        first = register(data)[0]
        for lane in LANES[self._mask()]:
            if limit is not None and relative[lane] + size > limit:
                if not is_store:  # out of the descriptor's range: zero, or no store
                    self.v[first : first + words, lane] = 0
                continue
            place = self.memory.at(base + int(relative[lane]), size)
            if is_store:
                place[:] = self.v[first : first + words, lane].copy().view(np.uint8)[:size]
            else:
                self.v[first : first + words, lane] = place.copy().view(np.uint32)


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
