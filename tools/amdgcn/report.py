"""Run every case of `cases` as machine code and write the committed result: ``make test-amd``.

    python -m tools.amdgcn.report --output benchmarks/results/amdgcn_execution.json

With ``--only "gfx950 attention"`` it runs that part again and keeps the others. It takes minutes,
and fails where a case fails, where an instruction of the compile reports is not modelled, or
where a kernel or an instruction that they have was never executed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
import triton

from backend_core.testing.records import write_record
from tools.amdgcn.case import ExecutionCase
from tools.amdgcn.cases import all_cases
from tools.amdgcn.device import TARGETS, Device
from tools.amdgcn.errors import ExecutionError
from tools.amdgcn.opcodes import REPORTS, of_compile_reports

PARTS = [f"{arch} {family}" for family in REPORTS for arch in TARGETS]


def run_case(case: ExecutionCase) -> tuple[dict[str, Any], dict[str, Counter[str]]]:
    """A line of the result, and the instructions run, by kernel."""
    begin = time.perf_counter()
    with Device(case.arch, is_large=case.is_large) as device:
        try:
            error, allowed = case.run(device.target)
            outcome: dict[str, Any] = {"error": error, "allowed": allowed}
            outcome["passed"] = bool(error <= allowed)
        except (ExecutionError, AssertionError, RuntimeError) as failure:
            outcome = {"failure": str(failure), "passed": False}
    kernels = {
        name: {
            "workgroups": run.workgroups,
            "instructions": run.instructions,
            "unwaited_reads": run.unwaited_reads,
        }
        for name, run in device.runs.items()
    }
    line = {"case": case.name, **outcome}
    line |= {"seconds": round(time.perf_counter() - begin, 1), "kernels": kernels}
    return line, {name: run.opcodes for name, run in device.runs.items()}


def coverage(arch: str, family: str, by_kernel: dict[str, Counter[str]]) -> dict[str, Any]:
    """The share of the kernels and operations in a family's compile reports that ran in its
    cases, and the operations that are not modelled."""
    found = of_compile_reports(arch, family)
    kernels, known = set(found["kernels"]), set(found["opcodes"])
    executed = {name for kernel in kernels & set(by_kernel) for name in by_kernel[kernel]}
    missing = sorted(known - executed)
    return {
        "compilations": sum(found["kernels"].values()),
        "kernels": len(kernels),
        "kernels_not_executed": sorted(kernels - set(by_kernel)),
        "opcodes": len(known),
        "unmodelled": found["unmodelled"],
        "not_executed": missing,
        "executed_share": round(1 - len(missing) / len(known), 4),
        "further_opcodes_executed": sorted(executed - known),
    }


def run_part(name: str) -> dict[str, Any]:
    """All cases of one family on one architecture."""
    torch.set_num_threads(1)
    arch, family = name.split()
    lines: list[dict[str, Any]] = []
    by_kernel: dict[str, Counter[str]] = {}
    for case in all_cases(arch):
        if case.name.split()[0] != family:
            continue
        line, opcodes = run_case(case)
        lines.append(line)
        for kernel, counts in opcodes.items():
            by_kernel.setdefault(kernel, Counter()).update(counts)
        shown = line.get("failure") or f"{line['error']:.2e} of {line['allowed']:.0e}"
        print(f"{arch} {case.name}: {shown} ({line['seconds']} s)", flush=True)
    return {
        "arch": arch,
        "family": family,
        **_versions(),
        **summary(arch, family, lines, by_kernel),
    }


def summary(
    arch: str, family: str, lines: list[dict[str, Any]], by_kernel: dict[str, Counter[str]]
) -> dict[str, Any]:
    """The committed part of a result: its coverage, and a line for each kernel and each case."""
    kernels = {}
    for name, opcodes in sorted(by_kernel.items()):
        runs = [line["kernels"][name] for line in lines if name in line["kernels"]]
        sums = {
            key: sum(run[key] for run in runs)
            for key in ("workgroups", "instructions", "unwaited_reads")
        }
        kernels[name] = {"cases": len(runs), **sums, "opcodes": len(opcodes)}
    kept = ("case", "error", "allowed", "failure", "passed")
    return {
        "coverage": coverage(arch, family, by_kernel),
        "kernels": kernels,
        "cases": [{key: line[key] for key in kept if key in line} for line in lines],
    }


def _versions() -> dict[str, str]:
    today = datetime.date.today().isoformat()
    return {"date": today, "triton": triton.__version__, "torch": torch.__version__}


def failures(part: dict[str, Any]) -> list[str]:
    """The faults of a result."""
    found = [f"failed: {line['case']}" for line in part["cases"] if not line["passed"]]
    for gap in ("unmodelled", "not_executed", "kernels_not_executed"):
        found += [f"{gap}: {name}" for name in part["coverage"][gap]]
    return [f"{part['arch']} {part['family']} {text}" for text in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS)
    options = parser.parse_args()
    parts: dict[str, dict[str, Any]] = {}
    if set(options.only) != set(PARTS):  # the others stay as they are
        kept = json.loads(options.output.read_text(encoding="utf-8"))["parts"]
        parts = {f"{part['arch']} {part['family']}": part for part in kept}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        for name, part in zip(options.only, pool.map(run_part, options.only), strict=True):
            parts[name] = part
    ordered = [parts[name] for name in PARTS]
    write_record(options.output, _record(ordered))
    found = [text for part in ordered for text in failures(part)]
    print(*found, sep="\n")
    sys.exit(bool(found))


def _record(parts: list[dict[str, Any]]) -> dict[str, Any]:
    by = "the interpreter in tools/amdgcn, on a CPU; no AMD GPU was used"
    head = {"script": "tools/amdgcn/report.py", **_versions(), "executed_by": by}
    return {**head, "parts": parts}


if __name__ == "__main__":
    main()
