"""Result files: who may name one, and what makes it one that can be made again."""

from __future__ import annotations

import json
from pathlib import Path

from backend_cli.main import app

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")


def assert_made_by_a_script(root: Path, source: str, where: str) -> None:
    """``source`` is a result file that names the committed script, or command, that writes it."""
    path = Path(source)
    assert path.parent == RESULTS, f"{where}: {source} is no result file"
    assert (root / path).is_file(), f"{where}: {source} does not exist"
    report = json.loads((root / path).read_text(encoding="utf-8"))
    script = report.get("script") if isinstance(report, dict) else None
    assert isinstance(script, str), f"{where}: {source} does not name the script that writes it"
    program, *words = script.split()
    if program == "kda-dsv4":
        assert " ".join(words) in commands(), f"{where}: {source} was written by {script!r}"
        return
    file = root / program
    assert file.is_file(), f"{where}: {source} was written by {program}, which is not here"
    text = file.read_text(encoding="utf-8")
    assert "write_text" in text or "json.dump(" in text, f"{where}: {program} writes no file"


def commands() -> set[str]:
    """Every command of the program, with its group's name before it."""
    found = {(c.name or getattr(c.callback, "__name__", "")) for c in app.registered_commands}
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            found.add(f"{group.name} {command.name or getattr(command.callback, '__name__', '')}")
    return found
