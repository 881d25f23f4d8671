"""Random calls of every operator on this machine, shared among processes: ``make fuzz``.

    python -m tools.fuzz --batches 10000 --output benchmarks/results/fuzz_h100.json

A batch follows from its number, so any failure is run again alone by the line that is printed; the
exit status is then 1. ``--output`` keeps where the run was made, and for each operator:

- ``rows``: ``batches``, ``mismatches``, ``seconds`` (of the calls and their comparison, added up
  over processes) and ``worst``: the largest error of a right batch, as a share of what is allowed;
- ``failures``: ``seed``, ``status``, ``message`` and ``reproduce``;
- ``wall_seconds`` of each family.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend_cli.terminal import Bar
from backend_cli.worker import Workers, ask_all
from backend_core.family import families
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment

WORKER = "tools.fuzz.worker"
TIMEOUT_S = 120.0
"""For one batch, with its compilations."""
MAX_FAILURES = 20
"""After so many failures of a family the rest of its batches are left out."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the batches; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--batches", type=int, required=True, help="of each family")
    parser.add_argument("--seed", type=int, default=0, help="number of the first batch")
    parser.add_argument("--family", action="append", choices=list(families()), help="default: all")
    parser.add_argument("--jobs", type=int, default=min(14, len(os.sched_getaffinity(0))))
    parser.add_argument("--output", type=Path, help="the result file")
    args = parser.parse_args(arguments)
    for name, least in (("batches", 1), ("seed", 0), ("jobs", 1)):
        if (value := getattr(args, name)) < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    result: dict[str, Any] = {**environment(), "script": "tools/fuzz/__main__.py"}
    result |= {"seed": args.seed, "rows": [], "failures": [], "wall_seconds": {}}
    for family in args.family or families():
        begin = time.perf_counter()
        answers = _answers(family, args.batches, args.seed, args.jobs)
        rows, failures = summary(family, answers)
        print(*_lines(rows, failures), sep="\n", flush=True)
        result["rows"] += rows
        result["failures"] += failures
        result["wall_seconds"][family] = round(time.perf_counter() - begin, 1)
        if args.output is not None:
            write_record(args.output, result)
    made, failed = sum(row["batches"] for row in result["rows"]), len(result["failures"])
    print(f"fuzz: {made - failed} of {made} batches right, seed {args.seed}")
    return int(failed > 0)


def _answers(family: str, count: int, seed: int, jobs: int) -> dict[int, dict[str, Any]]:
    """The outcome of each batch that was run, by its number."""
    answers: dict[int, dict[str, Any]] = {}
    failed: list[int] = []
    with Bar(f"fuzzing {family}", count) as bar:

        def done(place: int, answer: dict[str, Any]) -> bool:
            answers[seed + place] = answer
            bar.update(1)
            if answer["status"] != "ok":
                failed.append(place)
            return len(failed) < MAX_FAILURES

        lines = [json.dumps({"family": family, "seed": seed + n}) for n in range(count)]
        ask_all(lines, lambda: Workers(WORKER), jobs, TIMEOUT_S, done)
    return answers


def summary(
    family: str, answers: dict[int, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each operator of a family, and its failures."""
    failures: list[dict[str, Any]] = []
    of_operators = collections.defaultdict(list)
    for number, answer in sorted(answers.items()):
        operator = answer.get("operator", "(the process ended)")
        of_operators[operator].append(answer)
        if answer["status"] != "ok":
            failure = {"family": family, "operator": operator, "seed": number}
            failure |= {key: answer[key] for key in ("status", "message")}
            again = f"python -m tools.fuzz --batches 1 --seed {number} --family {family}"
            failures.append(failure | {"reproduce": again})
    rows = [
        {
            "family": family,
            "operator": operator,
            "batches": len(made),
            "mismatches": sum(answer["status"] != "ok" for answer in made),
            "seconds": round(sum(answer["seconds"] for answer in made), 1),
            "worst": round(max(answer.get("used") or 0.0 for answer in made), 3),
        }
        for operator, made in sorted(of_operators.items())
    ]
    return rows, failures


def _lines(rows: list[dict[str, Any]], failures: list[dict[str, Any]]) -> list[str]:
    """A line for each operator, then one for each failure."""
    lines = [
        f"{row['family']} {row['operator']}: {row['batches']} batches, {row['mismatches']} "
        f"mismatches, {row['seconds']:.1f} s, at most {row['worst']:.2f} of the allowed error"
        for row in rows
    ]
    for failure in failures:
        what = f"{failure['family']} {failure['operator']}"
        lines += [
            f"{failure['status']}: {what}: {failure['message']}",
            f"    {failure['reproduce']}",
        ]
    if len(failures) >= MAX_FAILURES:
        lines.append(f"the rest was left out after {len(failures)} failures")
    return lines


if __name__ == "__main__":
    sys.exit(main())
