"""Sweep of how KDA prefill on Hopper shares the multiprocessors between its two stages.

    python benchmarks/sweep_kda_prefill.py --output benchmarks/results/kda_prefill_sweep_h200.json
    python benchmarks/sweep_kda_prefill.py --fit benchmarks/results/kda_prefill_sweep_h200.json
    python benchmarks/sweep_kda_prefill.py --table benchmarks/results/kda_prefill_sweep_h200.json

The first line times, for each shape, each layout that `prefill.sm_schedule.layouts` can come to.
The second looks for the parameters with which the estimate chooses best among them. The third
shows for each shape what the table's estimate chooses, and the best there is.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.tables.select import KernelPath, load_table
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.timing import environment, graph_time_ms
from benchmarks.bench_kda_prefill import UNBOUNDED, Ours, make_case
from kda_backend.prefill import two_stage_sm90 as prefill_sm90
from kda_backend.prefill.sm_schedule import (
    Costs,
    IntraCosts,
    Layout,
    ScanCosts,
    Work,
    costs_of,
    lay_out,
    layouts,
)

INTRA_BLOCKS = (2, 3, 4)
TILE_NS = range(4000, 9001, 500)
SCANS = [
    ScanCosts(split, start_ns, step_ns)
    for split, steps_ns in ((False, (1100, 1300, 1500)), (True, (800, 860, 920)))
    for start_ns, step_ns in itertools.product((3000, 6000, 9000), steps_ns)
]
# Of the parameters in ns: about what the stages take by themselves, lest a fit explain a choice
# among these shapes by times that no other shape has.
BOUNDS = {
    "intra_2_tile_ns": (7000, 10000),
    "intra_2_alone_ns": (9000, 14000),
    "intra_4_tile_ns": (4200, 5400),
    "intra_4_alone_ns": (17000, 25000),
    "scan_start_ns": (3000, 8000),
    "scan_step_ns": (1450, 1850),
    "split_start_ns": (3000, 6000),
    "split_step_ns": (850, 930),
    "fetch_ns": (18, 80),
}
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
    work = Work(
        meta.num_chunks * heads, heads * len(lens), meta.max_chunks, heads * meta.long_sequences
    )
    path, model, times = ours.plan.prefill.lookup(work.tiles), prefill_sm90._model, []
    every = Params(
        {f"intra_{blocks}_{name}_ns": 1 for blocks in INTRA_BLOCKS for name in ("tile", "alone")}
    )
    row = dataclasses.replace(path, params=Params({**path.params, **every}))
    candidates = {lay_out(costs, work) for costs in all_costs(ours.num_sms)}
    found = layouts(next(all_costs(ours.num_sms)), work)
    candidates |= {
        layout._replace(per_sm=blocks, intra_blocks=blocks * ours.num_sms)
        for _, layout in found
        if layout.in_turn
        for blocks in INTRA_BLOCKS
    }
    for layout in sorted(candidates):
        with (
            mock.patch.object(prefill_sm90, "lay_out", return_value=layout),
            mock.patch.object(prefill_sm90, "_model", lambda _, *rest: model(row, *rest)),
        ):
            times.append((layout, graph_time_ms(ours, replays=8)))
    names = ("H", "seq_lens", "num_sms", "tiles", "tasks", "max_chunks", "long_tasks", "times")
    return dict(zip(names, (heads, lens, ours.num_sms, *work, times), strict=True))


Timed = tuple[Work, dict[Layout, float]]


def timed(row: dict[str, Any]) -> Timed:
    """What there was to do, and ms by layout."""
    work = Work(row["tiles"], row["tasks"], row["max_chunks"], row["long_tasks"])
    return work, {Layout(*layout): ms for layout, ms in row["times"]}


def chosen(costs: Costs, work: Work, times: dict[Layout, float]) -> Layout:
    """The layout of the least estimate; of layouts that were not timed, the estimate's next."""
    return next(layout for _, layout in sorted(layouts(costs, work)) if layout in times)


def excess(costs: Costs, rows: list[Timed]) -> list[float]:
    """Time of each row's chosen layout over that of its best."""
    return [times[chosen(costs, work, times)] / min(times.values()) for work, times in rows]


def behind(excess: list[float]) -> float:
    return math.exp(sum(map(math.log, excess)) / len(excess)) - 1


def shipped_tables() -> list[KernelPath]:
    rows = load_table("kda", KNOWN_TARGETS["H200"]).rows
    return [row for row in rows if row.name == "two_stage_sm90"]


def fit(rows: list[Timed], num_sms: int, seconds: float, seed: int) -> tuple[float, dict[str, int]]:
    """A random walk between the bounds; (regret, the parameters).

    Regret: how far the choices are behind the best, and a tenth of how far the worst of them is.
    """
    draw = random.Random(seed)
    best = {name: (low + high) // 2 for name, (low, high) in BOUNDS.items()}

    def regret(params: dict[str, int]) -> float:
        found = excess(costs_of(params, num_sms), rows)
        return behind(found) + 0.1 * (max(found) - 1)

    def near(name: str, value: int) -> int:
        low, high = BOUNDS[name]
        return min(max(round(value * draw.gauss(1, step)), low), high)

    least = regret(best)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        step = draw.choice((0.03, 0.1, 0.3))
        tried = {
            name: near(name, value) if draw.random() < 0.4 else value
            for name, value in best.items()
        }
        result = regret(tried)
        if result < least:
            least, best = result, tried
    return least, best


def report(rows: list[dict[str, Any]]) -> None:
    """What the shipped table chooses beside the best of the layouts that were timed."""
    found = []
    for row in sorted(rows, key=lambda row: row["tiles"]):
        path = next(t for t in shipped_tables() if t.max_grid is None or row["tiles"] <= t.max_grid)
        work, times = timed(row)
        best = min(times, key=times.__getitem__)
        choice = chosen(costs_of(path.params, row["num_sms"]), work, times)
        found.append(times[choice] / times[best])
        lens = row["seq_lens"]
        print(
            f"{row['tiles']:6d} tiles  H{row['H']:<2d} {len(lens):2d} x {max(lens):5d}"
            f"  chosen {1e3 * times[choice]:7.1f} us {tuple(choice)}"
            f"  best {1e3 * times[best]:7.1f} us {tuple(best)}"
        )
    print(f"{100 * behind(found):.1f} % behind the best, at most {100 * (max(found) - 1):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="a result file, instead of a GPU")
    parser.add_argument("--fit", type=Path, help="a result file, instead of a GPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --fit, on all processors")
    args = parser.parse_args()
    if args.fit:
        measured = json.loads(args.fit.read_text())["rows"]
        walk = functools.partial(
            fit, [timed(row) for row in measured], measured[0]["num_sms"], args.seconds
        )
        with concurrent.futures.ProcessPoolExecutor() as pool:
            least, params = min(pool.map(walk, range(os.cpu_count() or 1)), key=lambda x: x[0])
        print("\n".join(f"{name} = {value}" for name, value in params.items()))
        print(f"# regret {100 * least:.2f} %")
        return
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
