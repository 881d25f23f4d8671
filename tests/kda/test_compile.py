"""Every kernel as the shipped tables choose it, compiled for each architecture without a GPU."""

from __future__ import annotations

import json

import pytest
import triton

from tests.kda.compile_report import REPORT
from tests.offline import SHARED_LIMIT, TARGETS, Report, compiled_again, report_of

COMMITTED = json.loads(REPORT.read_text(encoding="utf-8"))


@pytest.mark.skipif(
    triton.__version__ != COMMITTED["triton"],
    reason=f"the committed report is of Triton {COMMITTED['triton']}",
)
@pytest.mark.parametrize("arch", compiled_again("kda"))
def test_kernels_compile_to_what_the_report_says(arch: str) -> None:
    """A difference is a change of a kernel or a table: look at it, then
    ``python -m tests.kda.compile_report --write``."""
    assert report_of("tests.kda.compile_report", arch) == COMMITTED[arch]


def sixteen_bit(arch: str) -> Report:
    """All but the lines of fp32 inputs: those multiply in three passes, for exactness."""
    return {name: line for name, line in COMMITTED[arch].items() if " fp32" not in name}


@pytest.mark.parametrize("arch", TARGETS)
def test_no_kernel_spills(arch: str) -> None:
    lines = sixteen_bit(arch)
    kernels = {"intra", "scan", "recurrent", "decode_step", "verify_step"}
    kernels |= {"verify_records", "commit_records"}
    kernels |= {"short_conv", "gated_norm", "store_checkpoints", "chunk_table"}
    assert {name.split()[0] for name in lines} == kernels
    for name, line in lines.items():
        spilled = {key: line[key] for key in ("spills", "scalar_spills", "stack")}
        assert not any(spilled.values()), f"{name} on {arch}: {spilled}"


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_fits_shared_memory(arch: str) -> None:
    for name, line in COMMITTED[arch].items():
        assert line["shared"] <= SHARED_LIMIT[arch], f"{name} on {arch}: {line['shared']} bytes"


@pytest.mark.parametrize(
    "arch", [arch for arch in TARGETS if "mma" in COMMITTED[arch]["chunk_table"]]
)
def test_products_run_on_the_matrix_units(arch: str) -> None:
    for name, line in sixteen_bit(arch).items():
        multiplies = name.split()[0] in ("intra", "scan")
        assert (line["mma"] > 0) == multiplies, f"{name} on {arch}"


def test_all_lanes_get_the_same_sum() -> None:
    """Triton 3.8 lets lanes with the same sum store it at one address, whoever comes last."""
    kernels = report_of("tests.kda.joined_products", "sm90")
    assert (
        kernels and {name: line["joined"] for name, line in kernels.items() if line["joined"]} == {}
    )
    assert all(line["taken"] for name, line in kernels.items() if "bare" not in name)
