"""MLA decode of requests that share a prompt: where looking for shared pages pays.

    python benchmarks/bench_mla_shared.py --peers FOLDER benchmarks/results/mla_shared_h200.json

Each point is a number of requests of 512 tokens of their own behind ``shared`` tokens that all of
them have, or, with none shared, requests of 8,192 tokens. It is timed with a plan that takes each
request by itself (``alone``), with one that looks for equal pages (``search``), and with the peers'
calls, in the graphs and with the cold L2 cache of ``bench_mla_decode.py``. Both
plans are compared with float64 on five requests that share 1,024 tokens, and with each other at
each point; what is wrong ends the run.
``plans`` has the time of making a step's plan of both kinds.
"""

from __future__ import annotations

import argparse
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
    Case,
    Ours,
    check_one,
    selection_of,
)
from benchmarks.peers import mla_decode as mla_decode_peers
from mla_backend.plan import MlaPlanner
from mla_backend.spec import MlaSpec

REQUESTS = (8, 16, 32, 64, 128)
SHARED = (0, 1024, 2048, 8192)
OWN, WITHOUT = 512, 8192
SEARCHED_TOKENS = 1024
MOST_ERROR = 6e-3  # relative L2 of the output; bf16's rounding is 2e-3


def measure(
    pool: torch.Tensor, heads: int, requests: int, shared: int, peers: dict[str, Any]
) -> dict[str, Any]:
    """Times of one point in us; exits where the two plans' results disagree."""
    sizes = [shared + OWN if shared else WITHOUT] * requests
    case = Case(pool, heads, sizes, shared)
    case.tables, case.pages = case.tables[:4], case.pages[:4]
    runners: dict[str, Any] = {
        "alone": Ours(search=False),
        "search": Ours(search=True),
        **peers,
    }
    row: dict[str, Any] = {"heads": heads, "requests": requests, "shared": shared}
    want: torch.Tensor | None = None
    for name, make in runners.items():
        calls = make(case)
        calls[0]()
        out = case.result[0].reshape(requests, heads, 512).float().clone()
        want = out if want is None else want
        error = relative_error(out, want)
        if not error < MOST_ERROR:
            sys.exit(f"{name}, {row}: differs by {error}")
        row[f"{name}_us"] = round(graph_us(calls, REPLAYS), 2)
    print(row, flush=True)
    return row


def plan_us(heads: int, requests: int, search: bool) -> float:
    """GPU time of making a step's plan in place."""
    lengths = torch.full((requests,), WITHOUT, dtype=torch.int32, device="cuda")
    table = torch.arange(requests * WITHOUT // PAGE, dtype=torch.int32, device="cuda")
    table = table.view(requests, -1)
    tokens = SEARCHED_TOKENS if search else 0
    planner = MlaPlanner(selection_of(MlaSpec(heads, PAGE)), shared_prefix_tokens=tokens)
    plan = planner.plan(lengths, table)
    return round(graph_us([lambda: planner.plan(lengths, table, out=plan)] * 20, 10), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--peers", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for heads in HEADS:
        if wrong := check_one(MlaSpec(heads, PAGE), *CHECKED_PREFIX, path="sm90"):
            sys.exit(f"wrong against float64: {wrong}")
    peers = mla_decode_peers.load_peers(arguments.peers) if arguments.peers else {}
    tokens = max(REQUESTS) * max(WITHOUT, max(SHARED) + OWN) + (1 << 18)
    pool = torch.empty(tokens, 576, dtype=torch.bfloat16, device="cuda").normal_()
    plans = [
        {"requests": n, "alone_us": plan_us(16, n, False), "search_us": plan_us(16, n, True)}
        for n in REQUESTS
    ]
    rows: list[dict[str, Any]] = []
    for heads in HEADS:
        for requests in REQUESTS:
            for shared in SHARED:
                rows.append(measure(pool, heads, requests, shared, peers))
                write_record(arguments.output, {**environment(), "plans": plans, "rows": rows})
    for row in plans:
        print(row)


if __name__ == "__main__":
    main()
