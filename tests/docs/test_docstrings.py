"""A docstring's first line names the thing or begins with a verb."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backend_core.family import PACKAGES

ROOT = Path(__file__).parents[2]
FOLDERS = ("backend_cli", "backend_core", "docs", *PACKAGES)
POINTING = re.compile(r'(?m)^\s*[rf]?"""(?:What|Those|Of|As|All but)\b.*')


def pointing(source: str) -> list[str]:
    """The first lines that only point at what they stand beside."""
    return [found.strip() for found in POINTING.findall(source)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_name_the_thing_or_begin_with_a_verb(folder: str) -> None:
    found = {
        str(file.relative_to(ROOT)): lines
        for file in (ROOT / folder).rglob("*.py")
        if (lines := pointing(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_first_line_that_points_is_found() -> None:
    source = 'def f():\n    """Those of a step."""\n\n\nclass Ask:\n    """Asks a server."""\n'
    assert pointing(source) == ['"""Those of a step."""']
