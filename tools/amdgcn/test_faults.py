"""Faults planted in kernels' machine code, each of which must be caught, and by its kind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tools.amdgcn.case import ExecutionCase
from tools.amdgcn.cases import all_cases
from tools.amdgcn.device import Device
from tools.amdgcn.errors import DeadlockError, ExecutionError, HazardError, RaceError
from tools.amdgcn.memory import GlobalMemory
from tools.amdgcn.test_instructions import kernel

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU, not in place of the interpreter"
)
Change = Callable[[str], str]


def case_of(name: str, arch: str = "gfx950") -> ExecutionCase:
    return next(case for case in all_cases(arch) if case.name == name)


COMPRESSOR = "dsv4 main_c4_decode one_launch: small, ring"
VERIFY = "kda verify: convolution, norm, slots, K = V = 128"
SPARSE_ROWS = "attention sparse_mla: rows of bf16, sinks"


def body_of(text: str) -> str:
    return text.split(".Lfunc_end0:")[0]


def without(pattern: str, number: int, kernel_name: str) -> Change:
    """Drop one of the lines that match, in one kernel."""

    def change(text: str) -> str:
        if f".globl\t{kernel_name}" not in text:
            return text
        found = list(re.finditer(pattern, body_of(text), re.MULTILINE))[number]
        return text[: found.start()] + text[found.end() :]

    return change


def lines_in(case: ExecutionCase, pattern: str, kernel_name: str) -> int:
    count = 0

    def look(text: str) -> str:
        nonlocal count
        if f".globl\t{kernel_name}" in text:
            count = len(re.findall(pattern, body_of(text), re.MULTILINE))
        return text

    with Device(case.arch, change=look) as device:
        case.run(device.target)
    return count


def caught(case: ExecutionCase, change: Change) -> Iterator[str]:
    """The outcome of the fault, if it was noticed."""
    with Device(case.arch, change=change) as device:
        try:
            error, allowed = case.run(device.target)
        except ExecutionError as found:
            yield type(found).__name__
        except (AssertionError, RuntimeError):
            yield "wrong"
        else:
            if not error <= allowed:
                yield "wrong"


def test_each_dropped_wait_is_caught() -> None:
    """All but those that wait for what an earlier wait had already waited for."""
    case, pattern = case_of(COMPRESSOR), r"^\ts_waitcnt .*\n"
    count = lines_in(case, pattern, "decode_step_kernel")
    found = [
        kind
        for number in range(count)
        for kind in caught(case, without(pattern, number, "decode_step_kernel"))
    ]
    assert count >= 20 and len(found) >= 0.9 * count
    assert set(found) == {"HazardError", "RaceError"}


def test_each_dropped_barrier_is_caught() -> None:
    """All but those between accesses that other barriers order."""
    case, pattern = case_of(VERIFY), r"^\ts_barrier\n"
    count = lines_in(case, pattern, "verify_step_kernel")
    found = [
        kind
        for number in range(count)
        for kind in caught(case, without(pattern, number, "verify_step_kernel"))
    ]
    assert count >= 10 and len(found) >= 0.8 * count
    assert found.count("RaceError") >= 0.7 * count


@pytest.mark.parametrize(
    ("pattern", "step"),
    [(r"^\ts_barrier\n", 1), (r"^\ts_waitcnt lgkmcnt\(\d+\)\n(?=\tv_mfma)", 12)],
    ids=["barriers", "waits"],
)
def test_dropped_barriers_and_waits_of_products_are_caught(pattern: str, step: int) -> None:
    """Sparse MLA's keys pass through LDS, where transposing reads take them up. All barriers, and
    some of the waits, of which a few are for what was waited for before."""
    case, name = case_of(SPARSE_ROWS), "sparse_mla_rows_kernel"
    tried = range(0, lines_in(case, pattern, name), step)
    found = [kind for number in tried for kind in caught(case, without(pattern, number, name))]
    assert len(tried) >= 5 and len(found) >= 0.8 * len(tried)
    assert set(found) <= {"HazardError", "RaceError"}


def test_a_transposing_read_of_another_place_is_caught() -> None:
    def change(text: str) -> str:
        if ".globl\tsparse_mla_rows_kernel" not in text:
            return text
        pattern = r"(ds_read_b64_tr_b16 \S+, \S+ offset:)(\d+)"
        changed = re.sub(pattern, lambda x: f"{x[1]}{int(x[2]) ^ 1024}", text, count=1)
        assert changed != text
        return changed

    assert list(caught(case_of(SPARSE_ROWS), change)) == ["wrong"]


def test_swapped_operands_of_mfma_are_caught() -> None:
    pattern = r"(v_mfma_f32_\w+ \S+), (v\[\d+:\d+\]), (v\[\d+:\d+\])"

    def swap(text: str) -> str:
        if ".globl\tscan_kernel" not in text:
            return text
        changed = re.sub(pattern, r"\1, \3, \2", text, count=1)
        assert changed != text
        return changed

    assert list(caught(case_of("kda prefill: one chunk"), swap)) == ["wrong"]


@pytest.mark.parametrize(
    ("control", "other"),
    [("quad_perm:[1,0,3,2]", "quad_perm:[0,1,2,3]"), ("row_shr:8", "row_shr:4")],
)
def test_a_wrong_dpp_control_is_caught(control: str, other: str) -> None:
    def change(text: str) -> str:
        assert control in text
        return text.replace(control, other)

    case = case_of("dsv4 in_place_128 in_registers: small")
    assert list(caught(case, change)) == ["wrong"]


def test_a_missing_wait_state_is_caught() -> None:
    def change(text: str) -> str:
        return re.sub(r"\ts_nop \d+\n(?=.*_dpp )", "", text)

    case = case_of("dsv4 in_place_128 in_registers: small")
    assert list(caught(case, change)) == ["HazardError"]


def test_a_missing_mask_is_caught() -> None:
    """EXEC of all lanes where some must not store."""

    def change(text: str) -> str:
        changed = text.replace("s_and_saveexec_b64", "s_or_saveexec_b64")
        assert changed != text
        return changed

    assert list(caught(case_of(COMPRESSOR), change))


def test_waves_at_different_barriers_are_reported() -> None:
    built = kernel(
        "v_readfirstlane_b32 s4, v0",
        "s_cmp_eq_u32 s4, 0",
        "s_cbranch_scc1 .L1",
        "s_barrier",
        ".L1:",
        "s_nop 0",
        num_waves=2,
    )
    with pytest.raises(DeadlockError, match="has ended"):
        built.launch((1, 1, 1), [], GlobalMemory())


def test_workgroups_that_touch_the_same_byte_are_reported() -> None:
    memory = GlobalMemory()
    address = memory.add(np.zeros(256, np.uint8), "x")
    lines = (
        f"s_mov_b32 s6, {address & 0xFFFFFFFF:#x}",
        f"s_mov_b32 s7, {address >> 32:#x}",
        "v_mov_b32_e32 v1, s2",  # the workgroup's number
        "v_lshlrev_b32_e32 v2, 2, v0",
        "global_store_dword v2, v1, s[6:7]",
    )
    kernel(*lines).launch((1, 1, 1), [], memory)
    with pytest.raises(RaceError, match="of x, which wave 0 of workgroup 0 touched"):
        kernel(*lines).launch((2, 1, 1), [], memory)


def test_a_register_in_flight_must_not_be_used() -> None:
    memory = GlobalMemory()
    address = memory.add(np.zeros(256, np.uint8), "x")
    lines = [
        f"s_mov_b32 s6, {address & 0xFFFFFFFF:#x}",
        f"s_mov_b32 s7, {address >> 32:#x}",
        "v_lshlrev_b32_e32 v2, 2, v0",
        "global_load_dword v3, v2, s[6:7]",
        "global_load_dword v4, v2, s[6:7]",
    ]
    use = "v_add_u32_e32 v5, v3, v3"
    kernel(*lines, "s_waitcnt vmcnt(1)", use).launch((1, 1, 1), [], memory)
    with pytest.raises(HazardError, match=r"v3 is in flight .* vmcnt"):
        kernel(*lines, "s_waitcnt vmcnt(2)", use).launch((1, 1, 1), [], memory)
    # scalar loads return in any order: only a wait for all of them counts
    scalars = ["s_load_dword s8, s[6:7], 0x0", "s_load_dword s9, s[6:7], 0x4"]
    kernel(*lines, *scalars, "s_waitcnt lgkmcnt(0)", "s_mov_b32 s10, s8").launch(
        (1, 1, 1), [], memory
    )
    with pytest.raises(HazardError, match=r"s8 is in flight .* lgkmcnt"):
        kernel(*lines, *scalars, "s_waitcnt lgkmcnt(1)", "s_mov_b32 s10, s8").launch(
            (1, 1, 1), [], memory
        )
