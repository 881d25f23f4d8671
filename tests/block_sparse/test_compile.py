"""What the compiler makes of the kernels, for each architecture, beside the committed report."""

from __future__ import annotations

import json

import pytest
import triton

from tests.block_sparse.compile_report import REPORT
from tests.offline import SHARED_LIMIT, TARGETS, Report, compiled_again, report_of

COMMITTED = json.loads(REPORT.read_text(encoding="utf-8"))
FEW_BYTES = ("sm80", "sm86", "sm89", "sm120", "sm121")
"""Accumulators lie in a warp's registers there. The rows have the largest of the tiles that were
tried with which a thread spills no more than four registers."""


@pytest.mark.parametrize("arch", compiled_again("block_sparse"))
def test_report(arch: str) -> None:
    """Registers and spills are the committed ones."""
    if triton.__version__ != COMMITTED["triton"]:
        pytest.skip(f"the report is of triton {COMMITTED['triton']}")
    found = report_of("tests.block_sparse.compile_report", arch)
    assert found == COMMITTED[arch]


@pytest.mark.parametrize("arch", TARGETS)
def test_what_is_chosen_fits_and_does_not_spill(arch: str) -> None:
    report: Report = COMMITTED[arch]
    for name, line in report.items():
        assert line["shared"] <= SHARED_LIMIT[arch], name
        if arch in FEW_BYTES:
            assert line["stack"] <= 16, name
        elif name == "int8 e4m3":  # four registers, none of them in the walk over whole blocks
            assert line["stack"] <= 16, arch
        elif arch.startswith("sm"):
            assert line["spills"] == 0, name


def test_three_8_bit_programs_share_an_sm() -> None:
    for form in ("e4m3", "16-bit values, packed sequences"):
        line = COMMITTED["sm90"][f"int8 {form}"]
        assert line["registers"] <= 168 and 3 * (line["shared"] + 1024) <= 228 << 10
    line = COMMITTED["sm90"]["int8 e4m3, every key, D 64"]
    assert line["registers"] <= 128 and 4 * (line["shared"] + 1024) <= 228 << 10


def test_products_are_of_warpgroups() -> None:
    """On Hopper every product is a WGMMA, also those with functions in between."""
    for name, line in COMMITTED["sm90"].items():
        if name.startswith(("block_sparse", "int8", "gluon")):
            assert line["mma"] >= 8, name
