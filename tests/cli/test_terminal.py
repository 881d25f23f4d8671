"""Progress where there is no terminal: lines, not too many, and the last one always."""

from __future__ import annotations

import re
import sys

import pytest

from backend_cli import terminal
from backend_cli.main import main
from backend_cli.terminal import Bar


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""  # stdout is for the result
    return captured.err.splitlines()


def test_the_first_and_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("checking", 3) as bar:
        for _ in range(3):
            bar.update(1)
    assert [re.sub(r"\d+ s", "N s", line) for line in lines(capsys)] == [
        "checking  0/3  N s",
        "checking  3/3  N s",
    ]


def test_a_line_is_due_after_some_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with Bar("trials", 100, note="start") as bar:
        for _ in range(25):
            now[0] += 1.0
            bar.update(1, description="two_stage", note=f"at {now[0]:.0f}")
    assert lines(capsys) == [
        "trials  0/100  0 s  start",
        "two_stage  10/100  10 s  at 110",
        "two_stage  20/100  20 s  at 120",
        "two_stage  25/100  25 s  at 125",
    ]


def test_on_a_terminal_there_is_one_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    with Bar("checking", 2) as bar:
        bar.update(2, note="done")
    shown = capsys.readouterr().err
    assert "2/2" in shown and "done" in shown and "━" in shown


def test_a_terminal_of_no_width_is_one_of_an_unknown_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr(sys, "argv", ["kda-dsv4", "seams", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert "Usage: kda-dsv4 seams" in capsys.readouterr().out
