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
from benchmarks.engines import dsv4_sglang_side, sglang_needs
from benchmarks.engines.dsv4_vllm_side import MTP_SIDES, SIDES

PROMPTS = 64


def step(graph: str, kind: str, size: int, later: bool = False) -> dict[str, Any]:
    return {"graph": graph, "kind": kind, "later": later, "size": size, "equal": 3, "of": 3}


def side(name: str) -> dict[str, Any]:
    tokens = {
        "lengths": [5] * PROMPTS,
        "cached": [256] * PROMPTS,
        "accepted": [1.5 if name in MTP_SIDES else None] * PROMPTS,
        "tokens": [[i, i + 1] for i in range(PROMPTS)],
        "best": [[[-1.0, -2.0]] * 2] * PROMPTS,
    }
    flag, drafts = name.startswith("flag"), name in MTP_SIDES
    result = {
        "side": name,
        "gpu": "NVIDIA H200",
        "release": "0.5.17",
        "engine": {
            "capture_sizes": [] if name.endswith("eager") else [1, 2],
            "tokens_per_request": 3 if drafts else 1,
            "served": 5 if flag else 0,
            "unserved": 0,
            "deep_gemm": False,
        },
        "tokens": tokens,
        "tokens_from_cache": copy.deepcopy(tokens),
        "other_weights": [[0, 0]] * PROMPTS,
        "records": None,
    }
    if flag and not name.endswith("eager"):
        kind, width = ("verify", 3) if drafts else ("decode", 1)
        result["records"] = {
            "steps": [
                *(step("FULL", kind, width * size) for size in (1, 2)),
                *(step("NONE", "prefill", 0, later) for later in (False, True)),
            ],
            "failures": [],
            "planted_errors_seen": {f"FULL {kind}": True, "NONE prefill": True},
            "bytes_unlike_upstream": 1,
            "bytes_written": 1000,
            "kinds_of_bytes": {"e4m3 of a main record, 1 apart": 1},
            "records_unlike_upstream": 1,
            "records_written": 10,
        }
    return result


def run(*names: str) -> dict[str, Any]:
    return {name: side(name) for name in names or SIDES}


@pytest.mark.parametrize("names", [SIDES, SIDES + MTP_SIDES])
def test_equal_runs_have_rows_and_no_problem(names: tuple[str, ...]) -> None:
    rows, problems = judge(run(*names))
    assert problems == []
    assert all((row["engine"], row["release"]) == ("sglang", "0.5.17") for row in rows)
    by_check = {(row["mode"].split(";")[0], row["check"]): row for row in rows}
    assert len(by_check) == len(rows)
    counts = [(row["equal"], row["of"]) for row in rows]
    modes = len(names) // 2
    assert counts.count((64, 64)) == 4 * modes + 2
    watched = modes - 1  # with graphs
    assert counts.count((999, 1000)) == counts.count((9, 10)) == watched
    assert counts.count((6, 6)) == watched and counts.count((3, 3)) == 2 * watched


PROBLEMS = {
    "token": "upstream and flag, or parted at a gap up to 0.500",
    "records": "decode batches, graph beside eager, 2 sizes: 5 of 6",
    "size": "flag: no decode step was seen with graphs of [2] tokens",
    "planted": "flag: another input must be seen as an error",
    "cache": "flag: no prompt was continued from the prefix cache",
    "weights": "upstream: tokens hardly depend on compressed rows",
    "served": "flag-eager: 5 compressors must be served here, got 4, and 1 that are not",
    "listed": "flag: records of ratio 4 in 3 pages",
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_each_failure_is_a_problem(case: str) -> None:
    sides = run()
    records = sides["flag"]["records"]
    if case == "token":
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -2.5]] * 2] * PROMPTS
        sides["flag"]["tokens"]["tokens"][7][1] += 1
    elif case == "records":
        records["steps"][0]["equal"] = 2
    elif case == "size":
        records["steps"][1]["size"] = 4
    elif case == "planted":
        records["planted_errors_seen"]["NONE prefill"] = False
    elif case == "cache":
        sides["flag"]["tokens_from_cache"]["cached"] = [0] * PROMPTS
    elif case == "weights":
        sides["upstream"]["other_weights"] = sides["upstream"]["tokens"]["tokens"]
    elif case == "served":
        sides["flag-eager"]["engine"].update(served=4, unserved=1)
    elif case == "listed":
        records["failures"] = ["records of ratio 4 in 3 pages"]
    _, problems = judge(sides)
    assert len(problems) == 1 and PROBLEMS[case] in problems[0]


FAKE = """
import json, pathlib, sys
print("[   0.1 s] said by", sys.argv[1])
sides = json.loads(pathlib.Path(__file__).with_name("sides.json").read_text())
pathlib.Path(sys.argv[2]).write_text(json.dumps(sides[sys.argv[1]]))
if sys.argv[1] == "flag-mtp":
    raise SystemExit("broken as asked")
"""


@pytest.mark.parametrize("mtp", [False, True])
def test_the_processes_of_a_run(
    mtp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sglang_needs, "missing", lambda *args, **kwargs: None)
    out = tmp_path / "out.json"
    script = tmp_path / "fake_side.py"
    script.write_text(FAKE)
    (tmp_path / "sides.json").write_text(json.dumps(run(*SIDES, *MTP_SIDES)))
    popen = dsv4_engine_sglang.subprocess.Popen
    monkeypatch.setattr(
        dsv4_engine_sglang.subprocess,
        "Popen",
        lambda command, **how: popen([command[0], str(script), *command[3:]], **how),
    )
    argv = ["dsv4", str(out), "--logs", str(tmp_path / "logs"), *(["--mtp"] if mtp else [])]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        dsv4_engine_sglang.main()
    shown = capsys.readouterr().out
    assert ended.value.code == int(mtp) and ("broken as asked" in shown) == mtp
    assert "said by flag" in shown and json.loads(out.read_text())["rows"]
    assert ("flag-mtp did not run to the end" in shown) == mtp


def test_a_side_has_its_switches_and_arguments() -> None:
    switches, arguments = (
        dsv4_sglang_side.switches,
        dsv4_sglang_side.engine_arguments,
    )
    assert switches("flag")["KDA_DSV4_STRICT"] == switches("flag-mtp")["DSV4_WATCH"] == "1"
    assert "KDA_DSV4_STRICT" not in switches("upstream-mtp")
    assert "DSV4_WATCH" not in switches("flag-eager")
    assert arguments("flag")["attention_backend"] == "dsv4"
    assert "attention_backend" not in arguments("upstream")
    assert arguments("upstream-eager")["disable_cuda_graph"] is True
    assert arguments("flag-mtp")["speculative_num_draft_tokens"] == 3
