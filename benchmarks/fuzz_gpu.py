"""Random calls of every operator on this machine against float64 (``kda-dsv4 check --fuzz``), with
the result kept: benchmarks/results/fuzz_h200.json.

    python benchmarks/fuzz_gpu.py --batches 10000 --output benchmarks/results/fuzz_h200.json

A failure prints the line that runs it again; the exit status is then 1. A row's ``seconds`` are
those of its calls with their comparison, added up over processes; ``wall_seconds`` are a family's.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from backend_cli.check.fuzz import fuzz, lines_of
from backend_cli.families import chosen_families
from backend_core.target import detect_target
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10_000, help="of each family")
    parser.add_argument("--seed", type=int, default=0, help="number of the first batch")
    parser.add_argument("--family", action="append", default=[], help="by default all; repeatable")
    parser.add_argument("--jobs", type=int, default=14, help="processes at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop a family after so long")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("fuzz_gpu.py needs a GPU")
    result = environment() | {"seed": args.seed, "rows": [], "failures": [], "wall_seconds": {}}
    for family in chosen_families(args.family):
        begin = time.perf_counter()
        report = fuzz(
            detect_target(),
            [family],
            args.batches,
            args.seed,
            args.jobs,
            timeout=120.0,
            most_seconds=args.seconds,
        )
        print("\n".join(lines_of(report)), flush=True)
        result["rows"] += report["rows"]
        result["failures"] += report["failures"]
        result["wall_seconds"][family.name] = round(time.perf_counter() - begin, 1)
        write_record(args.output, result)
    if result["failures"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
