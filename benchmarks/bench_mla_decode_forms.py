"""MLA decode's plans of shared prefixes on Hopper with several overheads: correctness, then times.

    python benchmarks/bench_mla_decode_forms.py benchmarks/results/mla_decode_forms_h200.json

A form is another ``prefix_overhead`` of the ``sm90`` row of the path table (`Sm90MlaParams`); the
case, the cold L2 cache and the graphs are those of ``bench_mla_decode.py``. Each form is compared
with float64 on five requests that share 1,024 tokens, and on the case itself, which is long for
float64, with the form in use; what is wrong ends the run before a time is taken. ``used_us`` and
``again_us`` are the form in use, before and after the others, whose times by name are ``forms_us``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment, graph_us
from benchmarks.bench_mla_decode import (
    CHECKED_PREFIX,
    HEADS,
    PAGE,
    REPLAYS,
    SIZES,
    Case,
    Ours,
    check_one,
)
from mla_backend.spec import MlaSpec

FORMS: dict[str, dict[str, Any]] = {
    f"overhead {n}": {"prefix_overhead": n} for n in (1, 2, 3, 4, 5, 8)
}
MOST_ERROR = 6e-3  # relative L2 of the output; bf16's rounding is 2e-3


def measure_row(
    pool: torch.Tensor, name: str, heads: int, runners: dict[str, Ours]
) -> dict[str, Any]:
    """Errors and times of one point; exits where a result is wrong. "used" is the first runner."""
    case = Case(pool, heads, *SIZES[name])
    case.tables, case.pages = case.tables[:4], case.pages[:4]
    row: dict[str, Any] = {"case": name, "heads": heads, "forms_us": {}}
    want: torch.Tensor | None = None
    errors: dict[str, float] = {}
    for form, runner in runners.items():
        calls = runner(case)
        case.result[0].fill_(math.nan)
        calls[0]()
        out = case.result[0].double()
        want = out.clone() if want is None else want
        errors[form] = float(f"{relative_error(out, want):.2e}")
        if not errors[form] < MOST_ERROR:
            sys.exit(f"{form}, {name}, {heads} heads: relative error {errors[form]}")
        us = round(graph_us(calls, REPLAYS), 2)
        if form == "used":
            row["used_us"] = us
        else:
            row["forms_us"][form] = us
    row["again_us"] = round(graph_us(runners["used"](case), REPLAYS), 2)
    row["compared_with"] = "used"
    row["error"] = errors
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for heads in HEADS:
        for params in ({}, *FORMS.values()):
            if wrong := check_one(MlaSpec(heads, PAGE), *CHECKED_PREFIX, path="sm90", **params):
                sys.exit(f"wrong against float64: {wrong}")
    runners = {"used": Ours("sm90"), **{form: Ours("sm90", **FORMS[form]) for form in FORMS}}
    tokens = sum(SIZES["prefix"][0]) + (1 << 18)
    pool = torch.empty(tokens, 576, dtype=torch.bfloat16, device="cuda").normal_()
    rows = [measure_row(pool, "prefix", n, runners) for n in HEADS]
    document = {**environment(), "forms": FORMS, "rows": rows}
    write_record(arguments.output, document)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
