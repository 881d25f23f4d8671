"""The forms of MLA decode on Hopper beside the form in use: correctness, then times, in a minute.

    python benchmarks/bench_mla_decode_forms.py benchmarks/results/mla_decode_forms_h200.json

A form is a change of parameters of the ``sm90`` row of the path table (`Sm90MlaParams`); the cases,
the cold L2 cache and the graphs are those of ``bench_mla_decode.py``. Each form is compared with
float64 on that script's checks, then on each case of up to 131,072 tokens, and on longer ones with
the form in use; what is wrong ends the run before a time is taken. ``used_us`` and ``again_us`` are
the form in use, before and after the others, whose times by name are ``forms_us``. Where a form
does what the form in use does (`differs`), it is not timed. A run that reaches ``--seconds`` stops
and names the points that it left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.testing.timing import environment, graph_us
from benchmarks.bench_mla_decode import HEADS, SIZES, Case, Ours, check, relative_error
from softmax_backend.launch_params import Sm90MlaParams
from softmax_backend.run import mla_sm90

FORMS: dict[str, dict[str, Any]] = {
    "last": {"merge": "last"},
    "together": {"merge": "together"},
    "rope warp": {"rope_warp": True},
    "both": {"merge": "together", "rope_warp": True},
    **{f"prefetch {n}": {"prefetch_blocks": n} for n in (1, 2, 4)},
    "together, 2": {"merge": "together", "prefetch_blocks": 2},
    **{f"overhead {n}": {"prefix_overhead": n} for n in (2, 3, 4, 5, 8)},
}
LARGEST_CHECKED = 1 << 17  # tokens
MOST_ERROR = 6e-3  # relative L2 of the output; bf16's rounding is 2e-3


def differs(form: str, case: str) -> bool:
    """Whether a form does anything else than the form in use: shared prefixes have combine, and an
    overhead of their own."""
    names = FORMS[form].keys()
    return names != ({"merge"} if case == "prefix" else {"prefix_overhead"})


def compile_kernels(used: Sm90MlaParams) -> None:
    """All kernels at once: NVRTC leaves the other cores idle otherwise."""
    wanted = set()
    for change in ({}, *FORMS.values()):
        form = dataclasses.replace(used, **change)
        ring = form.merge, form.rope_warp, form.prefetch_blocks
        for rows in (8, 16, 32, 64):
            wanted.add((rows, used.evict_first and rows < 64, *ring))
        wanted.add((64, used.evict_first, *ring))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: mla_sm90._kernel(*key), sorted(wanted)))


def measure_row(
    pool: torch.Tensor, name: str, heads: int, runners: dict[str, Ours], replays: int
) -> dict[str, Any]:
    """Errors and times of one point; exits where a result is wrong."""
    sizes, shared = SIZES[name]
    case = Case(pool, heads, sizes, shared)
    if shared:
        case.tables, case.pages = case.tables[:4], case.pages[:4]
    row: dict[str, Any] = {"case": name, "heads": heads, "forms_us": {}}
    exact = sum(sizes) <= LARGEST_CHECKED
    want = case.expected()[0] if exact else None
    errors: dict[str, float] = {}
    for form, runner in runners.items():
        if form != "used" and not differs(form, name):
            continue
        calls = runner(case)
        for call in (calls[0], calls[-1], calls[0]):  # words left behind would show
            case.result[0].fill_(math.nan)
            call()
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
    row["compared_with"] = "float64" if exact else "used"
    row["error"] = errors
    return row


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A table: by head count and form, time in use over the form's: geometric mean over the points
    that differ, the least and the most, and where they are."""
    lines = ["heads form           mean  least        most"]
    for heads in dict.fromkeys(row["heads"] for row in rows):
        chosen = [row for row in rows if row["heads"] == heads]
        times: dict[str, Callable[[dict[str, Any]], float | None]] = {
            "in use again": lambda row: row["again_us"],
            **{form: lambda row, form=form: row["forms_us"].get(form) for form in FORMS},  # type: ignore[misc]
        }
        for form, time_of in times.items():
            gains = {row["case"]: row["used_us"] / us for row in chosen if (us := time_of(row))}
            if not gains:
                continue
            mean = math.exp(statistics.fmean(math.log(gain) for gain in gains.values()))
            least, most = (of(gains, key=lambda case: gains[case]) for of in (min, max))
            lines.append(
                f"{heads:5d} {form:13s} {mean:5.3f}  {gains[least]:.2f} {least:7s}"
                f" {gains[most]:.2f} {most}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--replays", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    small = torch.randn(4096 * 64, 576, dtype=torch.bfloat16, device="cuda")
    runners = {"used": Ours("sm90"), **{form: Ours("sm90", **FORMS[form]) for form in FORMS}}
    used = runners["used"].selection(Case(small, 4, [64])).path(1).params
    compile_kernels(used)
    checked = {form: runners[form] for form in ("used", "last", "both", "prefetch 2")}
    if wrong := check(small, checked, [4, 16, 32]):
        sys.exit("\n".join(["wrong against float64:", *wrong]))
    print(f"checked after {time.perf_counter() - begin:.0f} s", flush=True)
    del small
    tokens = max(sum(sizes) for sizes, _ in SIZES.values()) + (1 << 18)
    pool = torch.empty(tokens, 576, dtype=torch.bfloat16, device="cuda").normal_()
    rows: list[dict[str, Any]] = []
    left_out = []
    for heads in (16, 4, 32, 8):  # those that the forms are for come first
        for name in SIZES:
            if time.perf_counter() - begin > arguments.seconds:
                left_out.append(f"{name}, {heads} heads")
                continue
            rows.append(measure_row(pool, name, heads, runners, arguments.replays))
    rows.sort(key=lambda row: HEADS.index(row["heads"]))
    document = {
        **environment(),
        "forms": FORMS,
        "seconds": round(time.perf_counter() - begin),
        "left_out": left_out,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(summary(rows)))
    if left_out:
        print(f"left out after {arguments.seconds:.0f} s: {'; '.join(left_out)}")


if __name__ == "__main__":
    main()
