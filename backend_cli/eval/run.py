"""Writing and printing the record of an evaluation."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Any

from backend_cli.errors import BadInputError
from backend_cli.eval.endpoint import Server
from backend_cli.eval.record import FORMAT
from backend_cli.files import check_writable, write_json
from backend_cli.terminal import plain_console, visible
from backend_core import __version__


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
) -> dict[str, Any]:
    """Write the record and return it.

    Within one ``format`` keys are added, never changed: ``script``, ``task``, ``model``,
    ``engine``, ``engine_version``, ``backend``, ``flags``, ``accuracy`` (by extraction rule:
    ``value``, ``low``, ``high``), ``verdict`` (``ok``, ``text``), ``questions`` (``id``,
    ``question`` (its begin), ``expected``, ``answer``, ``right`` by rule), ``settings``, ``date``,
    ``version``.
    """
    record = {
        "format": FORMAT,
        "script": "backend_cli/eval/run.py",
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
    console.print(record["verdict"]["text"])
    console.print(f"record: {output}")
