"""Warming up runs every path a plan can choose, so that serving compiles nothing."""

from __future__ import annotations

import pytest

from backend_core.target import KNOWN_TARGETS
from kda_backend.selection import KdaPlan, KdaShape, select, warm_up


@pytest.mark.parametrize("target", ["H200", "B200", "MI355X", "cpu"])
def test_every_path_of_both_phases_is_called(target: str) -> None:
    plan = select(KNOWN_TARGETS[target], KdaShape(4, 4, 128, 128))
    called: dict[str, list[object]] = {"prefill": [], "decode": []}

    def prefill(single: KdaPlan) -> None:
        called["prefill"].append(single.prefill.lookup(1))

    def decode(single: KdaPlan) -> None:
        called["decode"].append(single.decode.lookup(1))

    warm_up(plan, prefill, decode)
    for phase in ("prefill", "decode"):
        paths = getattr(plan, phase).paths
        assert all(any(path is seen for seen in called[phase]) for path in paths)
