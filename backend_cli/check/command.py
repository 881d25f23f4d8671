"""``kda-dsv4 check``: every kernel that the tables can choose, compiled, run and compared here."""

from __future__ import annotations

import datetime
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from backend_cli.check.probes import WORKER, Probe, probes
from backend_cli.errors import BadInputError, CliError
from backend_cli.files import check_writable, write_json
from backend_cli.info import build_report
from backend_cli.terminal import Bar, plain_console
from backend_cli.worker import Workers, ask_all
from backend_core.tables.select import shipped_directory
from backend_core.target import KNOWN_TARGETS, Target, detect_target

SCHEMA = 2


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
) -> None:
    """Run every kernel that this machine's tables can choose and compare it with float64."""
    target = _target(interpret)
    if json_path is not None:
        check_writable(json_path)
    report = run(target, interpret is not None, jobs or _default_jobs(target), timeout)
    if json_path is not None:
        write_json(json_path, report)
    _print_report(report)
    if report["failures"] or not report["checked"]:
        raise typer.Exit(1)


def run(target: Target, interpreted: bool, jobs: int, timeout: float) -> dict[str, Any]:
    """The document of ``check --json``. Within one ``schema`` number keys are added, never changed.

    - ``script``: this file; ``schema``: 2 (1 had ``phase`` in place of ``operator``); ``date``;
      ``seconds`` of the whole run;
    - ``info``: what ``info --json`` prints for the target, with shipped tables named without their
      folder;
    - ``interpreted``: whether the kernels ran in Triton's interpreter;
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
            "operator": probe.path.operator,
            "path": probe.path.name,
            "grids": probe.grids,
            "params": probe.path.params_dict(),
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
    checked = len(asked)
    with Bar(f"checking {target.name}", checked) as bar:

        def done(place: int, answer: dict[str, Any]) -> bool:
            results[asked[place]].update(answer)
            bar.update(1)
            return True

        def start() -> Workers:
            if interpreted:
                return Workers(WORKER, target.name, TRITON_INTERPRET="1")
            return Workers(WORKER)

        ask_all([str(number) for number in asked], start, jobs, timeout, done)
    return {
        "script": "backend_cli/check/command.py",
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - begin, 1),
        "info": _info(target),
        "interpreted": interpreted,
        "checked": checked,
        "failures": sum(row["status"] in ("wrong", "failed") for row in results),
        "results": results,
    }


def _info(target: Target) -> dict[str, Any]:
    report = build_report([target], frozenset())
    for family in report["targets"][0]["families"]:
        table = family["table"]
        if table is not None and Path(table).is_relative_to(shipped_directory()):
            family["table"] = f"shipped {Path(table).relative_to(shipped_directory())}"
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


def _print_report(report: dict[str, Any]) -> None:
    width = None if sys.stdout.isatty() else 120
    console = plain_console(width=width, soft_wrap=False)
    info = report["info"]
    (target,) = info["targets"]
    versions = [f"{name} {version}" for name, version in info["packages"].items() if version]
    how = "interpreted on the CPU" if report["interpreted"] else f"{target['arch']}"
    console.print(f"{target['name']} ({how}), {', '.join(versions)}", soft_wrap=True)
    table = Table(
        "kernels", "path", "grids", "call", "error", "allowed", "", box=None, pad_edge=False
    )
    for row in report["results"]:
        error, allowed = (
            "" if row[key] is None else f"{row[key]:.1e}" for key in ("error", "allowed")
        )
        kernels = f"{row['family']} {row['operator']}"
        table.add_row(
            kernels, row["path"], row["grids"], row["case"], error, allowed, row["status"]
        )
    console.print(table)
    for row in report["results"]:
        if row["status"] != "ok":
            what = f"{row['family']} {row['operator']} {row['path']} {row['case']}".strip()
            console.print(f"{row['status']}: {what}: {row['message']}", soft_wrap=True)
    if target["vendor"] == "cpu":
        console.print(
            "no GPU here, so nothing was compiled; --interpret H200 runs that part's Triton "
            "kernels on the CPU",
            soft_wrap=True,
        )
    console.print(
        f"check: {report['checked'] - report['failures']} of {report['checked']} calls right, "
        f"{report['seconds']:.0f} s"
    )
