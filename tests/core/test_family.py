"""Families are declared: the list, what a declaration must hold, and one of another package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backend_cli import bench as bench_module
from backend_cli import serve as serve_module
from backend_cli.tune import command as tune_module
from backend_cli.tune import worker as tune_worker
from backend_core import family as family_module
from backend_core.engines import Engine
from backend_core.family import PACKAGES, families
from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from tests.cli.program import assert_one_sentence, run
from tests.core import toy

ROOT = Path(__file__).parents[2]
H200 = KNOWN_TARGETS["H200"]


def program(folder: Path, *args: str) -> tuple[int, str, str]:
    """``kda-dsv4 ARGS`` as a process of its own, with ``folder`` on its path."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "backend_cli.main", *args]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process with the toy family installed."""
    folder = toy.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KDA_DSV4_CONFIG_DIR", raising=False)
    families.cache_clear()
    yield folder
    families.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_backend"]:
        del sys.modules[name]


def test_ours_are_in_the_order_of_the_list() -> None:
    assert [f"{name}_backend" for name in families()][: len(PACKAGES)] == list(PACKAGES)


def test_a_family_of_another_package_is_in_info_and_check(tmp_path: Path) -> None:
    folder = toy.install(tmp_path)
    code, out, err = program(folder, "info", "--json", "--target", "H200")
    assert code == 0, err
    found = json.loads(out)["targets"][0]["families"]
    assert [f["family"] for f in found] == [*families(), "toy"]
    shown = found[-1]
    assert (shown["title"], shown["layer_kinds"]) == ("Toy attention", ["mla"])
    assert shown["table"] == str(folder / "toy_backend" / "tables" / "toy" / "nvidia_sm90.toml")
    (operator,) = shown["operators"]
    (row,) = operator["selections"][0]["rows"]
    assert (operator["operator"], operator["grid"], row["path"]) == ("sum", "rows", "tiled")
    assert row["params"] == {"block": 32, "num_warps": 4}
    code, out, err = program(folder, "check", "--jobs", "1", "--json", str(tmp_path / "check.json"))
    assert code == 0, out + err
    rows = json.loads((tmp_path / "check.json").read_text())["results"]
    (made,) = (row for row in rows if row["family"] == "toy")
    assert (made["operator"], made["path"], made["case"]) == ("sum", "torch", "small")
    assert (made["status"], made["error"], made["allowed"]) == ("ok", 0.25, 0.5)


def test_a_family_of_another_package_is_tuned(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real worker, in this process: its calls return their time, for want of a GPU."""

    class InThisProcess:
        def __init__(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
            assert module == "backend_cli.tune.worker"
            self.environment = environment

        def ask(self, line: str, timeout: float) -> dict[str, Any]:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in self.environment.items():
                    patch.setenv(name, value)
                return tune_worker.answer(line)

        def close(self) -> None:
            pass

    monkeypatch.setattr(tune_module, "Worker", InThisProcess)
    for module in (tune_module, tune_worker):
        monkeypatch.setattr(module, "detect_target", lambda: H200)
    monkeypatch.setattr(tune_worker, "graph_time_ms", lambda call: call())
    code, out, err = run("tune", "--family", "toy")
    assert code == 0, err
    assert "toy sum tiled open: block=64 (total " in out
    table = load_table(families()["toy"].tables, H200)
    assert table.source == tmp_path / "config" / "kda-dsv4" / "toy" / "nvidia_sm90.toml"
    (row,) = table.rows
    assert row.params_dict() == {"block": 64, "num_warps": 4} and row.measured
    trials = json.loads(table.source.with_suffix(".json").read_text())["trials"]
    blocks = [trial["params"]["block"] for trial in trials]
    assert blocks == [32, 16, 64, 64] and {trial["grid"] for trial in trials} == {128}


def test_a_family_of_another_package_is_served_and_benchmarked(
    beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (serve_module, bench_module):
        monkeypatch.setattr(module, "detect_target", lambda: H200)
    monkeypatch.setattr(Engine, "installed", lambda engine: "0.33.0")
    monkeypatch.setattr(serve_module, "_program", lambda engine: engine)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "toy"}')
    code, out, err = run("serve", "model", "--engine", "vllm", "-tp", "2", "--dry-run")
    assert code == 0, err
    assert "Toy attention:\ntoy paths of 2 ranks\n" in out
    assert out.splitlines()[-1] == "vllm serve model --attention-backend TOY -tp 2"
    code, out, err = run("bench", "toy-sum")
    assert code == 0, err
    assert "toy-sum on G, 1 shapes" in out and "peer" in out


def test_the_family_option_knows_it(beside: Path) -> None:
    code, _, err = run("tune", "--family", "mla")
    known = ", ".join([*(p.removesuffix("_backend") for p in PACKAGES), "toy"])
    assert (code, err) == (2, f"kda-dsv4: --family must be one of {known}, got 'mla'\n")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("toy_backend.nothing:FAMILY", "cannot be imported: No module named 'toy_backend.nothing'"),
        ("toy_backend.family:refusal", "must be a Family, got function"),
        ("kda_backend.family:FAMILY", "must hold a family with a name of its own, got kda"),
    ],
)
def test_a_package_that_names_no_family_is_one_sentence(
    value: str, message: str, beside: Path
) -> None:
    entry = beside / "toy_backend-1.0.dist-info" / "entry_points.txt"
    entry.write_text(f"[{family_module.GROUP}]\ntoy = {value}\n")
    code, out, err = run("info")
    assert (code, out) == (1, "") and f"entry point toy = {value}" in err and message in err
    assert_one_sentence(err)


def test_the_parts_of_a_declaration_belong_together() -> None:
    kda = families()["kda"]
    with pytest.raises(ValueError, match="tables of family mla must be its own, got those of kda"):
        replace(kda, name="mla")
    with pytest.raises(
        ValueError, match=r"layer_kinds of family kda must be among .*, got softmax"
    ):
        replace(kda, layer_kinds=frozenset({"softmax"}))
