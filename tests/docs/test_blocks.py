"""Every shell and Python block of README and docs runs, or says behind its fence what it needs.

```sh needs="a GPU"        is not run here
```python                  is run
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from backend_core.family import PACKAGES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What stands around an excerpt: names that the page describes, or the module it is written into.
PRELUDES = {
    "docs/families/dsv4.md": """
        import torch
        ape, norm_weight = torch.randn(4, 256), torch.ones(128)
        cos_sin_cache = torch.randn(1024, 64)
        positions, requests, slots = torch.tensor([7]), torch.tensor([0]), torch.tensor([0])
        state_slots, block_table = torch.tensor([7]), torch.arange(2, dtype=torch.int32)[None]
        kv_score, state = torch.randn(1, 512), torch.randn(2, 4, 512)
        cache = torch.zeros(1, 64 * 132, dtype=torch.uint8)
    """
}
# Excerpts that are files of the package, by how they begin.
FILES = {'"""Prefill by the recurrence itself': "kda_backend/prefill/by_token.py"}
# What is run with such a file: the calls that `kda-dsv4 check` makes of a row of that path.
RUN = """
import dataclasses, torch
from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.family import FAMILY
from kda_backend.testing.checks import check_cases
target = KNOWN_TARGETS["cpu"]
rows = load_table(FAMILY.tables, target).rows
row = dataclasses.replace(next(r for r in rows if r.operator == "prefill"), name="by_token")
for name, check in check_cases(row).items():
    error, allowed = check(target, torch.device("cpu"))
    assert error <= allowed, (name, error, allowed)
"""


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    needs: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    found = []
    for match in FENCE.finditer(text):
        language, info, body = match.groups()
        needs = re.fullmatch(r' needs="([^"]+)"', info)
        assert needs or not info.strip(), f'{name}: a fence takes needs="...", got {info!r}'
        line = text[: match.start()].count("\n") + 1
        found.append(Block(name, line, language, needs and needs.group(1), body))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [b for b in ALL if b.language in ("sh", "bash", "shell", "console") and b.needs is None]
PYTHON_PAGES = sorted({b.page for b in ALL if b.language == "python" and b.needs is None})


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which commands may write, with the program on the path."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    for name in (
        "backend_cli",
        "backend_core",
        *PACKAGES,
        "benchmarks",
        "configs",
        "docs",
        "tests",
    ):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    programs = tree / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, arguments in (("python", ""), ("kda-dsv4", " -m backend_cli.main")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        program.chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    return tree


def execute(tree: Path, command: list[str]) -> None:
    environment = {
        **os.environ,
        "PATH": f"{tree / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(tree),
        "XDG_CONFIG_HOME": str(tree / "config"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell(block: Block, tree: Path) -> None:
    execute(tree, ["bash", "-euo", "pipefail", "-c", block.text])


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python(page: str, tree: Path) -> None:
    """The blocks of a page, one after another in one process."""
    parts = ["import textwrap\nnames = {'__name__': 'page'}"]
    if page in PRELUDES:
        parts.append(f"exec(textwrap.dedent({PRELUDES[page]!r}), names)")
    for block in ALL:
        if (block.page, block.language, block.needs) != (page, "python", None):
            continue
        file = next((f for start, f in FILES.items() if block.text.startswith(start)), None)
        if file is not None:
            (tree / file).write_text(block.text)
            parts.append(RUN)
            continue
        parts.append(f"exec(compile({block.text!r}, {str(block)!r}, 'exec'), names)")
    execute(tree, [sys.executable, "-c", "\n".join(parts)])


def test_what_is_not_run_says_what_it_needs() -> None:
    skipped = [block for block in ALL if block.needs]
    assert skipped and SHELL and PYTHON_PAGES
    for block in skipped:
        assert block.language in ("sh", "python"), block


def test_a_fence_with_anything_else_is_refused(tmp_path: Path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh skip\nfalse\n```\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="a fence takes needs"):
        blocks(page)
