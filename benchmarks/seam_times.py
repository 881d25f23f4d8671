"""How long a server takes to hold what the adapters rely on against its engine's source.

    python -m benchmarks.seam_times benchmarks/results/seam_times.json PYTHON [PYTHON ...]

``PYTHON`` are interpreters of environments with an engine and this package. In each, new processes
hold the parts that a server of Kimi-Linear asks for, as `backend_core.engines.seams.refusal` does
before weights are loaded; ``parts`` has the median of each in ms, ``ms`` that of their sum.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from backend_core.engines import ENGINES, seams
from backend_core.testing.records import write_record

PROCESSES = 9
PARTS = {
    "vllm": (
        *("flag", "choice of attention backends", "KDA layers of Kimi-Linear"),
        *("pages of KDA states of Kimi-Linear", "prefill graphs of KDA models"),
        *("KDA layers inside of prefill graphs", "decode of MLA layers"),
    ),
    "sglang": (
        *("flag", "KDA layers", "prefill graphs of KDA models"),
        *("MLA layers outside of prefill graphs", "decode of MLA layers"),
    ),
}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("pythons", type=Path, nargs="*", metavar="PYTHON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.output.write_text(json.dumps(held()))
        return
    if not args.pythons:
        parser.error("expected an interpreter of an environment with an engine, got none")
    rows = [row_of(python, args.output) for python in args.pythons]
    report = {
        "script": "benchmarks/seam_times.py",
        "date": time.strftime("%Y-%m-%d"),
        "cpu_threads": os.cpu_count(),
        "processes": PROCESSES,
        "rows": rows,
    }
    write_record(args.output, report)
    for row in rows:
        print(row)


def row_of(python: Path, output: Path) -> dict[str, Any]:
    """The medians of an environment's processes."""
    file, runs = output.with_suffix(".child"), []
    for _ in range(PROCESSES):
        command = [str(python), "-m", "benchmarks.seam_times", str(file), "--child"]
        subprocess.run(command, check=True)
        runs.append(json.loads(file.read_text()))
    file.unlink()
    names = runs[0]["parts"]
    parts = {name: statistics.median(run["parts"][name] for run in runs) for name in names}
    total = statistics.median(sum(run["parts"].values()) for run in runs)
    return {**runs[0], "ms": round(total, 1), "parts": parts}


def held() -> dict[str, Any]:
    """Milliseconds of each part, for the engine that is installed.

    Raises:
        RuntimeError: there is none, or a part does not hold.
    """
    engine = next((name for name in PARTS if ENGINES[name].installed()), None)
    if engine is None:
        raise RuntimeError(f"expected vllm or sglang in the environment of {sys.executable}")
    parts = {part.name: part for part in seams.parts_of(engine)}
    times = {}
    for name in PARTS[engine]:
        begin = time.perf_counter()
        if (reason := seams.refusal(parts[name])) is not None:
            raise RuntimeError(reason)
        times[name] = round(1e3 * (time.perf_counter() - begin), 2)
    return {"engine": engine, "version": ENGINES[engine].installed(), "parts": times}


if __name__ == "__main__":
    main()
