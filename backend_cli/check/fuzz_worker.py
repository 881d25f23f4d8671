"""One process of ``kda-dsv4 check --fuzz``: reads portions of batches, answers with their outcomes.

A batch that raises ends its portion, since a GPU may be of no use afterwards; ``check`` starts
another process for the rest.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch

from backend_cli.families import table_of
from backend_cli.worker import serve_answers
from backend_core.family import Family, families
from backend_core.target import Target, detect_target
from backend_core.testing.fuzz import run_batch


def answer(line: str, target: Target, device: torch.device) -> dict[str, Any]:
    """``batches`` that were run, ``operators`` (what is known of each) and ``failures``.

    Args:
        line: JSON with ``family``, ``first`` and ``count``: the batches' numbers.
    """
    todo = json.loads(line)
    known = families()
    cases = known[todo["family"]].fuzz_cases()
    others = {
        f"{family.name} {operator}": case
        for family in known.values()
        if _has_table(family, target)
        for operator, case in family.fuzz_cases().items()
    }
    operators: dict[str, dict[str, Any]] = {}
    failures: list[dict[str, Any]] = []
    batches = 0
    for seed in range(todo["first"], todo["first"] + todo["count"]):
        begin = time.perf_counter()
        outcome = run_batch(seed, cases, others, target, device)
        row = operators.setdefault(
            outcome.operator, {"batches": 0, "mismatches": 0, "seconds": 0.0, "worst": 0.0}
        )
        batches += 1
        row["batches"] += 1
        row["seconds"] += time.perf_counter() - begin
        if outcome.status == "ok":
            row["worst"] = max(row["worst"], outcome.used)
            continue
        row["mismatches"] += 1
        failures.append(
            {
                "operator": outcome.operator,
                "seed": seed,
                "status": outcome.status,
                "message": outcome.message,
            }
        )
        if outcome.status == "failed":
            break
    return {"batches": batches, "operators": operators, "failures": failures}


def _has_table(family: Family, target: Target) -> bool:
    try:
        table_of(family, target)
    except LookupError:
        return False
    return True


def main() -> None:
    """Answer every line of stdin."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = detect_target()
    torch.set_num_threads(1)
    serve_answers(lambda line: answer(line, target, device))


if __name__ == "__main__":
    main()
