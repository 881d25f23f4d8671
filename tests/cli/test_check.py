"""``check``: the whole program on this machine, and that it sees what it is there to see."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_cli import worker
from backend_cli.check import command as check_module
from backend_cli.check.probes import probes
from backend_core.family import families
from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS, Target, detect_target
from dsv4_backend.testing import check_cases as check_dsv4
from kda_backend import torch_steps
from kda_backend.prefill import torch as torch_path
from kda_backend.selection import select
from kda_backend.testing import checks as check_kda
from tests.cli.program import assert_one_sentence, run

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CPU = torch.device("cpu")
DEVICE = torch.device("cuda") if torch.cuda.is_available() else CPU
# without a GPU, what the Hopper table chooses is interpreted
TARGET = detect_target() if torch.cuda.is_available() else KNOWN_TARGETS["H200"]


def test_every_call_is_right_here(tmp_path: Path) -> None:
    file = tmp_path / "new" / "check.json"
    code, out, _ = run("check", "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 0, out
    assert report["schema"] == check_module.SCHEMA and report["failures"] == 0
    (target,) = report["info"]["targets"]
    assert [family["table"] for family in target["families"] if family["table"]] == [
        f"shipped {family}/{detect_target().key}.toml" for family in families()
    ]
    made = [row for row in report["results"] if row["status"] == "ok"]
    assert report["checked"] == len(made) > 0
    assert all(row["error"] <= row["allowed"] and row["seconds"] >= 0 for row in made)
    assert {(row["family"], row["operator"]) for row in report["results"]} == {
        (name, operator)
        for name, family in families().items()
        for operator in family.tables.operator_names
    }
    assert out.splitlines()[-1].startswith(f"check: {len(made)} of {len(made)} calls right")


@pytest.mark.parametrize("target", KNOWN_TARGETS.values(), ids=lambda target: target.name)
def test_every_row_of_every_table_has_probes(target: Target) -> None:
    for name, family in families().items():
        todo = [p for p in probes(target, interpreted=False) if p.family == name]
        rows = load_table(family.tables, target).rows
        probed = {(p.row.operator, p.row.name, p.row.params, p.row.features) for p in todo}
        assert probed == {(row.operator, row.name, row.params, row.features) for row in rows}


def _row(family: str, operator: str) -> tuple[Target, object]:
    cpu = KNOWN_TARGETS["cpu"]
    rows = load_table(families()[family].tables, cpu).rows
    return cpu, next(row for row in rows if row.operator == operator)


@pytest.mark.parametrize(
    ("operator", "module"), [("prefill", torch_path), ("recurrent", torch_steps)]
)
def test_a_transposed_state_is_wrong(
    operator: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, row = _row("kda", operator)
    right = getattr(module, operator)

    def transposed(call):
        pool = call.state.read
        pool.copy_(pool.mT.clone())
        right(call)

    monkeypatch.setattr(module, operator, transposed)
    error, allowed = check_kda.check_cases(row)["small"](cpu, CPU)
    assert error > 10 * allowed


@pytest.fixture
def unbound() -> Iterator[None]:
    """Selections bind their paths anew, in the test and after it."""
    select.cache_clear()
    yield
    select.cache_clear()


@pytest.mark.usefixtures("unbound")
def test_a_neighbour_s_slot_written_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, row = _row("kda", "prefill")

    right = torch_path.prefill

    def greedy(call):
        right(call)
        call.state.write[0] += 1

    monkeypatch.setattr(torch_path, "prefill", greedy)
    with pytest.raises(RuntimeError, match="a state slot outside the call was written"):
        check_kda.check_cases(row)["small"](cpu, CPU)


def test_an_operator_that_forgets_the_decay_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, row = _row("kda", "recurrent")
    right = check_kda.kda_recurrent

    def no_decay(tokens, gate, *rest, **options):
        gate = gate._replace(a_log=torch.full_like(gate.a_log, -30.0))
        return right(tokens, gate, *rest, **options)

    monkeypatch.setattr(check_kda, "kda_recurrent", no_decay)
    error, allowed = check_kda.run(row, cpu, CPU, check_kda.hard("recurrent"))
    assert error > 10 * allowed


def test_a_step_without_its_convolution_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, row = _row("kda", "decode_step")
    case = check_kda.check_cases(row)["convolution, norm"]
    error, allowed = case(cpu, CPU)
    assert error <= allowed
    right = check_kda.kda_decode_step

    def unweighted(*values, conv, **options):
        conv = conv._replace(weight=torch.ones_like(conv.weight))
        return right(*values, conv=conv, **options)

    monkeypatch.setattr(check_kda, "kda_decode_step", unweighted)
    error, allowed = case(cpu, CPU)
    assert error > 10 * allowed


def test_a_draft_that_commits_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, row = _row("kda", "verify")
    right = check_kda.kda_verify_step

    def committing(tokens, gate, state, draft, **options):
        o = right(tokens, gate, state, draft, **options)
        state.write[5] = draft.states[0, -1]
        return o

    monkeypatch.setattr(check_kda, "kda_verify_step", committing)
    with pytest.raises(RuntimeError, match="a state slot outside the call was written"):
        check_kda.run_draft(row, cpu, CPU)


def test_a_compressor_without_its_ape_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, row = _row("dsv4", "indexer_decode")
    spec = check_dsv4._spec("indexer", "paged", False)
    assert check_dsv4._steps(row, "paged", spec, False, cpu, CPU) == 0.0
    moved = check_dsv4.to_device

    def without_ape(*args):
        call = moved(*args)
        call.layer = replace(call.layer, ape=0 * call.layer.ape)
        return call

    monkeypatch.setattr(check_dsv4, "to_device", without_ape)
    with pytest.raises(RuntimeError, match=r"state rows differ|more than one step"):
        check_dsv4._steps(row, "paged", spec, False, cpu, CPU)


WORKER = """
    import json, os, signal, sys, time
    print("ready", flush=True)
    for line in sys.stdin:
        if int(line) == 1:
            BEHAVIOUR
        print(json.dumps({"status": "ok", "error": 0.0, "allowed": 1.0, "seconds": 0.1,
                          "message": None}), flush=True)
