"""The rows of KDA's path tables that the benchmarks choose by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from backend_core.tables.load import load_table
from backend_core.target import detect_target
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaSelection, KdaShape, select


def only(shape: KdaShape, path: str, operator: str = "prefill", **params: Any) -> KdaSelection:
    """The table's selection with the last row of a path for every call, however long its sequences,
    with other parameters where given."""
    rows = load_table(TABLES, detect_target()).rows
    row = [r for r in rows if (r.operator, r.name) == (operator, path)][-1]
    row = dataclasses.replace(row, params=dataclasses.replace(row.params, **params))
    row = dataclasses.replace(row, min_longest=None, max_longest=None, max_width=None)
    return select(detect_target(), shape).with_path(row)
