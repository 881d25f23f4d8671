"""What the comparisons of DeepSeek-V4's engine runs say of their processes' results."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dsv4_engine_sglang, dsv4_engine_vllm
from benchmarks.engines import dsv4_verdict
from benchmarks.engines.dsv4_model import MTP_SIDES, SIDES
from benchmarks.engines.dsv4_verdict import write

PROMPTS = 64
JUDGES = {"vllm": dsv4_engine_vllm.judge, "sglang": dsv4_engine_sglang.judge}
Sides = dict[str, dict[str, Any]]


def step(mode: str, kind: str, size: int, later: bool = False) -> dict[str, Any]:
    return {"mode": mode, "kind": kind, "later": later, "size": size, "equal": 3, "of": 3}


def side(engine: str, name: str) -> dict[str, Any]:
    tokens = {
        "lengths": [5] * PROMPTS,
        "cached": [256] * PROMPTS,
        "accepted": [1.5 if name in MTP_SIDES else None] * PROMPTS,
        "tokens": [[i, i + 1] for i in range(PROMPTS)],
        "best": [[[-1.0, -2.0]] * 2] * PROMPTS,
    }
    found = {
        "side": name,
        "model": "v4",
        "heads": 64,
        "gpu": "NVIDIA H200",
        "release": "1.0",
        "attention": {
            "calls": {"decode": {"ours": 5, "flashmla": 2}, "prefill": {"flashmla": 7}},
            "captured": {} if name.endswith("eager") else {"decode ours": [1, 2]},
            "rows": {"decode": [77, 77], "prefill": [0, 0]},
            "worst": {"decode": 0.004, "prefill": 0.0},
        },
        "tokens": tokens,
        "tokens_from_cache": copy.deepcopy(tokens),
        "other_weights": [[0, 0]] * PROMPTS,
    }
    return found | {"vllm": of_vllm, "sglang": of_sglang}[engine](name, found)


def of_vllm(name: str, found: dict[str, Any]) -> dict[str, Any]:
    is_ours = name.startswith("flag")
    engine = {"model_runner_v2": True, "cudagraph_mode": "FULL_AND_PIECEWISE"}
    more: dict[str, Any] = {
        "compressors": ["FusedCompressor" if is_ours else "DeepseekCompressor"],
        "engine": engine | {"capture_sizes": [1, 2]},
    }
    if not is_ours:
        del found["attention"]
    elif not name.endswith("eager"):
        more["records"] = {
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
    return more


def of_sglang(name: str, found: dict[str, Any]) -> dict[str, Any]:
    is_ours = name.startswith("flag")
    if not is_ours:
        found["attention"]["calls"] = {}
    if name != "flag-eager":
        found["attention"]["rows"]["decode"] = [0, 0]
    return {
        "compressors": {
            "here": 5 if is_ours else 0,
            "left": 0,
            "calls": {"decode": {"ours": 9}, "prefill": {"sglang's": 9}},
        },
        "records": {
            "compared": {"decode": 9},
            "bytes_written": 1000,
            "bytes_unlike_upstream": 1,
            "planted_errors_seen": {"decode": True},
        },
    }


def run(engine: str, *names: str, model: str = "v4") -> Sides:
    sides = {name: side(engine, name) for name in names or SIDES}
    for name, one in sides.items():
        one["model"] = model
        if model == "v41" and name.startswith("flag"):
            if engine == "vllm":
                one["compressors"] = ["V41Compressor"]
            else:
                one["compressors"]["here"] = 3
    return sides


@pytest.mark.parametrize("engine", JUDGES)
@pytest.mark.parametrize("names", [SIDES, SIDES + MTP_SIDES])
def test_equal_runs_have_rows_and_no_problem(names: tuple[str, ...], engine: str) -> None:
    verdict = JUDGES[engine](run(engine, *names))
    assert verdict.problems == []
    assert all((row["engine"], row["release"]) == (engine, "1.0") for row in verdict.rows)
    assert len({(row["mode"].split(";")[0], row["check"]) for row in verdict.rows}) == len(
        verdict.rows
    )
    counts = [(row["equal"], row["of"]) for row in verdict.rows]
    # greedy tokens, and in vLLM nothing else has as many
    assert counts.count((64, 64)) == 2 * len(names) + 2
    assert (999, 1000) in counts and ((77, 77) if engine == "sglang" else (9, 10)) in counts


COMMON = {
    "token": "upstream and flag, or parted at a gap up to 0.500",
    "cache": "flag: no prompt was continued from the prefix cache",
    "weights": "upstream: tokens hardly depend on compressed rows",
    "attention": "flag: no decode ran on our sparse attention",
    "graphs": "flag: no graph holds our sparse attention",
    "rows": "rows of our sparse attention beside FlashMLA's on the same input, decodes, worst",
}


def spoil(sides: Sides, case: str) -> None:
    """One of `COMMON`."""
    flag = sides["flag"]
    if case == "token":
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -2.5]] * 2] * PROMPTS
        flag["tokens"]["tokens"][7][1] += 1
    elif case == "cache":
        flag["tokens_from_cache"]["cached"] = [0] * PROMPTS
    elif case == "weights":
        sides["upstream"]["other_weights"] = sides["upstream"]["tokens"]["tokens"]
    elif case == "attention":
        for one in (flag, sides["flag-eager"]):  # whose eager steps have too many requests
            one["attention"]["calls"]["decode"] = {"flashmla": 7}
    elif case == "graphs":
        flag["attention"]["captured"] = {"decode flashmla": [1, 2]}
    else:
        sides["flag-eager"]["attention"]["rows"]["decode"][0] -= 1


@pytest.mark.parametrize("engine", JUDGES)
@pytest.mark.parametrize("case", COMMON)
def test_each_failure_is_a_problem(case: str, engine: str) -> None:
    sides = run(engine)
    spoil(sides, case)
    problems = JUDGES[engine](sides).problems
    assert len(problems) == 1 and COMMON[case] in problems[0]


OF_VLLM = {
    "continued": "from the prefix cache, upstream and flag, or parted at a gap up to 0.000",
    "records": "PIECEWISE graph beside eager, mixed batches, from the beginning, 1 sizes: 2 of 3",
    "size": "no step was seen with graphs of [2] tokens",
    "planted": "a wrong plan for prefills must be seen as an error",
    "compressor": "flag-eager: compressors must be FusedCompressor, got ['DeepseekCompressor']",
    "listed": "model.layers.1.attn in 3 pages",
    "native heads": "flag: no prefill ran on our sparse attention",
    "drafts": "no drafts in a graph",
    "tokens_from_cache": "no tokens_from_cache of all sides",
}


@pytest.mark.parametrize("case", OF_VLLM)
def test_each_failure_in_vllm_is_a_problem(case: str) -> None:
    sides = run("vllm", *SIDES, *MTP_SIDES)
    flag, records = sides["flag"], sides["flag"]["records"]
    if case == "continued":  # what moves the plain prompts says nothing of these
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -3.5]] * 2] * PROMPTS
        flag["tokens_from_cache"]["tokens"][7][1] += 1
    elif case == "records":
        records["steps"][4]["equal"] = 2
    elif case == "size":
        del records["steps"][1]
        records["steps"].append(step("FULL", "decode", 4))
    elif case == "planted":
        records["planted_errors_seen"]["mixed"] = False
    elif case == "compressor":
        sides["flag-eager"]["compressors"] = ["DeepseekCompressor"]
    elif case == "listed":
        records["failures"] = [OF_VLLM["listed"]]
    elif case == "native heads":
        flag["heads"] = 8
    elif case == "drafts":
        sides["flag-mtp"]["records"]["drafts"] = 0
    else:  # of a process that failed before
        del flag["tokens_from_cache"], flag["other_weights"]
    problems = JUDGES["vllm"](sides).problems
    assert len(problems) == 1 and OF_VLLM[case] in problems[0]


OF_SGLANG = {
    "compressors": "flag: 5 compressors must be served here, got 4, and 1 that are not",
    "bytes": "flag-eager: 11 of 1000 bytes unlike sglang's",
    "planted": "flag-eager: moved input must be seen, got {'decode': False}",
    "no decode": "flag-eager: moved input must be seen, got {}",
    "drafts": "flag-mtp: no drafts were verified",
}


@pytest.mark.parametrize("case", OF_SGLANG)
def test_each_failure_in_sglang_is_a_problem(case: str) -> None:
    sides = run("sglang", *SIDES, *MTP_SIDES)
    eager = sides["flag-eager"]
    if case == "compressors":
        sides["flag"]["compressors"].update(here=4, left=1)
    elif case == "bytes":
        eager["records"]["bytes_unlike_upstream"] = 11
    elif case == "planted":
        eager["records"]["planted_errors_seen"]["decode"] = False
    elif case == "no decode":
        eager["records"]["planted_errors_seen"] = {}
        eager["compressors"]["calls"] = {"decode": {"sglang's": 9}}
    else:
        sides["flag-mtp"]["tokens"]["accepted"] = [None] * PROMPTS
    problems = JUDGES["sglang"](sides).problems
    assert len(problems) == 1 and OF_SGLANG[case] in problems[0]


def test_tokens_may_part_where_rounding_decides() -> None:
    """A gap of 1 where upstream moves it by 1.5: a row counts it, and it is no problem."""
    sides = run("vllm")
    sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -3.5]] * 2] * PROMPTS
    sides["flag"]["tokens"]["tokens"][7][1] += 1
    verdict = JUDGES["vllm"](sides)
    assert verdict.problems == []
    default = [row for row in verdict.rows if row["mode"].startswith("default")]
    equal = [row["equal"] for row in default if "greedy tokens of 64 prompts, up" in row["check"]]
    assert equal == [PROMPTS - 1, PROMPTS, PROMPTS]  # plainly; at that gap; upstream with itself


def test_prompts_asked_one_by_one_measure_rounding() -> None:
    sides = run("sglang")
    sides["flag"]["tokens"]["tokens"][7][1] += 1  # upstream's gap there is 1
    assert any("upstream and flag, or parted" in one for one in JUDGES["sglang"](sides).problems)
    apart = copy.deepcopy(sides["upstream"]["tokens"])
    apart["best"] = [[[-1.0, -3.5]] * 2] * PROMPTS
    sides["upstream"]["tokens_apart"] = apart
    assert JUDGES["sglang"](sides).problems == []


def test_rows_of_other_numbers_of_heads_and_other_modes_stay(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    drafts = {"engine": "vllm", "release": "1.0", "mode": "default with MTP; 64 heads, bf16"}
    old = {"engine": "vllm", "release": "1.0", "mode": "eager; 64 heads, another main kernel"}
    write(out, "NVIDIA H200", [drafts, old])
    sides = run("vllm")
    for heads in (8, 64):
        for one in sides.values():
            one["heads"] = heads
            if "attention" in one:
                one["attention"]["calls"]["prefill"]["ours"] = 1
        verdict = JUDGES["vllm"](sides)
        assert verdict.problems == []
        write(out, "NVIDIA H200", verdict.rows)
        kept = json.loads(out.read_text())["rows"]
        assert drafts in kept and (old in kept) == (heads == 8)
        modes = {row["mode"].split("; ")[1].split(",")[0] for row in kept}
        assert modes == {"8 heads", "64 heads"}


@pytest.mark.parametrize("engine", JUDGES)
def test_rows_of_another_engine_and_of_another_model_stay(engine: str, tmp_path: Path) -> None:
    out, counts = tmp_path / "result.json", []
    other = {"engine": "another", "release": "1.0", "mode": "eager; 64 heads, bf16 weights"}
    write(out, "NVIDIA H200", [other])
    for model in ("v4", "v41", "v4"):
        verdict = JUDGES[engine](run(engine, model=model))
        assert verdict.problems == []
        write(out, "NVIDIA H200", verdict.rows)
        kept = json.loads(out.read_text())["rows"]
        counts.append(len(kept))
        assert kept[0] == other
    named = ["; DeepSeek-V4.1, 64 heads," in row["mode"] for row in kept]
    assert counts[0] < counts[1] == counts[2] and counts[1] - counts[0] == sum(named)


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
