"""The Hopper verification from records on the CPU, from its own sources (tools/cuda_on_host), against
float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.tables.schema import KernelPath
from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaSelection, KdaShape
from kda_backend.testing.records import RecordedDrafts
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.verify_records import fused_sm90 as pipeline
from tests.kda.cases import Backend, assert_same_bits
from tests.kda.test_records import assert_step, drafts, verify
from tools.cuda_on_host.driver import GXX, HostKernel, run_launches
from tools.cuda_on_host.planted import plant

ROWS = {
    row.params.split: dataclasses.replace(row, max_grid=None)
    for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    if row.operator == "verify_records" and row.name == "fused_sm90"
}
pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]


@dataclass(frozen=True)
class OnHost(Backend):
    """The backend whose selections have one row of the table."""

    row: KernelPath

    def selection(self, shape: KdaShape) -> KdaSelection:
        return super().selection(shape).with_path(self.row)


def use_host(
    monkeypatch: pytest.MonkeyPatch, row: KernelPath, run_seed: int | None, source: Path | None = None
) -> OnHost:
    """Has the path launch the kernel on the host."""

    def kernel(path: pipeline.FusedRecordsSm90, defines: dict[str, int]) -> HostKernel:
        return HostKernel(
            pipeline.SOURCE if source is None else source,
            "verify_records",
            pipeline.PARAMS,
            defines,
            cluster_size=defines["SPLIT"],
            run_seed=run_seed,
        )

    monkeypatch.setattr(pipeline.FusedRecordsSm90, "kernel", kernel)
    return OnHost("kernels", torch.device("cpu"), row)


def model_of(**options: Any) -> dict[str, Any]:
    return {"heads": 1, "key_dim": 128, "value_dim": 128} | options


def run(
    backend: Backend, x: RecordedDrafts, accepted: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Steps of verify and accept; the outputs."""
    outs = []
    for step, counts in enumerate(accepted):
        stored = list(x.states)
        outs.append(verify(backend, x, step, x.ints(x.held)))
        x.expect(step)
        assert_step(x, step, outs[-1], stored)
        x.accept(counts)
    return outs


CALLS: dict[str, dict[str, Any]] = {
    "rolling windows, a draft of eight": {"lengths": (8, 3), "accepted": ((5, 1), (1, 2))},
    "buffers, bounded, no norm, bf16 state": {
        **{"lengths": (2, 0, 5), "accepted": ((2, 0, 4), (0, 0, 1)), "rolls": False},
        **{"gate": "bounded", "has_norm": False, "state_dtype": torch.bfloat16},
    },
    "grouped, no convolution, fp16 state and tokens": {
        **{"lengths": (4,), "accepted": ((4,), (1,)), "value_heads": 2, "has_conv": False},
        **{"l2norm": False, "state_dtype": torch.float16, "dtype": torch.float16},
    },
    "fp32, more than two chunks": {
        **{"lengths": (19,), "accepted": ((18,), (3,)), "dtype": torch.float32},
        **{"rolls": False, "beta_kind": "twice_sigmoid"},
    },
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("split", ROWS)
def test_rows_of_the_table_on_the_host(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: int, call: str
) -> None:
    options = dict(CALLS[call])
    lengths, accepted = options.pop("lengths"), options.pop("accepted")
    host = use_host(monkeypatch, ROWS[split], seed)
    x = drafts(host, seed, lengths, steps=len(accepted), **model_of(**options))
    run(host, x, accepted)
