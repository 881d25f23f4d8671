"""``info``, and what every command has in common: errors, exit codes, processes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend_cli import info as info_module
from backend_cli.errors import BadInputError, CliError
from backend_cli.main import app
from backend_cli.rows import oldest
from backend_core import __version__
from backend_core.engines import seams
from backend_core.family import families
from backend_core.target import KNOWN_TARGETS
from tests.cli.program import run

ROOT = Path(__file__).parents[2]


PATH = r"  (\w+) +(?:20[\d-]{8}|not measured)"


def report(*args: str) -> dict:
    code, out, _ = run("info", "--json", *args)
    assert code == 0
    return json.loads(out)


def test_every_row_that_serves_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, without the rows that another one takes every size from."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("info", "--target", "H200")
    assert (code, err) == (0, "")
    assert "strict    off" in out
    assert all(len(line) <= 80 for line in out.partition("strict")[2].splitlines())
    assert "kda on H200, from shipped kda/nvidia_sm90.toml" in out
    (long,) = [line for line in out.splitlines() if "segmented_sm90" in line]
    assert re.split("  +", long)[1:3] == ["length >= 4096, heads <= 8", "segmented_sm90"]
    for family in report("--target", "H200")["targets"][0]["families"]:
        shown = out.partition(f"{family['family']} on H200, from")[2].partition("\n\n")[0]
        for operator in family["operators"]:
            of_operator = shown.partition(f"\n  {operator['operator']} ")[2]
            of_operator = re.split(r"\n  \w", of_operator)[0]
            served = {
                (
                    row["path"],
                    row["provenance"].split(", ")[1] if row["measured"] else "not measured",
                )
                for selection in operator["selections"]
                for row in selection["rows"]
                if not row["refusal"]
            }
            left = any(x["path"] == "upstream" for y in operator["selections"] for x in y["rows"])
            assert left == ("in an engine some calls are left to " in of_operator)
            assert {path for path, _ in served} == set(re.findall(PATH, of_operator))
            dates = {date for _, date in served}
            assert set(re.findall(r"20[\d-]{8}|not measured", of_operator)) <= dates
    assert "torch serves every call, not measured" in run("info", "--target", "cpu")[1]


def test_the_date_is_the_oldest_of_what_was_measured() -> None:
    assert oldest(["2026-11-26", "2026-11-24"]) == "2026-11-24"
    assert oldest(["not measured", "2026-11-26"]) == "2026-11-26 (part)"
    assert oldest(["not measured", "not measured"]) == "not measured"


def test_verbose_shows_what_each_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run("info", "--target", "H200", "--verbose")[1]
    assert "kda on H200, from " in out
    words = " ".join(out.split())
    for operator in report("--target", "H200")["targets"][0]["families"][0]["operators"]:
        for selection in operator["selections"]:
            for row in selection["rows"]:
                assert f": {row['path']} " in words
                why = f"refused: {row['refusal']}" if row["refusal"] else row["provenance"]
                assert why in words
                assert all(f" {name}={value} " in words for name, value in row["params"].items())


def test_json_keys_are_the_documented_ones() -> None:
    found = report()
    assert list(found) == [
        *("schema", "python", "packages", "engines", "machine", "strict", "targets")
    ]
    assert found["schema"] == 3
    assert list(found["packages"]) == ["kda-dsv4-backend", "torch", "triton"]
    assert found["packages"]["kda-dsv4-backend"] == __version__
    engine_keys = {"name", "installed", "tested", "tested_versions", "holds"}
    assert [set(engine) for engine in found["engines"]] == [engine_keys] * 3
    assert set(found["machine"]) == {"vendor", "arch", "num_sms", "name"}
    (target,) = found["targets"]
    assert set(target) == {"vendor", "arch", "num_sms", "name", "families"}
    for family in target["families"]:
        declared = families()[family["family"]]
        assert set(family) == {"family", "title", "layer_kinds", "table", "error", "operators"}
        assert (family["title"], set(family["layer_kinds"])) == (
            declared.title,
            set(declared.layer_kinds),
        )
        names = [operator["operator"] for operator in family["operators"]]
        assert names == list(declared.tables.operator_names)
        row_keys = {"path", "low", "high", "refusal", "params", "features", "measured"}
        row_keys |= {"max_longest", "min_longest", "max_width"}
        for operator in family["operators"]:
            assert set(operator) == {"operator", "grid", "selections"} and operator["selections"]
            for selection in operator["selections"]:
                assert set(selection) == {"requires", "rows"} and selection["rows"]
                assert all(set(row) == row_keys | {"provenance"} for row in selection["rows"])


def test_engines_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.33.0", "sglang": "0.4.0", "transformers": None}
    monkeypatch.setattr(
        "backend_core.engines.Engine.installed", lambda engine: versions[engine.name]
    )
    monkeypatch.setattr(
        seams, "difference", lambda part: None if part.engine == "vllm" else "another"
    )
    found = {engine["name"]: engine for engine in report()["engines"]}
    tested = {name: engine["tested"] for name, engine in found.items()}
    assert tested == {"vllm": True, "sglang": False, "transformers": None}
    assert found["vllm"]["holds"]["KDA layers of Kimi-K3"] is True
    assert set(found["sglang"]["holds"].values()) == {False}
    out = run("info")[1]
    assert "engine    vllm 0.33.0: tested; what is relied on holds\n" in out
    assert "sglang 0.4.0: not tested (0.5.22, 0.5.23 are); left to sglang's own code: flag," in out
    assert "transformers: not installed (tested: " in out


def test_other_targets_on_request() -> None:
    assert [t["name"] for t in report("--target", "mi300x", "--target", "B200")["targets"]] == [
        "MI300X",
        "B200",
    ]
    assert [t["name"] for t in report("--target", "all")["targets"]] == list(KNOWN_TARGETS)


def test_refusals_are_reported() -> None:
    family = report("--target", "H200", "--requires", "teleport")["targets"][0]["families"][0]
    (selection,) = family["operators"][0]["selections"]
    assert selection["requires"] == ["teleport"]
    rows = selection["rows"]
    assert rows and all(row["refusal"] == "lacks teleport" and row["low"] is None for row in rows)
    assert "refused: lacks teleport" in " ".join(run("info", "--requires", "teleport")[1].split())


def test_a_part_without_a_table_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = info_module.Target("nvidia", "sm75", 72, "T4")
    monkeypatch.setattr(info_module, "detect_target", lambda: turing)
    family = report()["targets"][0]["families"][0]
    assert family["table"] is None and "no kda kernel paths for sm75" in family["error"]
    assert "kda on T4: no kda kernel paths for sm75" in run("info")[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["info", "--target", "H900"], "target must be one of H200, A100, "),
        (["info", "--colour"], "No such option: --colour"),
        (["sing"], "No such command 'sing'."),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(args: list[str], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err.startswith(f"kda-dsv4: {message}") and err.count("\n") == 1


def test_a_malformed_user_table_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "kda" / "cpu.toml"
    table.parent.mkdir()
    table.write_text("speed = 9")
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path))
    code, _, err = run("info", "--target", "cpu")
    assert (code, err) == (2, f"kda-dsv4: {table}: unknown key speed\n")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CliError("the server\ndid not answer"), 1, "the server did not answer"),
        (BadInputError("no such file"), 2, "no such file"),
        (KeyError("x"), 1, "internal error, KeyError: 'x'"),
    ],
)
def test_exceptions_become_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(info_module, "build_report", fail)
    assert run("info") == (code, "", f"kda-dsv4: {message}\n")


def test_an_interrupt_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info_module, "build_report", interrupt)
    assert run("info") == (130, "", "")


def test_the_traceback_of_a_bug_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(info_module, "build_report", fail)
    monkeypatch.setenv("KDA_DSV4_TRACEBACK", "1")
    result = CliRunner().invoke(app, ["info"])
    assert isinstance(result.exception, KeyError)


def test_demo_without_its_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run("demo") == (
        1,
        "",
        "kda-dsv4: the demo needs torch and transformers: pip install '.[cpu]' in the clone\n",
    )


def test_version_and_help() -> None:
    assert run("--version") == (0, f"{__version__}\n", "")
    code, out, err = run()
    assert (code, err) == (0, "") and "info" in out and "demo" in out


def test_as_a_process() -> None:
    command = [sys.executable, "-m", "backend_cli.main"]
    bad = subprocess.run([*command, "info", "--target", "H900"], cwd=ROOT, capture_output=True)
    assert bad.returncode == 2 and bad.stdout == b""
    assert bad.stderr.startswith(b"kda-dsv4: target must be") and bad.stderr.count(b"\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_early_is_no_error_of_ours(unbuffered: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "backend_cli.main", "info", "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as stderr:
        assert stderr.read() == b""
    assert process.wait() == 1


def test_info_needs_no_torch_and_no_triton() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['triton'] = None;"
        "sys.argv[1:] = ['info', '--json', '--target', 'all'];"
        "from backend_cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert json.loads(done.stdout)["machine"]["vendor"] == "cpu"
