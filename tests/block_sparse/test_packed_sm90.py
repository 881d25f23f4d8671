"""Packed sequences on Hopper, as far as a CPU can say: when it is taken, what it is handed, and
that the calls which prove it on a GPU see faults."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from backend_core.launch import triton as launch
from backend_core.launch.triton import KernelLaunch
from backend_core.operator import select
from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense16 import gluon
from block_sparse_backend.launch_params import TABLES
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.spec import BlockSparseSpec
from block_sparse_backend.testing import checks
from block_sparse_backend.testing.cases import inputs

CPU = torch.device("cpu")
H200 = KNOWN_TARGETS["H200"]


def packed_plan() -> BlockPlan:
    cu = torch.tensor([0, 30, 131], dtype=torch.int32)
    return intervals.ragged(cu, cu, 101, 101, 4)


@pytest.mark.parametrize("is_packed", [False, True])
def test_one_row_serves_packed_sequences_too(is_packed: bool) -> None:
    plan = packed_plan() if is_packed else intervals.causal(128, 128, 4, device=CPU)
    q, k, v = inputs((4, 131, 128), (2, 512, 128), seed=0, device=CPU)
    chosen = select(TABLES, "block_sparse", H200, BlockSparseSpec.of(q, k, v, plan))
    assert {chosen.row(grid).name for grid in (1, 10**6)} == {"gluon"}


def test_without_hopper_it_is_refused() -> None:
    q, k, v = inputs((4, 128, 128), (2, 128, 128), seed=0, device=CPU)
    plan = intervals.causal(128, 128, 4, device=CPU)
    with pytest.raises(ValueError, match="path gluon needs Hopper, got cpu"):
        block_sparse_attention(q, k, v, plan, path="gluon")


def handed(monkeypatch: pytest.MonkeyPatch, plan: BlockPlan, *x: torch.Tensor) -> dict[str, Any]:
    """The kernel's arguments by name."""
    found: dict[str, Any] = {}

    def called(self: KernelLaunch, grid: tuple[int, int, int], *arguments: Any) -> None:
        found.update(dict(zip(self.argument_names, arguments, strict=True)), grid=grid)
        found.update(self._kwargs)

    monkeypatch.setattr(KernelLaunch, "_interpret", called)
    monkeypatch.setattr(launch, "_launchers", lambda kernel: (kernel._call_by_name, None))
    q, k, v = x
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    spec = BlockSparseSpec.of(q, k, v, plan)
    row = select(TABLES, "block_sparse", H200, spec).row(1)
    assert row.name == "gluon"
    call = BlockSparseInputs(q, k, v, plan, 0.1, out, lse)
    gluon.bind(row, spec, H200)(call)(call)
    return found


def test_packed_sequences_are_handed_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = packed_plan()
    q, k, v = inputs((4, 131, 64), (1, 131, 64), seed=0, device=CPU)
    got = handed(monkeypatch, plan, q, k, v)
    assert got["k_desc"].shape == [1, 1, 131, 64] and got["q_desc"].block_shape == [1, 1, 64, 64]
    assert got["k_desc"].strides == list(k.stride())
    assert (got["GROUP"], got["STAGES"], got["IS_PACKED"]) == (4, 4, True)
    assert got["sequences_ptr"] is plan.sequences and got["mask_aux_ptr"] is plan.cols
    assert got["grid"] == (len(plan.work), 1, 1)


def test_the_calls_that_prove_it_see_faults(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the Triton kernel: right, then with a key too many, then with tiles begun too late."""
    rows = load_table(TABLES, KNOWN_TARGETS["MI300X"]).rows
    row = next(r for r in rows if (r.operator, r.name) == ("block_sparse", "triton"))

    def error() -> float:
        try:
            return checks._packed(row, 64, H200, device)[0]
        except RuntimeError as found:  # a row of another sequence, which two tiles have written
            if "a query that sees no key" not in str(found):
                raise
            return math.inf

    assert error() < checks.OUT_ERROR
    for column, size in ((4, 1), (1, 1)):

        def wrong(*x: Any, column: int = column, size: int = size, **y: Any) -> Any:
            *tensors, plan = x
            table = plan.sequences.clone()
            table[0, column] += size
            return block_sparse_attention(*tensors, dataclasses.replace(plan, sequences=table), **y)

        monkeypatch.setattr(checks, "block_sparse_attention", wrong)
        assert not error() < checks.OUT_ERROR
