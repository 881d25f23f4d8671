"""``kda-dsv4 check --fuzz``: random calls of every operator, shared among processes.

A batch follows from its number, so any failure can be run again alone by the line that is printed.
"""

from __future__ import annotations

import collections
import datetime
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from backend_cli.errors import CliError
from backend_cli.terminal import Bar
from backend_cli.worker import WorkerDiedError, Workers, in_threads
from backend_core.family import Family
from backend_core.target import Target

WORKER = "backend_cli.check.fuzz_worker"
SCHEMA = 1
MAX_FAILURES = 20
"""After so many failures of a family the rest of its batches are left out."""
_PORTION = 25
_SECONDS_A_BATCH = 5.0


@dataclass
class _Rows:
    """The progress of one family's batches; ``lock`` guards all of it."""

    deadline: float
    operators: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    batches: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, family: str, answer: dict[str, Any]) -> None:
        with self.lock:
            self.batches += answer["batches"]
            for name, found in answer["operators"].items():
                row = self.operators.setdefault(
                    name, {"batches": 0, "mismatches": 0, "seconds": 0.0, "worst": 0.0}
                )
                row["batches"] += found["batches"]
                row["mismatches"] += found["mismatches"]
                row["seconds"] += found["seconds"]
                row["worst"] = max(row["worst"], found["worst"])
            for failure in answer["failures"]:
                self.failures.append(failure | {"reproduce": reproducer(family, failure["seed"])})

    @property
    def is_over(self) -> bool:
        with self.lock:
            return len(self.failures) >= MAX_FAILURES or time.perf_counter() > self.deadline


def reproducer(family: str, seed: int) -> str:
    """The command that runs one batch again."""
    return f"kda-dsv4 check --fuzz 1 --seed {seed} --family {family}"


def fuzz(
    target: Target,
    chosen: Sequence[Family],
    count: int,
    seed: int,
    jobs: int,
    timeout: float,
    most_seconds: float = float("inf"),
) -> dict[str, Any]:
    """``count`` batches of each family, numbers ``seed`` on, and none begun after ``most_seconds``.
    What ``check --fuzz --json`` writes:

    - ``script``, ``schema``: 1, ``date``, ``target``, ``seed``, ``jobs``, ``seconds``;
    - ``rows``: for each operator ``family``, ``operator``, ``batches``, ``mismatches``,
      ``seconds`` (of the calls and their comparison, added up over processes) and ``worst``: the
      largest error of a right batch, as a share of what is allowed;
    - ``failures``: for each ``family``, ``operator``, ``seed``, ``status``, ``message`` and
      ``reproduce``.

    Raises:
        CliError: none of the families declares fuzz cases.
    """
    begin = time.perf_counter()
    attacked = [family for family in chosen if family.fuzz_cases()]
    if not attacked:
        names = ", ".join(family.name for family in chosen)
        raise CliError(f"nothing to fuzz: {names} declares no fuzz cases")
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for family in attacked:
        found = _Rows(deadline=time.perf_counter() + most_seconds)
        with Bar(f"fuzzing {family.name}", count) as bar:
            _share(family.name, count, seed, jobs, timeout, found, bar)
        for name in sorted(found.operators):
            row = found.operators[name]
            row["seconds"] = round(row["seconds"], 1)
            row["worst"] = round(row["worst"], 3)
            rows.append({"family": family.name, "operator": name, **row})
        failures += [{"family": family.name, **failure} for failure in found.failures]
    return {
        "script": "backend_cli/check/command.py",
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "target": target.name,
        "seed": seed,
        "jobs": jobs,
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": rows,
        "failures": failures,
    }


def _share(
    family: str, count: int, seed: int, jobs: int, timeout: float, found: _Rows, bar: Bar
) -> None:
    portions: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    size = max(1, min(_PORTION, count // (2 * jobs)))
    for first in range(seed, seed + count, size):
        portions.put((first, min(size, seed + count - first)))
    count = min(jobs, portions.qsize())
    in_threads(count, lambda: _serve(family, portions, timeout, found, bar))


def _serve(
    family: str,
    portions: queue.SimpleQueue[tuple[int, int]],
    timeout: float,
    found: _Rows,
    bar: Bar,
) -> None:
    """Have workers run portions until there are none left."""
    with Workers(WORKER) as ours:
        while not found.is_over:
            try:
                first, count = portions.get_nowait()
            except queue.Empty:
                return
            try:
                line = json.dumps({"family": family, "first": first, "count": count})
                answer = ours.ask(line, timeout + _SECONDS_A_BATCH * count)
            except WorkerDiedError as error:
                if count > 1:  # which of them it was shows when each runs alone
                    for seed in range(first, first + count):
                        portions.put((seed, 1))
                    continue
                answer = _died(first, str(error))
            except Exception as error:  # no process can be had, or what it says is no answer
                answer = _died(first, f"{type(error).__name__}: {error}")
            found.add(family, answer)
            bar.update(answer["batches"])
            done = answer["batches"]
            if done < count:  # it failed
                ours.drop()
                portions.put((first + done, count - done))


def _died(seed: int, message: str) -> dict[str, Any]:
    name = "(the process ended)"
    failure = {"operator": name, "seed": seed, "status": "failed", "message": message}
    row = {"batches": 1, "mismatches": 1, "seconds": 0.0, "worst": 0.0}
    return {"batches": 1, "operators": {name: row}, "failures": [failure]}


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report for people: a line for each operator, then one for each failure."""
    lines = [
        f"{row['family']} {row['operator']}: {row['batches']} batches, {row['mismatches']} "
        f"mismatches, {row['seconds']:.1f} s, at most {row['worst']:.2f} of the allowed error"
        for row in report["rows"]
    ]
    for failure in report["failures"]:
        lines.append(
            f"{failure['status']}: {failure['family']} {failure['operator']}: {failure['message']}"
        )
        lines.append(f"    {failure['reproduce']}")
    of_family = collections.Counter(failure["family"] for failure in report["failures"])
    lines += [
        f"{family}: the rest was left out after {count} failures"
        for family, count in of_family.items()
        if count >= MAX_FAILURES
    ]
    batches = sum(row["batches"] for row in report["rows"])
    lines.append(
        f"fuzz: {batches - len(report['failures'])} of {batches} batches right, "
        f"{report['seconds']:g} s, seed {report['seed']}"
    )
    return lines
