"""What of benchmarks/bench_kda_layer.py runs on a CPU: the layer, its float64 check, its parts."""

from __future__ import annotations

import pytest

from backend_core.target import KNOWN_TARGETS
from benchmarks.bench_kda_layer import Layer
from kda_backend.selection import KdaSelection, select


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
