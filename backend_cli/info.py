"""``kda-dsv4 info``: what this machine is, and which kernel path would serve each grid on it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from backend_cli.errors import BadInputError
from backend_cli.families import table_of
from backend_cli.rows import facts, oldest, short_rows, sizes, when
from backend_cli.terminal import plain_console, wrapped
from backend_core import __version__
from backend_core.engines import ENGINES, seams
from backend_core.family import Family, families
from backend_core.strict import strict_mode
from backend_core.tables.load import (
    PathTable,
    Verdict,
    explain,
    feature_sets,
    shipped_directory,
)
from backend_core.tables.schema import UPSTREAM, Operator
from backend_core.target import KNOWN_TARGETS, Target, detect_target

SCHEMA = 3


def info(
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Show the paths of another GPU instead of this machine's: "
            f"{', '.join(KNOWN_TARGETS)} or all. Repeatable.",
        ),
    ] = None,
    requires: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE",
            help="Show the paths and refusals for a model that requires this feature. Repeatable.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show each row with its parameters and its source.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for use in scripts.")
    ] = False,
) -> None:
    """Show the GPU, the installed versions, and which kernel path serves which size of call."""
    report = build_report(_resolve_targets(target or []), frozenset(requires or ()))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report, verbose=verbose, refused=bool(requires))


def build_report(targets: list[Target], requires: frozenset[str]) -> dict[str, Any]:
    """The document of ``info --json``. Within one ``schema`` number keys are added, never changed.

    - ``schema``: 3 (2 had ranges of engines' versions, 1 ``phases`` in place of ``operators``);
    - ``python``, ``packages``: version strings, ``null`` for a package that is not installed;
    - ``engines``: ``name``, ``installed`` (version or ``null``), ``tested`` (whether the contract
      tests run with that version; ``null`` if none is installed), ``tested_versions``, and
      ``holds``, by part whether what is relied on is as expected (``kda-dsv4 seams``);
    - ``machine``: the target found here, with ``vendor``, ``arch``, ``num_sms`` and ``name``;
    - ``strict``: whether ``KDA_DSV4_STRICT`` is on;
    - ``targets``: for each target asked for, its fields and ``families``: each with ``family``,
      ``title``, ``layer_kinds``, ``table`` (the file, or ``null``), ``error`` (why there is none,
      or ``null``) and ``operators``: each with ``operator``, ``grid`` (what its grids count, in
      words) and ``selections``: each with ``requires``, the features that a kind of model needs,
      and ``rows``, in the table's order: ``path``, ``low`` and ``high`` (the grids it serves,
      inclusive; ``high`` is ``null`` for no limit, both are for a refused row), ``max_longest``,
      ``min_longest`` and ``max_width`` (limits of a call's sequences, or ``null``), ``refusal``
      (why, or ``null``), ``params``, ``features``, ``measured``, ``provenance``.

    With ``requires`` there is one selection, of every row. Without, there is one for each feature
    set in the table, of the rows that have it.
    """
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "packages": {
            "kda-dsv4-backend": __version__,
            "torch": _version("torch"),
            "triton": _version("triton"),
        },
        "engines": [
            {
                "name": engine.name,
                "installed": (version := engine.installed()),
                "tested": None if version is None else engine.is_tested(version),
                "tested_versions": engine.tested,
                "holds": {} if version is None else seams.parts_held(engine.name),
            }
            for engine in ENGINES.values()
        ],
        "machine": asdict(detect_target()),
        "strict": strict_mode(),
        "targets": [
            asdict(target)
            | {"families": [_family(f, target, requires) for f in families().values()]}
            for target in targets
        ],
    }


def _resolve_targets(names: list[str]) -> list[Target]:
    if not names:
        return [detect_target()]
    if "all" in names:
        return list(KNOWN_TARGETS.values())
    by_name = {name.lower(): target for name, target in KNOWN_TARGETS.items()}
    for name in names:
        if name.lower() not in by_name:
            known = ", ".join(KNOWN_TARGETS)
            raise BadInputError(f"target must be one of {known} or all, got {name!r}")
    return [by_name[name.lower()] for name in names]


def _family(family: Family, target: Target, requires: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "family": family.name,
        "title": family.title,
        "layer_kinds": sorted(family.layer_kinds),
        "table": None,
        "error": None,
        "operators": [],
    }
    try:
        table = table_of(family, target)
    except LookupError as error:
        return found | {"error": str(error)}
    operators = [_operator(table, operator, requires) for operator in family.tables.operators]
    return found | {"table": str(table.source), "operators": operators}


def _operator(table: PathTable, operator: Operator, requires: frozenset[str]) -> dict[str, Any]:
    if requires:
        selections = [_selection(requires, explain(table, operator.name, requires))]
    else:
        selections = [
            _selection(
                kind,
                [v for v in explain(table, operator.name, kind) if kind <= v.row.features],
            )
            for kind in feature_sets(table, operator.name)
        ]
    return {"operator": operator.name, "grid": operator.grid, "selections": selections}


def _selection(requires: frozenset[str], verdicts: Iterable[Verdict]) -> dict[str, Any]:
    return {"requires": sorted(requires), "rows": [facts(verdict) for verdict in verdicts]}


def shown_table(file: str) -> str:
    """A table's file, without the folder of those that ship with the package."""
    shipped = shipped_directory()
    if Path(file).is_relative_to(shipped):
        return f"shipped {Path(file).relative_to(shipped)}"
    return file


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_report(report: dict[str, Any], *, verbose: bool, refused: bool) -> None:
    """``refused``: with the rows that do not serve, and why."""
    console = plain_console(soft_wrap=False)
    machine = report["machine"]
    units = "" if machine["vendor"] == "cpu" else f" ({machine['arch']}, {machine['num_sms']} SMs)"
    console.print(f"machine   {machine['name']}{units}")
    versions = {"python": report["python"], **report["packages"]}
    found = [f"{name} {version or 'not installed'}" for name, version in versions.items()]
    console.print(f"versions  {', '.join(found)}", soft_wrap=True)
    for engine in report["engines"]:
        console.print(f"engine    {seams.in_words(engine['name'])}", soft_wrap=True)
    console.print(f"strict    {'on' if report['strict'] else 'off'} (KDA_DSV4_STRICT)")
    for target in report["targets"]:
        for family in target["families"]:
            console.print()
            _print_family(console, target, family, verbose=verbose, refused=refused)


def _print_family(
    console: Console,
    target: dict[str, Any],
    family: dict[str, Any],
    *,
    verbose: bool,
    refused: bool,
) -> None:
    title = f"{family['family']} on {target['name']}"
    if family["error"]:
        console.print(f"{title}: {family['error']}", soft_wrap=True)
        return
    served = {
        (row["path"], when(row))
        for operator in family["operators"]
        for selection in operator["selections"]
        for row in selection["rows"]
    }
    if len(served) == 1 and not (verbose or refused):
        ((path, date),) = served
        console.print(f"{title}: {path} serves every call, {date}", soft_wrap=True)
        return
    print(wrapped(f"{title}, from {shown_table(family['table'])}"))
    if not (verbose or refused):
        _print_short(family["operators"])
        return
    for operator in family["operators"]:
        print(wrapped(f"{operator['operator']}, sizes in {operator['grid']}", 2))
        for selection in operator["selections"]:
            if needs := ", ".join(selection["requires"]):
                print(wrapped(f"{'with' if refused else 'at most with'} {needs}", 4))
            if verbose:
                _print_rows(selection["rows"])
                continue
            for size, path, why in short_rows(selection["rows"]):
                print(wrapped(f"{size:28}  {path:15}  {why}", 6))


def _print_short(operators: Sequence[dict[str, Any]]) -> None:
    """A line for each row that serves; models of several kinds follow what tells them apart."""
    width = max(len(operator["operator"]) for operator in operators)
    for operator in operators:
        name, groups = operator["operator"], _by_rows(operator["selections"])
        of_most = groups[0][0]
        for features, rows in groups:
            if features is not of_most:
                print(wrapped(_difference(features, of_most), 4))
            for size, path, date in rows:
                print(f"  {name:{width}}  {size:26}  {path:15}  {date}")
                name = ""
        if any(" to " in size for _, rows in groups for size, *_ in rows):
            print(wrapped(f"sizes in {operator['grid']}", 4))
        every = [row for selection in operator["selections"] for row in selection["rows"]]
        kernels = {row["params"]["kernel"] for row in every if row["path"] == UPSTREAM}
        if kernels:
            left = ", ".join(sorted(kernels))
            print(wrapped(f"in an engine some calls are left to {left} (kda-dsv4 serve)", 4))


def _by_rows(
    selections: Iterable[dict[str, Any]],
) -> list[tuple[frozenset[str], list[tuple[str, str, str]]]]:
    """The features of the models that have the same sizes and paths, and those with their dates."""
    merged: dict[tuple[tuple[str, str], ...], tuple[frozenset[str], list[str]]] = {}
    for selection in selections:
        rows = short_rows(row for row in selection["rows"] if not row["refusal"])
        key = tuple((size, path) for size, path, _ in rows)
        features, dates = merged.get(key, (frozenset(), [date for *_, date in rows]))
        dates = [oldest(pair) for pair in zip(dates, (date for *_, date in rows), strict=True)]
        merged[key] = features | frozenset(selection["requires"]), dates
    return [
        (features, [(*row, date) for row, date in zip(key, dates, strict=True)])
        for key, (features, dates) in merged.items()
    ]


def _difference(features: frozenset[str], of_most: frozenset[str]) -> str:
    """Requirements that a model served so may have, beside those of the first kind."""
    words = [
        f"{word} {', '.join(sorted(names))}"
        for word, names in (("with", features - of_most), ("without", of_most - features))
        if names
    ]
    return ", ".join(words) or "otherwise"


def _print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """All that a table says of each row."""
    for row in rows:
        print(wrapped(f"{sizes(row)}: {row['path']}", 6))
        print(wrapped(f"refused: {row['refusal']}" if row["refusal"] else row["provenance"], 8))
        if row["params"]:
            print(wrapped(" ".join(f"{key}={value}" for key, value in row["params"].items()), 8))
