"""``kda-dsv4 tune``: launch parameters for this machine, as a table found before the shipped one.

Every row of the shipped table keeps its path, grids and features; its parameters are tried one
after another, each over its values with the others at their best so far. A candidate that does not
compile, or is wrong on a call of ``kda-dsv4 check``, is left out; what wins has to be right on all.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from backend_cli.errors import BadInputError, CliError
from backend_cli.files import check_writable, write_json, write_text
from backend_cli.worker import Worker, WorkerDiedError
from backend_core import __version__
from backend_core.tables.schema import PHASES, parse_table
from backend_core.tables.select import load_table, shipped_directory, user_directory
from backend_core.target import Target, detect_target

SCHEMA = 1
WORKER = "backend_cli.tune_worker"
GAIN = 0.02
"""A value replaces another where it saves this share of the time: less is noise."""

Values = tuple[int, ...]
Ask = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
Keep = Callable[[dict[str, Any], list[dict[str, Any]]], None]

# By path: what to measure, and the values of each parameter. Parameters that are not here stay.
SPACE: dict[str, dict[str, dict[str, Values]]] = {
    "two_stage": {
        "prefill": {
            "block_v": (16, 32),
            "block_v_max": (32, 64),
            "scan_num_warps": (2, 4, 8),
            "scan_num_stages": (2, 3, 4),
        }
    },
    "two_stage_sm90": {
        "prefill": {"intra_2_tile_ns": (7000, 8000, 9000), "intra_4_tile_ns": (4400, 4900, 5400)}
    },
    "recurrent": {
        "recurrent": {"block_v": (8, 16, 32, 64), "num_warps": (1, 2, 4)},
        "step": {"step_num_warps": (2, 4, 8), "step_k_inner": (16, 32, 64)},
        "bare_step": {"step_block_v": (16, 32, 64, 128), "step_split_num_warps": (1, 2, 4)},
    },
}
_ROWS_IN_WAVE: dict[str, Values] = {"num_warps": (1, 2, 4, 8), "block_w": (4, 8)}
_C128: dict[str, Values] = {"num_warps": (2, 4, 8), "block_w": (16, 32, 64)}
COMPRESSOR_SPACE: dict[tuple[str, str], dict[str, Values]] = {
    ("decode", "indexer"): _ROWS_IN_WAVE,
    ("decode", "main_c4"): _ROWS_IN_WAVE,
    ("decode", "pair"): {"num_warps": (1, 2, 4, 8)},
    ("decode", "main_c128"): {"num_warps": (4, 8, 16), "block_w": (8, 16, 32)},
    ("prefill", "indexer"): _ROWS_IN_WAVE | {"rest_num_warps": (1, 2, 4)},
    ("prefill", "main_c4"): _ROWS_IN_WAVE | {"rest_num_warps": (1, 2, 4)},
    ("prefill", "main_c128"): _C128 | {"block_d": (32, 64, 128), "rest_num_warps": (1, 2, 4)},
}
_OPEN_GRID = {("kda", "prefill"): 4096, ("kda", "decode"): 2048, ("dsv4", "decode"): 64}
_OPEN_GRID[("dsv4", "prefill")] = 256


@dataclass(frozen=True)
class Sweep:
    """One parameter search: the table's row, what is measured, at which grid, and the values."""

    family: str
    row: int
    measure: str
    grid: int
    space: dict[str, Values]


