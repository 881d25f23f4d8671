"""Result files of the benchmarks: rows of GPU times, ours beside the peers'."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from backend_cli.errors import BadInputError
from backend_cli.files import read_json

_SUFFIX = "_gpu_ms"
_NOT_A_PEER = {"ours", "best_peer", "bare", "two_stage"}
_NAMES = {"fla": "FLA", "flashkda": "FlashKDA", "vllm": "vLLM"}

Row = dict[str, Any]


def read_result(path: Path) -> dict[str, Any]:
    """A result with ``rows``, each with its shape and ``ours_gpu_ms``.

    Raises:
        BadInputError: the file cannot be read, or is no such result.
    """
    result = read_json(path, "result")
    rows = result.get("rows") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not rows:
        raise BadInputError(f"result {path} must have rows of times, as kda-dsv4 bench writes them")
    for number, row in enumerate(rows, start=1):
        time = row.get("ours_gpu_ms") if isinstance(row, dict) else None
        if not isinstance(time, float) or not time > 0:
            raise BadInputError(f"result {path}, row {number}: ours_gpu_ms must be a time in ms")
    return dict(result)


def times(row: Row) -> dict[str, float]:
    """GPU time in ms by contender, ours first; those that were not measured are left out."""
    found = {
        key.removesuffix(_SUFFIX): value
        for key, value in row.items()
        if key.endswith(_SUFFIX) and isinstance(value, float)
    }
    found.pop("best_peer", None)
    return {"ours": found.pop("ours"), **found}


def name(contender: str) -> str:
    """The name that is shown for a contender."""
    return _NAMES.get(contender, contender)


def speedups(rows: list[Row]) -> dict[str, tuple[float, float, int]]:
    """By peer: geometric mean and least of its time over ours, and over how many rows."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        found = times(row)
        for peer, ms in found.items():
            if peer not in _NOT_A_PEER:
                ratios.setdefault(peer, []).append(ms / found["ours"])
    return {
        peer: (math.exp(sum(map(math.log, all_)) / len(all_)), min(all_), len(all_))
        for peer, all_ in ratios.items()
    }
