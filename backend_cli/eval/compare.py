"""``kda-dsv4 eval compare``: do two runs of the same questions differ beyond chance?"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from backend_cli.errors import BadInputError
from backend_cli.eval.record import mcnemar, read_record
from backend_cli.files import check_writable, write_json
from backend_cli.terminal import plain_console, visible

SCHEMA = 1
LEVEL = 0.05


def compare(
    first: Annotated[
        Path, typer.Argument(metavar="A.json", help="A record, for instance without the flag.")
    ],
    second: Annotated[
        Path, typer.Argument(metavar="B.json", help="A record, for instance with the flag.")
    ],
    rule: Annotated[
        str | None,
        typer.Option(
            help="The rule for extracting answers; by default the first that both records have."
        ),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="How many changed questions to show.")] = 10,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the comparison there.")
    ] = None,
) -> None:
    """Compare two records by McNemar's exact test; the exit code is 1 if B is worse."""
    if json_path is not None:
        check_writable(json_path)
        if any(os.path.realpath(json_path) == os.path.realpath(path) for path in (first, second)):
            raise BadInputError(f"--json must name a file of its own, got the record {json_path}")
    records = [read_record(path) for path in (first, second)]
    report = compare_records(records[0], records[1], rule)
    if json_path is not None:
        write_json(json_path, {"schema": SCHEMA, "a": str(first), "b": str(second), **report})
    _print(report, show)
    if report["differ"] and report["only_a"] > report["only_b"]:
        raise typer.Exit(1)


def compare_records(
    first: dict[str, Any], second: dict[str, Any], rule: str | None
) -> dict[str, Any]:
    """``rule``, ``settings`` (A's and B's of those that differ), ``questions`` (how many),
    ``accuracy_a`` and ``accuracy_b``, ``only_a`` and ``only_b`` (how many only that run answered
    rightly), ``p_value``, ``differ`` and ``changed`` (``question``, ``expected``, ``answer_a``,
    ``answer_b``, ``right_a``, ``right_b``).

    Raises:
        BadInputError: the records are of different tasks or questions, or lack the rule.
    """
    if first["task"] != second["task"]:
        raise BadInputError(
            f"both results must be of one task, got {first['task']} and {second['task']}"
        )
    common = [name for name in first["accuracy"] if name in second["accuracy"]]
    rule = rule or (common[0] if common else "any")
    if rule not in common:
        raise BadInputError(f"--rule must be one of {', '.join(common) or 'none'}, got {rule}")
    a, b = (_by_id(record["questions"]) for record in (first, second))
    if a.keys() != b.keys():
        raise BadInputError(
            f"both results must be over the same questions, got {len(a)} and {len(b)} with "
            f"{len(a.keys() & b.keys())} in common"
        )
    pairs = [(q, b[name], q["right"][rule], b[name]["right"][rule]) for name, q in a.items()]
    only_a = sum(x and not y for _, _, x, y in pairs)
    only_b = sum(y and not x for _, _, x, y in pairs)
    p_value = mcnemar(only_a, only_b)
    settings = [record.get("settings") for record in (first, second)]
    ours, theirs = (x if isinstance(x, dict) else {} for x in settings)
    return {
        "rule": rule,
        "settings": {
            key: [ours.get(key), theirs.get(key)]
            for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key)
        },
        "questions": len(pairs),
        "accuracy_a": sum(x for _, _, x, _ in pairs) / max(1, len(pairs)),
        "accuracy_b": sum(y for _, _, _, y in pairs) / max(1, len(pairs)),
        "only_a": only_a,
        "only_b": only_b,
        "same_text": sum(q["answer"] == other["answer"] for q, other, _, _ in pairs),
        "p_value": p_value,
        "differ": p_value < LEVEL,
        "changed": [
            {
                "question": q["question"],
                "expected": q["expected"],
                "answer_a": q["answer"],
                "answer_b": other["answer"],
                "right_a": x,
                "right_b": y,
            }
            for q, other, x, y in pairs
            if x != y
        ],
    }


def _by_id(questions: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The questions by ``id`` and a count of those before them that have the same: data may hold a
    question more than once."""
    seen: Counter[str] = Counter()
    found = {}
    for question in questions:
        found[question["id"], seen[question["id"]]] = question
        seen[question["id"]] += 1
    return found


def _print(report: dict[str, Any], show: int) -> None:
    console = plain_console(soft_wrap=False)
    for name, (ours, theirs) in report["settings"].items():
        line = f"the runs had other settings: {name} {ours} in A and {theirs} in B"
        console.print(visible(line), soft_wrap=True)
    changed = report["changed"][:show]
    if changed:
        table = Table("question", "expected", "A", "B", box=None, pad_edge=False)
        for row in changed:
            answers = [_tail(row[f"answer_{x}"], row[f"right_{x}"]) for x in "ab"]
            texts = row["question"], row["expected"], *answers
            table.add_row(*(visible(text) for text in texts))
        console.print(table)
        hidden = len(report["changed"]) - len(changed)
        console.print(f"and {hidden} more changed questions (--show)" if hidden else "")
    console.print(
        f"{report['rule']}: A {report['accuracy_a']:.4f}, B {report['accuracy_b']:.4f} over "
        f"{report['questions']} questions; only A right {report['only_a']}, only B right "
        f"{report['only_b']}, same text {report['same_text']}",
        soft_wrap=True,
    )
    verdict = "differ beyond chance" if report["differ"] else "do not differ beyond chance"
    console.print(f"the runs {verdict} (exact McNemar, p = {report['p_value']:.3g})")


def _tail(answer: str, right: bool) -> str:
    """The end of an answer, where the result stands."""
    text = " ".join(answer.split())
    return f"{'right' if right else 'wrong'}: {'…' if len(text) > 40 else ''}{text[-40:]}"
