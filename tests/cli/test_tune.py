"""``tune``: the search, the table it writes, and that the loader takes it before the shipped one.

What a trial measures needs a GPU; here its questions are answered by functions of the parameters.
"""

from __future__ import annotations

import copy
import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend_cli import worker
from backend_cli.tune import command as tune_module
from backend_cli.tune import worker as tune_worker
from backend_cli.tune.search import render, search, sweeps
from backend_core import __version__
from backend_core.family import families
from backend_core.tables.load import PathTable, load_table, shipped_directory
from backend_core.tables.schema import parse_table, read_document
from backend_core.target import KNOWN_TARGETS, detect_target
from dsv4_backend import reference
from dsv4_backend.testing import steps
from tests.cli.program import assert_one_sentence, run

H200 = KNOWN_TARGETS["H200"]
GPUS = [target for target in KNOWN_TARGETS.values() if target.vendor != "cpu"]


FAMILIES = list(families())
TUNED = [name for name in FAMILIES if name != "block_sparse"]  # which has nothing to try


def table_of(family: str, target: Any = H200) -> PathTable:
    return load_table(families()[family].tables, target, directory=shipped_directory())


def shipped(family: str, target: Any = H200) -> dict[str, Any]:
    return read_document(table_of(family, target).source)


def sweeps_of(family: str, operator: str, path: str) -> list[Any]:
    """The searches of the first row of a path."""
    table = table_of(family)
    row = next(n for n, r in enumerate(table.rows) if (r.operator, r.name) == (operator, path))
    return [sweep for sweep in sweeps(families()[family], table) if sweep.row == row]


def cost(params: dict[str, Any]) -> float:
    """Least where every parameter is the largest: 1 ms over the product of all numbers."""
    return 1.0 / math.prod(v for v in params.values() if type(v) is int and v > 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.name)
def test_rendering_a_table_changes_nothing(family: str, target: Any, tmp_path: Path) -> None:
    try:
        table = table_of(family, target)
    except LookupError:
        return
    file = tmp_path / table.source.name
    file.write_text(render(shipped(family, target), "A comment."))
    assert parse_table(file, table.schema) == parse_table(table.source, table.schema)


@pytest.mark.parametrize("family", TUNED)
def test_every_tunable_row_is_searched(family: str) -> None:
    table, declared = table_of(family), families()[family]
    todo = list(sweeps(declared, table))
    searched = {(sweep.row, sweep.measure) for sweep in todo}
    wanted = {
        (n, measure) for n, row in enumerate(table.rows) for measure in declared.tune_space(row)
    }
    assert searched == wanted and searched
    for sweep in todo:
        row = table.rows[sweep.row]
        assert sweep.space and set(sweep.space) <= set(row.params_dict())
        assert sweep.grid == row.max_grid or row.max_grid is None
        if row.max_grid is None:
            assert sweep.grid >= declared.open_grid[row.operator]


def test_a_search_space_with_an_unknown_parameter_is_refused() -> None:
    wrong = replace(families()["kda"], tune_space=lambda path: {"speed": {"warp": (9,)}})
    with pytest.raises(ValueError, match="must name its parameters, got warp"):
        list(sweeps(wrong, table_of("kda")))


