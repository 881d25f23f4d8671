"""The rows of KDA's path tables that the benchmarks choose by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from backend_core.tables.load import load_table
from backend_core.target import detect_target
from kda_backend.launch_params import TABLES
from kda_backend.selection import KdaSelection, KdaShape, select


def row_of(path: str, operator: str = "prefill", **params: Any) -> Any:
    """The last row of a path in this GPU's table, with other parameters where given."""
    rows = load_table(TABLES, detect_target()).rows
    row = [r for r in rows if (r.operator, r.name) == (operator, path)][-1]
    return dataclasses.replace(row, params=dataclasses.replace(row.params, **params))


def only(shape: KdaShape, path: str, operator: str = "prefill", **params: Any) -> KdaSelection:
    """The table's selection with one row of a path for every call, however long its sequences."""
    row = row_of(path, operator, **params)
    lengths = {"min_longest": None, "max_longest": None, "max_width": None}
    return select(detect_target(), shape).with_path(dataclasses.replace(row, **lengths))
