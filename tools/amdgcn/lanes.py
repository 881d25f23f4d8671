"""Movements between lanes: DPP, permlane swaps, swizzles, bpermute, and lanes to scalars."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.amdgcn.errors import UnmodelledError
from tools.amdgcn.operands import Operand, convert, reader
from tools.amdgcn.wave import LANES, Operation, Wave

Run = Callable[[Wave], None]
_ROW, _WITHIN = LANES & ~15, LANES & 15
_EVERY = np.ones(64, np.bool_)


def with_dpp(
    target: Operand,
    sources: list[Operand],
    types: tuple[str, str, Callable[..., Any]],
    modifiers: dict[str, str],
) -> Run:
    """Data-parallel primitives: source 0 comes from another lane of the wave.

    A lane whose source lane does not exist or is not in EXEC gets zero with ``bound_ctrl``, and is
    not written without.
    """
    kinds, view, function = types
    index, exists = movement(modifiers)
    enabled = _enabled(modifiers)
    gives_zero = modifiers.pop("bound_ctrl", "0") == "1"
    first, *others = sources
    if first.kind != "v" or first.negate or first.absolute:
        raise UnmodelledError("DPP of anything but a plain vector register")
    readers = [reader(source, kind) for source, kind in zip(others, kinds[1:], strict=True)]
    row, moved = target.index, frozenset(first.registers)

    def run(wave: Wave) -> None:
        wave.expect_wait_states(moved, 2, "DPP reads it")
        valid = exists & wave.mask[index]
        bits = np.where(valid, wave.u[first.index][index], np.uint32(0))
        value = function(convert(bits, kinds[0]), *(read(wave) for read in readers))
        where = wave.mask & enabled
        if not gives_zero:
            where = where & valid
        np.copyto(getattr(wave, view)[row], value, where=where, casting="unsafe")

    return run


def movement(modifiers: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """For each lane the lane it reads, and whether there is one."""
    if "quad_perm" in modifiers:
        picks = re.fullmatch(r"\[(\d),(\d),(\d),(\d)\]", modifiers.pop("quad_perm"))
        if picks is None:
            raise UnmodelledError("quad_perm without four lanes")
        return LANES & ~3 | np.array([int(x) for x in picks.groups()])[LANES & 3], _EVERY
    for kind in ("row_shl", "row_shr", "row_ror", "row_bcast"):
        if kind in modifiers:
            return _row_movement(kind, int(modifiers.pop(kind)))
    for kind, flip in (("row_mirror", 15), ("row_half_mirror", 7)):
        if modifiers.pop(kind, None) is not None:
            return LANES ^ flip, _EVERY
    raise UnmodelledError(f"DPP control {', '.join(modifiers)}")


def _row_movement(kind: str, amount: int) -> tuple[np.ndarray, np.ndarray]:
    if kind == "row_shr":
        return np.maximum(LANES - amount, 0), amount <= _WITHIN
    if kind == "row_shl":
        return np.minimum(LANES + amount, 63), _WITHIN + amount < 16
    if kind == "row_ror":
        return _ROW | (_WITHIN - amount) % 16, _EVERY
    if amount == 15:  # the last lane of each row to the next row
        return np.maximum(_ROW - 1, 0), _ROW > 0
    if amount == 31:  # lane 31 to the rows after it
        return np.full(64, 31), LANES > 31
    raise UnmodelledError(f"row_bcast:{amount}")


def _enabled(modifiers: dict[str, str]) -> np.ndarray:
    """Lanes whose row of 16 and bank of 4 are enabled."""
    rows = int(modifiers.pop("row_mask"), 0)
    banks = int(modifiers.pop("bank_mask"), 0)
    enabled: np.ndarray = (rows >> (LANES >> 4) & 1 & (banks >> (LANES >> 2 & 3))).astype(np.bool_)
    return enabled


def _read_lane(operands: list[Operand], modifiers: dict[str, str]) -> Run:
    target, source, lane = operands
    row, at = source.index, reader(lane, "u")
    return lambda wave: wave.set_s32(target.index, int(wave.u[row, int(at(wave)) & 63]))


def _write_lane(operands: list[Operand], modifiers: dict[str, str]) -> Run:
    """Writes one lane, in EXEC or not: how scalar registers are spilled."""
    target, source, lane = operands
    if lane.kind != "literal":
        raise UnmodelledError("v_writelane_b32 of a lane in a register")
    row, at = target.index, lane.bits & 63
    read = reader(source, "u")

    def run(wave: Wave) -> None:
        wave.u[row, at] = read(wave)

    return run


def _read_first_lane(operands: list[Operand], modifiers: dict[str, str]) -> Run:
    target, source = operands

    def run(wave: Wave) -> None:
        # with no lane in EXEC it is lane 0
        wave.set_s32(target.index, int(wave.u[source.index, int(np.argmax(wave.mask))]))

    return run


def _count_below(first: int) -> Callable[[list[Operand], dict[str, str]], Run]:
    """The last source, and 1 for each lane below a lane's own whose bit is set in a half of a mask,
    which begins at lane ``first``."""
    below = np.array([(1 << max(0, min(32, lane - first))) - 1 for lane in range(64)], np.uint64)

    def build(operands: list[Operand], modifiers: dict[str, str]) -> Run:
        target, mask, added = operands
        read_mask, read_added = reader(mask, "u"), reader(added, "u")

        def run(wave: Wave) -> None:
            seen = np.bitwise_count(np.asarray(read_mask(wave)).astype(np.uint64) & below)
            wave.put(wave.u, target.index, (read_added(wave) + seen).astype(np.uint32))

        return run

    return build


def _permlane_swap(half: int) -> Callable[[list[Operand], dict[str, str]], Run]:
    """The odd groups of ``half`` lanes of the first register change places with the even groups of
    the second one."""
    odd = LANES[(LANES // half) % 2 == 1]
    even = odd - half

    def build(operands: list[Operand], modifiers: dict[str, str]) -> Run:
        a, b = (x.index for x in operands)
        both = frozenset({a, b})

        def run(wave: Wave) -> None:
            wave.expect_wait_states(both, 2, "a permlane swap reads it")
            if not wave.full:
                raise UnmodelledError("a permlane swap under a partial EXEC")
            wave.u[a, odd], wave.u[b, even] = wave.u[b, even].copy(), wave.u[a, odd].copy()

        return run

    return build


def _swizzle(operands: list[Operand], modifiers: dict[str, str]) -> Run:
    pattern = modifiers.pop("offset")
    found = re.fullmatch(r"swizzle\(SWAP,(\d+)\)", pattern)
    if found is None:
        raise UnmodelledError(f"ds_swizzle_b32 with {pattern}")
    index = LANES ^ int(found.group(1))
    target, source = operands

    def run(wave: Wave) -> None:
        value = np.where(wave.mask[index], wave.u[source.index][index], np.uint32(0))
        wave.put(wave.u, target.index, value)
        wave.issue(Operation("lgkmcnt", True, target.registers, ()))

    return run


def _bpermute(operands: list[Operand], modifiers: dict[str, str]) -> Run:
    target, address, data = operands
    offset = int(modifiers.pop("offset", "0"))

    def run(wave: Wave) -> None:
        index = (wave.u[address.index].astype(np.int64) + offset) >> 2 & 63
        value = np.where(wave.mask[index], wave.u[data.index][index], np.uint32(0))
        wave.put(wave.u, target.index, value)
        wave.issue(Operation("lgkmcnt", True, target.registers, ()))

    return run


BUILDERS: dict[str, Callable[[list[Operand], dict[str, str]], Run]] = {
    "v_readlane_b32": _read_lane,
    "v_writelane_b32": _write_lane,
    "v_readfirstlane_b32": _read_first_lane,
    "v_mbcnt_lo_u32_b32": _count_below(0),
    "v_mbcnt_hi_u32_b32": _count_below(32),
    "v_permlane16_swap_b32": _permlane_swap(16),
    "v_permlane32_swap_b32": _permlane_swap(32),
    "ds_swizzle_b32": _swizzle,
    "ds_bpermute_b32": _bpermute,
}
