"""The scalar unit: arithmetic on single registers and pairs, comparisons, branches."""

from __future__ import annotations

from collections.abc import Callable

from tools.amdgcn.errors import UnmodelledError
from tools.amdgcn.operands import EXEC, VCC, Operand, operand
from tools.amdgcn.program import Instruction
from tools.amdgcn.wave import BARRIER, END, Wave

Run = Callable[[Wave], "str | None"]
Get = Callable[[Wave], int]


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _immediate(value: int) -> int:
    """A 16-bit constant, sign-extended to 32 bits."""
    return signed(value & 0xFFFF, 16) & 0xFFFFFFFF


def _bfe(a: int, b: int, is_signed: bool) -> int:
    width = b >> 16 & 0x7F
    field = a >> (b & 31) & ((1 << width) - 1)
    return signed(field, width) if is_signed and width else field


# Two sources to a result; the result's low 32 bits are kept, and whether it is zero sets SCC for
# those of _SETS_SCC.
_TWO: dict[str, Callable[[int, int], int]] = {
    "s_and_b32": lambda a, b: a & b,
    "s_or_b32": lambda a, b: a | b,
    "s_xor_b32": lambda a, b: a ^ b,
    "s_andn2_b32": lambda a, b: a & ~b,
    "s_lshl_b32": lambda a, b: a << (b & 31),
    "s_lshr_b32": lambda a, b: a >> (b & 31),
    "s_ashr_i32": lambda a, b: signed(a) >> (b & 31),
    "s_bfe_u32": lambda a, b: _bfe(a, b, False),
    "s_bfe_i32": lambda a, b: _bfe(a, b, True),
    "s_mul_i32": lambda a, b: a * b,
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16,
}
_SETS_NO_SCC = ("s_mul_i32", "s_mul_hi_u32", "s_mul_hi_i32", "s_pack_ll_b32_b16")
_ONE: dict[str, Callable[[int], int]] = {
    "s_mov_b32": lambda a: a,
    "s_movk_i32": _immediate,
    "s_brev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
}
_ONE_SETS_SCC: dict[str, Callable[[int], int]] = {
    "s_abs_i32": lambda a: abs(signed(a)),
    "s_not_b32": lambda a: ~a,
}
_TWO_64: dict[str, Callable[[int, int], int]] = {
    "s_and_b64": lambda a, b: a & b,
    "s_or_b64": lambda a, b: a | b,
    "s_xor_b64": lambda a, b: a ^ b,
    "s_andn2_b64": lambda a, b: a & ~b,
    "s_lshl_b64": lambda a, b: a << (b & 63),
    "s_lshr_b64": lambda a, b: a >> (b & 63),
    "s_ashr_i64": lambda a, b: signed(a, 64) >> (b & 63),
}
# The source and EXEC to the new EXEC; the old one is kept.
_SAVE_EXEC: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda a, b: a & b,
    "s_or_saveexec_b64": lambda a, b: a | b,
    "s_xor_saveexec_b64": lambda a, b: a ^ b,
    "s_andn2_saveexec_b64": lambda a, b: a & ~b,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_BRANCH: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda wave: True,
    "s_cbranch_scc0": lambda wave: not wave.scc,
    "s_cbranch_scc1": lambda wave: bool(wave.scc),
    "s_cbranch_vccz": lambda wave: wave.s64(VCC) == 0,
    "s_cbranch_vccnz": lambda wave: wave.s64(VCC) != 0,
    "s_cbranch_execz": lambda wave: wave.s64(EXEC) == 0,
    "s_cbranch_execnz": lambda wave: wave.s64(EXEC) != 0,
}
_NOTHING = ("s_nop", "s_setprio", "s_sleep")


