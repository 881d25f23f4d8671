"""What the page and README show of results that exist only where a GPU has written them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from docs import performance
from docs.performance_parts import engines, page


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's results without those of the newest releases."""
    to = tmp_path / "results"
    newest = (*engines.DEFAULT_MODES, "recall_vllm033.json", "load_vllm033.json")
    shutil.copytree(page.RESULTS, to, ignore=shutil.ignore_patterns(*newest))
    monkeypatch.setattr(page, "RESULTS", to)
    return to


def pair() -> dict[str, Any]:
    profile = {"what": "1 × 512", "gpu_ms": 15.0}
    side = {
        "rows": [{"what": "1 × 512", "kind": "call", "ms": 1.0, "steps": [500, 12]}],
        "profiles": [profile],
        "engine": {"cudagraph_mode": "PIECEWISE"},
        "router": {"distinct": {"the first 128 tokens": [250, 252]}},
    }
    return {
        "gpu": "a GPU",
        "engine": "vllm 0.33.0",
        "torch": "2",
        "triton": "3",
        "date": "today",
        "rows": [
            {"what": "1 × 512", "kind": "call", "upstream_ms": 40.0, "flag_ms": 20.0},
            {"what": "mixed load", "kind": "mixed", "upstream_ms": 9000.0, "flag_ms": 3000.0},
            {"what": "1 × 32,768", "kind": "call", "upstream_ms": 9.0},
        ],
        "sides": {"upstream": side, "flag": side},
    }


def test_a_pair_is_the_headline_and_a_section(results: Path) -> None:
    (results / "vllm033_kimi48b.json").write_text(json.dumps(pair()))
    assert "in vLLM 0.33.0, default mode" in performance.headline()
    row = next(line for line in performance.headline().splitlines() if "default mode" in line)
    assert row.endswith("| 2.00× | 2.00× to 2.00× |")  # the calls of both sides alone
    text = performance.render()
    assert "| mixed load | 9,000.0 | 3,000.0 | 3.00 |" in text
    assert "1 × 32,768 | 9" not in text
    assert "| 1 × 512 | 500 + 12 | 15.0 of 40.0 | 15.0 of 20.0 |" in text
    assert "251 by the first 128 tokens" in text and "in vLLM 0.26.0, eager" not in text
    assert "vLLM 0.26.0, 27 layers" in text  # the older release stays on the page


def test_a_load_and_its_servers_are_shown(results: Path) -> None:
    load = {
        "environment": {"gpu": "a GPU", "vllm": "0.33.0", "torch": "2", "triton": "3"},
        "date": "today",
        "minutes": 8.0,
        "requests": {"recall": {"requests": 12345, "wrong": 0}},
        "verdict": {
            "preemption and prefix hits": {"preemptions": 77.0},
            "memory, gpu_mib": {"growth": 0.0},
            "memory, host_mib": {"growth": 0.0123},
        },
    }
    (results / "load_vllm033.json").write_text(json.dumps(load))
    servers = {
        "upstream": {"rounds": [{"right": 320}]},
        "flag, ngram drafts": {"rounds": [{"right": 320}, {"right": 319}]},
    }
    report = {"environment": {"vllm": "0.33.0"}, "items": 320, "date": "today", "servers": servers}
    (results / "recall_vllm033.json").write_text(json.dumps(report))
    text = performance.render()
    assert "| recall | 12,345 | 0 |" in text and "0.00%, 1.23%" in text and "77 pre" in text
    assert "| with the flag, ngram drafts | 319 of 320 | today |" in text
