from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs import support_matrix


def test_the_page_is_what_the_files_say() -> None:
    assert support_matrix.PAGE.read_text(encoding="utf-8") == support_matrix.render(), (
        "run python docs/support_matrix.py"
    )


def test_every_family_of_the_repository_is_shown() -> None:
    page = support_matrix.render()
    for family in support_matrix.FAMILIES.values():
        assert f" {family.title} |" in page
        for operator in family.tables.operator_names:
            assert re.search(rf"\| H200[^|]*\| {family.name} \| `{operator}` \|", page)


def test_a_failed_check_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads((support_matrix.RESULTS / "check_h200.json").read_text())
    rows = [r for r in report["results"] if r["family"] == "kda" and r["status"] != "skipped"]
    rows[0]["status"] = "wrong"
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "check_h200.json").write_text(json.dumps(report))
    monkeypatch.setattr(support_matrix, "RESULTS", folder)
    monkeypatch.setattr(support_matrix, "_link", lambda file: file.name)
    page = support_matrix.render()
    assert f"checked, {len(rows) - 1} of {len(rows)} (" in page


def test_a_file_that_no_page_cites_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list(support_matrix.RESULTS.glob("*.json"))
    for file in files:
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "private_vllm.json").write_text('{"script": "benchmarks/serve_vllm.py"}')
    monkeypatch.setattr(support_matrix, "RESULTS", tmp_path)
    monkeypatch.setattr(support_matrix, "_link", lambda file: file.name)
    page = support_matrix.render()
    assert "private_vllm.json" not in page and "load_vllm033.json" in page
