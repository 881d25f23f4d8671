"""The record of an evaluation: questions, answers and accuracy, written, printed and read."""

from __future__ import annotations

import datetime
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend_cli.errors import BadInputError
from backend_cli.eval.endpoint import Server
from backend_cli.files import check_writable, read_json, write_json
from backend_cli.terminal import plain_console, visible
from backend_core import __version__

FORMAT = "kda-dsv4 eval 1"
QUESTION_CHARS = 80
"""Characters of a question that a record keeps; its ``id`` is of the whole text."""
_TEXTS = ("id", "question", "expected", "answer")

# Interval of 95 %: the normal distribution's quantile at 0.975.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Published:
    """A model's accuracy on GSM8K as others have published it.

    Attributes:
        values: by extraction rule, or under ``"flexible"`` where the rule is not known.
        floor: what a continuous integration asks for, if one does.
        source: where the values stand.
    """

    name: str
    pattern: str
    values: dict[str, float]
    floor: float | None
    source: str


PUBLISHED = (
    Published(
        "Kimi-Linear-48B",
        r"kimi-?linear-?48b",
        {"flexible": 0.8901, "strict": 0.8779},
        0.88,
        "vllm-project/vllm#28445 (lm-evaluation-harness); floor: sglang's CI",
    ),
    Published(
        "DeepSeek-V4",
        r"deepseek-?v4",
        {"flexible": 0.94},
        None,
        "sgl-project/sglang#37062 and #36581 (0.947 and 0.952, five-shot)",
    ),
)


def published_for(model: str) -> Published | None:
    """The published values of a model by its served name or path."""
    return next((p for p in PUBLISHED if re.search(p.pattern, model, re.IGNORECASE)), None)


def verdict(model: str, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """``ok`` (``None`` without a published value) and ``text``.

    A run is not ok where the whole interval of a rule lies under its published value, or where the
    flexible rule's value is under the floor.
    """
    published = published_for(model)
    if published is None:
        return {"ok": None, "text": f"no published value for {model}"}
    ok, said = True, []
    for rule, value in published.values.items():
        low, high = found[rule]["low"], found[rule]["high"]
        if high < value:
            ok = False
            said.append(f"{rule} below the published {value} beyond chance")
        elif low > value:
            said.append(f"{rule} above the published {value} beyond chance")
        else:
            said.append(f"{rule} agrees with the published {value}")
    if published.floor is not None and found["flexible"]["value"] < published.floor:
        ok = False
        said.append(f"under the floor {published.floor}")
    return {"ok": ok, "text": f"{published.name}: {', '.join(said)} ({published.source})"}


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson's score (Wilson 1927); (0, 1) of nothing."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = right / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return 0.0 if right == 0 else centre - half, 1.0 if right == total else centre + half


def accuracy(rights: list[bool]) -> dict[str, float]:
    """``value``, and ``low`` and ``high`` of its 95 % interval."""
    low, high = wilson(sum(rights), len(rights))
    return {"value": sum(rights) / len(rights) if rights else 0.0, "low": low, "high": high}


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of McNemar's test (McNemar 1947).

    Args:
        only_first, only_second: questions that only the one run, and only the other, answered
            rightly. Without a difference each such question is the toss of a coin.
    """
    n, k = only_first + only_second, min(only_first, only_second)
    tail: float = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return min(1.0, 2.0 * tail)


def output_path(output: Path | None, task: str, model: str) -> Path:
    """``output``, or a name from task and model.

    Raises:
        BadInputError: the file exists, or cannot be written.
    """
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", model.rstrip("/").split("/")[-1])
    path = output or Path(f"{task}-{slug}.json")
    if os.path.lexists(path):  # Path's raises where a folder above is closed
        raise BadInputError(f"{path} exists already: name another --output")
    check_writable(path)
    return path


def write_record(
    path: Path,
    task: str,
    server: Server,
    flags: str | None,
    accuracy: dict[str, dict[str, float]],
    verdict: dict[str, Any],
    questions: list[dict[str, Any]],
    settings: dict[str, Any],
    without_text: int,
) -> dict[str, Any]:
    """Write the record and return it.

    Within one ``format`` keys are added, never changed: ``script``, ``task``, ``model``,
    ``engine``, ``engine_version``, ``backend``, ``flags``, ``accuracy`` (by extraction rule:
    ``value``, ``low``, ``high``), ``verdict`` (``ok``, ``text``), ``questions`` (``id``,
    ``question`` (its begin), ``expected``, ``answer``, ``right`` by rule), ``settings``, ``date``,
    ``version``, ``without_text`` (how many answers had null for a text).
    """
    record = {
        "format": FORMAT,
        "script": "backend_cli/eval/record.py",
        "task": task,
        "model": server.model,
        "engine": server.engine,
        "engine_version": server.version,
        "backend": server.backend,
        "flags": flags,
        "accuracy": accuracy,
        "verdict": verdict,
        "settings": settings,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "version": __version__,
        "without_text": without_text,
        "questions": questions,
    }
    write_json(path, record)
    return record


def print_record(record: dict[str, Any], output: Path) -> None:
    """The result in a few lines on stdout."""
    console = plain_console()
    where = " ".join(str(record[k]) for k in ("engine", "engine_version") if record[k])
    on = f" on {where}" if where else ""
    backend = f", attention backend {record['backend']}" if record["backend"] else ""
    title = f"{record['model']}{on}{backend}, {len(record['questions'])} questions"
    console.print(visible(title))
    for rule, found in record["accuracy"].items():
        console.print(
            f"{rule:10} {found['value']:.4f}, 95 % interval {found['low']:.4f} to "
            f"{found['high']:.4f}"
        )
    if count := record["without_text"]:
        console.print(f"{count} answers had null for a text and count as wrong")
    console.print(visible(record["verdict"]["text"]))
    console.print(visible(f"record: {output}"))


def read_record(path: Path) -> dict[str, Any]:
    """A record that ``eval gsm8k`` or ``eval recall`` wrote.

    Raises:
        BadInputError: the file cannot be read or is not such a record.
    """
    record = read_json(path, "result")
    found = record.get("format") if isinstance(record, dict) else type(record).__name__
    if found != FORMAT:
        raise BadInputError(f"result {path} must be of format {FORMAT!r}, got {found!r}")
    for name, kind in (("questions", list), ("accuracy", dict), ("task", str), ("model", str)):
        if not isinstance(record.get(name), kind):
            raise BadInputError(f"result {path} is damaged: {name!r} is missing or wrong")
    for number, question in enumerate(record["questions"], start=1):
        if not _is_question(question, record["accuracy"]):
            raise BadInputError(
                f"result {path} is damaged: question {number} must have the texts "
                f"{', '.join(_TEXTS)}, and right by rule"
            )
    return dict(record)


def _is_question(question: Any, rules: Iterable[str]) -> bool:
    return (
        isinstance(question, dict)
        and all(isinstance(question.get(name), str) for name in _TEXTS)
        and isinstance(question.get("right"), dict)
        and all(isinstance(question["right"].get(rule), bool) for rule in rules)
    )
