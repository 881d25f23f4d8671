"""MLA decode's benchmark without a GPU: which cases fit, and how overheads are compared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benchmarks import bench_mla_decode as bench
from benchmarks import bench_mla_decode_forms as forms
from mla_backend.plan.split_kv import split_kv
from mla_backend.spec import MlaSpec
from mla_backend.testing.cases import forced


def test_what_does_not_fit_into_memory_is_named() -> None:
    gib = 1 << 30
    fits, left_out = bench.fitting(bench.GROWTH, 130 * gib)
    assert fits == bench.GROWTH and left_out == []
    # 64 requests of 256k tokens take 18 GiB, 256 of 64k as many
    fits, left_out = bench.fitting(bench.GROWTH, 40 * gib)
    assert left_out == ["256x256k"] and list(fits) == [n for n in bench.GROWTH if n != "256x256k"]
    _, left_out = bench.fitting(bench.GROWTH, 20 * gib)
    assert left_out == ["256x64k", "64x256k", "256x256k"]


def test_an_overhead_matters_to_shared_prefixes_alone() -> None:
    """The cases without one have the same plan, which docs/studies/mla-decode.md says."""
    for name, (sizes, shared) in bench.SIZES.items():
        lengths = torch.tensor(sizes)
        if shared:  # as at 32 heads: 32 tiles of the prefix and the requests' own keys
            lengths = torch.cat([lengths - shared, torch.full((32,), shared)])
        plans = [split_kv(lengths, 132, overhead, 1)[0] for overhead in (1, 2, 3, 5)]
        assert all(torch.equal(plan, plans[0]) for plan in plans) == (not shared), name


class Point:
    """A case without a GPU: two page tables, of which the first is measured."""

    def __init__(self, pool: torch.Tensor, heads: int, sizes: list[int], shared: int) -> None:
        self.tables, self.pages = [0, 1], [0, 1]
        self.result = (torch.empty(4), torch.empty(4))


def test_an_overhead_is_compared_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the form in use; a wrong one ends the run."""
    timed: list[int] = []
    monkeypatch.setattr(forms, "Case", Point)
    monkeypatch.setattr(forms, "graph_us", lambda calls, replays: timed.append(len(calls)) or 2.0)

    def runner(value: float) -> Any:
        return lambda case: [
            lambda i=i: case.result[0].copy_(torch.full((4,), value + i)) for i in (0, 1)
        ]

    good = {"used": runner(1.0), "overhead 3": runner(1.0)}
    row = forms.measure_row(torch.empty(0), "prefix", 4, good, 8)
    assert row["forms_us"] == {"overhead 3": 2.0} and timed == [2, 2, 2]
    assert row["error"] == {"used": 0.0, "overhead 3": 0.0}
    for value, error in ((1.5, "0.5"), (math.nan, "inf")):
        with pytest.raises(
            SystemExit, match=f"overhead 3, prefix, 4 heads: relative error {error}"
        ):
            forms.measure_row(torch.empty(0), "prefix", 4, {**good, "overhead 3": runner(value)}, 8)
    assert len(timed) == 5


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
