"""Sweep of how KDA prefill on Hopper shares the multiprocessors between its two stages.

    python benchmarks/sweep_kda_prefill.py --output benchmarks/results/kda_prefill_sweep_h200.json
    python benchmarks/sweep_kda_prefill.py --table benchmarks/results/kda_prefill_sweep_h200.json

The first line times, for each shape, each layout that `kda_backend.prefill_sm90.layouts` can come
to. The second shows for each shape what the table's estimate chooses, and the best there is.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.path_table import load_table
from backend_core.target import KNOWN_TARGETS
from benchmarks.bench_kda_prefill import UNBOUNDED, Ours, make_case
from benchmarks.timing import environment, graph_time_ms
from kda_backend import prefill_sm90
from kda_backend.prefill_sm90 import (
    Costs,
    IntraCosts,
    Layout,
    ScanCosts,
    costs_of,
    lay_out,
    layouts,
)

INTRA_BLOCKS = (2, 3, 4)
TILE_NS = range(5000, 10001, 500)
SCANS = [
    ScanCosts(split, start_ns, step_ns)
    for split, steps_ns in ((False, (1100, 1300, 1500)), (True, (800, 860, 920)))
    for start_ns, step_ns in itertools.product((3000, 6000, 9000), steps_ns)
]
MIXED = [32768] + [256] * 31
SHAPES = [*UNBOUNDED, (4, [1024]), (8, [256] * 64), (32, [256] * 64), (4, MIXED), (32, MIXED)]


def all_costs(num_sms: int) -> Iterator[Costs]:
    for blocks, tile_ns, scan in itertools.product(INTRA_BLOCKS, TILE_NS, SCANS):
        yield Costs(num_sms, (IntraCosts(blocks, tile_ns, 2 * tile_ns),), (scan,), 18)


class Params(dict[str, Any]):
    """Launch parameters that differ from the table's; a row's hash leaves them out."""

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.items())))


def measure(heads: int, lens: list[int]) -> dict[str, Any]:
    """One shape, and (layout, ms) of every choice."""
    ours = Ours(make_case(lens, heads, "init", None, seed=7))
    meta = ours.meta
    shape = (
        meta.num_chunks * heads,
        heads * len(lens),
        meta.max_chunks,
        heads * meta.long_sequences,
    )
    path, model, times = ours.plan.prefill.lookup(shape[0]), prefill_sm90._model, []
    every = Params(
        {f"intra_{blocks}_{name}_ns": 1 for blocks in INTRA_BLOCKS for name in ("tile", "alone")}
    )
    row = dataclasses.replace(path, params=Params({**path.params, **every}))
    chosen = {lay_out(costs, *shape) for costs in all_costs(ours.num_sms)}
    found = layouts(next(all_costs(ours.num_sms)), *shape)
    chosen |= {
        layout._replace(per_sm=blocks, intra_blocks=blocks * ours.num_sms)
        for _, layout in found
        if layout.in_turn
        for blocks in INTRA_BLOCKS
    }
    for layout in sorted(chosen):
        with (
            mock.patch.object(prefill_sm90, "lay_out", return_value=layout),
            mock.patch.object(prefill_sm90, "_model", lambda _, *rest: model(row, *rest)),
        ):
            times.append((layout, graph_time_ms(ours, replays=8)))
    names = ("H", "seq_lens", "num_sms", "tiles", "tasks", "max_chunks", "long_tasks", "times")
    return dict(zip(names, (heads, lens, ours.num_sms, *shape, times), strict=True))


def report(rows: list[dict[str, Any]]) -> None:
    """What the shipped table chooses beside the best of the layouts that were timed."""
    tables = [
        row for row in load_table("kda", KNOWN_TARGETS["H200"]).rows if row.name == "two_stage_sm90"
    ]
    excess = []
    for row in sorted(rows, key=lambda row: row["tiles"]):
        path = next(t for t in tables if t.max_grid is None or row["tiles"] <= t.max_grid)
        costs = costs_of(path.params, row["num_sms"])
        timed = {Layout(*layout): ms for layout, ms in row["times"]}
        best = min(timed, key=timed.__getitem__)
        shape = (row["tiles"], row["tasks"], row["max_chunks"], row["long_tasks"])
        # of layouts that were not timed the estimate's next is shown
        chosen = next(layout for _, layout in sorted(layouts(costs, *shape)) if layout in timed)
        excess.append(timed[chosen] / timed[best])
        lens = row["seq_lens"]
        print(
            f"{row['tiles']:6d} tiles  H{row['H']:<2d} {len(lens):2d} x {max(lens):5d}"
            f"  chosen {1e3 * timed[chosen]:7.1f} us {tuple(chosen)}"
            f"  best {1e3 * timed[best]:7.1f} us {tuple(best)}"
        )
    behind = math.exp(sum(map(math.log, excess)) / len(excess)) - 1
    print(f"{100 * behind:.1f} % behind the best layouts, at most {100 * (max(excess) - 1):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="a result file, instead of a GPU")
    args = parser.parse_args()
    if args.table:
        report(json.loads(args.table.read_text())["rows"])
        return
    if args.output is None:
        parser.error("one of --output and --table is needed")
    rows: list[dict[str, Any]] = []
    for heads, lens in SHAPES:
        rows.append(measure(heads, lens))
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(environment() | {"rows": rows}, indent=1) + "\n")
    report(rows)


if __name__ == "__main__":
    main()
