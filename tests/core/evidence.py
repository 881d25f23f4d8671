"""Result files: who may name one, and what makes it one that can be made again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path("benchmarks/results")
GONE = {"benchmarks/bench_kda_prefill_forms.py": "447b9bfe"}
"""Scripts whose results stay, and the last commit that has each."""


def assert_made_by_a_script(root: Path, source: str, where: str) -> None:
    """``source`` is a result file that names the committed file that writes it."""
    path = Path(source)
    assert path.parent == RESULTS, f"{where}: {source} is no result file"
    assert (root / path).is_file(), f"{where}: {source} does not exist"
    report = json.loads((root / path).read_text(encoding="utf-8"))
    script = report.get("script") if isinstance(report, dict) else None
    assert isinstance(script, str), f"{where}: {source} does not name the script that writes it"
    if script in GONE:
        return
    file = root / script
    assert file.is_file(), f"{where}: {source} was written by {script}, which is not here"
    text = "\n".join(one.read_text(encoding="utf-8") for one in [file, *shared_modules(root, file)])
    writes = ("write_text", "write_json(", "write_record(", "json.dump(")
    assert any(word in text for word in writes), f"{where}: {script} writes no file"


def shared_modules(root: Path, file: Path) -> Iterator[Path]:
    """The benchmarks' modules that a script imports, which may write for it."""
    imported = re.compile(r"^\s*from (benchmarks[\w.]*) import (\([^)]*|.*)", re.MULTILINE)
    for package, names in imported.findall(file.read_text(encoding="utf-8")):
        place = root / package.replace(".", "/")
        found = [place.with_suffix(".py"), *(place / f"{n}.py" for n in re.findall(r"\w+", names))]
        yield from (module for module in found if module.is_file())
