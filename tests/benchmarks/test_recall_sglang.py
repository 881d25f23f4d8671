"""The recall benchmark of sglang against a server that reads the answer in the prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import recall_sglang
from benchmarks.engines import sglang_server
from tests.benchmarks.fake_vllm import free_port


def run(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *options: str,
    served: str = "served by a fake",
) -> int:
    monkeypatch.setattr(recall_sglang, "versions", lambda engine: {"sglang": "0.5.17"})
    monkeypatch.setattr(recall_sglang, "SERVED", served)
    monkeypatch.setattr(sglang_server, "IDLE_S", 0.0)
    base = ["recall_sglang", str(out), "--items", "12", "--timeout", "30"]
    monkeypatch.setattr(sys, "argv", [*base, "--port", str(free_port()), *options])
    return recall_sglang.main()


def test_every_round_is_asked_and_a_failing_server_leaves_the_others(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    only = ("--only", "upstream", "drafts", "sleep", "--beside", "2")
    assert run(out, monkeypatch, *only) == 1
    result = json.loads(out.read_text())
    assert list(result["servers"]) == ["upstream", "flag, after sleep and reload"]
    assert list(result["failed"]) == ["flag, ngram drafts"]
    upstream, slept = result["servers"].values()
    assert [r["concurrency"] for r in upstream["rounds"]] == [1, 16, 64, 64]
    assert all(r["right"] == 12 for r in [*upstream["rounds"], *slept["rounds"]])
    found = [r.get("after") for r in slept["rounds"]]
    assert found == [None, "sleep and wake", "reload of weights"]
    assert "kda" in slept["command"] and "kda" not in upstream["command"]
    posts = [
        line.split()[1]
        for line in (tmp_path / "out_sleep.log").read_text().splitlines()
        if line.startswith("POST")
    ]
    assert posts == [path for _, calls in recall_sglang.VARIANTS["sleep"].then for path, _ in calls]


def test_a_server_without_our_layers_is_a_failure(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    assert run(out, monkeypatch, "--only", "flag", served="KDA layers on") == 1
    assert "expected a line with 'KDA layers on'" in json.loads(out.read_text())["failed"]["flag"]


def test_drafts_that_are_never_accepted_are_a_failure(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    assert run(out, monkeypatch, "--only", "upstream_drafts") == 1
    (why,) = json.loads(out.read_text())["failed"].values()
    assert "expected lines with an accept len above 1" in why


def test_without_time_servers_are_left_out(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    assert run(out, monkeypatch, "--only", "upstream", "flag", "--budget", "60") == 1
    result = json.loads(out.read_text())
    assert result["left_out"] == ["upstream", "flag"] and result["servers"] == {}
