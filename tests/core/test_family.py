"""Families are declared: the list, what a declaration must hold, and how `tune` times a row."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from backend_cli.tune import worker as tune_worker
from backend_core.family import PACKAGES, families
from backend_core.target import KNOWN_TARGETS


def test_ours_are_in_the_order_of_the_list() -> None:
    assert [f"{name}_backend" for name in families()] == list(PACKAGES)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (0.5, {"ms": 0.25, "message": None}),
        (0.6, {"ms": None, "message": "ValueError: small: error 6.0e-01, allowed 5.0e-01"}),
    ],
)
def test_the_tuning_worker_times_a_row_that_is_right(
    error: float, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls return their time, for want of a GPU."""
    kda = replace(
        families()["kda"],
        check_cases=lambda path: {"small": lambda target, device: (error, 0.5)},
        measure=lambda path, target, name, grid, heads: lambda: 1.0 / grid,
    )
    monkeypatch.setattr(tune_worker, "families", lambda: {"kda": kda})
    monkeypatch.setattr(tune_worker, "detect_target", lambda: KNOWN_TARGETS["H200"])
    monkeypatch.setattr(tune_worker, "graph_time_ms", lambda call: call())
    question = {"family": "kda", "row": 0, "measure": "any", "grid": 4, "heads": 8, "check": "all"}
    assert tune_worker.answer(json.dumps(question)) == answer
