"""``kda-dsv4 bench``: the families' benchmark scripts, on this machine.

Ours are those under ``benchmarks/`` of the repository, from which every committed figure comes; an
installed package has them as ``kda_dsv4_benchmarks``. They run as programs of their own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from backend_cli.errors import BadInputError, CliError
from backend_cli.families import no_gpu
from backend_cli.files import check_writable, read_json
from backend_cli.terminal import Bar, hidden, plain_console
from backend_core.family import families
from backend_core.target import detect_target

_SUFFIX = "_gpu_ms"
_NOT_A_PEER = {"ours", "best_peer", "bare", "two_stage"}
_NAMES = {"fla": "FLA", "flashkda": "FlashKDA", "vllm": "vLLM"}

Row = dict[str, Any]


def bench(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            help="One benchmark, such as kda-prefill (an unknown name lists them). By default all"
            " of them run."
        ),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder for the results.")
    ] = Path("bench-results"),
) -> None:
    """Time the kernels and the peers that are installed; more options go to the script."""
    known = scripts()
    if what is not None and what not in known:
        raise BadInputError(f"WHAT must be one of {', '.join(known)}, got {what!r}")
    if what is None and context.args:
        raise BadInputError(f"options of a script need its name first, got {context.args[0]}")
    chosen = list(known) if what is None else [what]
    outputs = {item: output_dir / f"{item}.json" for item in chosen}
    for path in outputs.values():
        check_writable(path)
        if os.path.lexists(path):
            raise BadInputError(f"{path} exists already: name another --output-dir")
    files = {item: script_file(known[item]) for item in chosen}
    if detect_target().vendor == "cpu":
        raise CliError(f"bench measures a GPU, and {no_gpu()}")
    output_dir.mkdir(parents=True, exist_ok=True)
    with Bar("benchmarks", len(chosen)) as bar:
        for item, path in outputs.items():
            bar.update(description=item, note="")
            _run(files[item], path, context.args, bar)
            bar.update(1)
    for item, path in outputs.items():
        _print_summary(item, path)


def scripts() -> dict[str, str]:
    """Every family's scripts, by what the user calls them."""
    found: dict[str, str] = {}
    for family in families().values():
        found |= family.benchmarks
    return found


def script_file(script: str) -> Path:
    """Where a script of `Family.benchmarks` is: in the clone, or in the installed package.

    Raises:
        CliError: it is in neither.
    """
    path = _own_folder() / script
    if not path.is_file():
        raise CliError(f"the benchmark script {path} does not exist")
    return path


def _own_folder() -> Path:
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


def _run(script: Path, output: Path, arguments: list[str], bar: Bar) -> None:
    """Run one script to its end; what it prints goes above the bar."""
    command = [sys.executable, str(script), "--output", str(output.absolute()), *arguments]
    lines = 0
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                bar.print(hidden(line.rstrip()))
                lines += 1
                bar.update(note=f"{lines} lines")
            code = process.wait()
        finally:
            process.kill()  # where this process was interrupted
            process.wait()
        if code:
            errors.seek(0)
            last = errors.read().strip().splitlines()[-1:] or [f"exit code {code}"]
            kept = f"; what it had measured is in {output}" if output.exists() else ""
            raise CliError(f"{script.name} failed: {last[0]}{kept}")


def _print_summary(item: str, path: Path) -> None:
    result = read_result(path)
    console = plain_console()
    found = speedups(result["rows"])
    console.print(f"\n{item} on {result.get('gpu')}, {len(result['rows'])} shapes: {path}")
    if not found:
        console.print("no peer was installed")
        return
    table = Table("peer", "its time over ours", "least", "shapes", box=None, pad_edge=False)
    for peer, (mean, least, count) in found.items():
        table.add_row(_NAMES.get(peer, peer), f"{mean:.2f}", f"{least:.2f}", str(count))
    console.print(table)


def read_result(path: Path) -> dict[str, Any]:
    """A result with ``rows``, each with its shape and ``ours_gpu_ms``.

    Raises:
        BadInputError: the file cannot be read, or is no such result.
    """
    result = read_json(path, "result")
    rows = result.get("rows") if isinstance(result, dict) else None
    if not isinstance(rows, list) or not rows:
        raise BadInputError(f"result {path} must have rows of times, as kda-dsv4 bench writes them")
    for number, row in enumerate(rows, start=1):
        time = row.get("ours_gpu_ms") if isinstance(row, dict) else None
        if not isinstance(time, float) or not time > 0:
            raise BadInputError(f"result {path}, row {number}: ours_gpu_ms must be a time in ms")
    return dict(result)


def times(row: Row) -> dict[str, float]:
    """GPU time in ms by contender, ours first; those that were not measured are left out."""
    found = {
        key.removesuffix(_SUFFIX): value
        for key, value in row.items()
        if key.endswith(_SUFFIX) and isinstance(value, float)
    }
    found.pop("best_peer", None)
    return {"ours": found.pop("ours"), **found}


def speedups(rows: list[Row]) -> dict[str, tuple[float, float, int]]:
    """By peer: geometric mean and least of its time over ours, and over how many rows."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        found = times(row)
        for peer, ms in found.items():
            if peer not in _NOT_A_PEER:
                ratios.setdefault(peer, []).append(ms / found["ours"])
    return {
        peer: (math.exp(sum(map(math.log, all_)) / len(all_)), min(all_), len(all_))
        for peer, all_ in ratios.items()
    }
