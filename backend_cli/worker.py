"""A process that answers lines with lines of JSON, and may hang or die without taking us along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

START_SECONDS = 120.0
END_SECONDS = 20.0
"""For a process whose input or output is closed to end; a driver may keep it longer."""


class WorkerDiedError(Exception):
    """The process ended, or was ended, before it answered."""


class Worker:
    """A Python module run as a process.

    It prints a line when it is ready and then one JSON object for each line it reads.
    """

    def __init__(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        """Raises WorkerDiedError where it does not become ready."""
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (kept for a dead worker)
        # the package may be a source tree that only this process's sys.path knows
        path = [str(Path(__file__).resolve().parent.parent), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # an interrupt from the terminal is for its parent alone
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        )
        self._read(START_SECONDS)

    def ask(self, line: str, timeout: float) -> dict[str, Any]:
        """The answer to one line, which has to come within ``timeout`` seconds.

        Raises:
            WorkerDiedError: the process ended or was ended; it cannot be asked again.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._dead(timeout, timed_out=False)
        found: dict[str, Any] = json.loads(self._read(timeout))
        return found

    def kill(self) -> None:
        """End the process, whatever it does; an `ask` that waits for it raises."""
        self._process.kill()
        self._process.wait(END_SECONDS)

    def close(self) -> None:
        """Let the process end, and wait for it; one that does not is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._end()

    def _end(self) -> str:
        """How the process ended."""
        try:
            return f"the process ended with {self._process.wait(END_SECONDS)}"
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"the process closed its output and was killed after {END_SECONDS:g} s more"

    def _read(self, timeout: float) -> str:
        assert self._process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._process.kill()

        timer = threading.Timer(timeout, expire)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._dead(timeout, timed_out=expired.is_set())
        return line

    def _dead(self, timeout: float, *, timed_out: bool) -> None:
        ended = self._end()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        why = f"no answer within {timeout:g} s" if timed_out else ended
        raise WorkerDiedError(f"{why}{': ' + last[0][:300] if last else ''}")


class Workers:
    """Workers one after another: one is started when it is asked for, and another where it has died
    or was dropped. Used in a ``with`` statement, which kills it on an interrupt."""

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._start = module, list(arguments), environment
        self._worker: Worker | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:
            self.kill()
        self.drop()

    def ask(self, line: str, timeout: float) -> dict[str, Any]:
        """Ask as `Worker.ask` does."""
        try:
            self._worker = self._worker or Worker(*self._start)
            return self._worker.ask(line, timeout)
        except WorkerDiedError:
            self._worker = None
            raise

    def kill(self) -> None:
        """End the worker, if there is one."""
        if self._worker is not None:
            self._worker.kill()

    def drop(self) -> None:
        """Let the worker end: an illegal access leaves it no GPU to go on with."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def ask_all(
    lines: Sequence[str],
    start: Callable[[], Workers],
    jobs: int,
    timeout: float,
    done: Callable[[int, dict[str, Any]], bool],
) -> None:
    """Have ``jobs`` workers answer every line with a ``status`` and what belongs to it.

    Where a worker died, none can be had, or what it says is no answer, the status is ``"failed"``.

    Args:
        start: makes what asks the workers of one thread.
        timeout: for one answer, in seconds.
        done: called with a line's number and its answer, from several threads; ``False`` leaves the
            rest out.

    Raises:
        KeyboardInterrupt: at an interrupt. Workers are killed, and ``done`` is not called any more.
    """
    numbers = iter(range(len(lines)))
    lock = threading.Lock()
    over, interrupted = threading.Event(), threading.Event()
    started: list[Workers] = []

    def take() -> int | None:
        with lock:
            return None if over.is_set() else next(numbers, None)

    def serve() -> None:
        with start() as workers:
            started.append(workers)
            while (number := take()) is not None:
                begin = time.perf_counter()
                try:
                    answer = workers.ask(lines[number], timeout)
                    if answer["status"] == "failed":
                        workers.drop()
                except Exception as error:
                    died = isinstance(error, WorkerDiedError)
                    message = str(error) if died else f"{type(error).__name__}: {error}"
                    seconds = round(time.perf_counter() - begin, 2)
                    answer = {"status": "failed", "seconds": seconds, "message": message}
                with lock:
                    if not interrupted.is_set() and not done(number, answer):
                        over.set()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(jobs, len(lines)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():  # another thread may have got the interrupt's signal
                thread.join(0.2)
    except KeyboardInterrupt:
        with lock:
            over.set()
            interrupted.set()
        for workers in started:
            workers.kill()
        raise


def serve_answers(answer: Any) -> None:
    """The other side: answer every line of stdin with ``answer(line)``, until there are no more."""
    # compilers print on stdout, which is for the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=answers, flush=True)
