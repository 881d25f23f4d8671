"""Records of runs: JSON in which each entry of a list of rows has a line of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def record_text(record: Any) -> str:
    """JSON of ``record``; a list or a dictionary that holds neither has one line."""
    return _lines(record, "\n") + "\n"


def write_record(path: Path, record: Any) -> None:
    """Write `record_text` to a file, whose folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record_text(record), encoding="utf-8")


def _lines(value: Any, margin: str) -> str:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(x, dict | list) and x for x in inner):
        return json.dumps(value)
    deeper = margin + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(key))}: {_lines(x, deeper)}" for key, x in value.items()]
        return "{" + deeper + ("," + deeper).join(parts) + margin + "}"
    return "[" + deeper + ("," + deeper).join(_lines(x, deeper) for x in value) + margin + "]"
