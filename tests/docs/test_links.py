"""Links between the pages lead somewhere, and benchmarks/README.md names every script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "tools/**/*.md")
    for page in ROOT.glob(pattern)
)
SCRIPT = re.compile(r"`(\w+\.py)`")


def broken(page: Path) -> list[str]:
    """The links of a page to a file or a heading that does not exist."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        of_a_page = target.suffix == ".md" and target.exists()
        if not target.exists() or (heading and of_a_page and heading not in headings(target)):
            found.append(link)
    return found


def headings(page: Path) -> set[str]:
    """The headings of a page as GitHub writes them into a link."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    named = (re.sub(r"[^\w\- ]", "", x.lower()) for x in re.findall(r"(?m)^#+ (.+?)\s*$", text))
    return {name.replace(" ", "-") for name in named}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken(ROOT / page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = ("#one-thing", "#two", "none.md", "page.md#one-thing")
    page.write_text("# One `thing`\n" + " ".join(f"[x]({link})" for link in links))
    assert broken(page) == ["#two", "none.md"]


def test_every_script_of_the_benchmarks_is_listed() -> None:
    scripts = {
        path.name
        for path in (ROOT / "benchmarks").glob("*.py")
        if "__main__" in path.read_text() and path.name != "__init__.py"
    }
    listed = set(SCRIPT.findall((ROOT / "benchmarks" / "README.md").read_text()))
    assert scripts and listed == scripts
