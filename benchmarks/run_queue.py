"""What is to be measured next, run on this machine's GPUs one job after another until time is up.

    python -m benchmarks.run_queue --list
    python -m benchmarks.run_queue DIR [JOB ...] --seconds 560 [--set engine=FOLDER ...]

``queue.toml`` beside this file has the jobs, most wanted first, and they start in this order: each
when the share of a GPU that it needs is free, none that takes longer than is left. One that takes
twice its time, or that is running when time is up, is ended with all its processes. DIR keeps each
job's log, the result files that it wrote and ``queue.json``, which is written after each job.
Called again with the same DIR it leaves out what is done: a queue can be cut into several calls.
It uses the GPUs that CUDA_VISIBLE_DEVICES names, so that two queues can share a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
QUEUE = Path(__file__).with_name("queue.toml")
TICK = 0.2


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        command: as in a shell, from the repository's root; ``{python}`` is this interpreter, other
            fields are given by ``--set``.
        seconds: how long it takes on an H200, starts of engines included.
        results: files that it writes, from the repository's root.
        beside: how many jobs like it fit on one GPU; 1 for whatever is timed.
        gpus: GPUs that it needs.
        after: what has to be looked at or changed when the result is there.
    """

    name: str
    command: str
    seconds: float
    results: tuple[str, ...] = ()
    beside: int = 1
    gpus: int = 1
    after: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9-]+", self.name):
            raise ValueError(f"a name must be of a-z, 0-9 and -, got {self.name!r}")
        if self.seconds <= 0 or self.beside < 1 or self.gpus < 1:
            raise ValueError(f"{self.name}: seconds, beside and gpus must be positive, got {self}")
        if self.gpus > 1 and self.beside > 1:
            raise ValueError(f"{self.name}: a job of several GPUs has them to itself")

    @property
    def fields(self) -> set[str]:
        """The names in braces, ``python`` apart."""
        return {name for _, name, _, _ in string.Formatter().parse(self.command) if name} - {
            "python"
        }


