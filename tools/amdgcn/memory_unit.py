"""Loads and stores: buffer and global memory, LDS, spilled registers, and scalar loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tools.amdgcn.errors import FaultError, UnmodelledError
from tools.amdgcn.memory import Access, Region, spread
from tools.amdgcn.operands import SCALAR, Operand, operand, reader
from tools.amdgcn.program import Instruction
from tools.amdgcn.wave import Operation, Wave

Run = Callable[[Wave], None]
_SIZES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "dwordx8": 32, "dwordx16": 64,
    "ubyte": 1, "byte": 1, "ushort": 2, "short": 2,
    "b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "b64": 8, "b128": 16,
}  # fmt: skip


def build(instruction: Instruction, modifiers: dict[str, str]) -> Run:
    """Make a memory instruction ready, taking from ``modifiers`` what it understands."""
    name = instruction.operation
    operands = [operand(text) for text in instruction.operands]
    if name.startswith("s_load_"):
        further = int(modifiers.pop("offset", "0"), 0)
        return _scalar_load(operands, _SIZES[name.removeprefix("s_load_")], further)
    if name.startswith("ds_"):
        return _lds(name, operands, modifiers)
    space, direction, kind = name.split("_", 2)
    if name == "global_atomic_smax":
        return _atomic_max(operands, modifiers)
    if space == "scratch":
        return _spill(name, operands, int(modifiers.pop("offset", "0")))
    is_store, upper = direction == "store", kind == "short_d16_hi"
    kind = kind.removesuffix("_d16_hi") if is_store and upper else kind
    if kind not in _SIZES or direction not in ("load", "store") or space == "flat":
        raise UnmodelledError(f"{name} is not modelled")
    address = _buffer_address if space == "buffer" else _global_address
    for hint in ("nt", "sc0", "sc1"):  # cache hints, which change no value
        modifiers.pop(hint, None)
    size = _SIZES[kind]
    data, address_of = address(operands, is_store, modifiers, size)
    return _vector_memory(is_store, size, data, address_of, upper)


def _scalar_load(operands: list[Operand], size: int, further: int) -> Run:
    target, base, offset = operands
    read_offset = reader(offset, "u")

    def run(wave: Wave) -> None:
        address = wave.s64(base.index) + int(read_offset(wave)) + further
        region = wave.workgroup.memory.find(address, size)
        at = address - region.base
        words = region.data[at : at + size].copy().view(np.uint32)
        for number, word in enumerate(words):
            wave.s[target.index + number] = int(word)
        registers = range(target.index + SCALAR, target.index + SCALAR + target.count)
        accesses = []
        if region.tracker is not None:
            accesses.append(region.tracker.read(wave, np.arange(at, at + size)))
        wave.issue(Operation("lgkmcnt", False, registers, accesses))

    return run


# Vector memory. An address function returns the byte addresses of all lanes, and which of them are
# in the descriptor's range: out of it a load gives zero and a store does nothing.
Address = Callable[[Wave], "tuple[np.ndarray, np.ndarray | None]"]


def _buffer_address(
    operands: list[Operand], is_store: bool, modifiers: dict[str, str], size: int
) -> tuple[Operand, Address]:
    data, index, descriptor, base_offset = operands
    if "offen" not in modifiers:
        raise UnmodelledError("a buffer access without offen")
    del modifiers["offen"]
    offset = int(modifiers.pop("offset", "0"))
    read_base = reader(base_offset, "u")

    def address(wave: Wave) -> tuple[np.ndarray, np.ndarray]:
        low, high, limit, _ = (wave.s[descriptor.index + n] for n in range(4))
        relative = wave.u[index.index].astype(np.int64) + offset
        inside = relative + size <= limit
        base = (low | (high & 0xFFFF) << 32) + int(read_base(wave))
        return relative + base, inside

    return data, address


def _global_address(
    operands: list[Operand], is_store: bool, modifiers: dict[str, str], size: int
) -> tuple[Operand, Address]:
    offset = int(modifiers.pop("offset", "0"))
    first, second, base = operands
    data, index = (second, first) if is_store else (first, second)
    if base.kind == "off":
        read = reader(index, "p")
        return data, lambda wave: (read(wave) + offset, None)

    def address(wave: Wave) -> tuple[np.ndarray, None]:
        return wave.u[index.index].astype(np.int64) + (wave.s64(base.index) + offset), None

    return data, address


def _atomic_max(operands: list[Operand], modifiers: dict[str, str]) -> Run:
    """The largest of a signed word of memory and the lanes' words, of which none is returned.
    Atomics of several waves do not race."""
    data, address_of = _global_address(operands, True, modifiers, 4)

    def run(wave: Wave) -> None:
        addresses, _ = address_of(wave)
        active = np.flatnonzero(wave.mask)
        if active.size:
            _check_aligned(addresses[active], 4)
            for region, where in wave.workgroup.memory.split(addresses[active], 4):
                given = wave.u[data.index].view(np.int32)
                for lane in active[where]:
                    at = int(addresses[lane] - region.base)
                    word = region.data[at : at + 4].view(np.int32)
                    word[0] = max(word[0], given[lane])
        wave.issue(Operation("vmcnt", True, (), ()))

    return run


def _vector_memory(is_store: bool, size: int, data: Operand, address: Address, upper: bool) -> Run:
    words = (size + 3) // 4
    if data.count != words:
        raise UnmodelledError(f"{size} bytes in {data.count} registers")
    rows = range(data.index, data.index + words)

    def run(wave: Wave) -> None:
        addresses, inside = address(wave)
        lanes = wave.mask if inside is None else wave.mask & inside
        accesses: list[Access] = []
        if not is_store and inside is not None and (wave.mask & ~inside).any():
            wave.u[rows.start : rows.stop, wave.mask & ~inside] = 0
        active = np.flatnonzero(lanes)
        if active.size:
            _check_aligned(addresses[active], size)
            for region, where in wave.workgroup.memory.split(addresses[active], size):
                touched = active[where]
                at = addresses[touched] - region.base
                if is_store:
                    accesses += _store(wave, region, at, touched, rows, size, upper)
                else:
                    accesses += _load(wave, region, at, touched, rows, size)
        registers: Sequence[int] = () if is_store else rows
        wave.issue(Operation("vmcnt", True, registers, accesses))

    return run


def _spill(name: str, operands: list[Operand], offset: int) -> Run:
    """A register to or from its lane's private memory, at a place that the compiler knows. A wave's
    own vector memory operations are performed in order."""
    is_store = name.startswith("scratch_store_")
    data = operands[1 if is_store else 0]
    where = [x for x in operands if x is not data]
    words = _SIZES.get(name.split("_")[-1], 0) // 4
    if any(x.kind != "off" for x in where) or data.count != words or not words or offset % 4:
        raise UnmodelledError(f"{name} at an address in a register, or of a part of one")
    rows, places = slice(data.index, data.index + words), slice(offset // 4, offset // 4 + words)

    def run(wave: Wave) -> None:
        if places.stop > len(wave.scratch):
            raise FaultError(f"{4 * len(wave.scratch)} bytes of scratch memory end before {offset}")
        registers: Sequence[int] = () if is_store else range(rows.start, rows.stop)
        source, target = wave.u[rows], wave.scratch[places]
        if not is_store:
            source, target = target, source
        np.copyto(target, source, where=wave.mask)
        wave.issue(Operation("vmcnt", True, registers, ()))

    return run


def _check_aligned(addresses: np.ndarray, size: int) -> None:
    unit = min(size, 4)
    if unit > 1 and (addresses & (unit - 1)).any():
        raise FaultError(f"an address of {size} bytes is not a multiple of {unit}")


def _load(
    wave: Wave, region: Region, at: np.ndarray, lanes: np.ndarray, rows: range, size: int
) -> list[Access]:
    index = spread(at, size)
    _gather(wave, region.data[index], lanes, rows, size)
    return [] if region.tracker is None else [region.tracker.read(wave, index)]


def _gather(wave: Wave, found: np.ndarray, lanes: np.ndarray, rows: range, size: int) -> None:
    found = found.reshape(lanes.size, size)
    if size < 4:
        found = np.pad(found, ((0, 0), (0, 4 - size)))
    wave.u[rows.start : rows.stop, lanes] = np.ascontiguousarray(found).view(np.uint32).T


def _bytes_of(
    wave: Wave, lanes: np.ndarray, rows: range, size: int, upper: bool = False
) -> np.ndarray:
    """The first bytes of the registers, or those from the upper half on."""
    words = np.ascontiguousarray(wave.u[rows.start : rows.stop, lanes].T)
    first = 2 if upper else 0
    return words.view(np.uint8)[:, first : first + size].ravel()


def _store(
    wave: Wave,
    region: Region,
    at: np.ndarray,
    lanes: np.ndarray,
    rows: range,
    size: int,
    upper: bool,
) -> list[Access]:
    index = spread(at, size)
    new = _bytes_of(wave, lanes, rows, size, upper)
    assert region.tracker is not None
    access = region.tracker.write(wave, index, region.data[index], new)
    region.data[index] = new
    return [access]


# LDS.


def _lds(name: str, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    if name in ("ds_read_b64_tr_b16", "ds_read_b64_tr_b8"):
        size = 2 if name.endswith("b16") else 1
        return _transposed_read(operands, int(modifiers.pop("offset", "0")), size)
    upper = name.endswith("_d16_hi")
    parts = name.removesuffix("_d16_hi").split("_")
    verb, kind = parts[1], parts[-1]
    if verb.removesuffix("st64") not in ("read", "read2", "write", "write2") or len(parts) != 3:
        raise UnmodelledError(f"{name} is not modelled")
    if kind not in _SIZES or (upper and name not in ("ds_write_b16_d16_hi", "ds_write_b8_d16_hi")):
        raise UnmodelledError(f"{name} is not modelled")
    size = _SIZES[kind]
    if verb.startswith(("read2", "write2")):
        unit = size * (64 if verb.endswith("st64") else 1)
        offsets = [int(modifiers.pop(f"offset{n}", "0")) * unit for n in range(2)]
    else:
        offsets = [int(modifiers.pop("offset", "0"))]
    words = (size + 3) // 4
    if verb.startswith("read"):
        target, base = operands
        if target.count != words * len(offsets):
            raise UnmodelledError(f"{name} into {target.count} registers")
        rows = [
            range(target.index + words * n, target.index + words * (n + 1))
            for n in range(len(offsets))
        ]
        return _lds_read(base, rows, offsets, size)
    base, *sources = operands
    rows = [range(source.index, source.index + words) for source in sources]
    return _lds_write(base, rows, offsets, size, upper)


def _lds_read(base: Operand, rows: list[range], offsets: list[int], size: int) -> Run:
    registers = range(rows[0].start, rows[-1].stop)

    def run(wave: Wave) -> None:
        lds = wave.workgroup.lds
        lanes = np.flatnonzero(wave.mask)
        start = wave.u[base.index].astype(np.int64)[lanes]
        accesses = []
        for target, offset in zip(rows, offsets, strict=True):
            lds.check(start + offset, size)
            index = spread(start + offset, size)
            _gather(wave, lds.data[index], lanes, target, size)
            accesses.append(lds.tracker.read(wave, index))
        wave.issue(Operation("lgkmcnt", True, registers, accesses))

    return run


def _lds_write(base: Operand, rows: list[range], offsets: list[int], size: int, upper: bool) -> Run:
    def run(wave: Wave) -> None:
        lds = wave.workgroup.lds
        lanes = np.flatnonzero(wave.mask)
        start = wave.u[base.index].astype(np.int64)[lanes]
        accesses = []
        for source, offset in zip(rows, offsets, strict=True):
            lds.check(start + offset, size)
            index = spread(start + offset, size)
            new = _bytes_of(wave, lanes, source, size, upper)
            accesses.append(lds.tracker.write(wave, index, lds.data[index], new))
            lds.data[index] = new
        wave.issue(Operation("lgkmcnt", True, (), accesses))

    return run


def _transposed_read(operands: list[Operand], offset: int, size: int) -> Run:
    """Sixteen lanes read rows of 16 elements of ``size`` bytes; each lane gets a column.

    Of two bytes there are 4 rows: lanes 4j to 4j + 3 hold row j, four elements each, and lane l
    gets element l of the rows 0 to 3. Of one byte there are 8 rows: lanes 2j and 2j + 1 hold row j,
    eight elements each (CDNA4 instruction set, "MFMA Transpose Load from LDS").
    """
    target, base = operands
    rows = range(target.index, target.index + 2)
    count = 8 // size  # elements of a lane, and rows
    lane = np.arange(64)
    element = np.arange(count)
    source = (lane & ~15)[:, None] + 16 // count * element + (lane & 15)[:, None] // count

    def run(wave: Wave) -> None:
        if not wave.full:
            raise UnmodelledError("a transposed read under a partial EXEC")
        lds = wave.workgroup.lds
        start = wave.u[base.index].astype(np.int64) + offset
        lds.check(start, 8)
        index = spread(start, 8)
        held: Any = lds.data[index].view(f"u{size}").reshape(64, count)
        columns = np.ascontiguousarray(held[source, (lane & (count - 1))[:, None]])
        wave.u[rows.start : rows.stop] = columns.view(np.uint32).T
        access = lds.tracker.read(wave, index)
        wave.issue(Operation("lgkmcnt", True, rows, [access]))

    return run
