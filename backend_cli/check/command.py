"""``kda-dsv4 check``: every kernel that the tables can choose, compiled, run and compared here."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.check.probes import WORKER, Probe, probes
from backend_cli.errors import BadInputError, CliError
from backend_cli.files import check_writable, write_json
from backend_cli.info import build_report, shown_table
from backend_cli.rows import columns
from backend_cli.terminal import Bar
from backend_cli.worker import Workers, ask_all
from backend_core.target import KNOWN_TARGETS, Target, detect_target

SCHEMA = 3
_NOT_RUN = "not run: interrupted"


def check(
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the results to a file, for a bug report."
        ),
    ] = None,
    interpret: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run another GPU's Triton kernels in Triton's interpreter, on the CPU: "
            f"{', '.join(name for name in KNOWN_TARGETS if name != 'cpu')}.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes; by default as many as the CPUs allow."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=1.0, max=86_400.0, help="Most seconds for one call, including compilation."
        ),
    ] = 120.0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show each call with its error.")
    ] = False,
) -> None:
    """Run every kernel that this machine's tables can choose and compare it with float64."""
    target = _target(interpret)
    if json_path is not None:
        check_writable(json_path)
    report = run(target, interpret is not None, jobs or _default_jobs(target), timeout)
    try:
        if json_path is not None:
            write_json(json_path, report)
    finally:  # also where a disk is full by now
        _print_report(report, verbose=verbose)
    if report.get("interrupted"):
        raise typer.Exit(130)
    if report["failures"] or not report["checked"]:
        raise typer.Exit(1)


def run(target: Target, interpreted: bool, jobs: int, timeout: float) -> dict[str, Any]:
    """The document of ``check --json``. Within one ``schema`` number keys are added, never changed.

    - ``script``: this file; ``schema``: 3 (2 had every selection of ``info``); ``date``;
      ``seconds`` of the whole run;
    - ``info``: what ``info --json`` prints for the target, without the operators of its families,
      and with shipped tables named without their folder;
    - ``interpreted``: whether the kernels ran in Triton's interpreter;
    - ``interrupted``: whether it was ended by hand before all calls were made;
    - ``checked``, ``failures``: how many calls were made, and how many were not right;
    - ``results``: for each call ``family``, ``operator``, ``path``, ``grids``, ``params``,
      ``case``, ``status`` (``"ok"``, ``"wrong"``, ``"failed"`` or ``"skipped"``), ``error`` and
      ``allowed`` (in the family's measure: relative L2 for KDA, the share of differing values for
      the compressor), ``seconds`` and ``message``.

    Raises:
        CliError: torch or triton is missing, or there is no table for the target.
        BadInputError: a user's table is malformed.
    """
    begin = time.perf_counter()
    todo = _probes(target, interpreted)
    results: list[dict[str, Any]] = [
        {
            "family": probe.family,
            "operator": probe.row.operator,
            "path": probe.row.name,
            "grids": probe.grids,
            "params": probe.row.params_dict(),
            "case": probe.case,
            "status": "skipped",
            "error": None,
            "allowed": None,
            "seconds": 0.0,
            "message": probe.skip,
        }
        for probe in todo
    ]
    asked = [number for number, probe in enumerate(todo) if probe.skip is None]
    for number in asked:
        results[number]["message"] = _NOT_RUN
    interrupted = False
    with Bar(f"checking {target.name}", len(asked)) as bar:

        def done(place: int, answer: dict[str, Any]) -> bool:
            results[asked[place]].update(answer)
            bar.update(1)
            return True

        def start() -> Workers:
            if interpreted:
                return Workers(WORKER, target.name, TRITON_INTERPRET="1")
            return Workers(WORKER)

        try:
            ask_all([str(number) for number in asked], start, jobs, timeout, done)
        except KeyboardInterrupt:
            interrupted = True
    return {
        "script": "backend_cli/check/command.py",
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - begin, 1),
        "info": _info(target),
        "interpreted": interpreted,
        "interrupted": interrupted,
        "checked": sum(results[number]["status"] != "skipped" for number in asked),
        "failures": sum(row["status"] in ("wrong", "failed") for row in results),
        "results": results,
    }


