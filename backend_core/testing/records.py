"""Records of runs: JSON in which each row has a line of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

DIGITS = 6
"""Significant ones of a number; no time is measured more exactly."""


def record_text(record: Any) -> str:
    """JSON of ``record``. A list or a dictionary that holds neither has one line, and so has a
    dictionary in a list if what it holds has one."""
    return _lines(_rounded(record), "\n") + "\n"


def write_record(path: Path, record: Any) -> None:
    """Write `record_text` to a file, whose folder is made where there is none. A run that ends in
    the middle of it leaves the record before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():  # a device or a pipe, which stays one
        path.write_text(record_text(record), encoding="utf-8")
        return
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(record_text(record), encoding="utf-8")
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(key): _rounded(x) for key, x in value.items()}
    return [_rounded(x) for x in value] if isinstance(value, list | tuple) else value


def _lines(value: Any, margin: str) -> str:
    if _depth(value) <= 1:
        return json.dumps(value)
    deeper = margin + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_lines(x, deeper)}" for key, x in value.items()]
        return "{" + deeper + ("," + deeper).join(parts) + margin + "}"
    rows = [
        json.dumps(x) if isinstance(x, dict) and _depth(x) <= 2 else _lines(x, deeper)
        for x in value
    ]
    return "[" + deeper + ("," + deeper).join(rows) + margin + "]"


def _depth(value: Any) -> int:
    """How far lists and dictionaries that are not empty lie in one another."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + _depth(x) for x in inner), default=0)
