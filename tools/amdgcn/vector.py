"""The vector unit: how an instruction's sources, encoding and target surround its arithmetic."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.amdgcn import lanes, matrix, numerics
from tools.amdgcn.errors import UnmodelledError
from tools.amdgcn.operands import VCC, Operand, Reader, convert, operand, reader
from tools.amdgcn.program import Instruction
from tools.amdgcn.wave import Wave, bits_of, lanes_of

Run = Callable[[Wave], None]
_VIEWS: dict[str, Callable[[Wave], np.ndarray]] = {
    "u": lambda wave: wave.u,
    "f": lambda wave: wave.f,
    "i": lambda wave: wave.i,
}


def build(instruction: Instruction, modifiers: dict[str, str]) -> Run:
    """Make a vector instruction ready, taking from ``modifiers`` what it understands."""
    name = instruction.operation
    operands = [operand(text) for text in instruction.operands]
    if name in lanes.BUILDERS:
        return lanes.BUILDERS[name](operands, modifiers)
    if name.startswith("v_mfma_"):
        return matrix.build(name, operands)
    if name.startswith("v_cmp_"):
        return _compare(instruction, operands, modifiers)
    if name in _SPECIAL:
        return _SPECIAL[name](instruction, operands, modifiers)
    if name.startswith("v_pk_"):
        return _packed(name, operands, modifiers)
    if name.startswith("v_bitop3_"):
        return _bitop3(name, operands, modifiers)
    if name in numerics.WIDE:
        return _wide(name, operands)
    if name == "v_fmac_f32":  # the target is the third source
        sources = [*operands[1:], operands[0]]
        return _apply(
            instruction, operands[0], sources, numerics.ARITHMETIC["v_fma_f32"], modifiers
        )
    if name not in numerics.ARITHMETIC:
        raise UnmodelledError(f"{name} is not modelled")
    types = numerics.ARITHMETIC[name]
    return _apply(instruction, operands[0], operands[1:], types, modifiers)


def _apply(
    instruction: Instruction,
    target: Operand,
    sources: list[Operand],
    types: tuple[str, str, Callable[..., Any]],
    modifiers: dict[str, str],
) -> Run:
    kinds, view, function = types
    if len(kinds) != len(sources) or target.count != 1:
        raise UnmodelledError(f"{instruction.operation} with {len(sources)} sources")
    if instruction.encoding == "dpp":
        return lanes.with_dpp(target, sources, types, modifiers)
    if instruction.encoding == "sdwa":
        return _with_sdwa(target, sources, types, modifiers)
    if modifiers.pop("clamp", None) is not None:
        types = kinds, view, function = _saturated(instruction.operation)
    select = modifiers.pop("op_sel", None)
    readers = [reader(source, kind) for source, kind in zip(sources, kinds, strict=True)]
    if select is not None:  # fp16 in the upper halves
        if instruction.operation != "v_pack_b32_f16":
            raise UnmodelledError("op_sel")
        readers = [
            _upper(read) if bit else read for read, bit in zip(readers, _bits(select), strict=False)
        ]
    row = target.index
    pick = _VIEWS[view]
    if len(readers) == 1:
        (a,) = readers
        return lambda wave: wave.put(pick(wave), row, function(a(wave)))
    if len(readers) == 2:
        a, b = readers
        return lambda wave: wave.put(pick(wave), row, function(a(wave), b(wave)))
    a, b, c = readers
    return lambda wave: wave.put(pick(wave), row, function(a(wave), b(wave), c(wave)))


def _saturated(name: str) -> tuple[str, str, Callable[..., Any]]:
    """A sum or difference of unsigned integers that stops at the ends of their range."""
    if name not in numerics.SATURATED:
        raise UnmodelledError(f"{name} with clamp")
    exact = numerics.SATURATED[name]
    most = np.int64(0xFFFFFFFF)
    return "uu", "u", lambda a, b: np.clip(exact(a.astype(np.int64), b.astype(np.int64)), 0, most)


def _upper(read: Reader) -> Reader:
    return lambda wave: read(wave) >> np.uint32(16)


_SELECTIONS = {
    "DWORD": (0, 0xFFFFFFFF), "WORD_0": (0, 0xFFFF), "WORD_1": (16, 0xFFFF),
    **{f"BYTE_{n}": (8 * n, 0xFF) for n in range(4)},
}  # fmt: skip


def _selected(source: Operand, kind: str, selection: str) -> Reader:
    shift, keep = (np.uint32(x) for x in _SELECTIONS[selection])
    plain = Operand(source.kind, source.index, source.count, source.bits)
    if source.negate or source.absolute:
        raise UnmodelledError("a sign modifier with SDWA")
    read = reader(plain, "u")
    return lambda wave: convert(read(wave) >> shift & keep, kind)


def _part_of_target(modifiers: dict[str, str]) -> tuple[np.uint32, np.uint32]:
    """Where a result goes and which of its bits; the rest of the target becomes zero."""
    shift, keep = (np.uint32(x) for x in _SELECTIONS[modifiers.pop("dst_sel", "DWORD")])
    if modifiers.pop("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise UnmodelledError("SDWA that keeps a part of the target")
    return shift, keep


def _with_sdwa(
    target: Operand,
    sources: list[Operand],
    types: tuple[str, str, Callable[..., Any]],
    modifiers: dict[str, str],
) -> Run:
    """Sub-dword addressing: parts of the sources in, into a part of the target, zero elsewhere."""
    kinds, view, function = types
    readers = [
        _selected(source, kind, modifiers.pop(f"src{n}_sel", "DWORD"))
        for n, (source, kind) in enumerate(zip(sources, kinds, strict=True))
    ]
    shift, keep = _part_of_target(modifiers)
    row = target.index

    def run(wave: Wave) -> None:
        value = function(*(read(wave) for read in readers))
        if view == "f":
            value = np.asarray(value, np.float32).view(np.uint32)
        wave.put(wave.u, row, (value & keep) << shift)

    return run


def _compare(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    name = instruction.operation
    _, _, kind, dtype = name.split("_")
    if kind not in numerics.COMPARISONS or dtype not in numerics.TYPES:
        raise UnmodelledError(f"{name} is not modelled")
    test, letter = numerics.COMPARISONS[kind], numerics.TYPES[dtype]
    if instruction.encoding == "sdwa":
        picks = [modifiers.pop(f"src{n}_sel", "DWORD") for n in range(2)]
        a, b = (_selected(x, letter, pick) for x, pick in zip(operands[1:], picks, strict=True))
    else:
        a, b = (reader(x, letter) for x in operands[1:])
    target = operands[0].index

    def run(wave: Wave) -> None:
        wave.set_s64(target, bits_of(test(a(wave), b(wave)) & wave.mask))

    return run


def _cndmask(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    target, *sources, condition = operands
    if instruction.encoding == "sdwa":
        picks = [modifiers.pop(f"src{n}_sel", "DWORD") for n in range(2)]
        a, b = (_selected(x, "u", pick) for x, pick in zip(sources, picks, strict=True))
    else:
        kind = "f" if any(x.negate or x.absolute for x in sources) else "u"
        a, b = (_raw(reader(x, kind)) for x in sources)
    shift, keep = _part_of_target(modifiers)
    row, at = target.index, condition.index

    def run(wave: Wave) -> None:
        value = np.where(lanes_of(wave.s64(at)), b(wave), a(wave))
        wave.put(wave.u, row, (value & keep) << shift)

    return run


def _raw(read: Reader) -> Reader:
    return lambda wave: np.asarray(read(wave)).view(np.uint32)


def _carry(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    """Additions and subtractions with a carry out, and in."""
    name = instruction.operation
    target, out, *sources = operands
    a, b = (reader(x, "u") for x in sources[:2])
    if name.startswith(("v_subrev_", "v_subbrev_")):
        a, b = b, a
    takes_carry = name in ("v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
    is_sum = name.startswith("v_add")
    carry_at = sources[2].index if takes_carry else 0
    row, flags = target.index, out.index

    def run(wave: Wave) -> None:
        left = np.asarray(a(wave)).astype(np.int64)
        right = np.asarray(b(wave)).astype(np.int64)
        if takes_carry:
            right = right + lanes_of(wave.s64(carry_at))
        total = np.broadcast_to(left + right if is_sum else left - right, 64)
        lanes_out = (total >> 32 != 0) & wave.mask
        wave.put(wave.u, row, (total & 0xFFFFFFFF).astype(np.uint32))
        wave.set_s64(flags, bits_of(lanes_out))

    return run


def _mad64(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    target, out, left, right, addend = operands
    is_signed = instruction.operation == "v_mad_i64_i32"
    a, b = (reader(x, "i" if is_signed else "u") for x in (left, right))
    c = reader(addend, "q")
    row, flags = target.index, out.index

    def run(wave: Wave) -> None:
        x, y = (np.asarray(read(wave)).astype(np.int64).view(np.uint64) for read in (a, b))
        product = x * y
        total = np.broadcast_to(product + c(wave), 64)
        put64(wave, row, total)
        # nothing reads the carry: whoever does gets an arbitrary one
        wave.set_s64(flags, 0xDEADBEEFDEADBEEF)

    return run


def put64(wave: Wave, row: int, value: Any) -> None:
    bits = np.asarray(value).astype(np.uint64)
    wave.put(wave.u, row, (bits & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    wave.put(wave.u, row + 1, (bits >> np.uint64(32)).astype(np.uint32))


def _wide(name: str, operands: list[Operand]) -> Run:
    kinds, function = numerics.WIDE[name]
    readers = [reader(x, kind) for x, kind in zip(operands[1:], kinds, strict=True)]
    row = operands[0].index
    return lambda wave: put64(wave, row, function(*(read(wave) for read in readers)))


def _div_scale(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    target, out, *sources = operands
    readers = [reader(x, "f") for x in sources]
    row, flags = target.index, out.index

    def run(wave: Wave) -> None:
        value, scales = numerics.div_scale(*(read(wave) for read in readers))
        wave.put(wave.f, row, value)
        wave.set_s64(flags, bits_of(np.broadcast_to(scales, 64) & wave.mask))

    return run


def _div_fmas(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    readers = [reader(x, "d") for x in operands[1:]]
    row = operands[0].index

    def run(wave: Wave) -> None:
        wave.expect_wait_states(frozenset({VCC + 512, VCC + 513}), 4, "v_div_fmas_f32 reads VCC")
        scales = lanes_of(wave.s64(VCC))
        wave.put(wave.f, row, numerics.div_fmas(*(read(wave) for read in readers), scales))

    return run


def _fma_mix(instruction: Instruction, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    """Of three sources, each fp32, or where op_sel_hi says so fp16 in the half that op_sel picks:
    fp32, or fp16 into one half of the target, whose other half stays."""
    upper = _bits(modifiers.pop("op_sel", "[0,0,0]"))
    is_half = _bits(modifiers.pop("op_sel_hi", "[0,0,0]"))
    a, b, c = (
        _half_float(x, bool(high)) if half else reader(x, "d")
        for x, half, high in zip(operands[1:], is_half, upper, strict=True)
    )
    row = operands[0].index
    if instruction.operation == "v_fma_mix_f32":
        return lambda wave: wave.put(wave.f, row, a(wave) * b(wave) + c(wave))
    shift = np.uint32(16 if instruction.operation == "v_fma_mixhi_f16" else 0)
    keep = np.uint32(0xFFFF0000) >> shift

    def run(wave: Wave) -> None:
        half = numerics.f16_bits((a(wave) * b(wave) + c(wave)).astype(np.float32))
        wave.put(wave.u, row, wave.u[row] & keep | half << shift)

    return run


def _half_float(source: Operand, is_upper: bool) -> Reader:
    """fp16 in one half of a register, as float64."""
    if source.kind == "literal":
        raise UnmodelledError("a constant as fp16")
    read = reader(Operand(source.kind, source.index), "u")
    shift = np.uint32(16 if is_upper else 0)

    def value(wave: Wave) -> Any:
        x = convert(read(wave) >> shift & np.uint32(0xFFFF), "w")
        x = np.abs(x) if source.absolute else x
        return -x if source.negate else x

    return value


_SPECIAL: dict[str, Callable[[Instruction, list[Operand], dict[str, str]], Run]] = {
    "v_cndmask_b32": _cndmask,
    "v_add_co_u32": _carry,
    "v_addc_co_u32": _carry,
    "v_sub_co_u32": _carry,
    "v_subrev_co_u32": _carry,
    "v_subb_co_u32": _carry,
    "v_subbrev_co_u32": _carry,
    "v_mad_u64_u32": _mad64,
    "v_mad_i64_i32": _mad64,
    "v_div_scale_f32": _div_scale,
    "v_div_fmas_f32": _div_fmas,
    "v_fma_mix_f32": _fma_mix,
    "v_fma_mixlo_f16": _fma_mix,
    "v_fma_mixhi_f16": _fma_mix,
}


def _bitop3(name: str, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    table = int(modifiers.pop("bitop3"), 0)
    a, b, c = (reader(x, "u") for x in operands[1:])
    row = operands[0].index
    keep = np.uint32(0xFFFF if name == "v_bitop3_b16" else 0xFFFFFFFF)

    def run(wave: Wave) -> None:
        wave.put(wave.u, row, numerics.bitop3(table, a(wave), b(wave), c(wave)) & keep)

    return run


_PACKED: dict[str, Callable[..., Any]] = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": lambda a, b, c: a.astype(np.float64) * b + c,
}


def _packed(name: str, operands: list[Operand], modifiers: dict[str, str]) -> Run:
    """Two operations at once; op_sel picks the half of each source for the low result, op_sel_hi
    for the high one."""
    target, *sources = operands
    low = _bits(modifiers.pop("op_sel", "[0,0,0]"))
    high = _bits(modifiers.pop("op_sel_hi", "[1,1,1]"))
    signs = [_bits(modifiers.pop(key, "[0,0,0]")) for key in ("neg_lo", "neg_hi")]
    if name in _PACKED_16:
        return _packed_16(_PACKED_16[name], target, sources, (low, high))
    if name == "v_pk_mov_b32":  # the low result from source 0, the high one from source 1
        moved = [_half(source, low[n], "u", False) for n, source in enumerate(sources)]
        return _both(target, "u", np.array, [moved[:1], moved[1:]])
    if name not in _PACKED:
        raise UnmodelledError(f"{name} is not modelled")
    halves = [
        [_half(source, picks[n], "f", bool(signs[which][n])) for n, source in enumerate(sources)]
        for which, picks in enumerate((low, high))
    ]
    return _both(target, "f", _PACKED[name], halves)


def _both(
    target: Operand, view: str, function: Callable[..., Any], halves: list[list[Reader]]
) -> Run:
    pick, row = _VIEWS[view], target.index
    low, high = halves

    def run(wave: Wave) -> None:
        first = function(*(read(wave) for read in low))
        second = function(*(read(wave) for read in high))
        wave.put(pick(wave), row, first)
        wave.put(pick(wave), row + 1, second)

    return run


def _half(source: Operand, pick: int, kind: str, negate: bool) -> Reader:
    """One register of a pair, or a constant, which has no second half."""
    if source.kind == "literal":
        if pick:
            raise UnmodelledError("the high half of a constant")
        return reader(source, kind)
    half = Operand(source.kind, source.index + pick)
    read = reader(half, kind)
    if negate:
        return lambda wave: -read(wave)
    return read


_PACKED_16: dict[str, tuple[str, Callable[..., Any]]] = {
    "v_pk_mul_f16": ("w", lambda a, b: numerics.f16_bits(a * b)),
    "v_pk_lshlrev_b16": ("u", lambda a, b: b << (a & np.uint32(15)) & np.uint32(0xFFFF)),
}
"""Of two halves of a register: the type of the sources, and the result's 16 bits."""


def _packed_16(
    types: tuple[str, Callable[..., Any]],
    target: Operand,
    sources: list[Operand],
    picks: tuple[list[int], ...],
) -> Run:
    kind, function = types
    row = target.index
    readers = [reader(source, "u") for source in sources]
    for source, *chosen in zip(sources, *picks, strict=False):
        if source.kind == "literal" and any(chosen):
            raise UnmodelledError("the high half of a constant")

    def run(wave: Wave) -> None:
        result: Any = np.uint32(0)
        for half, chosen in enumerate(picks):
            a, b = (
                convert(np.asarray(read(wave)) >> np.uint32(16 * pick) & np.uint32(0xFFFF), kind)
                for read, pick in zip(readers, chosen, strict=False)
            )
            result = result | function(a, b) << np.uint32(16 * half)
        wave.put(wave.u, row, result)

    return run


def _bits(text: str) -> list[int]:
    found = re.fullmatch(r"\[([01](?:,[01])*)\]", text)
    if found is None:
        raise UnmodelledError(f"a choice of halves {text}")
    return [int(x) for x in found.group(1).split(",")]