def _info(target: Target) -> dict[str, Any]:
    report = build_report([target], frozenset())
    for family in report["targets"][0]["families"]:
        del family["operators"]
        if family["table"] is not None:
            family["table"] = shown_table(family["table"])
    return report


def _target(interpret: str | None) -> Target:
    if interpret is None:
        return detect_target()
    by_name = {name.lower(): target for name, target in KNOWN_TARGETS.items() if name != "cpu"}
    if interpret.lower() not in by_name:
        names = ", ".join(target.name for target in by_name.values())
        raise BadInputError(f"--interpret must be one of {names}, got {interpret!r}")
    return by_name[interpret.lower()]


def _probes(target: Target, interpreted: bool) -> list[Probe]:
    try:
        import torch  # noqa: F401 (each probe runs on it)

        return probes(target, interpreted=interpreted)
    except ModuleNotFoundError as error:
        raise CliError(
            f"check runs kernels and needs {error.name}, which is not installed here"
        ) from error
    except LookupError as error:
        raise CliError(f"nothing to check, upstream code runs on this machine: {error}") from error


def _default_jobs(target: Target) -> int:
    """Compilation fills one CPU per process; each process holds half a gigabyte of GPU memory."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // (1 if target.vendor == "cpu" else 2)))


def _print_report(report: dict[str, Any], *, verbose: bool) -> None:
    """One line for each row of the tables, then a sentence for each call that is not right."""
    info = report["info"]
    (target,) = info["targets"]
    versions = [f"{name} {version}" for name, version in info["packages"].items() if version]
    how = "interpreted on the CPU" if report["interpreted"] else f"{target['arch']}"
    print(f"{target['name']} ({how}), {', '.join(versions)}")
    rows = [(key, list(calls)) for key, calls in itertools.groupby(report["results"], _row)]
    cells = [(*key[1:4], _error(calls), _calls(calls)) for key, calls in rows]
    lines = columns([("", "path", "sizes", "error", "calls"), *cells], 2)
    print(lines[0])
    family = ""
    for ((named, *_), calls), line in zip(rows, lines[1:], strict=True):
        if named != family:
            family = named
            print(family)
        print(line)
        if verbose:
            _print_calls(calls)
    for row in report["results"]:
        if row["status"] not in ("ok", "skipped"):
            what = f"{row['family']} {row['operator']} {row['path']} {row['case']}".strip()
            print(f"{row['status']}: {what}: {row['message']}")
    if target["vendor"] == "cpu":
        print(
            "no GPU here, so nothing was compiled; --interpret H200 runs that part's Triton "
            "kernels on the CPU"
        )
    if report.get("interrupted"):  # older reports do not say
        left = sum(row["message"] == _NOT_RUN for row in report["results"])
        print(f"interrupted: {left} calls were not made")
    largest = _error(report["results"])
    errors = f"errors of up to {largest} of what is allowed, " if largest else ""
    print(
        f"check: {report['checked'] - report['failures']} of {report['checked']} calls right, "
        f"{errors}{report['seconds']:.0f} s"
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    """The table's row that a call was made of."""
    names = ("family", "operator", "path", "grids")
    return (*(result[name] for name in names), repr(result["params"]))


def _calls(calls: list[dict[str, Any]]) -> str:
    """The number of right calls, or why none was made."""
    if all(call["status"] == "skipped" for call in calls):
        return str(calls[0]["message"])
    right = sum(call["status"] == "ok" for call in calls)
    return f"{right} right" if right == len(calls) else f"{right} of {len(calls)} right"


def _error(calls: list[dict[str, Any]]) -> str:
    """The largest share of the allowed error that a call used."""
    shares = [_share(call) for call in calls if call["error"] is not None]
    return f"{max(shares):.2f}" if shares else ""


def _share(call: dict[str, Any]) -> float:
    if call["allowed"] or not call["error"]:
        return float(call["error"] and call["error"] / call["allowed"])
    return math.inf


def _print_calls(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        if call["error"] is not None:
            errors = f"{call['error']:.1e} of {call['allowed']:.1e}"
            print(f"      {call['status']:7} {errors}  {call['case']}")
