"""Offline compilation of the Hopper decode step with nvcc, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from kda_backend.contract.inputs import (
    BETA_GIVEN,
    BETA_SIGMOID,
    GATE_BOUNDED,
    GATE_LOG,
    GATE_SOFTPLUS,
)
from kda_backend.decode.step_sm90 import BLOCKS_A_SM, SOURCE, defines

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# q, g, beta, A_log, dt_bias, convolution state, taps, bias, norm weight, norm gate
ENGINE = (BF16, BF16, BF16, FP32, FP32, BF16, FP32, None, BF16, BF16)
BARE = (FP32, FP32, FP32, None, None, None, None, None, None, None)
MIXED = (FP16, FP32, FP32, BF16, FP16, FP16, FP16, FP16, FP32, FP16)
VARIANTS = {
    "engine": (GATE_SOFTPLUS, BETA_SIGMOID, True, False, *ENGINE),
    "bounded, bf16 state": (GATE_BOUNDED, BETA_SIGMOID, True, True, *ENGINE),
    "bare": (GATE_LOG, BETA_GIVEN, False, False, *BARE),
    "other types": (GATE_SOFTPLUS, BETA_SIGMOID, True, True, *MIXED),
}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("split", "warps"), [(1, 4), (1, 8), (2, 8), (2, 16), (4, 4), (8, 4)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_fit_a_multiprocessor_without_spills(
    tmp_path: Path, split: int, warps: int, variant: str
) -> None:
    """The sizes of both structs agree with the host's, or the source does not compile."""
    constants = defines(split, warps, 2, 1, *VARIANTS[variant])
    command = [
        *("nvcc", "-cubin", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"),
        *("-Xptxas", "-v", "-o", str(tmp_path / "kernel.cubin")),
        *(f"-D{name}={value}" for name, value in constants.items()),
        str(SOURCE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])  # type: ignore[index]
    blocks = BLOCKS_A_SM[warps]
    assert blocks * 32 * warps * registers <= 65536
    assert blocks * (constants["SHARED_BYTES"] + 1024) <= 228 * 1024
