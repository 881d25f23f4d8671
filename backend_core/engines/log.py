"""Lines for an engine's log: which layers are served, where and by which paths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backend_core.tables.load import unmeasured
from backend_core.target import Target

PREFIX = "kda-dsv4-backend"


def chosen(
    layers: str,
    target: Target,
    facts: str,
    rows: Iterable[object] = (),
    selections: Iterable[Any] = (),
) -> list[str]:
    """Lines that say what was chosen for a model's layers.

    Args:
        layers: in words: ``"KDA layers"``; facts: how they are served.
        rows: of the path table, a line each.
        selections: those that serve; where none of their rows was measured on this GPU, a line
            more says so.
    """
    selections = tuple(selections)
    note = unmeasured(target, selections) if selections else None
    line = f"{layers} on {target.name} ({target.arch}): {facts}"
    return [line, *map(str, rows), *([] if note is None else [note])]