def tune(
    family: Annotated[
        list[str] | None, typer.Option(help=f"{' or '.join(PHASES)}; by default both. Repeatable.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Value heads on a GPU of your model.")] = 32,
    output_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Of the tables; by default where they are found."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one candidate.")] = 180.0,
) -> None:
    """Try launch parameters on this GPU; write tables that every run on this machine then uses."""
    families = family or list(PHASES)
    if unknown := set(families) - set(PHASES):
        raise BadInputError(f"--family must be {' or '.join(PHASES)}, got {unknown.pop()!r}")
    target = detect_target()
    if target.vendor == "cpu":
        raise CliError("tune measures a GPU, and there is none here")
    try:
        folder = output_dir or user_directory()
        tables = {
            name: load_table(name, target, directory=shipped_directory()) for name in families
        }
    except LookupError as error:
        raise CliError(f"nothing to tune on this machine: {error}") from error
    except ValueError as error:
        raise BadInputError(str(error)) from error
    for name, table in tables.items():
        check_writable(folder / name / table.source.name)
    for name, table in tables.items():
        _tune_family(name, table.source, target, heads, folder, timeout)


def _tune_family(
    family: str, source: Path, target: Target, heads: int, folder: Path, timeout: float
) -> None:
    document = tomllib.loads(source.read_text(encoding="utf-8"))
    todo = list(sweeps(family, document, heads))
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    file = folder / family / source.name
    record = file.with_suffix(".json")
    about = {
        "schema": SCHEMA,
        "gpu": target.name,
        "date": date,
        "release": __version__,
        "heads": heads,
    }
    measured = {"measured": True, "gpu": target.name, "date": date, "source": str(record)}

    def keep(found: dict[str, Any], trials: list[dict[str, Any]]) -> None:
        """A stop loses no sweep that is over."""
        table = copy.deepcopy(found)
        for number in {t["row"] for t in trials if t["ms"] is not None}:
            table["path"][number] |= measured
        table["table"]["release"] = __version__
        write_json(record, about | {"trials": trials})
        write_text(file, render(table, f"Written by kda-dsv4 tune on {target.name}, {date}."))

    with tempfile.TemporaryDirectory() as scratch, _asking(family, source, scratch, timeout) as ask:
        tuned, trials = search(document, todo, ask, heads, keep)
    keep(tuned, trials)
    parse_table(file, family, source.stem)
    _print(family, document, tuned, trials, file)


def sweeps(family: str, document: dict[str, Any], heads: int) -> Iterator[Sweep]:
    """What there is to search in a table, in its rows' order."""
    low: dict[str, int] = {}
    for number, row in enumerate(document["path"]):
        phase, high = row["phase"], row.get("max_grid")
        if high is None:
            grid = max(_OPEN_GRID[family, phase], 2 * low.get(phase, 1))
        else:
            grid = high
            low[phase] = high + 1
        params = row.get("params", {})
        if family == "kda":
            spaces = SPACE.get(row["name"], {})
            grid = max(grid, heads)
        else:
            spaces = {
                kind: space
                for (of, kind), space in COMPRESSOR_SPACE.items()
                if of == phase
                and kind in row["features"]
                # rings have plans of their own, and the same kernels
                and ("paged" in row["features"] or phase == "decode")
            }
        for measure, space in spaces.items():
            present = {name: values for name, values in space.items() if name in params}
            if present:
                yield Sweep(family, number, measure, grid, present)


