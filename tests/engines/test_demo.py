"""The demo, run as the program runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_cli import demo
from backend_cli.errors import BadInputError, CliError
from backend_core.family import families
from dsv4_backend import reference
from dsv4_backend.engines import transformers as dsv4
from kda_backend.engines import transformers as kda

TINY = "DeepSeek-V4's KV compressor (tiny model, random weights)"


def test_report_and_last_line(
    capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    assert demo.run(2) == 0
    assert not [str(x.message) for x in recwarn if x.category is FutureWarning]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "demo: accuracy 1.000, upstream 1.000, 2 questions"
    assert lines[-2].startswith(f"{TINY}: 16 of 16 tokens equal")
    text = "\n".join(lines)
    assert all(command in text for command in demo.SERVE)
    assert not kda.is_enabled() and not dsv4.is_enabled()


def test_the_commands_that_it_prints_are_those_of_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "engines" / "vllm.md"
    assert demo.SERVE[0] in page.read_text(encoding="utf-8").splitlines()


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, generate = set(), demo.generate

    def counting(*arguments: Any) -> list[int]:
        threads.add(torch.get_num_threads())
        return generate(*arguments)

    monkeypatch.setattr(demo, "generate", counting)
    torch.set_num_threads(2)
    assert demo.run(1, json_output=True) == 0
    assert threads == {demo.THREADS} and torch.get_num_threads() == 2  # bounded, and put back
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == demo.SCHEMA and report["questions"] == 1
    assert report["accuracy"] == report["upstream_accuracy"] == report["token_agreement"] == 1.0
    assert report["tokens_per_second"] > 0 and report["upstream_tokens_per_second"] > 0
    assert report["tiny_equal_tokens"] == {families()["dsv4"].title: report["tiny_tokens"]}


@pytest.mark.parametrize("count", [0, -1, 10_000])
def test_a_number_of_questions_out_of_range_is_bad_input(count: int) -> None:
    with pytest.raises(BadInputError, match=f"questions must number 1 to 320, got {count}"):
        demo.run(count)


def test_without_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "RECALL", tmp_path)
    with pytest.raises(CliError, match="run the demo from a clone"):
        demo.run()


def test_wrong_answers_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "generate", lambda *_: [ord("x"), ord("\n")])
    assert demo.run(1) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "demo: accuracy 0.000, upstream 0.000, 1 questions"


def test_a_wrong_compressor_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reference, "rope", lambda x, *_: x)
    assert demo.run(1) == 1
    shown = capsys.readouterr().out.splitlines()[-2]
    assert shown.startswith(f"{TINY}: ") and "16 of 16" not in shown


def test_agreement_counts_missing_tokens() -> None:
    assert demo.agreement([[1, 2, 3]], [[1, 2, 3]]) == 1.0
    assert demo.agreement([[1, 2, 3, 4]], [[1, 5, 3]]) == 0.5
    assert demo.agreement([[1], [2, 3]], [[1], [2, 4]]) == pytest.approx(2 / 3)
