"""From a program's instructions to steps that a wave runs: the one place that knows all units."""

from __future__ import annotations

from collections.abc import Mapping

from tools.amdgcn import lanes, memory_unit, scalar, vector
from tools.amdgcn.errors import UnmodelledError
from tools.amdgcn.operands import SCALAR, VCC, operand
from tools.amdgcn.program import Instruction, Program
from tools.amdgcn.wave import Step

_VCC = frozenset({SCALAR + VCC, SCALAR + VCC + 1})
# These read VCC without naming it.
_READS_VCC = ("v_div_fmas_f32", "s_cbranch_vccz", "s_cbranch_vccnz")
# Vector instructions with a second target.
_TWO_TARGETS = (
    "v_add_co_u32", "v_addc_co_u32", "v_sub_co_u32", "v_subb_co_u32", "v_subrev_co_u32",
    "v_subbrev_co_u32", "v_mad_u64_u32", "v_mad_i64_i32", "v_div_scale_f32",
    "v_permlane16_swap_b32", "v_permlane32_swap_b32",
)  # fmt: skip


def steps_of(program: Program) -> tuple[Step, ...]:
    """Raises UnmodelledError, with the line, where any instruction is unknown, executed or not."""
    return tuple(step_of(x, program.labels, program.arch) for x in program.instructions)


def step_of(instruction: Instruction, labels: Mapping[str, int], arch: str) -> Step:
    name = instruction.operation
    modifiers = dict(instruction.modifiers)
    try:
        if name in lanes.BUILDERS:
            run = lanes.BUILDERS[name]([operand(x) for x in instruction.operands], modifiers)
        elif name.startswith(("s_load_", "ds_", "global_", "buffer_", "flat_", "scratch_")):
            run = memory_unit.build(instruction, modifiers)
        elif name.startswith("s_"):
            run = scalar.build(instruction, dict(labels), modifiers)
        else:
            run = vector.build(instruction, modifiers)
        if modifiers:
            raise UnmodelledError(f"modifiers {', '.join(modifiers)}")
    except (UnmodelledError, KeyError, ValueError, IndexError) as error:
        raise UnmodelledError(f"{arch} `{instruction.text}`: {error}") from error
    return Step(instruction, run, _touched(instruction), _written(instruction), _waits(instruction))


def _touched(instruction: Instruction) -> frozenset[int]:
    if instruction.operation.startswith(("s_branch", "s_cbranch", "s_nop", "s_waitcnt")):
        registers: set[int] = set()
    else:
        registers = {r for x in instruction.operands for r in operand(x).registers}
    if instruction.operation in _READS_VCC:
        registers |= _VCC
    return frozenset(registers)


def _written(instruction: Instruction) -> frozenset[int]:
    """Registers that a vector instruction writes."""
    if not instruction.operation.startswith("v_"):
        return frozenset()
    count = 2 if instruction.operation in _TWO_TARGETS else 1
    return frozenset(r for x in instruction.operands[:count] for r in operand(x).registers)


def _waits(instruction: Instruction) -> int:
    """Wait states beyond the one that every instruction passes."""
    if instruction.operation == "s_nop":
        return int(instruction.operands[0], 0)
    return 0
