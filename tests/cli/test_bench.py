"""``bench``: running the scripts, and reading their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_cli import bench as bench_module
from backend_cli import families
from backend_cli.bench import read_result, speedups, times
from backend_cli.errors import BadInputError, CliError
from backend_cli.tune import command as tune_module
from backend_core.target import KNOWN_TARGETS
from tests.cli.program import assert_one_sentence, run

ROWS: list[dict[str, Any]] = [
    {"H": 4, "batch": batch, "ours_gpu_ms": 0.01 * batch, "fla_gpu_ms": 0.02 * batch}
    for batch in (1, 8)
]

SCRIPT = """
import argparse, json, sys
parser = argparse.ArgumentParser()
parser.add_argument("--output"), parser.add_argument("--heads")
args = parser.parse_args()
print("first row of", args.heads)
sys.stdout.flush(), sys.stdout.buffer.write(bytes([255, 10]))  # what a driver may say
json.dump({"gpu": "G", "rows": ROWS}, open(args.output, "w"))
if args.heads == "7":
    sys.exit("accuracy gate failed: no times were taken")
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, and scripts that finish at once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "detect_target", lambda: KNOWN_TARGETS["H200"])
    monkeypatch.setattr(bench_module, "_own_folder", lambda: tmp_path)
    for name in bench_module.scripts().values():
        (tmp_path / name).write_text(SCRIPT.replace("ROWS", repr(ROWS)))


def test_all_scripts_run_and_are_summed_up(scripts: None) -> None:
    code, out, err = run("bench")
    assert code == 0, err
    for what in bench_module.scripts():
        assert json.loads(Path(f"bench-results/{what}.json").read_text())["rows"] == ROWS
        assert f"{what} on G, 2 shapes: bench-results/{what}.json" in out
    assert "FLA   2.00                2.00   2" in out


def test_options_go_to_the_script(scripts: None) -> None:
    code, _, err = run("bench", "kda-decode", "--output-dir", "new/folder", "--heads", "8")
    assert code == 0 and "first row of 8" in err
    assert Path("new/folder/kda-decode.json").is_file()


def test_a_script_that_fails(scripts: None) -> None:
    code, out, err = run("bench", "kda-decode", "--heads", "7")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == (
        "kda-dsv4: bench_kda_decode.py failed: accuracy gate failed: no times were taken; what it "
        "had measured is in bench-results/kda-decode.json"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["speed"], "WHAT must be one of kda-prefill, kda-decode, kda-verify, dsv4-compressor,"),
        (["speed"], ", got 'speed'"),
        (["--heads", "8"], "WHAT must be one of"),
        (["--heads=8"], "WHAT must be one of"),
    ],
)
def test_bad_arguments(scripts: None, args: list[str], message: str) -> None:
    code, out, err = run("bench", *args)
    assert (code, out) == (2, "") and message in err
    assert_one_sentence(err)


def test_a_result_is_not_overwritten(scripts: None) -> None:
    Path("bench-results").mkdir()
    Path("bench-results/kda-decode.json").write_text("mine")
    code, _, err = run("bench")
    assert code == 2 and "bench-results/kda-decode.json exists already" in err
    assert Path("bench-results/kda-decode.json").read_text() == "mine"
    assert not Path("bench-results/kda-prefill.json").exists()


def test_the_repository_has_the_scripts() -> None:
    assert all(bench_module.script_file(name) for name in bench_module.scripts().values())


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(CliError, match=r"the benchmark script .*bench_nothing.py does not exist"):
        bench_module.script_file("bench_nothing.py")


@pytest.mark.parametrize(("command", "module"), [("bench", bench_module), ("tune", tune_module)])
def test_without_a_gpu_or_torch_that_finds_it(
    command: str, module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "detect_target", lambda: KNOWN_TARGETS["cpu"])
        code, _, err = run(command)
    assert (code, err) == (1, f"kda-dsv4: {command} measures a GPU, and there is none here\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    find = families.importlib.util.find_spec
    monkeypatch.setattr(
        families.importlib.util, "find_spec", lambda n, *a: None if n == "torch" else find(n, *a)
    )
    code, _, err = run(command)
    assert code == 1 and "a GPU, and torch, which finds it, is not installed here" in err


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"rows": []}, "must have rows of times"),
        ({"rows": {}}, "must have rows of times"),
        ({"format": "kda-dsv4 eval 1", "questions": []}, "must have rows of times"),
        ({"rows": [{"H": 4}]}, "row 1: ours_gpu_ms must be a time in ms"),
        ({"rows": [{"ours_gpu_ms": -1.0}]}, "row 1: ours_gpu_ms must be a time in ms"),
    ],
)
def test_a_result_without_times(tmp_path: Path, result: Any, message: str) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result))
    with pytest.raises(BadInputError, match=message):
        read_result(file)


def test_speedups() -> None:
    row = {"ours_gpu_ms": 1.0, "fla_gpu_ms": 3.0, "flashkda_gpu_ms": None, "best_peer_gpu_ms": 3.0}
    assert times(row) == {"ours": 1.0, "fla": 3.0}
    other = {"ours_gpu_ms": 1.0, "fla_gpu_ms": 12.0, "two_stage_gpu_ms": 2.0}
    assert speedups([row, other]) == {"fla": (pytest.approx(6.0), 3.0, 2)}
