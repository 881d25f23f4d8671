"""MLA decode's benchmark without a GPU: what a wrong output says."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_mla_decode as bench
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import forced


def test_a_wrong_output_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, right = MlaSpec(4, 64), bench.cases.expected
    monkeypatch.setattr(bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(bench, "selection_of", lambda spec, path: forced(spec, "torch"))
    assert bench.check_one(spec, [70, 0, 5]) is None
    monkeypatch.setattr(
        bench.cases, "expected", lambda case: (1.02 * right(case)[0], right(case)[1])
    )
    found = bench.check_one(spec, [70, 0, 5])
    assert found is not None and "relative error of the output" in found
