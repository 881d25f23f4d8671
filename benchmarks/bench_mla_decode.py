"""MLA decode beside its peers on one GPU: correctness against float64 first, then times.

    python benchmarks/bench_mla_decode.py --peers FOLDER \
        --output benchmarks/results/mla_decode_h200.json

One query token per request, bf16, one latent head of 512 + 64 channels (1,152 bytes per token),
page 64 in random order; output bf16 and natural-log LSE. "AxBk" is A requests of B * 1024 tokens;
"skew" one of 64k and 63 of 1k. Requests that share a prompt: ``bench_mla_shared.py``.

Times are medians of CUDA-graph replays. A graph holds one call for each of several page tables that
together touch more than 192 MB, since in an engine the other layers evict the L2 cache; its time is
divided by their number. Plans are made outside, once per step, as engines make them, and timed on
their own; a call is the main kernel and its combine. ``floor_us`` is the bytes of the keys over the
fastest rate at which any kernel of the run read them. What a peer needs: ``peers/mla_decode.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.operator import Selection, forced
from backend_core.tables.load import load_table
from backend_core.target import detect_target
from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment, graph_us
from benchmarks.peers import mla_decode as mla_decode_peers
from mla_backend.api import mla_decode, select_mla_decode
from mla_backend.decode import MlaPath
from mla_backend.launch_params import TABLES
from mla_backend.plan import MlaPlanner
from mla_backend.scratch import SplitScratch
from mla_backend.spec import MlaSpec
from mla_backend.testing import cases

Call = Callable[[], object]
SCALE = (128 + 64) ** -0.5
DEVICE = torch.device("cuda", 0)
PAGE = 64
COLD_BYTES = 192e6
MAX_TABLES = 64
HEADS = (4, 8, 16, 32)
REPLAYS = 8
SIZES: dict[str, list[int]] = {
    **{f"{batch}x{k}k": [k * 1024] * batch for k in (1, 8, 64) for batch in (1, 4, 16, 64, 128)},
    "skew": [65536] + [1024] * 63,
}
CHECKED_PREFIX = [2100, 1300, 4000, 1024 + 64, 3000], 1024  # tokens, how many are shared
CHECKS: list[tuple[list[int], int]] = [
    ([1, 63, 64, 65, 1000, 0, 2049, 4096, 0, 17], 64),
    ([1, 63, 64, 65, 1000, 0, 2049, 4096, 0, 17], 1888),
    ([1, 63, 64, 65, 1000, 0, 2049, 4096, 0, 17], 240),
    ([700, 16, 30, 5000], 16),
    ([20000], 64),
    ([0], 64),
    ([128] * 100, 64),
    ([1] * 200, 64),
    ([30000, 5, 0, 700], 944),
]


class Case:
    """One step of requests over a pool of pages, with several page tables."""

    def __init__(
        self,
        pool: torch.Tensor,
        heads: int,
        sizes: list[int],
        shared: int = 0,
    ) -> None:
        self.heads, self.sizes, self.shared, self.page_size = heads, sizes, shared, PAGE
        self.scale = SCALE
        self.lengths = torch.tensor(sizes, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(sizes), heads, 576, dtype=torch.bfloat16, device="cuda")
        self.cache = pool.view(-1, PAGE, 576)
        need = [-(-n // PAGE) for n in sizes]
        self.bytes = 1152 * (sum(sizes) - shared * (len(sizes) - 1 if shared else 0))
        pages = self.cache.shape[0]
        wanted = 1 + int(COLD_BYTES / max(self.bytes, 1))
        count = max(1, min(MAX_TABLES, wanted, pages // max(sum(need), 1)))
        order = torch.randperm(pages, device="cuda").int()
        width = (max(*need, 1) + 3) // 4 * 4
        owned = (
            torch.arange(width, device="cuda")[None] < torch.tensor(need, device="cuda")[:, None]
        )
        self.tables: list[torch.Tensor] = []
        for i in range(count):
            table = torch.full((len(sizes), width), 2147480000, dtype=torch.int32, device="cuda")
            table[owned] = order[i * sum(need) : (i + 1) * sum(need)]
            if shared:
                table[:, : shared // PAGE] = table[0, : shared // PAGE].clone()
            self.tables.append(table)
        self.pages = [table[owned].contiguous() for table in self.tables]
        self.result: tuple[torch.Tensor, ...] = ()


def selection_of(spec: MlaSpec, path: str | None = None) -> Selection[MlaSpec, MlaPath]:
    """The table's selection, or a row of one path."""
    chosen = select_mla_decode(detect_target(DEVICE), spec)
    if path is None:
        return chosen
    rows = (*chosen.rows, *load_table(TABLES, chosen.target).rows)
    row = next(row for row in rows if row.name == path)
    return forced(TABLES, chosen.target, spec, dataclasses.replace(row, max_grid=None))


