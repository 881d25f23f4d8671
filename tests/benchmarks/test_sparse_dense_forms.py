"""The comparison of forms of Hopper's bf16 kernels, as far as a CPU can say."""

from __future__ import annotations

import json

import pytest

from benchmarks import bench_sparse_dense_forms as bench
from tests.softmax.prefill import compile_report


def test_the_row_in_use_is_one_of_the_forms() -> None:
    assert bench.FORMS[bench.in_use()].ping_pong is (bench.in_use() != "no turns")
    assert set(bench.PACKED) <= set(bench.FORMS)
    assert len(set(bench.FORMS.values())) == len(bench.FORMS)


def test_forms_that_are_compiled_offline_are_timed() -> None:
    forms = {form.form for form in bench.FORMS.values()}
    assert {form for _, _, form in compile_report.FORMS} <= forms


def test_a_form_whose_process_says_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def __init__(self, command: list[str], **_: object) -> None:
            self.form = command[-1]

        def communicate(self, timeout: float) -> tuple[str, str]:
            good = {"form": self.form, "errors": {"causal": 2e-3}, "same_bits": True}
            return ("" if self.form == "turns" else json.dumps(good)), "no kernel image"

        def kill(self) -> None:
            pass

    monkeypatch.setattr(bench.subprocess, "Popen", Silent)
    found = bench.check_all(["no turns", "turns"], 1.0)
    worst = [max(one["errors"].values(), key=bench._or_nan) for one in found]
    assert [error < bench.ROOM for error in worst] == [True, False]


def test_the_table_is_over_the_form_in_use_and_fa3() -> None:
    times = {"no turns": (4.0, 4.2), "turns": (2.0, 2.1), "FA3": (3.0, 1.0)}
    rows = [
        {"work": "dense", "form": form, "ms": a, "again_ms": b, "tflops": 1.0}
        for form, (a, b) in times.items()
    ]
    _, *lines = bench.table(rows, "no turns")
    assert [line.split()[-2:] for line in lines] == [
        ["1.000", "0.250"],
        ["2.000", "0.500"],
        ["4.000", "1.000"],
    ]
