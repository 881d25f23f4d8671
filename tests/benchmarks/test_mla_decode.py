"""MLA decode's benchmark without a GPU: which cases fit, and how overheads are compared."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_mla_decode as bench
from mla_backend.plan.split_kv import split_kv
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import forced


def test_an_overhead_matters_to_shared_prefixes_alone() -> None:
    """The cases without one have the same plan, which docs/studies/mla-decode.md says."""
    for name, (sizes, shared) in bench.SIZES.items():
        lengths = torch.tensor(sizes)
        if shared:  # as at 32 heads: 32 tiles of the prefix and the requests' own keys
            lengths = torch.cat([lengths - shared, torch.full((32,), shared)])
        plans = [split_kv(lengths, 132, overhead, 1)[0] for overhead in (1, 2, 3, 5)]
        assert all(torch.equal(plan, plans[0]) for plan in plans) == (not shared), name


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
