"""One process of ``kda-dsv4 check``: reads the numbers of probes, answers each with a line of JSON.

A kernel that hangs, crashes the process or leaves the GPU unusable takes no other probe with it:
the process ends and ``check`` starts another.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend_cli import check_dsv4, check_kda, check_step
from backend_cli.worker import serve_answers
from backend_core.tables.schema import KernelPath
from backend_core.tables.select import PHASES, explain, load_table
from backend_core.target import KNOWN_TARGETS, Target, detect_target

INTERPRETABLE = frozenset(
    {"two_stage", "recurrent", "in_registers", "one_launch", "two_launch", "column_split"}
)
"""The paths written in Triton alone, which its interpreter runs."""


@dataclass(frozen=True)
class Probe:
    """One call of one table row.

    Attributes:
        grids: the buckets that the table has it for, in words.
        skip: why it cannot be made here, or ``None``.
        run: returns (error, allowed).
    """

    family: str
    path: KernelPath
    grids: str
    case: str
    skip: str | None
    run: Callable[[Target, torch.device], tuple[float, float]]


def probes(target: Target, *, interpreted: bool) -> list[Probe]:
    """Every probe of the tables of ``target``, the same list in every process.

    Raises:
        LookupError: neither family has a table for this target.
        ValueError: a table is malformed.
    """
    found: list[Probe] = []
    without: list[LookupError] = []
    for family in PHASES:
        try:
            table = load_table(family, target)
        except LookupError as error:
            without.append(error)
            found += [_stock(family, phase, str(error)) for phase in PHASES[family]]
            continue
        for phase in PHASES[family]:
            buckets: dict[object, tuple[KernelPath, list[str]]] = {}
            for row in explain(table, phase):
                path = row.path
                key = (path.name, tuple(path.params.items()), path.features)
                grids = "any" if path.max_grid is None else f"to {path.max_grid}"
                buckets.setdefault(key, (path, []))[1].append(grids)
            for path, labels in buckets.values():
                found += probes_of(family, path, ", ".join(labels), interpreted=interpreted)
    if len(without) == len(PHASES):
        raise LookupError("; ".join(map(str, without)))
    return found


def _stock(family: str, phase: str, reason: str) -> Probe:
    path = KernelPath("stock code", phase, None, frozenset(), {}, False, reason)
    return Probe(family, path, "any", "", reason, lambda *_: (0.0, 0.0))


def probes_of(family: str, path: KernelPath, grids: str, *, interpreted: bool) -> list[Probe]:
    """The probes of one row; a single skipped one where it cannot run here."""
    skip = None
    if path.requires_package is not None:
        skip = f"calls the package {path.requires_package}, which has tests of its own"
    elif interpreted and path.name not in INTERPRETABLE:
        skip = "is not written in Triton"
    elif family == "dsv4" and path.name == "reference":
        skip = "is the definition that other paths are compared with"
    if skip is not None:
        return [Probe(family, path, grids, "", skip, lambda *_: (0.0, 0.0))]
    if family == "kda":
        runs = {name: _run_kda(path, call) for name, call in check_kda.cases(path).items()}
        if path.phase == "decode":
            runs |= check_step.cases(path)
        return [Probe(family, path, grids, name, None, run) for name, run in runs.items()]
    return [
        Probe(family, path, grids, name, None, _run_dsv4(run))
        for name, run in check_dsv4.cases(path).items()
    ]


def _run_kda(
    path: KernelPath, call: Callable[[], check_kda.Call]
) -> Callable[[Target, torch.device], tuple[float, float]]:
    return lambda target, device: check_kda.run(path, target, device, call())


def _run_dsv4(
    run: Callable[[Target, torch.device], float],
) -> Callable[[Target, torch.device], tuple[float, float]]:
    return lambda target, device: (run(target, device), check_dsv4.ALLOWED)


def answer(probe: Probe, target: Target, device: torch.device) -> dict[str, object]:
    """``status`` (``"ok"``, ``"wrong"`` or ``"failed"``), ``error``, ``allowed``, ``seconds`` and
    ``message``."""
    start = time.perf_counter()
    error = allowed = message = None
    try:
        error, allowed = probe.run(target, device)
        status = "ok" if error <= allowed else "wrong"
        if status == "wrong":
            message = f"error {error:.2e}, allowed {allowed:.1e}"
            error = error if error < float("inf") else None
    except Exception as exception:  # whatever a compiler or a driver raises is the result
        status = "failed"
        message = " ".join(f"{type(exception).__name__}: {exception}".split())[:500]
    return {
        "status": status,
        "error": error,
        "allowed": allowed,
        "seconds": round(time.perf_counter() - start, 2),
        "message": message,
    }


def main() -> None:
    """Usage: check_worker [NAME], the part whose Triton paths are interpreted."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    device = torch.device("cuda" if name is None and torch.cuda.is_available() else "cpu")
    target = detect_target() if name is None else KNOWN_TARGETS[name]
    torch.set_num_threads(1)
    todo = probes(target, interpreted=name is not None)
    serve_answers(lambda line: answer(todo[int(line)], target, device))


if __name__ == "__main__":
    main()
