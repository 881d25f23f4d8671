"""Offline compilation of the Hopper kernels with nvcc, where it is installed.

``python -m tests.mla.test_cuda_compile`` writes the report anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend_core.launch.cuda_params import CudaParams
from mla_backend import combine
from mla_backend.decode import sm90 as mla_sm90
from mla_backend.plan import fill
from tests.cuda_offline import NVCC, compile_cubin, nvcc_version

REPORT = Path(__file__).parent / "cuda_report.json"


def variants() -> dict[str, tuple[Path, CudaParams, dict[str, int]]]:
    """(source, params, defines) of what the table can choose."""
    found = {
        f"mla_decode, {rows} query rows{', evict first' * once}": (
            mla_sm90.SOURCE,
            mla_sm90.PARAMS,
            mla_sm90.defines(rows, once),
        )
        for rows in (8, 16, 32, 64)
        for once in ((True, False) if rows == 64 else (True,))
    }
    found["mla_combine"] = (combine.SM90_SOURCE, combine.PARAMS, {})
    found["split_plan"] = (fill.SM90_SOURCE, fill.PARAMS, {})
    return found


def report() -> dict[str, object]:
    table = {name: compile_cubin(*variant)[1] for name, variant in variants().items()}
    return {"nvcc": nvcc_version(), "arch": "sm_90a", "kernels": table}


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_hopper_kernels_compile_to_what_the_report_says() -> None:
    """Nothing spills, and ptxas serialises no wgmma (its notes C7512, C7518 and C7520)."""
    committed = json.loads(REPORT.read_text())
    fresh = report()
    if fresh["nvcc"] == committed["nvcc"]:
        assert fresh == committed
    for name, kernel in fresh["kernels"].items():  # type: ignore[attr-defined]
        assert kernel["serialised_wgmma"] == 0, name
        assert kernel["spill_bytes"] == 0, name
        assert kernel["shared_bytes"] <= 227 * 1024, name


if __name__ == "__main__":
    REPORT.write_text(json.dumps(report(), indent=1) + "\n")
