"""Running the program in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from backend_cli.main import app

TEN = Path(__file__).with_name("gsm8k_ten.jsonl")


def run(*args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``kda-dsv4 ARGS``."""
    result = CliRunner().invoke(app, list(args), prog_name="kda-dsv4")
    return result.exit_code, result.stdout, result.stderr


def assert_one_sentence(error: str) -> None:
    assert error.startswith("kda-dsv4: ") and error.count("\n") == 1, error
