"""The search of ``kda-dsv4 tune``: which parameters to try, and which of them win.

Every row of a table keeps its path, grids and features; its parameters are tried one after another,
each over its values with the others at their best so far.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from backend_cli.terminal import Bar
from backend_core.family import Family
from backend_core.tables.load import PathTable

GAIN = 0.02
"""A value replaces another where it saves this share of the time: less is noise."""

Values = tuple[int | bool | str, ...]
Ask = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
Keep = Callable[[dict[str, Any], list[dict[str, Any]]], None]


@dataclass(frozen=True)
class Sweep:
    """One parameter search.

    Attributes:
        row: of the table, from 0.
        measure: what is timed, by the family's name for it.
        grid: at which grid.
        params: the row's parameters as shipped, defaults included.
        space: the values of each parameter that is searched.
    """

    family: str
    row: int
    measure: str
    grid: int
    params: dict[str, Any]
    space: dict[str, Values]


def sweeps(family: Family, table: PathTable) -> Iterator[Sweep]:
    """The searches of a table, in its rows' order.

    Raises:
        ValueError: the family's search space names a parameter that a path does not have.
    """
    low: dict[str, int] = {}
    for number, path in enumerate(table.rows):
        previous = low.get(path.operator, 1)
        if path.max_grid is not None:
            low[path.operator] = path.max_grid + 1
        params = path.params_dict()
        for measure, space in family.tune_space(path).items():
            if unknown := sorted(space.keys() - params.keys()):
                raise ValueError(
                    f"the search space of {family.name} {path.operator} {path.name} must name its "
                    f"parameters, got {', '.join(unknown)}"
                )
            grid = path.max_grid or max(family.open_grid[path.operator], 2 * previous)
            yield Sweep(family.name, number, measure, grid, params, dict(space))


def search(
    document: dict[str, Any],
    todo: list[Sweep],
    ask: Ask,
    heads: int,
    keep: Keep = lambda found, trials: None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The document with the best parameters found, and every trial in order.

    Args:
        document: a table as TOML has it.
        ask: takes a document and the question about one of its rows; returns ``ms`` and
            ``message``.
        keep: called after each sweep with the document and the trials so far.
    """
    best = copy.deepcopy(document)
    trials: list[dict[str, Any]] = []
    with Bar("trials", sum(2 + sum(len(v) for v in sweep.space.values()) for sweep in todo)) as bar:

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
            bar.update(1)
            ms: float | None = answer["ms"]
            return ms

        for sweep in todo:
            row = best["path"][sweep.row]
            bar.update(
                description=f"{sweep.family} {row['operator']} {row['name']} {sweep.measure}"
            )
            shipped = sweep.params | row.get("params", {})
            row["params"] = dict(shipped)
            fastest = time(sweep, shipped, "quick")
            for parameter, values in sweep.space.items():
                for value in values:
                    if value == row["params"][parameter]:
                        bar.update(1)
                        continue
                    params = row["params"] | {parameter: value}
                    ms = time(sweep, params, "quick")
                    if ms is not None and (fastest is None or ms < (1 - GAIN) * fastest):
                        fastest, row["params"] = ms, params
            if row["params"] == shipped:
                bar.update(1)
            elif time(sweep, row["params"], "all") is None:
                row["params"] = shipped
            keep(best, trials)
    return best, trials


def render(document: dict[str, Any], comment: str) -> str:
    """A table as TOML, readable by ``backend_core.tables.schema``."""
    lines = [f"# {comment}"]
    lines += _pairs({name: x for name, x in document.items() if isinstance(x, str)})
    for row in document["path"]:
        plain = {key: value for key, value in row.items() if key != "params"}
        lines += ["", "[[path]]", *_pairs(plain)]
        if row.get("params"):
            lines += ["[path.params]", *_pairs(row["params"])]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, Any]) -> list[str]:
    # JSON's strings, numbers, booleans and arrays of strings are TOML's
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
