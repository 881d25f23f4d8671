"""A call with many positions says of none what it is."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 12


def crowded(source: str) -> list[int]:
    """The lines of the calls with more than `MOST` positional arguments; a starred one counts as
    one."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if len(call.args) > MOST]


def test_arguments_behind_the_twelfth_have_names() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split()]
    found = {str(x.relative_to(ROOT)): crowded(x.read_text("utf-8")) for x in files if x.is_file()}
    assert found
    assert {name: lines for name, lines in found.items() if lines} == {}
