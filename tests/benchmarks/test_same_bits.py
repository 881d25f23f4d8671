"""The comparison of answers alone and among others, against servers that read the answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import same_bits_sglang, same_bits_vllm
from benchmarks.engines import same_bits
from tests.benchmarks.fake_vllm import free_port


def run(script: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch, *only: str) -> int:
    monkeypatch.setattr(same_bits, "versions", lambda engine: {engine: "0"})
    monkeypatch.setattr(same_bits, "NEIGHBOURS", 4)
    compare = same_bits.compare

    def served_by_a_fake(*args: Any) -> int:
        return compare(*args[:-1], "served by a fake")

    monkeypatch.setattr(script, "compare", served_by_a_fake)
    base = [script.__name__, str(out), "--requests", "12", "--timeout", "30", "--only", *only]
    monkeypatch.setattr(sys, "argv", [*base, "--port", str(free_port())])
    return int(script.main())


@pytest.mark.parametrize("script", [same_bits_vllm, same_bits_sglang])
def test_every_round_is_compared_with_the_answers_alone(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: ModuleType
) -> None:
    out = tmp_path / "out.json"
    assert run(script, out, monkeypatch, "first", "preempted") == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["requests"], row["equal"]) for row in rows] == [(12, 12)] * 6
    assert rows[0]["what"] == "alone, once more" and rows[-1]["what"].startswith("after ")
    assert "preemptions" in rows[-1]


def test_answers_that_change_are_counted(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM_WRONG", "5")
    out = tmp_path / "out.json"
    assert run(same_bits_vllm, out, monkeypatch, "first") == 1
    assert any(row["equal"] < 12 for row in json.loads(out.read_text())["rows"])
