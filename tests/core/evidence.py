"""Result files: who may name one, and what makes it one that can be made again."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")


def assert_made_by_a_script(root: Path, source: str, where: str) -> None:
    """``source`` is a result file that names the committed file that writes it."""
    path = Path(source)
    assert path.parent == RESULTS, f"{where}: {source} is no result file"
    assert (root / path).is_file(), f"{where}: {source} does not exist"
    report = json.loads((root / path).read_text(encoding="utf-8"))
    script = report.get("script") if isinstance(report, dict) else None
    assert isinstance(script, str), f"{where}: {source} does not name the script that writes it"
    file = root / script
    assert file.is_file(), f"{where}: {source} was written by {script}, which is not here"
    text = file.read_text(encoding="utf-8")
    writes = ("write_text", "write_json(", "json.dump(")
    assert any(word in text for word in writes), f"{where}: {script} writes no file"