def build(instruction: Instruction, labels: dict[str, int], modifiers: dict[str, str]) -> Run:
    """Make a scalar instruction ready."""
    name, texts = instruction.operation, instruction.operands
    if name == "s_endpgm":
        return lambda wave: END
    if name == "s_barrier":
        return lambda wave: BARRIER
    if name in _NOTHING:
        return lambda wave: None
    if name == "s_waitcnt":
        return _waitcnt(modifiers)
    if name in _BRANCH:
        return _branch(_BRANCH[name], labels[texts[0]])
    operands = [operand(text) for text in texts]
    if name in ("s_bitcmp0_b32", "s_bitcmp1_b32"):
        return _bit_compare(operands, int(name[8]))
    if name.startswith(("s_cmp_", "s_cmpk_")):
        return _compare(name, operands)
    if name == "s_ff1_i32_b64":
        return _first_bit(operands)
    if name.endswith(("_b64", "_i64", "_u64")):
        return _wide(name, operands)
    return _narrow(name, operands)


def _waitcnt(modifiers: dict[str, str]) -> Run:
    waits = [(name, int(modifiers.pop(name))) for name in ("vmcnt", "lgkmcnt") if name in modifiers]

    modifiers.pop("expcnt", None)  # counts exports, and no kernel has any

    def run(wave: Wave) -> None:
        for name, count in waits:
            wave.flights[name].wait(wave, count)

    return run


def _branch(is_taken: Callable[[Wave], bool], target: int) -> Run:
    def run(wave: Wave) -> None:
        if is_taken(wave):
            wave.pc = target

    return run


def _get32(source: Operand) -> Get:
    if source.kind == "literal":
        constant = source.bits & 0xFFFFFFFF
        return lambda wave: constant
    if source.kind != "s":
        raise UnmodelledError(f"a {source.kind} operand of the scalar unit")
    index = source.index
    return lambda wave: wave.s[index]


def _get64(source: Operand) -> Get:
    if source.kind == "literal":
        constant = source.bits
        return lambda wave: constant
    if source.kind != "s" or source.count != 2:
        raise UnmodelledError("a 64-bit scalar operand that is not a pair")
    index = source.index
    return lambda wave: wave.s64(index)


def _compare(name: str, operands: list[Operand]) -> Run:
    kind, dtype = name.split("_")[2:]
    get = _get64 if dtype == "u64" else _get32
    a, b = (get(x) for x in operands)
    if name.startswith("s_cmpk_"):  # a constant of 16 bits, extended as the type says
        constant = operands[1].bits & 0xFFFF
        value = _immediate(constant) if dtype == "i32" else constant
        b = lambda wave: value  # noqa: E731
    test = _COMPARE[kind]
    is_signed = dtype == "i32"

    def run(wave: Wave) -> None:
        left, right = a(wave), b(wave)
        if is_signed:
            left, right = signed(left), signed(right)
        wave.scc = int(test(left, right))

    return run


def _first_bit(operands: list[Operand]) -> Run:
    """The place of the lowest bit that is set, -1 without one."""
    target, a = operands[0].index, _get64(operands[1])

    def run(wave: Wave) -> None:
        value = a(wave)
        wave.set_s32(target, ((value & -value).bit_length() - 1) & 0xFFFFFFFF)

    return run


def _bit_compare(operands: list[Operand], wanted: int) -> Run:
    """Whether one bit of the first source is ``wanted``."""
    a, b = (_get32(x) for x in operands)

    def run(wave: Wave) -> None:
        wave.scc = int(a(wave) >> (b(wave) & 31) & 1 == wanted)

    return run


def _wide(name: str, operands: list[Operand]) -> Run:
    target = operands[0].index
    a = _get64(operands[1])
    if name == "s_mov_b64":
        return lambda wave: wave.set_s64(target, a(wave))
    if name == "s_not_b64":
        return _result64(target, lambda wave: ~a(wave))
    if name in _SAVE_EXEC:
        combine = _SAVE_EXEC[name]

        def save(wave: Wave) -> None:
            saved, given = wave.s64(EXEC), a(wave)
            wave.set_exec(combine(given, saved) % 2**64)
            wave.set_s64(target, saved)
            wave.scc = int(wave.s64(EXEC) != 0)

        return save
    if name == "s_cselect_b64":
        b = _get64(operands[2])
        return lambda wave: wave.set_s64(target, a(wave) if wave.scc else b(wave))
    if name not in _TWO_64:
        raise UnmodelledError(f"{name} is not modelled")
    function = _TWO_64[name]
    is_shift = "sh" in name
    second = _get32(operands[2]) if is_shift else _get64(operands[2])
    return _result64(target, lambda wave: function(a(wave), second(wave)))


