"""``kda-dsv4 check --fuzz``: random calls of every operator, shared among processes.

A batch follows from its number, so any failure can be run again alone by the line that is printed.
"""

from __future__ import annotations

import collections
import datetime
import json
import time
from collections.abc import Sequence
from typing import Any

from backend_cli.check.probes import WORKER
from backend_cli.errors import CliError
from backend_cli.terminal import Bar
from backend_cli.worker import Workers, ask_all
from backend_core.family import Family
from backend_core.target import Target

SCHEMA = 1
MAX_FAILURES = 20
"""After so many failures of a family the rest of its batches are left out."""


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
    attacked = [family.name for family in chosen if family.fuzz_cases()]
    if not attacked:
        names = ", ".join(family.name for family in chosen)
        raise CliError(f"nothing to fuzz: {names} declares no fuzz cases")
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for name in attacked:
        answers = _answers(name, count, seed, jobs, timeout, most_seconds)
        of_operators = collections.defaultdict(list)
        for number, answer in sorted(answers.items()):
            operator = answer.get("operator", "(the process ended)")
            of_operators[operator].append(answer)
            if answer["status"] != "ok":
                failure = {"family": name, "operator": operator, "seed": number}
                failure |= {key: answer[key] for key in ("status", "message")}
                failures.append(failure | {"reproduce": reproducer(name, number)})
        rows += [
            {
                "family": name,
                "operator": operator,
                "batches": len(made),
                "mismatches": sum(answer["status"] != "ok" for answer in made),
                "seconds": round(sum(answer["seconds"] for answer in made), 1),
                "worst": round(max(answer.get("error") or 0.0 for answer in made), 3),
            }
            for operator, made in sorted(of_operators.items())
        ]
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


def _answers(
    family: str, count: int, seed: int, jobs: int, timeout: float, most_seconds: float
) -> dict[int, dict[str, Any]]:
    """The outcome of each batch that was run, by its number."""
    deadline = time.perf_counter() + most_seconds
    answers: dict[int, dict[str, Any]] = {}
    failed: list[int] = []
    with Bar(f"fuzzing {family}", count) as bar:

        def done(place: int, answer: dict[str, Any]) -> bool:
            answers[seed + place] = answer
            bar.update(1)
            if answer["status"] != "ok":
                failed.append(place)
            return len(failed) < MAX_FAILURES and time.perf_counter() <= deadline

        lines = [json.dumps({"family": family, "seed": seed + n}) for n in range(count)]
        ask_all(lines, lambda: Workers(WORKER), jobs, timeout, done)
    return answers


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
