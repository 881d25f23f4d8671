"""Every kernel that a table chooses builds for every architecture, and costs what the report says.

The compiler runs in a process of its own: this one may have Triton's interpreter on.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton

from tests.offline import SHARED_LIMIT, TARGETS, Report, compiled_again, report_of

COMMITTED = json.loads(Path(__file__).with_name("compile_report.json").read_text())
MAY_SPILL = {
    "sm86 pool fp8_ds_mla c128 paged": 2,
    "sm89 pool fp8_ds_mla c128 paged": 2,
    "sm90 decode fp8_ds_mla c128 ring, large grid": 20,
}
"""Bytes with which more programs share an SM; the last was measured to be faster than no spill."""


@pytest.mark.parametrize("arch", compiled_again("dsv4"))
def test_report(arch: str) -> None:
    report = report_of("tests.dsv4.compile_report", arch)
    _assert_frugal(arch, report)
    if triton.__version__ == COMMITTED["triton"]:
        message = (
            "the kernels compile differently: run tests/dsv4/compile_report.py and read the diff"
        )
        assert report == COMMITTED[arch], message


@pytest.mark.parametrize("arch", TARGETS)
def test_the_committed_report(arch: str) -> None:
    _assert_frugal(arch, COMMITTED[arch])


def _assert_frugal(arch: str, report: Report) -> None:
    """Nothing spills, and what one warp or one row has is not fetched twice."""
    for name, line in report.items():
        allowed = MAY_SPILL.get(f"{arch} {name}", 0)
        assert line["spills"] <= allowed, f"{name} spills registers"
        assert allowed or line["stack"] == 0, f"{name} uses local memory"
        assert line["shared"] <= SHARED_LIMIT[arch], f"{name} needs {line['shared']} bytes"
        if "instructions" not in line:  # not counted on this architecture
            continue
        if line["num_warps"] == 1:
            assert line["barriers"] == 0, f"{name} waits for itself"
            # but for what an atomic gives one thread
            allowed_bytes = 256 if name.startswith("decode split") else 0
            assert line["shared"] <= allowed_bytes, f"{name} goes through shared memory"
        if name.startswith("in_place 128"):
            assert line["loads"] <= 6 and line["stores"] <= 2, f"{name}: {line}"
