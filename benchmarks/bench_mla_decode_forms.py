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

from backend_core.testing.timing import environment, graph_us
from benchmarks.bench_mla_decode import HEADS, SIZES, Case, Ours, check_one, relative_error

FORMS: dict[str, dict[str, Any]] = {
    f"overhead {n}": {"prefix_overhead": n} for n in (1, 2, 3, 4, 5, 8)
}
CHECKED = [2100, 1300, 4000, 1024 + 64, 3000], 1024  # tokens, and how many of them are shared
MOST_ERROR = 6e-3  # relative L2 of the output; bf16's rounding is 2e-3
MOST_LSE = 2e-2


def check(pool: torch.Tensor, params: dict[str, Any], heads: int) -> None:
    """Exits where a form's output is not float64's."""
    ours = Ours("sm90", {"shared_prefix_tokens": 256}, **params)
    error, lse, empty = check_one(ours, Case(pool, heads, *CHECKED, max_tables=1))
    if not (error < MOST_ERROR and lse < MOST_LSE and empty):
        sys.exit(f"{params}, {heads} heads: wrong against float64: {error:.1e} {lse:.1e} {empty}")


def measure_row(
    pool: torch.Tensor, name: str, heads: int, runners: dict[str, Ours], replays: int
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
        us = round(graph_us(calls, replays), 2)
        if form == "used":
            row["used_us"] = us
        else:
            row["forms_us"][form] = us
    row["again_us"] = round(graph_us(runners["used"](case), replays), 2)
    row["compared_with"] = "used"
    row["error"] = errors
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--replays", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    small = torch.randn(4096 * 64, 576, dtype=torch.bfloat16, device="cuda")
    for heads in HEADS:
        for params in ({}, *FORMS.values()):
            check(small, params, heads)
    del small
    runners = {"used": Ours("sm90"), **{form: Ours("sm90", **FORMS[form]) for form in FORMS}}
    tokens = sum(SIZES["prefix"][0]) + (1 << 18)
    pool = torch.empty(tokens, 576, dtype=torch.bfloat16, device="cuda").normal_()
    rows = [measure_row(pool, "prefix", n, runners, arguments.replays) for n in HEADS]
    document = {**environment(), "forms": FORMS, "rows": rows}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
