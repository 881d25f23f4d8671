"""Every Triton row of every table, interpreted on what ``kda-dsv4 check`` asks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS, detect_target
from mla_backend.family import FAMILY
from tests.interpreter import seen_parameters

CONFIGS = Path(__file__).parents[2] / "configs"


def rows() -> list[Any]:
    found = {}
    for target in [detect_target()] if torch.cuda.is_available() else KNOWN_TARGETS.values():
        for row in load_table(FAMILY.tables, target, directory=CONFIGS).rows:
            if row.name in FAMILY.interpretable:
                key = (row.operator, seen_parameters(row.params))
                found.setdefault(key, pytest.param(row, id=f"{target.arch}-{row.operator}"))
    return list(found.values())


@pytest.mark.parametrize("row", rows())
def test_every_row_is_right(row: Row, device: torch.device) -> None:
    if device.type == "cuda":
        target = detect_target(device)
    else:
        target = KNOWN_TARGETS["H200"]
    for name, run in FAMILY.check_cases(row).items():
        error, allowed = run(target, device)
        assert error <= allowed, f"{name}: {error:.1e}, allowed {allowed:.1e}"
