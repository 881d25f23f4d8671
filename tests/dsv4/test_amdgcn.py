"""The in-place kernel's own AMD instructions, executed lane by lane, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4_backend import RowPlan, SeqLens, reference_step
from tests.dsv4.wave64 import Memory, Wave

ROOT = Path(__file__).parents[2]
EPS = 1e-6


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def assembly(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Text of every in-place case, compiled in a process without Triton's interpreter."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment.pop("TRITON_INTERPRET", None)
    script = ROOT / "tests" / "dsv4" / "compile_report.py"
    command = [sys.executable, str(script), request.param, "in_place"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).flatten().numpy().copy()


@pytest.mark.parametrize("large", ["", ", over 2 GiB"])
@pytest.mark.parametrize(
    "head_dim, dtype, phase",
    [(128, "fp32", "decode"), (128, "fp32", "prefill"), (128, "bf16", "prefill"),
     (512, "fp32", "prefill")],
)  # fmt: skip
def test_in_place(assembly: dict[str, str], head_dim: int, dtype: str, phase: str, large: str):
    text = assembly[f"in_place {head_dim} {dtype} {phase}{large}"]
    torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    g = torch.Generator().manual_seed(head_dim)
    kv = torch.randn(3, head_dim + 16, generator=g).to(torch_dtype)
    weight = (0.5 + torch.rand(head_dim, generator=g)).to(torch_dtype)
    angle = 6.3 * torch.rand(64, 32, generator=g)
    table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    rows = torch.tensor([[2, 0, 59, 8], [-1, -1, -1, -1], [0, 1, 3, 8], [1, 1, 12, 8]])
    plan = RowPlan(rows.int()) if phase == "prefill" else SeqLens(torch.tensor([60, -1, 4]).int())
    entries = plan.rows if isinstance(plan, RowPlan) else plan.seq_lens

    memory = Memory()
    tensors = [_bytes(t) for t in (kv, weight, table, entries)]
    addresses = [memory.add(t) for t in tensors]
    wave = Wave(text, memory)
    for workgroup in range(plan.num_tokens):
        wave.run(workgroup, [*addresses, EPS, kv.stride(0), table.stride(0)])
    got = torch.from_numpy(tensors[0]).view(torch_dtype).view(kv.shape)

    want = kv.clone()
    reference_step.compress_in_place(
        want[:, :head_dim], weight, EPS, table, plan, 4, head_dim == 128
    )
    assert torch.equal(got[:, head_dim:], kv[:, head_dim:])
    tolerance = {"rtol": 0.0, "atol": 4e-6} if dtype == "fp32" else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(got.float(), want.float(), **tolerance)
    assert not torch.equal(got[0], kv[0])
    for other, original in zip(tensors[1:], (weight, table, entries), strict=True):
        assert np.array_equal(other, _bytes(original))
