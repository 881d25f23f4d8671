"""Every result file can be made again, and somebody reads it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.core.evidence import RESULTS, ROOT, assert_made_by_a_script

FILES = sorted((ROOT / RESULTS).glob("*.json"))
NAMED = re.compile(r"benchmarks/results/([\w.]+\.json)")


def readers() -> dict[str, list[str]]:
    """For each result file, what names it: pages, generators, tables, tests, README."""
    places = ["*.md", "*.py", "*.toml", "docs", "configs", "tests", "backend_cli"]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *places]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8", errors="replace")
        for name in listed.stdout.split()
        # a script that writes a file is no reader of it, and these lists name what others read
        if not name.startswith("benchmarks/") and name != "docs/support-matrix.md"
        if not name.endswith((".svg", ".jsonl")) and (ROOT / name).is_file()
    }
    return {
        file.name: [name for name, text in texts.items() if file.name in text] for file in FILES
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_names_the_script_that_writes_it(file: Path) -> None:
    assert_made_by_a_script(ROOT, str(file.relative_to(ROOT)), "the folder of results")


def test_every_result_is_read() -> None:
    assert [name for name, by in readers().items() if not by] == []


def test_every_result_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = [(page.name, n) for page in pages for n in NAMED.findall(page.read_text("utf-8"))]
    assert named
    assert [item for item in named if not (ROOT / RESULTS / item[1]).is_file()] == []
