"""Rows of path tables as the commands print them: one line for each, with sizes, path and date."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from backend_core.tables.load import Verdict
from backend_core.tables.schema import LIMITS, UPSTREAM

Facts = Mapping[str, Any]
"""A row in `info`'s document."""


def facts(verdict: Verdict) -> dict[str, Any]:
    """The row and what became of it, in values of JSON."""
    return {
        "path": verdict.row.name,
        "low": verdict.low,
        "high": verdict.high,
        **{limit: getattr(verdict.row, limit) for limit in LIMITS},
        "refusal": verdict.refusal,
        "params": verdict.row.params_dict(),
        "features": sorted(verdict.row.features),
        "measured": verdict.row.measured,
        "provenance": verdict.row.provenance,
    }


def short_rows(rows: Iterable[Facts]) -> list[tuple[str, str, str]]:
    """Sizes, path, and the oldest date or the refusal. Rows of adjacent sizes that differ in launch
    parameters are one."""
    lines = []
    for (path, _), group in itertools.groupby(rows, _kind):
        members = list(group)
        whole = {**members[0], "high": members[-1]["high"]}
        why = f"refused: {whole['refusal']}" if whole["refusal"] else oldest(map(when, members))
        if path == UPSTREAM:
            path = f"upstream's {whole['params']['kernel']}"
        lines.append((sizes(whole), path, why))
    return lines


def sizes(row: Facts) -> str:
    """The calls that a row serves, in words."""
    if row["low"] is None:
        return "none"
    words = [] if row["low"] == 1 and row["high"] is None else [_grids(row)]
    limits = {"max_longest": "length <= ", "min_longest": "length >= ", "max_width": "heads <= "}
    words += [f"{limits[name]}{row[name]}" for name in LIMITS if row[name] is not None]
    return ", ".join(words) or "any size"


def when(row: Facts) -> str:
    """The date of the measurement that chose a row, ISO."""
    return str(row["provenance"]).split(", ")[1] if row["measured"] else "not measured"


def oldest(dates: Iterable[str]) -> str:
    """The oldest of some `when`, and whether others were not measured."""
    found = sorted(set(dates))
    return f"{found[0]} (part)" if len(found) > 1 and "not measured" in found else found[0]


def columns(table: Iterable[tuple[str, ...]], indent: int) -> list[str]:
    """Lines whose cells begin below one another."""
    rows = list(table)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [" " * indent + "  ".join(map(str.ljust, cells, widths)).rstrip() for cells in rows]


def _kind(row: Facts) -> tuple[str, tuple[Any, ...]]:
    return row["path"], (row["refusal"], *(row[limit] for limit in LIMITS))


def _grids(row: Facts) -> str:
    return f"{row['low']} to {row['high']}" if row["high"] else f"{row['low']} and more"
