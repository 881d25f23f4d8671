"""Warming up runs every path a selection can choose, so that serving compiles nothing."""

from __future__ import annotations

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from kda_backend.selection import KdaSelection, KdaShape, select, warm_up


@pytest.mark.parametrize("target", ["H200", "B200", "MI355X", "cpu"])
def test_every_path_of_every_operator_is_called(target: str) -> None:
    selection = select(KNOWN_TARGETS[target], KdaShape(4, 4, 128, 128))
    called: list[object] = []

    def prefill(single: KdaSelection) -> None:
        called.append(single.prefill.rows[0])

    def decode(single: KdaSelection) -> None:
        steps = (single.decode_step, single.verify, single.verify_records)
        called.extend(x.rows[0] for x in (single.recurrent, *steps))

    warm_up(selection, prefill, decode)
    for operator in selection.operators:
        assert all(any(path is seen for seen in called) for path in operator.rows)


def test_a_warm_up_records_no_gradients() -> None:
    """An engine loads its model where gradients are on, and parameters ask for them."""
    selection = select(KNOWN_TARGETS["cpu"], KdaShape(4, 4, 128, 128))
    recorded: list[bool] = []

    def call(single: KdaSelection) -> None:
        recorded.append(torch.is_grad_enabled())

    with torch.enable_grad():
        warm_up(selection, call, call)
    assert recorded and not any(recorded)
