"""``kda-dsv4 bench``: the project's benchmark scripts, on this machine.

The scripts are those under ``benchmarks/`` of the repository, from which every committed figure
comes; an installed package has them as ``kda_dsv4_benchmarks``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from backend_cli.errors import BadInputError, CliError
from backend_cli.files import check_writable
from backend_cli.results import name, read_result, speedups
from backend_core.target import detect_target

SCRIPTS = {
    "kda-prefill": "bench_kda_prefill.py",
    "kda-decode": "bench_kda_decode.py",
    "dsv4-compressor": "bench_dsv4_compressor.py",
}


def bench(
    context: typer.Context,
    what: Annotated[
        str | None, typer.Argument(help=f"{', '.join(SCRIPTS)}; by default all of them.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where WHAT.json goes.")] = Path(
        "bench-results"
    ),
) -> None:
    """Time the kernels beside the peers that are installed; more options go to the one script."""
    if what is not None and what not in SCRIPTS:
        raise BadInputError(f"WHAT must be one of {', '.join(SCRIPTS)}, got {what!r}")
    if what is None and context.args:
        raise BadInputError(f"options of a script need its name first, got {context.args[0]}")
    chosen = list(SCRIPTS) if what is None else [what]
    outputs = {item: output_dir / f"{item}.json" for item in chosen}
    for path in outputs.values():
        check_writable(path)
        if path.exists():
            raise BadInputError(f"{path} exists already: name another --output-dir")
    folder = scripts_folder()
    if detect_target().vendor == "cpu":
        raise CliError("bench measures a GPU, and there is none here")
    output_dir.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[rows]} lines"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    with progress:
        overall = progress.add_task("benchmarks", total=len(chosen), rows=0)
        for item, path in outputs.items():
            progress.update(overall, description=f"{item:15}")
            _run(folder / SCRIPTS[item], path, context.args, progress)
            progress.advance(overall)
    for item, path in outputs.items():
        _print_summary(item, path)


def scripts_folder() -> Path:
    """Where the benchmark scripts are: in the clone, or in the installed package.

    Raises:
        CliError: they are in neither.
    """
    clone = Path(__file__).resolve().parent.parent / "benchmarks"
    if clone.is_dir():
        return clone
    try:
        spec = importlib.util.find_spec("kda_dsv4_benchmarks.benchmarks")
    except ModuleNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise CliError("the benchmark scripts are not installed: run bench from a clone")
    return Path(spec.submodule_search_locations[0])


def _run(script: Path, output: Path, arguments: list[str], progress: Progress) -> None:
    """Run one script to its end; what it prints goes above the bar."""
    command = [sys.executable, str(script), "--output", str(output.absolute()), *arguments]
    task = progress.add_task(f"{script.stem[6:]:15}", total=None, rows=0)
    lines = 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                progress.console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
                lines += 1
                progress.update(task, rows=lines)
            code = process.wait()
        finally:
            process.kill()  # where this process was interrupted
            process.wait()
        progress.remove_task(task)
        if code:
            errors.seek(0)
            said = errors.read().strip().splitlines()[-1:] or [f"exit code {code}"]
            kept = f"; what it had measured is in {output}" if output.exists() else ""
            raise CliError(f"{script.name} failed: {said[0]}{kept}")


def _print_summary(item: str, path: Path) -> None:
    result = read_result(path)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    found = speedups(result["rows"])
    console.print(f"\n{item} on {result.get('gpu')}, {len(result['rows'])} shapes: {path}")
    if not found:
        console.print("no peer was installed")
        return
    table = Table("peer", "its time over ours", "least", "shapes", box=None, pad_edge=False)
    for peer, (mean, least, count) in found.items():
        table.add_row(name(peer), f"{mean:.2f}", f"{least:.2f}", str(count))
    console.print(table)
