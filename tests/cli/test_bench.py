"""``bench`` and ``plot``: running the scripts, and drawing what they wrote."""

from __future__ import annotations

import errno
import json
import os
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from backend_cli import bench as bench_module
from backend_cli import families, files
from backend_cli.errors import CliError
from backend_cli.results import group, shape, speedups, times
from backend_core.target import KNOWN_TARGETS
from tests.cli.program import assert_one_sentence, run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PREFILL = RESULTS / "kda_prefill_h200.json"

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
        (["speed"], "WHAT must be one of kda-prefill, kda-decode, dsv4-compressor, mla-decode,"),
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


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_module, "detect_target", lambda: KNOWN_TARGETS["cpu"])
    code, _, err = run("bench")
    assert (code, err) == (1, "kda-dsv4: bench measures a GPU, and there is none here\n")


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_torch_nobody_knows_whether_there_is_a_gpu(
    command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)
    find = families.importlib.util.find_spec
    monkeypatch.setattr(
        families.importlib.util, "find_spec", lambda n, *a: None if n == "torch" else find(n, *a)
    )
    code, _, err = run(command)
    assert code == 1 and "a GPU, and torch, which finds it, is not installed here" in err


def plot(tmp_path: Path, rows: Any, *args: str) -> tuple[int, str, str]:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"gpu": "G", "rows": rows}))
    return run("plot", str(file), "--output", str(tmp_path / "plot.svg"), *args)


def test_a_plot_shows_every_contender_and_shape(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, err = plot(tmp_path, ROWS)
    assert (code, out, err) == (0, f"{tmp_path / 'plot.svg'}\n", "")
    text = (tmp_path / "plot.svg").read_text()
    ET.fromstring(text)
    for shown in ("this backend", "FLA", "1 sequences", "8 sequences", "4 heads", "0.16", "G"):
        assert f">{shown}" in text or shown in text
    again = tmp_path / "again.svg"
    run("plot", str(tmp_path / "result.json"), "--output", str(again))
    assert again.read_text() == text


@pytest.mark.parametrize("kind", ["bars", "growth"])
def test_the_committed_result_as_png(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    code, _, err = run(
        *("plot", str(PREFILL), "--output", str(file), "--kind", kind, "--where", "H=32")
    )
    assert (code, err) == (0, "") and file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("rows", "args", "message"),
    [
        (ROWS, ["--output", "plot.pdf"], "--output must end in .png or .svg, got plot.pdf"),
        (ROWS, ["--kind", "pie"], "--kind must be one of bars, growth, both, got 'pie'"),
        (ROWS, ["--where", "H"], "--where must be KEY=VALUE, got 'H'"),
        (ROWS, ["--where", "H=5"], "no row has H=5; H is 4"),
        (ROWS, ["--where", "gate=open"], "no row has gate=open; gate is in no row"),
        ([], [], "must have rows of times"),
        ({}, [], "must have rows of times"),
        ([{"H": 4}], [], "row 1: ours_gpu_ms must be a time in ms"),
        ([{"ours_gpu_ms": -1.0}], [], "row 1: ours_gpu_ms must be a time in ms"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, rows: Any, args: list[str], message: str) -> None:
    code, out, err = plot(tmp_path, rows, *args)
    assert (code, out) == (2, "") and message in err
    assert_one_sentence(err)
    assert not (tmp_path / "plot.svg").exists()


@pytest.mark.parametrize("row", [{}, {"H": 4}, {"H": 4, "seq_lens": ["a"]}, {"H": 4, "n": None}])
def test_a_row_without_its_shape_is_one_sentence(row: dict[str, Any], tmp_path: Path) -> None:
    code, _, error = plot(tmp_path, [row | {"ours_gpu_ms": 1.0}])
    assert code == 2 and "has a row without its shape" in error


def test_a_plot_on_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "replace", refuse)
    path = tmp_path / "prefill.svg"
    code, out, err = run("plot", str(PREFILL), "--where", "H=32", "--output", str(path))
    assert (code, out) == (2, "") and "prefill.svg: No space left on device" in err
    assert_one_sentence(err)
    assert not list(tmp_path.iterdir())


def test_an_evaluation_is_no_benchmark(tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text('{"format": "kda-dsv4 eval 1", "questions": []}')
    code, _, err = run("plot", str(tmp_path / "e.json"))
    assert code == 2 and "must have rows of times, as kda-dsv4 bench writes them" in err


def test_rows_in_words() -> None:
    row = {"H": 8, "seq_lens": [512, 512], "gate": "bounded", "ours_gpu_ms": 1.0}
    row |= {"fla_gpu_ms": 3.0, "flashkda_gpu_ms": None, "ours_gpu_ms_random": 2.0}
    assert times(row) == {"ours": 1.0, "fla": 3.0}
    assert (group(row), shape(row)) == ("8 heads, bounded gate", "2 × 512 tokens")
    step = {"phase": "decode", "part": "main", "ratio": 4, "n": 64, "ends": "mixed"}
    assert (group(step), shape(step)) == ("decode, main, C4, mixed ends", "64 sequences")
    other = {"ours_gpu_ms": 1.0, "fla_gpu_ms": 12.0, "two_stage_gpu_ms": 2.0}
    assert speedups([row, other]) == {"fla": (pytest.approx(6.0), 3.0, 2)}
