"""The kernels' own AMD instructions, executed: the quick cases of `cases`. ``make test-amd`` runs
all of them, and its result is checked here against what the compile reports hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.amdgcn.cases import ExecutionCase, all_cases
from tests.amdgcn.device import TARGETS, Device

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "amdgcn_execution.json"
QUICK = [case for arch in TARGETS for case in all_cases(arch) if case.is_quick]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU, not in place of the interpreter"
)
@pytest.mark.parametrize("case", QUICK, ids=[f"{case.arch} {case.name}" for case in QUICK])
def test_execution(case: ExecutionCase) -> None:
    with Device(case.arch, is_large=case.is_large) as device:
        error, allowed = case.run(device.target)
    assert device.runs and all(run.instructions for run in device.runs.values())
    assert error <= allowed


def test_the_committed_result_covers_every_case_and_opcode() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    done = {(line["arch"], line["case"]) for line in result["cases"] if line["passed"]}
    wanted = {(case.arch, case.name) for arch in TARGETS for case in all_cases(arch)}
    assert wanted - done == set(), "make test-amd"
    for arch in TARGETS:
        covered = result["coverage"][arch]
        assert covered["unmodelled"] == {} and covered["not_executed"] == []
