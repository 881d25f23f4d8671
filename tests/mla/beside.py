"""Paths beside an engine's kernel on processors for which no result compares the two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backend_core.operator import Selection, select
from backend_core.tables.load import Verdict
from backend_core.tables.schema import UPSTREAM, Row, TableSchema, UpstreamParams
from backend_core.target import KNOWN_TARGETS, Target
from mla_backend import beside


def run_up_to(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """Run calls of up to so many units here, or all, and leave larger ones to the engine."""

    def chosen(schema: TableSchema, name: str, target: Target, spec: Any, kernel: str) -> Any:
        ours = select(schema, name, target, spec)
        theirs = Row(
            UPSTREAM, name, None, frozenset(), UpstreamParams(kernel), True, "H200, a test"
        )
        rows = ours.rows if most is None else (replace(ours.rows[0], max_grid=most), theirs)
        explained = (*ours.explained, Verdict(theirs, (most or 0) + 1, None, None))
        return replace(ours, rows=rows, explained=explained, upstream=kernel)

    monkeypatch.setattr(beside, "select", chosen)


def run_as_on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run, by each target's own path, the sizes of call that run on an H200."""

    def chosen(schema: TableSchema, name: str, target: Target, spec: Any, kernel: str) -> Any:
        hopper: Selection[Any, Any] = select(schema, name, KNOWN_TARGETS["H200"], spec, kernel)
        (ours,) = select(schema, name, target, spec).rows
        rows = tuple(
            row if row.name == UPSTREAM else replace(ours, max_grid=row.max_grid)
            for row in hopper.rows
        )
        return replace(hopper, target=target, rows=rows)

    monkeypatch.setattr(beside, "select", chosen)