def test_the_search_finds_the_best_value_of_each_parameter() -> None:
    document = shipped("kda")
    before = copy.deepcopy(document)
    (sweep,) = sweeps_of("kda", "recurrent", "recurrent")

    def ask(candidate: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
        return {"ms": cost(candidate["path"][question["row"]]["params"]), "message": None}

    best, trials = search(document, [sweep], ask, 32)
    params = best["path"][sweep.row]["params"]
    for name, values in sweep.space.items():
        assert params[name] == max(values)
    assert document == before  # the shipped table is not touched
    assert trials[0]["check"] == "quick" and trials[-1]["check"] == "all"
    others = [row for n, row in enumerate(best["path"]) if n != sweep.row]
    assert others == [row for n, row in enumerate(before["path"]) if n != sweep.row]


def test_what_is_wrong_or_hardly_faster_is_not_taken() -> None:
    document = shipped("kda")
    (sweep,) = sweeps_of("kda", "recurrent", "recurrent")
    shipped_params = document["path"][sweep.row]["params"]

    def ask(candidate: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
        params = candidate["path"][question["row"]]["params"]
        if params["block_v"] == 64:
            return {"ms": None, "message": "ValueError: small: error 1.0e-01, allowed 5.0e-03"}
        return {"ms": 1.0 if params == shipped_params else 0.99, "message": None}

    best, trials = search(document, [sweep], ask, 32)
    assert best == document
    assert any(trial["ms"] is None for trial in trials)


def test_a_winner_that_fails_the_whole_check_is_dropped() -> None:
    document = shipped("kda")
    (sweep,) = sweeps_of("kda", "recurrent", "recurrent")

    def ask(candidate: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
        if question["check"] == "all":
            return {"ms": None, "message": "wrong"}
        return {"ms": cost(candidate["path"][question["row"]]["params"]), "message": None}

    assert search(document, [sweep], ask, 32)[0] == document


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU whose worker answers by `cost`; it reads the table it was given, as the real one."""
    questions: list[dict[str, Any]] = []

    class FakeWorker:
        def __init__(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
            assert (module, arguments) == (tune_module.WORKER, [])
            self.folder = Path(environment["KDA_DSV4_CONFIG_DIR"])

        def ask(self, line: str, timeout: float) -> dict[str, Any]:
            question = json.loads(line)
            questions.append(question)
            schema = families()[question["family"]].tables
            table = load_table(schema, H200, directory=self.folder)
            return {"ms": cost(table.rows[question["row"]].params_dict()), "message": None}

        def close(self) -> None:
            pass

    monkeypatch.setattr(worker, "Worker", FakeWorker)
    monkeypatch.setattr(tune_module, "detect_target", lambda: H200)
    return SimpleNamespace(questions=questions, folder=tmp_path / "config" / "kda-dsv4")


def test_the_table_is_found_before_the_shipped_one(tuned: SimpleNamespace) -> None:
    code, out, _ = run("tune", "--heads", "8")
    assert code == 0, out
    assert {question["heads"] for question in tuned.questions} == {8}
    for family in TUNED:
        table = load_table(families()[family].tables, H200)
        assert table.source == tuned.folder / family / "nvidia_sm90.toml"
        record = json.loads(table.source.with_suffix(".json").read_text())
        assert record["release"] == __version__ and record["trials"]
    rows = load_table(families()["kda"].tables, H200).rows
    (recurrent,) = (row for row in rows if row.name == "recurrent")
    assert recurrent.params.num_warps == 4 and recurrent.measured
    assert "nvidia_sm90.json" in recurrent.provenance and "H200" in recurrent.provenance
    code, out, _ = run("info", "--target", "H200")
    assert code == 0 and f"from {tuned.folder}/kda/nvidia_sm90.toml" in " ".join(out.split())


def test_a_stop_keeps_the_sweeps_that_are_over(
    tuned: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sweeps(families()["dsv4"], table_of("dsv4"))
    first, second, *_ = {sweep.row: sweep for sweep in found}.values()
    ask = worker.Worker.ask

    def stop(asked: Any, line: str, timeout: float) -> dict[str, Any]:
        if json.loads(line)["row"] == second.row:
            raise KeyboardInterrupt
        return ask(asked, line, timeout)

    monkeypatch.setattr(worker.Worker, "ask", stop)
    run("tune", "--family", "dsv4", "--heads", "8", "--output-dir", str(tmp_path / "half"))
    file = tmp_path / "half" / "dsv4" / "nvidia_sm90.toml"
    assert parse_table(file, families()["dsv4"].tables)
    rows, record = tomllib.loads(file.read_text())["path"], file.with_suffix(".json")
    assert rows[first.row]["source"] == str(record) != rows[second.row]["source"]
    trials = json.loads(record.read_text())["trials"]
    assert {trial["row"] for trial in trials} == {first.row}


def test_tables_elsewhere_are_announced(tuned: SimpleNamespace, tmp_path: Path) -> None:
    code, out, _ = run("tune", "--family", "dsv4", "--output-dir", str(tmp_path / "mine"))
    assert code == 0 and (tmp_path / "mine" / "dsv4" / "nvidia_sm90.toml").is_file()
    assert f"set KDA_DSV4_CONFIG_DIR={tmp_path / 'mine'} to use it" in out
    assert not tuned.folder.exists()


def test_a_table_of_another_release_is_refused(tuned: SimpleNamespace) -> None:
    assert run("tune", "--family", "kda")[0] == 0
    file = tuned.folder / "kda" / "nvidia_sm90.toml"
    file.write_text(file.read_text().replace(f'"{__version__}"', '"0.0.9"'))
    code, _, err = run("info", "--target", "H200")
    assert code == 2 and "written for release 0.0.9, this is" in err
    assert "run kda-dsv4 tune again, or remove it" in err
    assert_one_sentence(err)
    assert run("tune", "--family", "kda")[0] == 0  # which repairs it
    assert run("info", "--target", "H200")[0] == 0


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--family", "gqa"], 2, f"--family must be one of {', '.join(FAMILIES)}, got 'gqa'"),
        (["--heads", "0"], 2, "Invalid value for '--heads'"),
        (["--timeout", "inf"], 2, "Invalid value for '--timeout'"),
        (["--output-dir", f"{__file__}/tables"], 2, "cannot write"),
    ],
)
def test_bad_arguments(tuned: SimpleNamespace, args: list[str], code: int, message: str) -> None:
    found, out, err = run("tune", *args)
    assert (found, out) == (code, "") and message in err
    assert_one_sentence(err)
    assert not tuned.questions


# what tune measures of the kernels, called here on the torch paths: (operator, measure)
KDA_MEASURES = {
    (row.operator, measure)
    for row in table_of("kda").rows
    for measure in families()["kda"].tune_space(row)
}
COMPRESSOR_MEASURES = {
    (row.operator, measure)
    for row in table_of("dsv4").rows
    for measure in families()["dsv4"].tune_space(row)
}


def row_here(family: str, operator: str) -> Any:
    rows = load_table(families()[family].tables, detect_target()).rows
    return next(row for row in rows if row.operator == operator)


@pytest.mark.parametrize(("operator", "measure"), sorted(KDA_MEASURES))
def test_kda_calls_are_of_the_asked_size(operator: str, measure: str) -> None:
    kda = families()["kda"]
    result = kda.measure(row_here("kda", operator), detect_target(), measure, 6, 2)()
    o = result[0] if isinstance(result, tuple) else result
    tokens = {"prefill": (1, 192), "recurrent": (3, 1), "records": (12,)}.get(measure, (3,))
    assert isinstance(o, torch.Tensor)
    assert o.shape == (*tokens, 2, 128) and bool(o.isfinite().all()) and bool(o.any())


@pytest.mark.parametrize(("operator", "measure"), sorted(COMPRESSOR_MEASURES - {("v41", "v41")}))
def test_compressor_calls_store_a_record_for_each_window(
    operator: str, measure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make_step = steps.make_step

    def remember(*args: Any) -> Any:
        made.append(make_step(*args))
        return made[-1]

    monkeypatch.setattr(steps, "make_step", remember)
    call = families()["dsv4"].measure(row_here("dsv4", operator), detect_target(), measure, 3, 32)
    call()
    (step,) = made
    assert step.ends == 3
    slots = torch.arange(step.ends)
    data, _ = reference.load([step.cache], slots, step.layer.spec)
    assert bool((data != 0).any(1).all())


def test_calls_of_v41_store_both_records(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make_v41 = steps.make_v41

    def remember(*args: Any) -> Any:
        made.append(make_v41(*args))
        return made[-1]

    monkeypatch.setattr(steps, "make_v41", remember)
    row = row_here("dsv4", "v41")
    families()["dsv4"].measure(row, detect_target(), "v41", 6, 32)()
    (step,) = made
    assert step.ends == 3
    spec = step.call.layer.spec
    for cache, records in ((step.call.cache, spec.main), (step.call.index_cache, spec.index)):
        data, _ = reference.load([cache], torch.arange(3), records)
        assert bool((data != 0).any(1).all())


def test_a_row_that_cannot_run_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    question = {"family": "kda", "row": 99, "measure": "prefill", "grid": 1, "heads": 1}
    found = tune_worker.answer(json.dumps(question | {"check": "quick"}))
    assert found["ms"] is None and found["message"].startswith("IndexError")
