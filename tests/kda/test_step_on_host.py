"""The Hopper decode step on the CPU, a thread for each of its threads, against float64.

Compiled by g++ from the kernel's own sources; ``step_on_host/hopper.cuh`` stands in for the GPU's
instructions. Waits of one thread for another are real; what memory a GPU shows early is not.
"""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.launch.cuda import PARAMS_HEADER
from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.decode import step_sm90 as pipeline
from kda_backend.launch_params import TABLES
from kda_backend.testing.steps import StepPools, make_step
from tests.kda.cases import Backend, run_step
from tests.kda.test_decode_step import assert_rows

HOST = Path(__file__).parent / "step_on_host"
# one of each shape: how long the L2 cache keeps a state is nothing to a CPU
ROWS = {
    f"{row.params.split}x{row.params.warps}": row
    for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    if row.name == "fused_sm90"
}
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


class HostKernel:
    """Called as ``CudaKernel`` is."""

    def __init__(self, folder: Path, constants: dict[str, int]) -> None:
        self._split = constants["SPLIT"]
        library = folder / "step.so"
        (folder / PARAMS_HEADER).write_text(pipeline.PARAMS.header)
        command = [
            *("g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-w"),
            *(f"-D{name}={value}" for name, value in constants.items()),
            *(f"-I{place}" for place in (folder, HOST, pipeline.SOURCE.parent)),
            *(str(HOST / "run.cpp"), "-o", str(library)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._run = ctypes.CDLL(str(library)).run

    def __call__(self, grid: int, block: int, params: bytes, *, pdl: bool) -> None:
        assert grid % self._split == 0
        self._run(params, grid // self._split)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"gate": "bounded", "has_norm": False, "dtype": torch.float16, "pool": torch.bfloat16},
        {"heads": 1, "value_heads": 2, "has_conv": False, "l2norm": False},
    ],
    ids=["whole", "bounded, no norm, bf16 state", "grouped, no convolution"],
)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_of_the_table_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, row: Any, call: dict[str, Any]
) -> None:
    """Two live rows around a padded one, in each shape that the table chooses."""
    monkeypatch.setattr(pipeline, "_kernel", lambda *v: HostKernel(tmp_path, pipeline.defines(*v)))
    cpu = Backend("kernels", torch.device("cpu"))
    model = dict(call)
    dtype = model.pop("pool", torch.float32)
    case = make_step(seed, 3, device=cpu.device, key_dim=128, value_dim=128, **model)
    pools = StepPools(case, 3, dtype=dtype)
    pools.fill(seed + 1, [2, 0])
    before = pools.copy()
    selection = cpu.selection(case.shape).with_path(dataclasses.replace(row, max_grid=None))
    out = run_step(cpu, case, pools, [2, -1, 0], selection=selection, pdl_prefetch_safe=True)
    assert_rows(case, out, [2, -1, 0], before, pools)
