"""Offline compilation of the Hopper kernels with nvcc, where it is installed.

``python -m tests.kda.test_cuda_compile`` writes the report anew.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from kda_backend.contract.inputs import BETA_SIGMOID, GATE_BOUNDED, GATE_LOG, GATE_SOFTPLUS
from kda_backend.prefill.two_stage_sm90 import KERNELS, intra_defines, scan_defines

REPORT = Path(__file__).parent / "cuda_report.json"
NVCC = shutil.which("nvcc")
GATES = {"given": GATE_LOG, "softplus": GATE_SOFTPLUS, "bounded": GATE_BOUNDED}


def variants() -> dict[str, tuple[str, dict[str, int]]]:
    """Name -> (source, defines): what configs/kda/nvidia_sm90.toml can choose."""
    found = {}
    for blocks in (2, 4):
        for gate, code in GATES.items():
            defines = intra_defines(code, BETA_SIGMOID, True, torch.bfloat16, blocks)
            found[f"intra_chunk {gate}, {blocks} blocks"] = ("intra_chunk", defines)
    for split in (False, True):
        for track in (False, True):
            name = f"scan{', split' * split}{', tracking' * track}"
            found[name] = ("scan", scan_defines(False, False, track, split))
    return found


def nvcc_version() -> str:
    out = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", out)[1]  # type: ignore[index]


def compile_variant(source: str, defines: dict[str, int]) -> dict[str, int]:
    """Registers and spilled bytes, from ptxas."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("nvcc", "-cubin", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"),
            *("-Xptxas", "-v", "-o", f"{folder}/kernel.cubin"),
            *(f"-D{name}={value}" for name, value in defines.items()),
            str(KERNELS / f"{source}.cu"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {
        "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),  # type: ignore[index]
        "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr))),
        # ptxas runs wgmma one by one where it cannot follow the accumulators
        "serialised_wgmma": done.stderr.count("instructions are serialized"),
        "shared_bytes": defines["SHARED_BYTES"],
    }


def report() -> dict[str, object]:
    table = {name: compile_variant(*variant) for name, variant in variants().items()}
    return {"nvcc": nvcc_version(), "arch": "sm_90a", "kernels": table}


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
def test_hopper_kernels_compile_to_what_the_report_says() -> None:
    committed = json.loads(REPORT.read_text())
    fresh = report()
    if fresh["nvcc"] == committed["nvcc"]:
        assert fresh == committed
    for name, kernel in fresh["kernels"].items():  # type: ignore[attr-defined]
        assert kernel["serialised_wgmma"] == 0, name
        # four blocks of 128 registers beat three of 168 with a few words spilled
        assert kernel["spill_bytes"] <= (112 if "4 blocks" in name else 16), name
        assert kernel["shared_bytes"] <= 227 * 1024, name


if __name__ == "__main__":
    REPORT.write_text(json.dumps(report(), indent=1) + "\n")
