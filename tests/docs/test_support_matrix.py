from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import support_matrix


def test_the_page_is_what_the_files_say() -> None:
    assert support_matrix.PAGE.read_text(encoding="utf-8") == support_matrix.render(), (
        "run python docs/support_matrix.py"
    )


def test_a_failed_check_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads((support_matrix.RESULTS / "check_h200.json").read_text())
    rows = [r for r in report["results"] if (r["family"], r["phase"]) == ("kda", "decode")]
    rows[0]["status"] = "wrong"
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "check_h200.json").write_text(json.dumps(report))
    monkeypatch.setattr(support_matrix, "RESULTS", folder)
    monkeypatch.setattr(support_matrix, "_link", lambda file: file.name)
    page = support_matrix.render()
    assert f"checked, {len(rows) - 1} of {len(rows)} (" in page
