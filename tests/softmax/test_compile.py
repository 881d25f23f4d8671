"""The Triton kernels compile for GPUs that are not there, to what the committed report says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import triton

from tests.offline import SHARED_LIMIT, report_of
from tests.softmax.compile_report import REPORT

QUICK = ("gfx942",)
ARCHITECTURES = tuple(SHARED_LIMIT) if os.environ.get("KDA_TEST_ALL_TARGETS") else QUICK


def test_nothing_in_the_report_spills_or_overflows() -> None:
    committed = json.loads(REPORT.read_text())
    for arch, limit in SHARED_LIMIT.items():
        for name, kernel in committed[arch].items():
            assert kernel["shared"] <= limit, f"{arch} {name}"
            assert kernel["spills"] == 0 and kernel["stack"] == 0, f"{arch} {name}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_to_what_the_report_says(arch: str, tmp_path: Path) -> None:
    committed = json.loads(REPORT.read_text())
    if committed["triton"] != triton.__version__:
        pytest.skip(f"the report is of Triton {committed['triton']}")
    assert report_of("tests.softmax.compile_report", arch, tmp_path) == committed[arch]
