"""What the comparison of DeepSeek-V4 in sglang says of its processes' results."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import dsv4_engine_sglang, dsv4_engine_vllm
from benchmarks.dsv4_engine_sglang import judge
from benchmarks.dsv4_engine_vllm import write
from benchmarks.engines import dsv4_sglang_side
from benchmarks.engines.dsv4_vllm_side import MTP_SIDES, SIDES

PROMPTS = 64


def side(name: str) -> dict[str, Any]:
    tokens = {
        "lengths": [5] * PROMPTS,
        "cached": [256] * PROMPTS,
        "accepted": [1.5 if name in MTP_SIDES else None] * PROMPTS,
        "tokens": [[i, i + 1] for i in range(PROMPTS)],
        "best": [[[-1.0, -2.0]] * 2] * PROMPTS,
    }
    return {
        "side": name,
        "gpu": "NVIDIA H200",
        "release": "0.5.17",
        "engine": {
            "served": 5 if name.startswith("flag") else 0,
            "unserved": 0,
            "deep_gemm": False,
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
    rows = verdict.rows
    assert verdict.problems == []
    assert all((row["engine"], row["release"]) == ("sglang", "0.5.17") for row in rows)
    by_check = {(row["mode"].split(";")[0], row["check"]): row for row in rows}
    assert len(by_check) == len(rows)
    counts = [(row["equal"], row["of"]) for row in rows]
    modes = len(names) // 2
    assert counts.count((64, 64)) == 4 * modes + 2


PROBLEMS = {
    "token": "upstream and flag, or parted at a gap up to 0.500",
    "cache": "flag: no prompt was continued from the prefix cache",
    "weights": "upstream: tokens hardly depend on compressed rows",
    "served": "flag-eager: 5 compressors must be served here, got 4, and 1 that are not",
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_each_failure_is_a_problem(case: str) -> None:
    sides = run()
    if case == "token":
        sides["upstream-eager"]["tokens"]["best"] = [[[-1.0, -2.5]] * 2] * PROMPTS
        sides["flag"]["tokens"]["tokens"][7][1] += 1
    elif case == "cache":
        sides["flag"]["tokens_from_cache"]["cached"] = [0] * PROMPTS
    elif case == "weights":
        sides["upstream"]["other_weights"] = sides["upstream"]["tokens"]["tokens"]
    elif case == "served":
        sides["flag-eager"]["engine"].update(served=4, unserved=1)
    problems = judge(sides).problems
    assert len(problems) == 1 and PROBLEMS[case] in problems[0]


def test_rows_of_vllm_stay(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    other = {"engine": "vllm", "release": "0.33.0", "mode": "eager; 64 heads, bf16 weights"}
    write(out, "NVIDIA H200", [other])
    rows = judge(run()).rows
    for _ in range(2):
        write(out, "NVIDIA H200", rows)
    assert json.loads(out.read_text())["rows"] == [other, *rows]


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
    out = tmp_path / "out.json"
    script = tmp_path / "fake_side.py"
    script.write_text(FAKE)
    (tmp_path / "sides.json").write_text(json.dumps(run(*SIDES, *MTP_SIDES)))
    popen = dsv4_engine_vllm.subprocess.Popen
    monkeypatch.setattr(
        dsv4_engine_vllm.subprocess,
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
    assert switches("flag")["KDA_DSV4_STRICT"] == "1"
    assert "KDA_DSV4_STRICT" not in switches("upstream-mtp")
    assert arguments("flag")["attention_backend"] == "dsv4"
    assert "attention_backend" not in arguments("upstream")
    assert arguments("upstream-eager")["disable_cuda_graph"] is True
    assert arguments("flag-mtp")["speculative_num_draft_tokens"] == 3
