from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from docs import performance
from docs.performance_parts import cut_models

GENERATORS = [
    *Path(performance.__file__).parent.glob("*.py"),
    *Path(performance.__file__).parent.glob("performance_parts/*.py"),
]

# a number with the unit of a measurement: it has to come from a file
FIGURE = re.compile(r"\d\s*(?:µs|ms|ns|%|×|GB|MB|KiB|GiB|times)(?!\w)")

FORMAT = re.compile(r"\.\d+%")  # of a share, in an f-string


def test_the_pages_are_what_the_files_say() -> None:
    rendered = performance.render()
    for file, text in rendered.items():
        assert file.read_text(encoding="utf-8") == text, "run python docs/performance.py"
    written = {
        *(performance.DOCS / "performance").glob("*.md"),
        performance.DOCS / "performance.md",
    }
    assert set(rendered) == written


def test_readmes_table_is_what_the_files_say() -> None:
    assert performance.README.read_text(encoding="utf-8") == performance.headline(), (
        "run python docs/performance.py"
    )


def typed_figures(source: str) -> list[str]:
    """The strings of a generator that hold a figure."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in strings if FIGURE.search(text) and not FORMAT.fullmatch(text)]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda path: path.stem)
def test_no_figure_is_typed_into_a_generator(generator: Path) -> None:
    assert typed_figures(generator.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["58 % of it", "1.02 µs", "786 MB", "2.1× as fast", "4 times"])
def test_a_typed_figure_is_found(text: str) -> None:
    assert typed_figures(f"x = 'K = 128, {text}'") and not typed_figures("x = 'K = V = 128, µs'")


def test_drafts_of_a_side_are_shown_with_what_they_take() -> None:
    drafts = {"draft": 4000, "accepted": 3000, "blocks_kib": 4096.0, "records_kib": 0.0}
    (line,) = cut_models._drafts({"sides": {"flag": {"drafts": drafts}, "upstream": {}}})
    assert line == (
        "Drafts, flag: 3,000 of 4,000 accepted; a request takes 4,096 KiB of the cache for states."
    )
