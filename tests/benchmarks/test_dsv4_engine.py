"""What the comparison of DeepSeek-V4's engine runs says of their results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dsv4_engine_vllm import judge
from benchmarks.engines.dsv4_model import MTP_SIDES, SIDES
from benchmarks.engines.dsv4_verdict import write

PROMPTS = 64


def step(mode: str, kind: str, size: int, later: bool = False) -> dict[str, Any]:
    return {"mode": mode, "kind": kind, "later": later, "size": size, "equal": 3, "of": 3}


def side(name: str) -> dict[str, Any]:
    tokens = {
        "lengths": [5] * PROMPTS,
        "cached": [256] * PROMPTS,
        "tokens": [[i, i + 1] for i in range(PROMPTS)],
        "best": [[[-1.0, -2.0]] * 2] * PROMPTS,
    }
    result = {
        "side": name,
        "model": "v4",
        "heads": 64,
        "gpu": "NVIDIA H200",
        "release": "0.33.0",
        "compressors": ["FusedCompressor" if name.startswith("flag") else "DeepseekCompressor"],
        "engine": {
            "model_runner_v2": True,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "capture_sizes": [1, 2],
        },
        "tokens": tokens,
        "tokens_from_cache": copy.deepcopy(tokens),
        "other_weights": [[0, 0]] * PROMPTS,
    }
    if name.startswith("flag"):
        result["attention"] = {
            "calls": {"decode": {"ours": 5, "flashmla": 2}, "prefill": {"flashmla": 7}},
            "captured": {} if name.endswith("eager") else {"decode ours": [1, 2]},
            "rows": {"decode": [77, 77], "prefill": [0, 0]},
            "worst": {"decode": 0.004, "prefill": 0.0},
        }
    if name.startswith("flag") and not name.endswith("eager"):
        result["records"] = {
            "steps": [
                *(step("FULL", "decode", size) for size in (1, 2)),
                *(step("PIECEWISE", "prefill", size, later=size > 1) for size in (1, 2)),
                step("PIECEWISE", "mixed", 2),
                step("NONE", "prefill", 500),
            ],
            "failures": [],
            "planted_errors_seen": (
                {"decode": True} if name in MTP_SIDES else {"prefill": True, "mixed": True}
            ),
            "drafts": 9,
            "bytes_unlike_upstream": 1,
            "bytes_written": 1000,
            "records_unlike_upstream": 1,
            "records_written": 10,
        }
    return result


def run(*names: str) -> dict[str, Any]:
    return {name: side(name) for name in names or SIDES}


@pytest.mark.parametrize("names", [SIDES, SIDES + MTP_SIDES])
def test_equal_runs_have_rows_and_no_problem(names: tuple[str, ...]) -> None:
    verdict = judge(run(*names))
    rows = verdict.rows
    assert verdict.problems == []
    assert all(row["engine"] == "vllm" and row["release"] == "0.33.0" for row in rows)
    by_check = {
        (row["mode"].split(";")[0], row["check"]): (row["equal"], row["of"]) for row in rows
    }
    assert len(by_check) == len(rows)
    tokens = [of for (_, check), of in by_check.items() if check.startswith("greedy tokens")]
    assert tokens == [(PROMPTS, PROMPTS)] * len(tokens) and len(tokens) == len(names) + 2
    assert (999, 1000) in by_check.values() and (9, 10) in by_check.values()


PROBLEMS = {
    "token": "upstream and flag, or parted at a gap up to 0.500 (what other batches move in",
    "continued": "from the prefix cache, upstream and flag, or parted at a gap up to 0.000",
    "records": "PIECEWISE graph beside eager, mixed batches, from the beginning, 1 sizes: 2 of 3",
    "size": "no step was seen with graphs of [2] tokens",
    "planted": "a wrong plan for prefills must be seen as an error",
    "cache": "flag: no prompt was continued from the prefix cache",
    "weights": "upstream: tokens hardly depend on compressed rows",
    "compressor": "flag-eager: compressors must be FusedCompressor, got ['DeepseekCompressor']",
    "listed": "model.layers.1.attn in 3 pages",
    "attention": "flag: no decode ran on our sparse attention",
    "native heads": "flag: no prefill ran on our sparse attention",
    "graphs": "flag: no graph holds our sparse attention",
    "rows": "rows of our sparse attention beside FlashMLA's on the same input, decodes, worst",
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_each_failure_is_a_problem(case: str) -> None:
    sides = run()
    records = sides["flag"]["records"]
    if case == "token":
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -2.5]] * 2] * PROMPTS
        sides["flag"]["tokens"]["tokens"][7][1] += 1
    elif case == "continued":  # what moves the plain prompts says nothing of these
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -3.5]] * 2] * PROMPTS
        sides["flag"]["tokens_from_cache"]["tokens"][7][1] += 1
    elif case == "records":
        records["steps"][4]["equal"] = 2
    elif case == "size":
        del records["steps"][1]
        records["steps"].append(step("FULL", "decode", 4))
    elif case == "planted":
        records["planted_errors_seen"]["mixed"] = False
    elif case == "cache":
        sides["flag"]["tokens_from_cache"]["cached"] = [0] * PROMPTS
    elif case == "weights":
        sides["upstream"]["other_weights"] = sides["upstream"]["tokens"]["tokens"]
    elif case == "compressor":
        sides["flag-eager"]["compressors"] = ["DeepseekCompressor"]
    elif case == "listed":
        records["failures"] = [PROBLEMS["listed"]]
    elif case == "attention":
        for side in ("flag", "flag-eager"):  # whose eager steps have too many requests
            sides[side]["attention"]["calls"]["decode"] = {"flashmla": 7}
    elif case == "native heads":
        sides["flag"]["heads"] = 8
    elif case == "graphs":
        sides["flag"]["attention"]["captured"] = {"decode flashmla": [1, 2]}
    elif case == "rows":
        sides["flag"]["attention"]["rows"]["decode"][0] -= 1
    problems = judge(sides).problems
    assert len(problems) == 1 and PROBLEMS[case] in problems[0]


def test_tokens_may_part_where_rounding_decides() -> None:
    """A gap of 1 where upstream moves it by 1.5: a row counts it, and it is no problem."""
    sides = run()
    sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -3.5]] * 2] * PROMPTS
    sides["flag"]["tokens"]["tokens"][7][1] += 1
    verdict = judge(sides)
    rows = verdict.rows
    assert verdict.problems == []
    default = [row for row in rows if row["mode"].startswith("default")]
    equal = [row["equal"] for row in default if "greedy tokens of 64 prompts, up" in row["check"]]
    assert equal == [PROMPTS - 1, PROMPTS, PROMPTS]  # plainly; at that gap; upstream with itself


def test_drafts_must_have_been_verified_in_a_graph() -> None:
    sides = run(*SIDES, *MTP_SIDES)
    sides["flag-mtp"]["records"]["drafts"] = 0
    problems = judge(sides).problems
    assert len(problems) == 1 and "no drafts in a graph" in problems[0]


def test_rows_of_other_numbers_of_heads_and_other_modes_stay(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    drafts = {"engine": "vllm", "release": "0.33.0", "mode": "default with MTP; 64 heads, bf16"}
    old = {"engine": "vllm", "release": "0.33.0", "mode": "eager; 64 heads, another main kernel"}
    write(out, "NVIDIA H200", [drafts, old])
    sides = run()
    for heads in (8, 64):
        for one in sides.values():
            one["heads"] = heads
            if "attention" in one:
                one["attention"]["calls"]["prefill"]["ours"] = 1
        verdict = judge(sides)
        assert verdict.problems == []
        write(out, "NVIDIA H200", verdict.rows)
        kept = json.loads(out.read_text())["rows"]
        assert drafts in kept and (old in kept) == (heads == 8)
        modes = {row["mode"].split("; ")[1].split(",")[0] for row in kept}
        assert modes == {"8 heads", "64 heads"}


def test_rows_of_v41_leave_those_of_v4(tmp_path: Path) -> None:
    out, rows = tmp_path / "result.json", []
    for model in ("v4", "v41", "v4"):
        sides = run()
        for name, one in sides.items():
            one["model"] = model
            if model == "v41" and name.startswith("flag"):
                one["compressors"] = ["V41Compressor"]
        verdict = judge(sides)
        assert verdict.problems == []
        write(out, "NVIDIA H200", verdict.rows)
        rows.append(json.loads(out.read_text())["rows"])
    named = ["; DeepSeek-V4.1, 64 heads," in row["mode"] for row in rows[2]]
    assert len(rows[2]) == len(rows[1]) and 0 < sum(named) < len(named)


def test_what_a_process_found_until_it_failed_is_compared() -> None:
    sides = run()
    for part in ("tokens_from_cache", "other_weights"):
        del sides["flag"][part]
    problems = judge(sides).problems
    assert len(problems) == 1 and "no tokens_from_cache of all sides" in problems[0]
