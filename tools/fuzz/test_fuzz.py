"""Random batches: every family's on this machine's paths, and a failure prints one line."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.family import families
from backend_core.target import detect_target
from kda_backend import kda_prefill
from tests.core.evidence import RESULTS, ROOT
from tools.fuzz import __main__ as fuzz
from tools.fuzz import kda as kda_fuzz
from tools.fuzz.batches import (
    Draw,
    FuzzBatch,
    MismatchError,
    Outcome,
    expect_untouched,
    run_batch,
    worst,
)
from tools.fuzz.worker import CASES

BATCHES = 80
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(family: str, seed: int) -> Outcome:
    others = {f"{name} {x}": case for name, cases in CASES.items() for x, case in cases.items()}
    return run_batch(seed, CASES[family], others, detect_target(), DEVICE)


@pytest.mark.parametrize("family", list(families()))
def test_batches_are_right(family: str) -> None:
    outcomes = [run(family, seed) for seed in range(BATCHES)]
    assert [outcome.message for outcome in outcomes if outcome.status != "ok"] == []
    assert {outcome.operator for outcome in outcomes} == set(CASES[family])


@pytest.fixture
def lost_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A regression: where a chunk has a single token, its output is not written."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result, plan = kda_prefill(*args, **kwargs), args[3]
        if isinstance(plan, torch.Tensor):
            offsets = plan.tolist()
            for begin, end in itertools.pairwise(offsets):
                if (end - begin) % 64 == 1:
                    result[0][0, end - 1] = 0.0
        return result

    monkeypatch.setattr(kda_fuzz, "kda_prefill", wrong)
    yield


def test_a_planted_regression_is_found_and_found_again(lost_token: None) -> None:
    found = [seed for seed in range(BATCHES) if run("kda", seed).status != "ok"]
    assert found
    first, second = run("kda", found[0]), run("kda", found[0])
    assert first == second and first.operator == "prefill"
    assert first.message is not None and "times what is allowed (operator prefill" in first.message
    assert "lengths [" in first.message


def test_a_batch_follows_from_its_number() -> None:
    def choices(seed: int) -> str:
        draw = Draw(seed)
        draw.choice("a", ("x", "y", "z"))
        draw.integer("b", 0, 1000)
        draw.chance("c", 0.5)
        draw.lengths("d", 9, (0, 1, 64), 300)
        return f"{draw} {draw.shuffled(range(20))} {draw.seed()}"

    assert choices(5) == choices(5) != choices(6)
    for seed in range(50):
        lengths = Draw(seed).lengths("d", 9, (0, 1, 64), 300)
        assert all(0 <= length <= 300 for length in lengths)


@pytest.mark.parametrize(
    ("error", "status"),
    [(0.5, "ok"), (1.5, "wrong"), (float("nan"), "wrong"), (float("inf"), "wrong")],
)
def test_an_error_is_judged(error: float, status: str) -> None:
    def case(*_: Any) -> FuzzBatch:
        return FuzzBatch(lambda seed: None, lambda: None, lambda: (error, 1.0))

    cases = {"only": case}
    found = [run_batch(seed, cases, cases, detect_target(), DEVICE) for seed in range(20)]
    assert {outcome.status for outcome in found} == {status}


def test_what_is_written_beside_the_result_is_a_mismatch() -> None:
    x = torch.full((4,), float("nan"))
    expect_untouched("a slot", x, x.clone())
    with pytest.raises(MismatchError, match="a slot was written and must stay as it was"):
        expect_untouched("a slot", x, torch.zeros(4))
    assert worst((0.1, 1.0), (float("nan"), 1.0), (5.0, 1.0))[0] != 5.0


PLANTED = """
import os

import torch

from tools.fuzz import worker
from tools.fuzz.batches import FuzzBatch


def draw_sum(draw, target, device):
    x = torch.empty(draw.integer("rows", 1, 9), dtype=torch.float64, device=device)
    result = []

    def fill(seed):
        x.copy_(torch.arange(seed % 7, seed % 7 + len(x)))

    def run():
        if len(x) > 6 and os.environ.get("PLANT_DIES"):
            os._exit(3)
        result[:] = [x[:4].sum() if os.environ.get("PLANT_WRONG") else x.sum()]

    return FuzzBatch(fill, run, lambda: (abs(float(result[0] - sum(x.tolist()))), 0.5))


worker.CASES = {"kda": {"sum": draw_sum}}
worker.main()
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers have one operator in the place of those of all families."""
    (tmp_path / "planted_worker.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fuzz, "WORKER", "planted_worker")


def test_the_program_attacks_a_familys_operators(
    planted: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "fuzz.json"
    arguments = ["--batches", "12", "--seed", "40", "--family", "kda", "--jobs", "2"]
    assert fuzz.main([*arguments, "--output", str(kept)]) == 0
    report = json.loads(kept.read_text())
    (row,) = report["rows"]
    assert (row["family"], row["operator"]) == ("kda", "sum")
    assert (row["batches"], row["mismatches"]) == (12, 0) and row["seconds"] >= 0.0
    assert (report["seed"], report["failures"], list(report["wall_seconds"])) == (40, [], ["kda"])
    assert report.keys() == json.loads((ROOT / RESULTS / "fuzz_h100.json").read_text()).keys()
    assert capsys.readouterr().out.splitlines()[-1] == "fuzz: 12 of 12 batches right, seed 40"


def test_a_mismatch_prints_the_line_that_runs_it_again(
    planted: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANT_WRONG", "1")
    assert fuzz.main(["--batches", "2", "--seed", "6", "--family", "kda", "--jobs", "1"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    (line, *_) = [line for line in lines if line.startswith("python -m tools.fuzz --batches 1 ")]
    assert fuzz.main(line.split()[3:]) == 1 and line in capsys.readouterr().out


def test_a_batch_that_ends_its_process_is_named(
    planted: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANT_DIES", "1")
    assert fuzz.main(["--batches", "2", "--seed", "6", "--family", "kda", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "the process ended with 3" in out and "1 of 2 batches right" in out


def test_a_batch_without_a_process_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After too many of them the rest is left out."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(fuzz, "MAX_FAILURES", 2)
    assert fuzz.main(["--batches", "9", "--family", "kda", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "fuzz: 0 of 2 batches right" in out and "the rest was left out after 2 failures" in out
    assert "Resource temporarily unavailable" in out


def test_a_family_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fuzz.main(["--batches", "1", "--family", "mha"])
    assert "invalid choice: 'mha'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("batches", "0"), ("seed", "-1"), ("jobs", "0")])
def test_numbers_that_would_run_nothing_are_refused(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fuzz.main(["--batches", "1", f"--{name}", value])
    assert f"--{name} must be at least" in capsys.readouterr().err
