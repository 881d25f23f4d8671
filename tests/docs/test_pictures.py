"""The drawn pictures of the pages are what their generators draw, and the pages show them all."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs import call_picture, screenshots

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rendered() -> dict[Path, str]:
    return screenshots.render()


def test_the_screenshots_are_current(rendered: dict[Path, str]) -> None:
    for file, drawing in rendered.items():
        found = file.read_text(encoding="utf-8")
        assert found == drawing, f"{file.name}: run python docs/screenshots.py"


def test_a_screenshot_has_the_lines_of_80_columns(rendered: dict[Path, str]) -> None:
    for file, drawing in rendered.items():
        lines = [node.text or "" for node in ElementTree.fromstring(drawing) if node.text]
        assert f"$ kda-dsv4 {file.stem}" in "\n".join(lines)
        assert len(lines) > 15 and len(drawing) < 40_000
        shown = [line for line in lines if not line.startswith("\n")]
        assert max(map(len, shown)) <= screenshots.COLUMNS


def test_the_commands_find_the_machine_of_this_process_again() -> None:
    before = [vars(screenshots.serve)["detect_target"], vars(screenshots.check)["run"]]
    with screenshots.h200():
        assert screenshots.serve.detect_target().name == "NVIDIA H200"
    assert [vars(screenshots.serve)["detect_target"], vars(screenshots.check)["run"]] == before


def test_the_life_of_a_call_is_current() -> None:
    found = call_picture.FILE.read_text(encoding="utf-8")
    assert found == call_picture.render(), "run python docs/call_picture.py"


def test_the_picture_has_the_steps_of_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"(?m)^(\d)\. \*\*(.+?)\.\*\*", page.partition("\n## The map")[0])
    assert [f"{number}  {name}" for number, name in steps] == [
        x.name for x in sorted(call_picture.STEPS, key=lambda step: step.name)
    ]


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert set((ROOT / "docs" / "img").glob("*.svg")) == shown
