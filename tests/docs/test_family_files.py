"""The files that docs/adding-a-family.md promises of each family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backend_core.family import PACKAGES

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"(?m)^\| (`.+?) \| (.+?) \| (.*?) ?\|$")
PAGE = (ROOT / "docs" / "adding-a-family.md").read_text(encoding="utf-8")
ROWS = [(re.findall("`(.+?)`", names), absent) for names, _, absent in TABLE.findall(PAGE)]
FAMILIES = [package.removesuffix("_backend") for package in PACKAGES]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_there_unless_the_guide_says_so(family: str) -> None:
    for names, absent in ROWS:
        for name in names:
            there = (ROOT / f"{family}_backend" / name).exists()
            assert there != (f"`{family}`" in absent), f"{family}: {name}"


def test_what_stands_in_for_an_absent_file_is_there() -> None:
    assert len(ROWS) > 10
    for _, absent in ROWS:
        for entry in filter(None, absent.split("; ")):
            family, *others = re.findall("`(.+?)`", entry)
            assert family in FAMILIES
            for other in (name for name in others if name.endswith((".py", "/"))):
                assert (ROOT / f"{family}_backend" / other).exists(), entry
