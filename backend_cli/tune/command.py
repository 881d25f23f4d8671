"""``kda-dsv4 tune``: launch parameters for this machine, as a table found before the shipped one.

A candidate that does not compile, or is wrong on a call of ``kda-dsv4 check``, is left out; what
wins has to be right on all of them.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.errors import BadInputError, CliError
from backend_cli.families import chosen_families, no_gpu
from backend_cli.files import check_writable, write_json, write_text
from backend_cli.terminal import plain_console
from backend_cli.tune.search import Ask, render, search, sweeps
from backend_cli.worker import WorkerDiedError, Workers
from backend_core import __version__
from backend_core.family import Family
from backend_core.tables.load import PathTable, load_table, shipped_directory, user_directory
from backend_core.tables.schema import parse_table, read_document
from backend_core.target import Target, detect_target

SCHEMA = 2
WORKER = "backend_cli.tune.worker"


def tune(
    family: Annotated[
        list[str] | None,
        typer.Option(help="The family to tune, as info names it; all by default. Repeatable."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Value heads of your model on one GPU.")] = 32,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to write the tables; by default where every run finds them."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=86_400.0, help="Most seconds for one candidate.")
    ] = 180.0,
) -> None:
    """Search faster launch parameters on this GPU and write tables that later runs use."""
    chosen = chosen_families(family or [])
    target = detect_target()
    if target.vendor == "cpu":
        raise CliError(f"tune measures a GPU, and {no_gpu()}")
    try:
        folder = output_dir or user_directory()
        if folder is None:
            raise ValueError("--output-dir must be given, since this user has no home")
        shipped = shipped_directory()
        tables = [(item, load_table(item.tables, target, directory=shipped)) for item in chosen]
    except LookupError as error:
        raise CliError(f"nothing to tune on this machine: {error}") from error
    except ValueError as error:
        raise BadInputError(str(error)) from error
    for item, table in tables:
        check_writable(folder / item.name / table.source.name)
    for item, table in tables:
        _tune_family(item, table, target, heads, folder, timeout)


def _tune_family(
    family: Family, table: PathTable, target: Target, heads: int, folder: Path, timeout: float
) -> None:
    source = table.source
    document = read_document(source)
    todo = list(sweeps(family, table))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    file = folder / family.name / source.name
    record = file.with_suffix(".json")
    about = {
        "script": "backend_cli/tune/command.py",
        "schema": SCHEMA,
        "gpu": target.name,
        "date": date,
        "release": __version__,
        "heads": heads,
    }
    measured = {"gpu": target.name, "date": date, "source": str(record)}

    def keep(found: dict[str, Any], trials: list[dict[str, Any]]) -> None:
        """A stop loses no sweep that is over."""
        tuned = copy.deepcopy(found)
        for number in {t["row"] for t in trials if t["ms"] is not None}:
            tuned["path"][number] |= measured
        tuned["release"] = __version__
        write_json(record, about | {"trials": trials})
        write_text(file, render(tuned, f"Written by kda-dsv4 tune on {target.name}, {date}."))

    with (
        tempfile.TemporaryDirectory() as scratch,
        Workers(WORKER, KDA_DSV4_CONFIG_DIR=scratch) as workers,
    ):
        ask = _asker(table, scratch, timeout, workers)
        tuned, trials = search(document, todo, ask, heads, keep)
    keep(tuned, trials)
    parse_table(file, family.tables)
    _print(table, tuned, trials, file)


def _asker(table: PathTable, scratch: str, timeout: float, workers: Workers) -> Ask:
    """Asks a worker, whose table is rewritten before each question."""
    candidate = Path(scratch) / table.family / table.source.name

    def ask(document: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
        write_text(candidate, render(document, "A candidate."))
        try:
            answer = workers.ask(json.dumps(question), timeout)
        except WorkerDiedError as error:
            return {"ms": None, "message": str(error)}
        if answer["ms"] is None:
            workers.drop()
        return answer

    return ask


def _print(
    table: PathTable, after: dict[str, Any], trials: list[dict[str, Any]], file: Path
) -> None:
    console = plain_console()
    for number, (path, new) in enumerate(zip(table.rows, after["path"], strict=True)):
        own = [t for t in trials if t["row"] == number]
        if not own:
            continue
        old = path.params_dict()
        changed = {k: v for k, v in new["params"].items() if old[k] != v}
        grids = "open" if path.max_grid is None else f"to {path.max_grid}"
        shown = " ".join(f"{key}={value}" for key, value in changed.items()) or "as shipped"
        gains = []
        for measure in dict.fromkeys(t["measure"] for t in own):
            times = [t["ms"] for t in own if t["measure"] == measure and t["ms"] is not None]
            first = next(t["ms"] for t in own if t["measure"] == measure)
            if times and first is not None:
                gains.append(f"{measure} {1e3 * first:.1f} to {1e3 * min(times):.1f} us")
        console.print(
            f"{table.family} {path.operator} {path.name} {grids}: {shown} ({', '.join(gains)})"
        )
    refused = sum(t["ms"] is None for t in trials)
    console.print(f"{len(trials)} trials, {refused} not usable; table: {file}")
    shadow = os.environ.get("KDA_DSV4_CONFIG_DIR")
    if user_directory() != file.parent.parent:
        where = shadow or user_directory()
        console.print(f"set KDA_DSV4_CONFIG_DIR={file.parent.parent} to use it (now: {where})")
