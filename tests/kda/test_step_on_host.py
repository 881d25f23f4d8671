"""The Hopper decode step on the CPU, from its own sources (tests/cuda_on_host), against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.decode import step_sm90 as pipeline
from kda_backend.launch_params import TABLES, FusedStepSm90Params
from kda_backend.testing.steps import StepPools, make_step
from tests.cuda_on_host.driver import GXX, HostKernel
from tests.kda.cases import Backend, run_step
from tests.kda.test_decode_step import assert_rows

# one of each shape: how long the L2 cache keeps a state is nothing to a CPU
ROWS = {
    f"{row.params.split}x{row.params.warps}": row
    for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    if row.name == "fused_sm90"
}
pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


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
    monkeypatch: pytest.MonkeyPatch, seed: int, row: Any, call: dict[str, Any]
) -> None:
    """Two live rows around a padded one, in each shape that the table chooses."""

    def kernel(launch: FusedStepSm90Params, *variant: Any) -> HostKernel:
        defines = pipeline.defines(launch, *variant)
        source, params = pipeline.SOURCE, pipeline.PARAMS
        return HostKernel(
            source, "decode_step", params, defines, cluster_size=launch.split, run_seed=seed
        )

    monkeypatch.setattr(pipeline, "_kernel", kernel)
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
