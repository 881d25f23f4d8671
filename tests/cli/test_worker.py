"""A worker that dies, hangs or only closes its output is an error, never a wait without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_cli import worker
from backend_cli.worker import Worker, WorkerDiedError

READY = "import os, sys, time\nprint('ready', flush=True)\nsys.stdin.readline()\n"


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("sys.exit(3)", "the process ended with 3"),
        ("time.sleep(600)", "no answer within 2 s"),
        ("os.close(1); time.sleep(600)", "closed its output and was killed after 0.5 s more"),
    ],
)
def test_a_worker_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, message: str
) -> None:
    (tmp_path / "answers_nothing.py").write_text(f"{READY}{then}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker, "END_SECONDS", 0.5)
    asked = Worker("answers_nothing", [], {})
    with pytest.raises(WorkerDiedError, match=message):
        asked.ask("1", timeout=2.0)
    assert asked._process.poll() is not None
