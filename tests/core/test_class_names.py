"""A class's name has one meaning in all packages."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from backend_core.family import PACKAGES

ROOT = Path(__file__).parents[2]


def test_no_two_classes_share_a_name() -> None:
    found: Counter[str] = Counter()
    for package in ("backend_core", "backend_cli", *PACKAGES):
        for file in (ROOT / package).rglob("*.py"):
            body = ast.parse(file.read_text("utf-8")).body
            found.update(node.name for node in body if isinstance(node, ast.ClassDef))
    assert len(found) > 100
    assert [name for name, times in found.items() if times > 1] == []