class Ours:
    """Our operator on a case; ``search``: whether the plan looks for shared pages."""

    def __init__(self, *, search: bool = False) -> None:
        self._search = search
        self._scratch = SplitScratch(torch.device("cuda", torch.cuda.current_device()))

    def __call__(self, case: Case) -> list[Call]:
        selection = selection_of(MlaSpec(case.heads, PAGE))
        planner = MlaPlanner(selection, shared_prefix_tokens=1024 if self._search else 0)
        plans = [planner.plan(case.lengths, case.tables[0])]
        if plans[0].prefix is not None:  # a plan belongs to its block table
            plans += [planner.plan(case.lengths, table) for table in case.tables[1:]]
        q = case.q.unsqueeze(1)
        out = torch.full((*q.shape[:3], 512), math.nan, dtype=torch.bfloat16, device="cuda")
        lse = torch.full(q.shape[:3], math.nan, device="cuda")
        rows = max(planner.spec.query_rows, 64)
        for tensor in self._scratch.reserve(plans[0].num_slots, rows, 512):
            tensor.fill_(math.nan)
        case.result = (out, lse)
        latent, rope = case.cache[..., :512], case.cache[..., 512:]

        def call(i: int) -> None:
            mla_decode(
                q[..., :512], q[..., 512:], latent, rope, case.tables[i],
                plans[min(i, len(plans) - 1)], planner.selection, scale=SCALE, out=out, lse=lse,
                scratch=self._scratch, pdl_prefetch_safe=True,
            )  # fmt: skip

        return [functools.partial(call, i) for i in range(len(case.tables))]


def check_one(
    spec: MlaSpec, lengths: list[int], shared: int = 0, path: str | None = None
) -> str | None:
    """What is not float64's on poisoned memory, in a sentence; or ``None``."""
    case = cases.make_case(spec, lengths, shared_tokens=shared, device=DEVICE)
    planner = MlaPlanner(
        selection_of(spec, path), **({"shared_prefix_tokens": 256} if shared else {})
    )
    try:
        cases.assert_close(cases.run_case(case, planner), cases.expected(case))
    except AssertionError as error:
        return f"{spec}, {lengths[:4]}: {error}"
    return None


def check() -> list[str]:
    """The wrong cases, in sentences."""
    found = []
    for count in HEADS:
        for sizes, page_size in CHECKS:
            for tokens in (1, 2):
                found.append(check_one(MlaSpec(count, page_size, tokens), sizes))
        found.append(check_one(MlaSpec(count, PAGE), *CHECKED_PREFIX))
    return [line for line in found if line is not None]


def plan_times(heads: int, requests: int, peers: bool) -> dict[str, float]:
    """GPU time of planning alone, in us."""
    lengths = torch.full((requests,), 1024, dtype=torch.int32, device="cuda")
    spec = MlaSpec(heads, 64)
    planner = MlaPlanner(select_mla_decode(detect_target(DEVICE), spec))
    plan = planner.plan(lengths)
    times = {"ours": graph_us([lambda: planner.plan(lengths, out=plan)] * 20, 10)}
    if peers:
        times["flashmla"] = graph_us([mla_decode_peers.flashmla_plan(lengths, heads)] * 20, 10)
    return times


def measure(
    pool: torch.Tensor,
    runners: dict[str, Callable[[Any], list[Call]]],
    save: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for count in HEADS:
        for name, sizes in SIZES.items():
            case = Case(pool, count, sizes)
            row: dict[str, Any] = {"case": name, "heads": count, "bytes": case.bytes}
            results: dict[str, torch.Tensor] = {}
            for runner, make in runners.items():
                calls = make(case)
                row[f"{runner}_us"] = graph_us(calls, REPLAYS)
                calls[0]()
                results[runner] = case.result[0].reshape(len(sizes), count, 512).float().clone()
            first = next(iter(results.values()))
            row["disagreement"] = {
                runner: relative_error(out, first) for runner, out in results.items()
            }
            rows.append(row)
            times = " ".join(f"{key}={row[f'{key}_us']:.1f}" for key in runners)
            print(f"{count:3d} {name:9s} {times}", flush=True)
            save(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peers", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    if wrong := check():
        sys.exit("\n".join(["wrong against float64:", *wrong]))
    tokens = max(map(sum, SIZES.values())) + (1 << 18)
    pool = torch.empty(tokens, 576, dtype=torch.bfloat16, device="cuda").normal_()
    peers = mla_decode_peers.load_peers(arguments.peers) if arguments.peers else {}
    runners: dict[str, Callable[[Any], list[Call]]] = {"ours": Ours(), **peers}
    plans = {
        requests: plan_times(HEADS[0], requests, "flashmla" in peers)
        for requests in dict.fromkeys(map(len, SIZES.values()))
    }

    def save(rows: list[dict[str, Any]]) -> None:
        if arguments.output is None:
            return
        rate = max(row["bytes"] / row[f"{name}_us"] for row in rows for name in runners)
        finished = [
            {
                "case": row["case"],
                "heads": row["heads"],
                "ours_gpu_us": round(row["ours_us"], 2),
                **{f"{name}_us": round(row[f"{name}_us"], 2) for name in peers},
                "floor_us": round(row["bytes"] / rate, 2),
                "disagreement": float(f"{max(row['disagreement'].values()):.2e}"),
            }
            for row in rows
        ]
        document = {
            **environment(),
            "read_gbs": round(rate / 1e3, 1),
            "plan_us": plans,
            "rows": finished,
        }
        write_record(arguments.output, document)

    measure(pool, runners, save)
    print("plans, us:", json.dumps(plans))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
