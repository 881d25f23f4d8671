"""What the comparison of DeepSeek-V4 in sglang says of its processes' results."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dsv4_engine_sglang
from benchmarks.dsv4_engine_sglang import judge
from benchmarks.engines import dsv4_verdict
from benchmarks.engines.dsv4_model import MTP_SIDES, SIDES

PROMPTS = 64


def side(name: str) -> dict[str, Any]:
    tokens = {
        "lengths": [5] * PROMPTS,
        "cached": [256] * PROMPTS,
        "accepted": [1.5 if name in MTP_SIDES else None] * PROMPTS,
        "tokens": [[i, i + 1] for i in range(PROMPTS)],
        "best": [[[-1.0, -2.0]] * 2] * PROMPTS,
    }
    is_ours = name.startswith("flag")
    calls = {"decode": {"ours": 5, "flashmla": 2}, "prefill": {"flashmla": 7}}
    return {
        "side": name,
        "model": "v4",
        "heads": 64,
        "gpu": "NVIDIA H200",
        "release": "0.5.23",
        "compressors": {
            "here": 5 if is_ours else 0,
            "left": 0,
            "calls": {"decode": {"ours": 9}, "prefill": {"sglang's": 9}},
        },
        "attention": {
            "calls": calls if is_ours else {},
            "captured": {} if name.endswith("eager") else {"decode ours": [1, 2]},
            "rows": {"decode": [77, 77] if name == "flag-eager" else [0, 0], "prefill": [0, 0]},
            "worst": {"decode": 0.004, "prefill": 0.0},
        },
        "records": {
            "compared": {"decode": 9},
            "bytes_written": 1000,
            "bytes_unlike_upstream": 1,
            "planted_errors_seen": {"decode": True},
        },
        "tokens": tokens,
        "tokens_from_cache": copy.deepcopy(tokens),
        "other_weights": [[0, 0]] * PROMPTS,
    }


def run(*names: str) -> dict[str, Any]:
    return {name: side(name) for name in names or SIDES}


@pytest.mark.parametrize("names", [SIDES, SIDES + MTP_SIDES])
def test_equal_runs_have_rows_and_no_problem(names: tuple[str, ...]) -> None:
    verdict = judge(run(*names))
    assert verdict.problems == []
    assert all((row["engine"], row["release"]) == ("sglang", "0.5.23") for row in verdict.rows)
    counts = [(row["equal"], row["of"]) for row in verdict.rows]
    assert counts.count((64, 64)) == 2 * len(names) + 2
    assert counts.count((77, 77)) == counts.count((999, 1000)) == 1


def test_prompts_asked_one_by_one_measure_rounding() -> None:
    sides = run()
    sides["flag"]["tokens"]["tokens"][7][1] += 1  # upstream's gap there is 1
    assert any("upstream and flag, or parted" in one for one in judge(sides).problems)
    apart = copy.deepcopy(sides["upstream"]["tokens"])
    apart["best"] = [[[-1.0, -3.5]] * 2] * PROMPTS
    sides["upstream"]["tokens_apart"] = apart
    assert judge(sides).problems == []


PROBLEMS = {
    "token": "upstream and flag, or parted at a gap up to 0.500",
    "cache": "flag: no prompt was continued from the prefix cache",
    "weights": "upstream: tokens hardly depend on compressed rows",
    "compressors": "flag: 5 compressors must be served here, got 4, and 1 that are not",
    "attention": "flag: no decode ran on our sparse attention",
    "graphs": "flag: no graph holds our sparse attention",
    "rows": "rows of our sparse attention beside FlashMLA's on the same input, decodes, worst",
    "bytes": "flag-eager: 11 of 1000 bytes unlike sglang's",
    "planted": "flag-eager: moved input must be seen, got {'decode': False}",
    "no decode": "flag-eager: moved input must be seen, got {}",
    "drafts": "flag-mtp: no drafts were verified",
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_each_failure_is_a_problem(case: str) -> None:
    sides = run(*SIDES, *MTP_SIDES)
    flag, eager = sides["flag"], sides["flag-eager"]
    if case == "token":
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -2.5]] * 2] * PROMPTS
        flag["tokens"]["tokens"][7][1] += 1
    elif case == "cache":
        flag["tokens_from_cache"]["cached"] = [0] * PROMPTS
    elif case == "weights":
        sides["upstream"]["other_weights"] = sides["upstream"]["tokens"]["tokens"]
    elif case == "compressors":
        flag["compressors"].update(here=4, left=1)
    elif case == "attention":
        for side in (flag, eager):  # whose eager steps have too many requests
            side["attention"]["calls"]["decode"] = {"flashmla": 7}
    elif case == "graphs":
        flag["attention"]["captured"] = {"decode flashmla": [1, 2]}
    elif case == "rows":
        eager["attention"]["rows"]["decode"][0] -= 1
    elif case == "bytes":
        eager["records"]["bytes_unlike_upstream"] = 11
    elif case == "planted":
        eager["records"]["planted_errors_seen"]["decode"] = False
    elif case == "no decode":
        eager["records"]["planted_errors_seen"] = {}
        eager["compressors"]["calls"] = {"decode": {"sglang's": 9}}
    elif case == "drafts":
        sides["flag-mtp"]["tokens"]["accepted"] = [None] * PROMPTS
    problems = judge(sides).problems
    assert len(problems) == 1 and PROBLEMS[case] in problems[0]


def test_rows_of_vllm_and_of_another_model_stay(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    other = {"engine": "vllm", "release": "0.33.0", "mode": "eager; 64 heads, bf16 weights"}
    dsv4_verdict.write(out, "NVIDIA H200", [other])
    counts = []
    for model in ("v4", "v41", "v4"):
        sides = run()
        for name, one in sides.items():
            one["model"] = model
            if model == "v41" and name.startswith("flag"):
                one["compressors"]["here"] = 3
        verdict = judge(sides)
        assert verdict.problems == []
        dsv4_verdict.write(out, "NVIDIA H200", verdict.rows)
        kept = json.loads(out.read_text())["rows"]
        counts.append(len(kept))
        assert kept[0] == other
    assert counts[0] == 1 + len(verdict.rows) and counts[1:] == [1 + 2 * len(verdict.rows)] * 2


def test_a_process_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a machine without sglang: every process fails."""
    monkeypatch.setattr(dsv4_verdict, "SIDES", ("upstream",))
    words = ["dsv4_engine_sglang", str(tmp_path / "out.json"), "--logs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit) as stopped:
        dsv4_engine_sglang.main()
    said = capsys.readouterr().out
    assert stopped.value.code == 1 and "-- end of the log of upstream" in said
    assert "importing sglang" in said and "no result file: upstream gave no tokens" in said
    assert not (tmp_path / "out.json").exists()
