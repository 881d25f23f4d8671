"""A worker that dies, hangs or only closes its output is an error, never a wait without end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

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


def test_an_interrupt_ends_workers_and_what_they_would_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line is answered at once, the second never, during which the interrupt comes."""
    answers = "import json\nprint(json.dumps({'status': 'ok'}), flush=True)\n"
    source = f"{READY}{answers}sys.stdin.readline()\ntime.sleep(600)\n"
    (tmp_path / "answers_once.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found: list[tuple[int, dict[str, Any]]] = []
    started: list[Worker] = []
    upstream = Worker.ask

    def ask(self: Worker, line: str, timeout: float) -> dict[str, Any]:
        started.append(self)
        if line == "1":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return upstream(self, line, timeout)

    def done(number: int, answer: dict[str, Any]) -> bool:
        found.append((number, answer))
        return True

    monkeypatch.setattr(Worker, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        worker.ask_all(["0", "1", "2"], lambda: worker.Workers("answers_once"), 1, 100.0, done)
    assert found == [(0, {"status": "ok"})]
    assert len(started) == 2 and started[1]._process.poll() is not None


def test_an_interrupt_ends_a_single_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in a session of its own, so that the terminal's interrupt does not reach it first."""
    (tmp_path / "answers_nothing.py").write_text(f"{READY}time.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(worker, "END_SECONDS", 30.0)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt), worker.Workers("answers_nothing") as workers:
        workers._worker = Worker("answers_nothing", [], {})
        process = workers._worker._process
        assert os.getsid(process.pid) == process.pid
        raise KeyboardInterrupt
    assert process.poll() == -signal.SIGKILL and time.monotonic() - begin < 30.0