@dataclass
class Outcome:
    """How a job ended: ``done``, ``failed``, ``stopped`` (out of time) or ``waiting``."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    results: list[str] = field(default_factory=list)


@dataclass
class Running:
    job: Job
    gpus: list[int]
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    begin: float


def load_queue(path: Path = QUEUE) -> list[Job]:
    """The jobs of a file, in its order.

    Raises:
        ValueError: an unknown key, a wrong value or a name that stands twice.
    """
    jobs = []
    for row in tomllib.loads(path.read_text(encoding="utf-8"))["job"]:
        if unknown := row.keys() - Job.__dataclass_fields__.keys():
            raise ValueError(f"{path.name}: {row.get('name')} has unknown keys {sorted(unknown)}")
        jobs.append(Job(**{**row, "results": tuple(row.get("results", ()))}))
    names = [job.name for job in jobs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path.name}: these names stand twice: {sorted(twice)}")
    return jobs


class Queue:
    """Jobs on GPUs until a deadline; ``run`` returns how each ended."""

    def __init__(self, jobs: Iterable[Job], folder: Path, gpus: int, deadline: float) -> None:
        self.waiting, self.folder, self.deadline = list(jobs), folder, deadline
        self.free = [Fraction(1)] * gpus
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.names = given.split(",") if given else [str(n) for n in range(gpus)]
        self.running: list[Running] = []
        self.outcomes: dict[str, Outcome] = {
            job.name: Outcome(job.name, "waiting", "time was up") for job in self.waiting
        }

    def run(self, values: dict[str, str]) -> list[Outcome]:
        """Runs what can be run; ``values`` fill the commands' fields."""
        for job in list(self.waiting):
            reason = ""
            if missing := job.fields - values.keys():
                reason = "needs " + ", ".join(f"--set {name}=..." for name in sorted(missing))
            elif job.gpus > len(self.free):
                reason = f"needs {job.gpus} GPUs, there are {len(self.free)}"
            if reason:
                self.outcomes[job.name].reason = reason
                self.waiting.remove(job)
        try:
            while self.waiting or self.running:
                self._start_what_fits(values)
                if not self.running:
                    break
                time.sleep(TICK)
                self._end_what_is_over()
        finally:
            for one in list(self.running):
                self._end(one, "stopped", "the queue ended")
        self._write()
        return list(self.outcomes.values())

    def _start_what_fits(self, values: dict[str, str]) -> None:
        for job in list(self.waiting):
            if time.monotonic() + job.seconds > self.deadline:
                continue
            share = Fraction(1, job.beside)
            gpus = [n for n, free in enumerate(self.free) if free >= share][: job.gpus]
            if len(gpus) < job.gpus:
                break  # later ones would take what it waits for
            self.waiting.remove(job)
            for n in gpus:
                self.free[n] -= share
            log = (self.folder / f"{job.name}.log").open("wb")
            command = [
                part.format(**values, python=sys.executable) for part in shlex.split(job.command)
            ]
            visible = ",".join(self.names[n] for n in gpus)
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONUNBUFFERED": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.append(Running(job, gpus, process, log, time.monotonic()))
            print(f"{job.name}: started on GPU {visible}", flush=True)

    def _end_what_is_over(self) -> None:
        now = time.monotonic()
        for one in list(self.running):
            code = one.process.poll()
            if code is not None:
                self._end(one, "failed" if code else "done", f"exit status {code}" if code else "")
            elif now > self.deadline:
                self._end(one, "stopped", "time was up")
            elif now - one.begin > 2 * one.job.seconds:
                self._end(one, "stopped", f"took over {2 * one.job.seconds:.0f} s")

    def _end(self, one: Running, status: str, reason: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # also what an ended job left behind
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        one.log.close()
        self.running.remove(one)
        for n in one.gpus:
            self.free[n] += Fraction(1, one.job.beside)
        seconds = time.monotonic() - one.begin
        began = time.time() - seconds
        written = [
            name
            for name in one.job.results
            if (ROOT / name).is_file() and (ROOT / name).stat().st_mtime >= began - 1
        ]
        for name in written:
            shutil.copy2(ROOT / name, self.folder)
        if status == "done" and len(written) < len(one.job.results):
            status, reason = "failed", "not all results were written"
        self.outcomes[one.job.name] = Outcome(
            one.job.name, status, reason, round(seconds, 1), written
        )
        print(f"{one.job.name}: {status} after {seconds:.0f} s {reason}", flush=True)
        self._write()

    def _write(self) -> None:
        rows = {name: asdict(outcome) for name, outcome in done_before(self.folder).items()}
        rows |= {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        text = json.dumps({"jobs": list(rows.values())}, indent=1)
        (self.folder / "queue.json").write_text(text + "\n")


def done_before(folder: Path) -> dict[str, Outcome]:
    """What an earlier call with the same folder finished."""
    path = folder / "queue.json"
    rows = json.loads(path.read_text())["jobs"] if path.is_file() else []
    return {row["name"]: Outcome(**row) for row in rows if row["status"] == "done"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*", metavar="JOB", help="these alone; by default all")
    parser.add_argument("--seconds", type=float, default=1e9, help="no job runs longer")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--gpus", type=int, help="by default those that torch sees")
    parser.add_argument("--queue", type=Path, default=QUEUE)
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    args = parser.parse_args()
    jobs = load_queue(args.queue)
    if args.list:
        for job in jobs:
            print(f"{job.name:28s} {job.seconds:5.0f} s  1/{job.beside} of {job.gpus}  {job.after}")
        return
    if args.folder is None:
        parser.error("the folder of the logs is missing")
    if unknown := set(args.names) - {job.name for job in jobs}:
        parser.error(f"{args.queue.name} has no job {', '.join(sorted(unknown))}")
    deadline = time.monotonic() + args.seconds
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    if args.gpus < 1:
        parser.error("torch sees no GPU here")
    before = done_before(args.folder)
    jobs = [j for j in jobs if j.name not in before and (not args.names or j.name in args.names)]
    outcomes = Queue(jobs, args.folder, args.gpus, deadline).run(
        dict(pair.split("=", 1) for pair in args.set)
    )
    for outcome in outcomes:
        print(f"{outcome.name:28s} {outcome.status:8s} {outcome.seconds:6.1f} s  {outcome.reason}")
    sys.exit(any(outcome.status != "done" for outcome in outcomes))


if __name__ == "__main__":
    main()
