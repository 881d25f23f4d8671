"""The tables of docs/studies/mla-decode.md are what the H200's result says.

``python -m tests.docs.test_mla_decode_study`` prints them.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_mla_decode import HEADS, SIZES
from softmax_backend.plan.split_kv import split_kv

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "studies" / "mla-decode.md"
RESULT = json.loads((ROOT / "benchmarks/results/mla_decode_forms_h200.json").read_text("utf-8"))
ROWS: dict[tuple[str, int], dict[str, Any]] = {(r["case"], r["heads"]): r for r in RESULT["rows"]}
FORMS = ["last", "together", "rope warp", "prefetch 1", "prefetch 2", "prefetch 4"]
SHOWN = [
    *(("1x1k", heads) for heads in (4, 32)),
    *(("16x1k", heads) for heads in (4, 8, 32)),
    *(("64x1k", heads) for heads in (4, 32)),
    *(("1x8k", heads) for heads in (4, 32)),
    *(("16x8k", heads) for heads in (4, 16, 32)),
    *(("64x8k", heads) for heads in (16, 32)),
]
ALONE = 4
"""Splits of a row that a warp merged by itself; more took a step for every 64 channels of it."""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def time_of(row: dict[str, Any], form: str) -> float | None:
    return row["again_us"] if form == "in use again" else row["forms_us"].get(form)


def mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def speeds(form: str, heads: int) -> list[float]:
    """Time in use over the form's, by case."""
    return [
        row["used_us"] / us
        for (_, count), row in ROWS.items()
        if count == heads and (us := time_of(row, form)) is not None
    ]


def speed_table() -> list[str]:
    rows = []
    for form in ["in use again", *FORMS]:
        cells = [form]
        for heads in HEADS:
            found = speeds(form, heads)
            cells.append(f"{mean(found):.2f} ({min(found):.2f} to {max(found):.2f})")
        rows.append(cells)
    return table(["form", *(f"{heads} heads" for heads in HEADS)], rows)


def splits_of(case: str) -> int:
    """Splits of the request that has the most, in the plan for an H200's SMs."""
    starts = split_kv(torch.tensor(SIZES[case][0]), 132, 1, 1)[1]
    return int((starts[1:] - starts[:-1]).max())


def times_table() -> list[str]:
    rows = []
    for case, heads in SHOWN:
        row, splits = ROWS[case, heads], splits_of(case)
        cells = [case, str(heads), str(splits), f"{row['used_us']:.1f}"]
        cells += [f"{row['forms_us'][form]:.1f}" for form in FORMS if form != "prefetch 1"]
        for form, sharing in (("last", 1), ("together", splits)):
            more = (row["forms_us"][form] - row["used_us"]) / (8 * heads / sharing)
            cells.append(f"{more:.2f}" if splits > ALONE and 8 * heads >= 2 * sharing else "")
        rows.append(cells)
    names = [form for form in FORMS if form != "prefetch 1"]
    steps = ["last, a step", "together, a step"]
    return table(["case", "heads", "splits", "in use", *names, *steps], rows)


def overhead_table() -> list[str]:
    names = [form for form in RESULT["forms"] if form.startswith("overhead")]
    rows = [["1 (in use), again", *(f"{ROWS['prefix', h]['again_us']:.1f}" for h in HEADS), ""]]
    rows.insert(0, ["1 (in use)", *(f"{ROWS['prefix', h]['used_us']:.1f}" for h in HEADS), ""])
    for form in names:
        times = [ROWS["prefix", heads]["forms_us"][form] for heads in HEADS]
        gain = mean([speed for heads in HEADS for speed in speeds(form, heads)])
        rows.append([form.split()[1], *(f"{us:.1f}" for us in times), f"{gain:.2f}"])
    heads = [f"{count} heads" for count in HEADS]
    return table(["prefix_overhead", *heads, "mean of the speeds"], rows)


def tables() -> list[list[str]]:
    return [speed_table(), times_table(), overhead_table()]


def test_the_tables_are_of_the_result() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for lines in tables():
        assert "\n".join(lines) in page, "run python -m tests.docs.test_mla_decode_study"


def test_the_overhead_in_use_is_the_best_that_was_measured() -> None:
    """In the mean over head counts, which the page says."""
    gains = {
        form: mean([speed for heads in HEADS for speed in speeds(form, heads)])
        for form in RESULT["forms"]
        if form.startswith("overhead")
    }
    assert max(gains, key=lambda form: gains[form]) == "overhead 4"


if __name__ == "__main__":
    for lines in tables():
        print("\n".join(lines), end="\n\n")
