"""Random batches: every family's on this machine's paths, and a failure prints one line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.family import families
from backend_core.target import detect_target
from backend_core.testing.fuzz import (
    Draw,
    FuzzBatch,
    MismatchError,
    Outcome,
    expect_untouched,
    run_batch,
    worst,
)
from kda_backend.testing import fuzz as kda_fuzz
from tests.cli.program import run as run_here
from tests.core.test_family import program

BATCHES = 80
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(family: str, seed: int) -> Outcome:
    known = {name: found.fuzz_cases() for name, found in families().items()}
    others = {f"{name} {x}": case for name, cases in known.items() for x, case in cases.items()}
    return run_batch(seed, known[family], others, detect_target(), DEVICE)


@pytest.mark.parametrize("family", list(families()))
def test_batches_are_right(family: str) -> None:
    outcomes = [run(family, seed) for seed in range(BATCHES)]
    assert [outcome.message for outcome in outcomes if outcome.status != "ok"] == []
    assert {outcome.operator for outcome in outcomes} == set(families()[family].fuzz_cases())


@pytest.fixture
def lost_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A regression: where a chunk has a single token, its output is not written."""
    right = kda_fuzz.kda_prefill

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result, plan = right(*args, **kwargs), args[3]
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
import dataclasses, os
import kda_backend.family

def draw_sum(draw, target, device):
    import torch
    from backend_core.testing.fuzz import FuzzBatch

    x = torch.empty(draw.integer("rows", 1, 9), dtype=torch.float64, device=device)
    result = []

    def fill(seed):
        x.copy_(torch.arange(seed % 7, seed % 7 + len(x)))

    def run():
        if len(x) > 6 and os.environ.get("PLANT_DIES"):
            os._exit(3)
        result[:] = [x[:4].sum() if os.environ.get("PLANT_WRONG") else x.sum()]

    return FuzzBatch(fill, run, lambda: (abs(float(result[0] - sum(x.tolist()))), 0.5))

cases = {} if os.environ.get("PLANT_NO_CASES") else {"sum": draw_sum}
kda_backend.family.FAMILY = dataclasses.replace(
    kda_backend.family.FAMILY, fuzz_cases=lambda: cases
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """On the path of `program`: one operator in the place of those that KDA's fuzz attacks."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    return tmp_path


def test_the_program_attacks_a_familys_operators(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "fuzz.json"
    arguments = ("check", "--fuzz", "12", "--seed", "40", "--family", "kda", "--jobs", "2")
    code, out, err = program(folder, *arguments, "--json", str(kept))
    assert code == 0, err
    report = json.loads(kept.read_text())
    (row,) = report["rows"]
    assert (row["family"], row["operator"]) == ("kda", "sum")
    assert (row["batches"], row["mismatches"]) == (12, 0) and row["seconds"] >= 0.0
    assert out.splitlines()[-1].startswith("fuzz: 12 of 12 batches right")


def test_a_mismatch_prints_the_line_that_runs_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANT_WRONG", "1")
    code, out, _ = program(folder, "check", "--fuzz", "2", "--family", "kda", "--jobs", "1")
    assert code == 1
    (line, *_) = [x.strip() for x in out.splitlines() if "kda-dsv4 check --fuzz 1 --seed" in x]
    code, again, _ = program(folder, *line.split()[1:])
    assert code == 1 and line in again


def test_a_batch_that_ends_its_process_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANT_DIES", "1")
    code, out, _ = program(folder, "check", "--fuzz", "5", "--family", "kda", "--jobs", "2")
    assert code == 1 and "the process ended with 3" in out
    assert "of 5 batches right" in out


def test_a_family_without_cases_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANT_NO_CASES", "1")
    code, out, err = program(folder, "check", "--fuzz", "1", "--family", "kda")
    assert (code, out) == (1, "")
    assert err == "kda-dsv4: nothing to fuzz: kda declares no fuzz cases\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "3"], "--seed must come with --fuzz"),
        (["--family", "kda"], "--family must come with --fuzz"),
        (["--fuzz", "1", "--interpret", "H200"], "must come without --interpret"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: list[str], message: str) -> None:
    code, out, err = run_here("check", *arguments)
    assert code == 2 and out == "" and message in err
