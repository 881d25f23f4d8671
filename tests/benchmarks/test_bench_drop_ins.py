"""The benchmark of the drop-ins: every case at a small size, on a CPU, beside itself."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backend_core.testing.records import write_record
from benchmarks import bench_drop_ins
from benchmarks.bench_drop_ins import Case

SMALL = {
    "heads": 8,
    "kv_heads": 2,
    "requests": 3,
    "tokens": 256,
    "keys": 64,
    "shared": 64,
    "own": 32,
    "clips": 2,
}
CASES = {f"{case.ours.rpartition('.')[2]}.{case.function}": case for case in bench_drop_ins.cases()}


def allowed(function: str) -> float:
    return 0.1 if "sage" in function else 0.02


def small(case: Case) -> Case:
    shape = {key: SMALL.get(key, value) for key, value in case.shape.items()}
    return Case(case.ours, "the_original", case.function, case.caller, case.draw, shape)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Callable[[Case, Any], dict[str, Any]]:
    """A row of a case, the original being a module of the caller's."""

    def run(case: Case, original: Any) -> dict[str, Any]:
        for name in ("stream_time_ms", "host_time_ms", "call_time_ms"):
            monkeypatch.setattr(bench_drop_ins, name, lambda call, repeats: (call(), 1.0)[1])
        monkeypatch.setitem(sys.modules, "the_original", original)
        return bench_drop_ins.measure(case, torch.device("cpu"), 1)

    return run


@pytest.mark.parametrize("function", CASES)
def test_a_case_beside_itself(function: str, beside: Callable[[Case, Any], dict[str, Any]]) -> None:
    case = small(CASES[function])
    row = beside(case, importlib.import_module(case.ours))
    assert row["ours_error"] == row["theirs_error"] < allowed(function)
    assert row["ours_us"] == row["theirs_us"] == 1e3


def test_a_wrong_original_shows_and_an_absent_one_is_named(
    beside: Callable[[Case, Any], dict[str, Any]],
) -> None:
    case = small(CASES["sageattention.sageattn"])
    ours = importlib.import_module(case.ours)
    wrong = types.SimpleNamespace(sageattn=lambda *call, **more: 1.5 * ours.sageattn(*call, **more))
    row = beside(case, wrong)
    assert row["theirs_error"] > 0.4 > row["ours_error"]
    row = beside(case, types.SimpleNamespace())
    assert "theirs_us" not in row and "sageattn" in row["theirs_refused"]


def test_every_function_has_two_callers() -> None:
    seen = [(case.theirs, case.function, case.draw) for case in bench_drop_ins.cases()]
    assert all(seen.count(one) == 2 for one in seen)


@pytest.mark.parametrize("sharpness", sorted(bench_drop_ins.ATTENTION.values()))
def test_accuracy_beside_a_worse_original(
    sharpness: float, beside: Callable[[Case, Any], dict[str, Any]]
) -> None:
    """Every function at every length, of which one of each is run."""
    found = list(bench_drop_ins.accuracy_cases())
    wanted = {case.function for case in bench_drop_ins.cases() if "sage" in case.function}
    assert {case.function for case in found} == wanted
    assert all(n % 64 for n in bench_drop_ins.LENGTHS) and len(bench_drop_ins.LENGTHS) == 20
    case = next(case for case in found if case.function == "sageattn" and case.shape["is_causal"])
    shape = case.shape | {"sharpness": sharpness, "dim": 64}
    case = Case(case.ours, "the_original", case.function, case.caller, case.draw, shape)
    ours = importlib.import_module(case.ours)

    def worse(*call: Tensor, **more: Any) -> Tensor:
        """Rows that see more keys are off, whose part in a norm of all rows is small."""
        out: Tensor = ours.sageattn(*call, **more)
        out[:, :, 1:] *= 1.3
        return out

    row = beside(case, types.SimpleNamespace(sageattn=worse))
    assert row["ours_error"] < 0.1 < 0.29 < row["theirs_error"] < 0.32
    assert 0.02 < row["e4m3_error"] < 0.05  # both round numbers of three bits after the first
    (line,) = bench_drop_ins.worst([row])
    assert "over 1 rows" in line and "causal" in line


def test_parts_of_one_run_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"gpu": "one", "date": "2026-01-01"}
    rows = [
        {"function": name, "caller": "", "shape": {"tokens": 1}, "theirs_refused": "none"}
        for name in ("a", "b")
    ]
    parts = [tmp_path / f"{row['function']}.json" for row in rows]
    for part, row in zip(parts, rows, strict=True):
        write_record(part, {**head, "rows": [row]})
    whole = tmp_path / "whole.json"
    options = ["bench_drop_ins.py", "--merge", *map(str, parts), "--output", str(whole)]
    monkeypatch.setattr(sys, "argv", options)
    bench_drop_ins.main()
    assert json.loads(whole.read_text()) == {**head, "rows": rows}
    write_record(parts[1], {**head, "gpu": "other", "rows": []})
    with pytest.raises(ValueError, match="differ"):
        bench_drop_ins.merged(parts)
