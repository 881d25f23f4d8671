"""Run every case of `cases` as machine code and write the committed result: ``make test-amd``.

    python -m tests.amdgcn.report --output benchmarks/results/amdgcn_execution.json

Takes minutes. Fails where a case fails, where an instruction of the compile reports is not
modelled, or where one that they have was never executed.
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

from tests.amdgcn.cases import ExecutionCase, all_cases
from tests.amdgcn.device import TARGETS, Device
from tests.amdgcn.errors import ExecutionError
from tests.amdgcn.opcodes import of_compile_reports


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
            "opcodes": len(run.opcodes),
            "unwaited_reads": run.unwaited_reads,
        }
        for name, run in device.runs.items()
    }
    line = {"arch": case.arch, "case": case.name, **outcome}
    line |= {"seconds": round(time.perf_counter() - begin, 1), "kernels": kernels}
    return line, {name: run.opcodes for name, run in device.runs.items()}


def coverage(arch: str, executed: Counter[str]) -> dict[str, Any]:
    """Which share of the operations in the compile reports is modelled, and was executed."""
    found = of_compile_reports(arch)
    known = set(found["opcodes"])
    missing = sorted(known - set(executed))
    return {
        "kernels": found["kernels"],
        "opcodes": len(known),
        "unmodelled": found["unmodelled"],
        "not_executed": missing,
        "executed_share": round(1 - len(missing) / len(known), 4),
        "further_opcodes_executed": sorted(set(executed) - known),
    }


def run_arch(arch: str) -> tuple[list[dict[str, Any]], dict[str, Counter[str]], dict[str, Any]]:
    """All cases of one architecture: lines of the result, instructions by kernel, coverage."""
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    by_kernel: dict[str, Counter[str]] = {}
    for case in all_cases(arch):
        line, opcodes = run_case(case)
        lines.append(line)
        for name, counts in opcodes.items():
            by_kernel.setdefault(name, Counter()).update(counts)
        shown = line.get("failure") or f"{line['error']:.2e} of {line['allowed']:.0e}"
        print(f"{arch} {case.name}: {shown} ({line['seconds']} s)", flush=True)
    return lines, by_kernel, coverage(arch, sum(by_kernel.values(), Counter()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--arch", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(options.arch), mp_context=context) as pool:
        done = dict(zip(options.arch, pool.map(run_arch, options.arch), strict=True))
    lines = [line for of_arch, _, _ in done.values() for line in of_arch]
    covered = {arch: shares for arch, (_, _, shares) in done.items()}
    result = {
        "script": "tests/amdgcn/report.py",
        "date": datetime.date.today().isoformat(),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "executed_by": "the interpreter in tests/amdgcn, on a CPU; no AMD GPU was used",
        "coverage": covered,
        "opcodes_by_kernel": {
            arch: {name: dict(sorted(counts.items())) for name, counts in sorted(kernels.items())}
            for arch, (_, kernels, _) in done.items()
        },
        "cases": lines,
    }
    options.output.write_text(_dump(result), encoding="utf-8")
    failed = [f"{line['arch']} {line['case']}" for line in lines if not line["passed"]]
    for arch, shares in covered.items():
        failed += [f"{arch} not modelled: {text}" for text in shares["unmodelled"]]
        failed += [f"{arch} never executed: {name}" for name in shares["not_executed"]]
    print(*failed, sep="\n")
    sys.exit(bool(failed))


def _dump(result: dict[str, Any]) -> str:
    """JSON with one line for each case and each kernel, so that a difference can be read."""
    parts = []
    for key, value in result.items():
        if key == "cases":
            rows = ",\n".join(f"    {json.dumps(line)}" for line in value)
            parts.append(f'  "cases": [\n{rows}\n  ]')
        elif key == "opcodes_by_kernel":
            blocks = []
            for arch, kernels in value.items():
                rows = ",\n".join(
                    f"      {json.dumps(k)}: {json.dumps(v)}" for k, v in kernels.items()
                )
                blocks.append(f"    {json.dumps(arch)}: {{\n{rows}\n    }}")
            parts.append('  "opcodes_by_kernel": {\n' + ",\n".join(blocks) + "\n  }")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
