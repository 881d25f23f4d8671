"""Sweep of how KDA prefill on Hopper shares the SMs between its two stages.

    RESULT=benchmarks/results/kda_prefill_sweep_h200.json
    python benchmarks/sweep_kda_prefill.py --output $RESULT
    python benchmarks/sweep_kda_prefill.py --fit $RESULT

--output times, for each shape, each schedule that `prefill.sm_schedule.schedules` can come to.
--fit looks for the constants with which the cost model chooses best among them, whose regret
tests/kda/test_sm_schedule.py compares with that of the shipped ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
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

from kda_backend.prefill.sm_schedule import (
    CostModel,
    IntraCost,
    PrefillShape,
    ScanCost,
    Schedule,
    schedules,
)

INTRA_CTAS = (2, 3, 4)  # per SM
TILE_NS = range(4000, 9001, 500)
SCANS = [
    ScanCost(split, start_ns, step_ns)
    for split, steps_ns in ((False, (1100, 1300, 1500)), (True, (800, 860, 920)))
    for start_ns, step_ns in itertools.product((3000, 6000, 9000), steps_ns)
]
# Of the constants, in ns: about what the stages take by themselves, so that a fit does not explain
# a choice among these shapes by times that no other shape has.
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
# (heads, lengths) beside those of bench_kda_prefill
MORE_SHAPES = [(4, [1024]), (8, [256] * 64), (32, [256] * 64), (4, MIXED), (32, MIXED)]


def all_models(num_sms: int) -> Iterator[CostModel]:
    for ctas, tile_ns, scan in itertools.product(INTRA_CTAS, TILE_NS, SCANS):
        yield CostModel(num_sms, (IntraCost(ctas, tile_ns, 2 * tile_ns),), (scan,), 18)


def candidates(shape: PrefillShape, num_sms: int) -> list[Schedule]:
    """Whatever some cost model chooses, and the sequence-major schedules with more CTAs per SM."""
    found = {min(schedules(model, shape))[1] for model in all_models(num_sms)}
    found |= {
        schedule._replace(intra_ctas_per_sm=ctas, intra_ctas=ctas * num_sms)
        for _, schedule in schedules(next(all_models(num_sms)), shape)
        if schedule.sequence_major
        for ctas in INTRA_CTAS
    }
    return sorted(found)


def measure(heads: int, lens: list[int]) -> dict[str, Any]:
    """One shape, and ms of every candidate by the fields of its schedule."""
    from backend_core.testing.timing import graph_time_ms
    from benchmarks.bench_kda_prefill import Ours, draw
    from kda_backend.prefill import two_stage_sm90 as pipeline

    case = draw(lens, heads, "init", None, seed=7)
    ours = Ours(case, "two_stage_sm90")
    plan = ours.step_plan
    shape = PrefillShape(
        plan.num_chunks * heads, heads * len(lens), plan.max_chunks, heads * plan.long_sequences
    )
    schedules_of = candidates(shape, ours.num_sms)
    intra = tuple(IntraCost(ctas, 1, 1) for ctas in INTRA_CTAS)
    every = CostModel(ours.num_sms, intra, (SCANS[0],), 1)
    times = {}
    with mock.patch.object(pipeline, "CostModel", return_value=every):
        for schedule in schedules_of:
            _forget()
            with mock.patch.object(pipeline, "choose_schedule", return_value=schedule) as choose:
                call = Ours(case, "two_stage_sm90")  # a step plan keeps the launch it has made
                times[" ".join(f"{field:d}" for field in schedule)] = graph_time_ms(call, replays=8)
            if not choose.called:
                raise RuntimeError(f"the call ran with another schedule than {schedule}")
    _forget()
    names = ("H", "seq_lens", "num_sms", "tiles", "tasks", "max_chunks", "long_tasks", "times")
    return dict(zip(names, (heads, lens, ours.num_sms, *shape, times), strict=True))


def _forget() -> None:
    """The bound paths of models with their schedules; compiled code is kept on disk."""
    from kda_backend.selection import select, selection_for

    select.cache_clear()
    selection_for.cache_clear()


Timed = tuple[PrefillShape, dict[Schedule, float]]


def timed(row: dict[str, Any]) -> Timed:
    """The shape of a row, and ms by schedule."""
    shape = PrefillShape(row["tiles"], row["tasks"], row["max_chunks"], row["long_tasks"])
    times = row["times"].items()
    return shape, {Schedule._make(map(int, fields.split())): ms for fields, ms in times}


def chosen(model: CostModel, shape: PrefillShape, times: dict[Schedule, float]) -> Schedule:
    """The schedule with the least estimate, among those that were timed."""
    return next(schedule for _, schedule in sorted(schedules(model, shape)) if schedule in times)


def regrets(model: CostModel, rows: list[Timed]) -> list[float]:
    """Time of each row's chosen schedule over that of its best."""
    return [times[chosen(model, shape, times)] / min(times.values()) for shape, times in rows]


def mean_regret(ratios: list[float]) -> float:
    """How much longer the choices take than the best, on geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1


def model_of(constants: dict[str, int], num_sms: int) -> CostModel:
    """The cost model with these constants, by the names of `BOUNDS`."""
    intra = tuple(
        IntraCost(n, constants[f"intra_{n}_tile_ns"], constants[f"intra_{n}_alone_ns"])
        for n in (2, 4)
    )
    scan = tuple(
        ScanCost(split, constants[f"{name}_start_ns"], constants[f"{name}_step_ns"])
        for split, name in ((False, "scan"), (True, "split"))
    )
    return CostModel(num_sms, intra, scan, constants["fetch_ns"])


def fit(rows: list[Timed], num_sms: int, seconds: float, seed: int) -> tuple[float, dict[str, int]]:
    """A random walk between the bounds; (regret, the constants).

    The regret is the mean regret of the choices, and a tenth of that of the worst.
    """
    draw = random.Random(seed)
    best = {name: (low + high) // 2 for name, (low, high) in BOUNDS.items()}

    def regret(constants: dict[str, int]) -> float:
        found = regrets(model_of(constants, num_sms), rows)
        return mean_regret(found) + 0.1 * (max(found) - 1)

    def near(name: str, value: int, step: float) -> int:
        low, high = BOUNDS[name]
        return min(max(round(value * draw.gauss(1, step)), low), high)

    least = regret(best)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        step = draw.choice((0.03, 0.1, 0.3))
        tried = {
            name: near(name, value, step) if draw.random() < 0.4 else value
            for name, value in best.items()
        }
        result = regret(tried)
        if result < least:
            least, best = result, tried
    return least, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--fit", type=Path, help="a result file, instead of a GPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --fit, on all processors")
    args = parser.parse_args()
    if args.fit:
        rows = json.loads(args.fit.read_text())["rows"]
        walk = functools.partial(
            fit, [timed(row) for row in rows], rows[0]["num_sms"], args.seconds
        )
        with concurrent.futures.ProcessPoolExecutor() as pool:
            found = pool.map(walk, range(os.cpu_count() or 1))
            least, constants = min(found, key=lambda x: x[0])
        print(model_of(constants, rows[0]["num_sms"]))
        print(f"# regret {100 * least:.2f} %")
        return
    if args.output is None:
        parser.error("one of --output and --fit is needed")
    from backend_core.testing.records import write_record
    from backend_core.testing.timing import environment
    from benchmarks.bench_kda_prefill import UNBOUNDED

    rows = []
    head = environment()
    for heads, lens in (*UNBOUNDED, *MORE_SHAPES):
        rows.append(measure(heads, lens))
        write_record(args.output, head | {"rows": rows})


if __name__ == "__main__":
    main()
