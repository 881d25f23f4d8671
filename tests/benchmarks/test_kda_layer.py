"""What of benchmarks/bench_kda_layer.py runs on a CPU: the layer, its float64 check, its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from benchmarks import bench_kda_layer
from benchmarks.bench_kda_layer import Layer, Mixed
from kda_backend.selection import KdaSelection, select
from kda_backend.step_plan import StepPlan, build_chunk_table, build_step_plan


def selection_of(made: Layer) -> KdaSelection:
    return select(KNOWN_TARGETS["cpu"], made.shape)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_layer_is_checked_against_float64(lower_bound: float | None) -> None:
    made = Layer(2, [70, 1, 9], "cpu", lower_bound)
    assert 0 < made.error(selection_of(made)) < 1e-2


def test_a_wrong_window_is_seen() -> None:
    made = Layer(1, [5], "cpu")
    made.expected[1][1, 3, 2] += 1.0
    with pytest.raises(AssertionError, match="a window is wrong"):
        made.error(selection_of(made))


def test_a_wrong_output_is_seen() -> None:
    made = Layer(1, [70], "cpu")
    made.expected[0].mul_(1.02)
    with pytest.raises(AssertionError, match="off by"):
        made.error(selection_of(made))


def plan_of_a_gpu(bounds: torch.Tensor, tokens: int, **options: Any) -> StepPlan:
    """`build_step_plan` with a table, of offsets that only a graph's plan keeps from the host."""
    if not options.pop("any_batch", False):
        plan = build_step_plan(bounds, tokens, chunk_table=False)
    else:
        plan = build_step_plan(bounds.to("meta"), tokens, chunk_table=False, any_batch=True)
    table = build_chunk_table(bounds, plan.num_chunks)
    return dataclasses.replace(plan, cu_seqlens=bounds, chunk_table=table)


@pytest.mark.interpreter
def test_a_step_on_tables_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests decode before two prompts, in tables of six rows."""
    monkeypatch.setattr(bench_kda_layer, "TASKS", 6)
    monkeypatch.setattr(bench_kda_layer, "detect_target", lambda: KNOWN_TARGETS["A100"])
    monkeypatch.setattr(bench_kda_layer, "build_step_plan", plan_of_a_gpu)
    timed: list[Any] = []
    monkeypatch.setattr(
        bench_kda_layer, "graph_time_ms", lambda call, replays: timed.append(call) or 0.002
    )
    made = Mixed(1, 80, 2, 2, "cpu")
    assert made.row() == {"exact_us": 2.0, "tables_us": 2.0} and len(timed) == 2
    made.of_decodes.indices[0] = -1  # a decode that the tables do not have
    with pytest.raises(AssertionError):
        made.row()
