"""The kernels' own AMD instructions, executed: of the quick cases of `cases` a tenth, another one
each day. ``make test-amd`` runs all cases, and its result is checked here against what the compile
reports hold."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from tests.offline import ALL
from tools.amdgcn.case import ExecutionCase
from tools.amdgcn.cases import all_cases
from tools.amdgcn.device import TARGETS, Device
from tools.amdgcn.report import PARTS, failures

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "amdgcn_execution.json"
QUICK = [case for arch in TARGETS for case in all_cases(arch) if case.is_quick]
TODAY = QUICK if ALL else QUICK[datetime.date.today().toordinal() % 10 :: 10]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU, not in place of the interpreter"
)
@pytest.mark.parametrize("case", TODAY, ids=[f"{case.arch} {case.name}" for case in TODAY])
def test_execution(case: ExecutionCase) -> None:
    with Device(case.arch, is_large=case.is_large) as device:
        error, allowed = case.run(device.target)
    assert device.runs and all(run.instructions for run in device.runs.values())
    assert error <= allowed


def test_the_committed_result_covers_every_case_kernel_and_opcode() -> None:
    parts = json.loads(RESULT.read_text(encoding="utf-8"))["parts"]
    assert [f"{part['arch']} {part['family']}" for part in parts] == PARTS
    done = {
        (part["arch"], line["case"]) for part in parts for line in part["cases"] if line["passed"]
    }
    wanted = {(case.arch, case.name) for arch in TARGETS for case in all_cases(arch)}
    assert wanted - done == set(), "make test-amd"
    assert [text for part in parts for text in failures(part)] == []
