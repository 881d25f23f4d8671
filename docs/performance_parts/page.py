"""The tools of every page in docs/performance/."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def section(title: str, report: dict[str, Any], name: str) -> list[str]:
    source = f"[{name}](../../benchmarks/results/{name})"
    versions = f"torch {report['torch']}, Triton {report['triton']}"
    return ["", f"## {title}", "", f"{report['gpu']}, {versions}, {report['date']}: {source}."]


def table(titles: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [titles, ["---:" if title != titles[0] else "---" for title in titles], *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def by_size(titles: list[str], cells: dict[Any, dict[str, str]]) -> list[str]:
    """A table with a row for each size, a tuple as long as ``titles``, and a column for each key
    of its cells."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    rows = ([*size, *(row.get(column, "") for column in columns)] for size, row in cells.items())
    return table([*titles, *columns], rows)


def shape(lengths: list[int]) -> str:
    if len(set(lengths)) > 1:
        return f"{len(lengths)} ragged, {sum(lengths):,}"
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{len(lengths)} × {lengths[0]:,}"


def best(row: dict[str, Any], peers: tuple[str, ...]) -> float:
    return min(float(row[f"{peer}_gpu_ms"]) for peer in peers)


def us(ms: float) -> str:
    return f"{ms * 1e3:.1f}" if ms < 0.1 else f"{ms * 1e3:,.0f}"


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return report