def _result64(target: int, compute: Get) -> Run:
    def run(wave: Wave) -> None:
        value = compute(wave) % 2**64
        wave.set_s64(target, value)
        wave.scc = int(value != 0)

    return run


def _narrow(name: str, operands: list[Operand]) -> Run:
    target = operands[0].index
    if name in ("s_addk_i32", "s_mulk_i32"):
        return _with_constant(name, target, operands[1].bits)
    a = _get32(operands[1])
    if name in _ONE:
        one = _ONE[name]
        return lambda wave: wave.set_s32(target, one(a(wave)))
    if name == "s_bitset1_b32":
        return lambda wave: wave.set_s32(target, wave.s[target] | 1 << (a(wave) & 31))
    if name == "s_bitset0_b32":
        return lambda wave: wave.set_s32(target, wave.s[target] & ~(1 << (a(wave) & 31)))
    if name in _ONE_SETS_SCC:
        single = _ONE_SETS_SCC[name]
        return _result32(target, lambda wave: single(a(wave)))
    b = _get32(operands[2])
    if name in _TWO:
        two = _TWO[name]
        if name in _SETS_NO_SCC:
            return lambda wave: wave.set_s32(target, two(a(wave), b(wave)) & 0xFFFFFFFF)
        return _result32(target, lambda wave: two(a(wave), b(wave)))
    if name == "s_cselect_b32":
        return lambda wave: wave.set_s32(target, a(wave) if wave.scc else b(wave))
    if name in ("s_max_i32", "s_min_i32"):
        return _extreme(target, a, b, name == "s_max_i32")
    return _sum(name, target, a, b)


def _with_constant(name: str, target: int, bits: int) -> Run:
    constant = signed(_immediate(bits))

    def run(wave: Wave) -> None:
        value = signed(wave.s[target])
        total = value + constant if name == "s_addk_i32" else value * constant
        if name == "s_addk_i32":
            wave.scc = int(not -(2**31) <= total < 2**31)
        wave.set_s32(target, total & 0xFFFFFFFF)

    return run


def _result32(target: int, compute: Get) -> Run:
    def run(wave: Wave) -> None:
        value = compute(wave) & 0xFFFFFFFF
        wave.set_s32(target, value)
        wave.scc = int(value != 0)

    return run


def _extreme(target: int, a: Get, b: Get, is_max: bool) -> Run:
    def run(wave: Wave) -> None:
        left, right = signed(a(wave)), signed(b(wave))
        wave.scc = int(left > right if is_max else left < right)
        wave.set_s32(target, (left if wave.scc else right) & 0xFFFFFFFF)

    return run


def _sum(name: str, target: int, a: Get, b: Get) -> Run:
    """Additions and subtractions; SCC is the carry or borrow, signed ones set it on overflow."""
    if name not in ("s_add_u32", "s_addc_u32", "s_sub_u32", "s_subb_u32", "s_add_i32", "s_sub_i32"):
        raise UnmodelledError(f"{name} is not modelled")
    is_signed = name.endswith("i32")
    takes_carry = name in ("s_addc_u32", "s_subb_u32")
    sign = -1 if "sub" in name else 1

    def run(wave: Wave) -> None:
        left, right = a(wave), b(wave)
        if is_signed:
            left, right = signed(left), signed(right)
        total = left + sign * (right + (wave.scc if takes_carry else 0))
        if is_signed:
            wave.scc = int(not -(2**31) <= total < 2**31)
        else:
            wave.scc = int(not 0 <= total < 2**32)
        wave.set_s32(target, total & 0xFFFFFFFF)

    return run