def search(
    document: dict[str, Any],
    todo: list[Sweep],
    ask: Ask,
    heads: int,
    keep: Keep = lambda found, trials: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document with the best parameters found, and every trial in order.

    Args:
        ask: takes a document and the question about one of its rows; returns ``ms`` and
            ``message``.
        keep: called after each sweep with the document and the trials so far.
    """
    best = copy.deepcopy(document)
    trials: list[dict[str, Any]] = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        total = sum(2 + sum(len(v) for v in sweep.space.values()) for sweep in todo)
        bar = progress.add_task("trials", total=total)

        def time(sweep: Sweep, params: dict[str, Any], check: str) -> float | None:
            candidate = copy.deepcopy(best)
            candidate["path"][sweep.row]["params"] = params
            question = {
                "family": sweep.family,
                "row": sweep.row,
                "measure": sweep.measure,
                "grid": sweep.grid,
                "heads": heads,
                "check": check,
            }
            answer = ask(candidate, question)
            trials.append(question | {"params": params} | answer)
            progress.advance(bar)
            ms: float | None = answer["ms"]
            return ms

        for sweep in todo:
            row = best["path"][sweep.row]
            name = f"{sweep.family} {row['phase']} {row['name']} {sweep.measure}"
            progress.update(bar, description=name)
            shipped = dict(row["params"])
            fastest = time(sweep, shipped, "quick")
            for parameter, values in sweep.space.items():
                for value in values:
                    if value == row["params"][parameter]:
                        progress.advance(bar)
                        continue
                    params = row["params"] | {parameter: value}
                    ms = time(sweep, params, "quick")
                    if ms is not None and (fastest is None or ms < (1 - GAIN) * fastest):
                        fastest, row["params"] = ms, params
            if row["params"] == shipped:
                progress.advance(bar)
            elif time(sweep, row["params"], "all") is None:
                row["params"] = shipped
            keep(best, trials)
    return best, trials


class _asking:  # noqa: N801 (used as a function in a with statement)
    """Asks a worker, whose table is rewritten before each question; a dead one is replaced."""

    def __init__(self, family: str, source: Path, scratch: str, timeout: float) -> None:
        self._table = Path(scratch) / family / source.name
        self._scratch, self._timeout = scratch, timeout
        self._worker: Worker | None = None

    def __enter__(self) -> Ask:
        return self._ask

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()

    def _ask(self, document: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
        write_text(self._table, render(document, "A candidate."))
        try:
            environment = {"KDA_DSV4_CONFIG_DIR": self._scratch}
            self._worker = self._worker or Worker(WORKER, [], environment)
            answer = self._worker.ask(json.dumps(question), self._timeout)
        except WorkerDiedError as error:
            self._worker = None
            return {"ms": None, "message": str(error)}
        if answer["ms"] is None:  # an illegal access leaves no GPU to go on with
            self._worker.close()
            self._worker = None
        return answer


def render(document: dict[str, Any], comment: str) -> str:
    """A table as TOML, readable by ``backend_core.tables.schema``."""
    lines = [f"# {comment}", "", "[table]", *_pairs(document["table"])]
    for row in document["path"]:
        plain = {key: value for key, value in row.items() if key != "params"}
        lines += ["", "[[path]]", *_pairs(plain)]
        if row.get("params"):
            lines += ["[path.params]", *_pairs(row["params"])]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and arrays of strings are TOML's
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def _print(
    family: str,
    before: dict[str, Any],
    after: dict[str, Any],
    trials: list[dict[str, Any]],
    file: Path,
) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for number, (old, new) in enumerate(zip(before["path"], after["path"], strict=True)):
        own = [t for t in trials if t["row"] == number]
        changed = {k: v for k, v in new.get("params", {}).items() if old["params"][k] != v}
        if not own:
            continue
        grids = f"to {old['max_grid']}" if "max_grid" in old else "open"
        shown = " ".join(f"{key}={value}" for key, value in changed.items()) or "as shipped"
        gains = []
        for measure in dict.fromkeys(t["measure"] for t in own):
            times = [t["ms"] for t in own if t["measure"] == measure and t["ms"] is not None]
            first = next(t["ms"] for t in own if t["measure"] == measure)
            if times and first is not None:
                gains.append(f"{measure} {1e3 * first:.1f} to {1e3 * min(times):.1f} us")
        console.print(
            f"{family} {old['phase']} {old['name']} {grids}: {shown} ({', '.join(gains)})"
        )
    refused = sum(t["ms"] is None for t in trials)
    console.print(f"{len(trials)} trials, {refused} not usable; table: {file}")
    shadow = os.environ.get("KDA_DSV4_CONFIG_DIR")
    if user_directory() != file.parent.parent:
        where = shadow or str(user_directory())
        console.print(f"set KDA_DSV4_CONFIG_DIR={file.parent.parent} to use it (now: {where})")