"""


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", f"the process ended with {-signal.SIGSEGV}"),
        ("sys.exit('out of registers')", "the process ended with 1: out of registers"),
    ],
)
def test_a_kernel_that_takes_its_process_along(
    behaviour: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "worker.py"
    stand_in.write_text(textwrap.dedent(WORKER).replace("BEHAVIOUR", behaviour))
    start = worker.subprocess.Popen

    def started(command: list[str], **options: object) -> object:
        return start([sys.executable, str(stand_in)], **options)

    monkeypatch.setattr(worker.subprocess, "Popen", started)
    report = check_module.run(KNOWN_TARGETS["cpu"], False, 1, 1.0)
    rows = [row for row in report["results"] if row["status"] != "skipped"]
    assert [row["status"] for row in rows] == ["ok", "failed", *["ok"] * (len(rows) - 2)]
    assert rows[1]["message"] == message and report["failures"] == 1


def test_a_call_without_a_process_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that was to be made and was not: none of them is right."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(worker.subprocess, "Popen", refuse)
    report = check_module.run(KNOWN_TARGETS["cpu"], False, 2, 1.0)
    assert report["failures"] == report["checked"] > 0
    failed = [row["message"] for row in report["results"] if row["status"] == "failed"]
    assert "Resource temporarily unavailable" in failed[0]


def test_an_interrupted_check_says_what_it_has_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def two_answers(lines: list[str], *more: Any) -> None:
        more[-1](0, {"status": "ok", "error": 0.0, "allowed": 1.0, "seconds": 0.1, "message": None})
        more[-1](1, {"status": "wrong", "error": 2.0, "allowed": 1.0, "message": "error 2.0"})
        raise KeyboardInterrupt

    monkeypatch.setattr(check_module, "ask_all", two_answers)
    file = tmp_path / "check.json"
    code, out, _ = run("check", "--json", str(file))
    report = json.loads(file.read_text())
    assert code == 130 and report["interrupted"]
    assert (report["checked"], report["failures"]) == (2, 1)
    left = [row for row in report["results"] if row["message"] == "not run: interrupted"]
    assert f"interrupted: {len(left)} calls were not made" in out and "1 of 2 calls right" in out


def test_every_row_of_a_table_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found on an H200, with two calls made wrong: exit code 1, and all is kept."""
    report = json.loads((RESULTS / "check_h200.json").read_text())
    first, second = report["results"][:2]
    first |= {"status": "wrong", "error": 2 * first["allowed"], "message": "error 1.0e-02"}
    second |= {"status": "failed", "error": None, "message": "a kernel hangs"}
    report["failures"] = 2
    monkeypatch.setattr(check_module, "run", lambda *_: report)
    file = tmp_path / "check.json"
    code, out, _ = run("check", "--json", str(file))
    assert json.loads(file.read_text()) == report
    assert code == 1 and all(len(line) <= 80 for line in out.splitlines())
    lines = [line.split() for line in out.splitlines() if line.startswith("  ")]
    rows = {
        (row["operator"], row["path"], row["grids"], str(row["params"]), str(row["message"])[:7])
        for row in report["results"][2:]
    }
    assert len(lines) - 1 == len(rows)
    of_first = [row for row in report["results"] if row["path"] == first["path"]]
    right = f"{len(of_first) - 2} of {len(of_first)} right"
    assert lines[1][-5:] == ["2.00", *right.split()]
    assert f"wrong: kda prefill {first['path']} small: error 1.0e-02" in out
    calls = [line for line in run("check", "--verbose")[1].splitlines() if line[:6] == "      "]
    made = [row for row in report["results"] if row["error"] is not None]
    assert [line.split()[0] for line in calls[1:]] == [row["status"] for row in made]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--interpret", "H900"], "--interpret must be one of H200, "),
        (["--jobs", "0"], "Invalid value for '--jobs'"),
    ],
)
def test_bad_input(args: list[str], message: str) -> None:
    code, out, err = run("check", *args)
    assert (code, out) == (2, "") and message in err
    assert_one_sentence(err)


def test_a_json_that_cannot_be_written_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results are printed all the same: a run takes minutes."""

    def checked(*_: object) -> Any:
        (tmp_path / "new").write_text("")
        return json.loads((RESULTS / "check_h200.json").read_text())

    monkeypatch.setattr(check_module, "run", checked)
    code, out, err = run("check", "--json", str(tmp_path / "new" / "check.json"))
    assert code == 2 and "cannot write" in err
    assert "calls right" in out.splitlines()[-1]


def test_a_json_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("check", "--json", str(tmp_path / "file" / "check.json"))
    assert (code, out) == (2, "") and "cannot write" in err
    assert_one_sentence(err)


def test_a_machine_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = Target("nvidia", "sm75", 72, "T4")
    monkeypatch.setattr(check_module, "detect_target", lambda: turing)
    code, _, err = run("check")
    assert code == 1
    assert err.startswith("kda-dsv4: nothing to check, upstream code runs on this machine: no kda")
