"""GPU and host times of the public calls in two checkouts of this repository, in turns.

    python benchmarks/one_way_pair.py benchmarks/results/one_way_pair_h200.json --before FOLDER

``FOLDER`` holds the packages of an earlier commit, with its benchmarks. Each side is measured by
processes of its own in turns (`ORDER`), and a figure is the least of its medians, since what else
the machine does only adds: between two processes of one checkout host times differed by half. A
process takes each call's host time in several rounds through all calls. One more process of each
side, whose times do not count, compiles before that. The calls are those of the benchmarks of each
checkout, whose names are the same in both.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
ORDER = ("before", "after", "after", "before", "before", "after")
ROUNDS = 5
Calls = list[Callable[[], object]]


def calls() -> Iterator[tuple[str, Calls]]:
    """Each public call by name; a call that works on cold memory comes once for each set of it."""
    import torch

    from benchmarks import (
        bench_dsv4_attention,
        bench_dsv4_compressor,
        bench_kda_decode,
        bench_kda_prefill,
        bench_mla_decode,
    )
    from benchmarks import sparse_attention_modes as modes
    from block_sparse_backend.block_sparse import block_sparse_attention
    from block_sparse_backend.plan.block_plan import from_kinds, uniform_sequences
    from mla_backend.plan import MlaPlanner

    for lens in ([64], [512], [1024] * 8):
        case = bench_kda_prefill.draw(lens, 32, "init", None, 7)
        yield f"KDA prefill, {len(lens)} x {lens[0]}", [bench_kda_prefill.Ours(case)]
    for batch in (1, 64):
        layer = bench_kda_decode.make_layer(batch, 32, calls=16)
        step = bench_kda_decode.ours(layer)
        yield f"KDA decode, {batch}", [functools.partial(step, i) for i in range(16)]
    captured: Calls = []

    def capture(step: Callable[[int], object], x: Any, *_: int) -> float:
        captured[:] = [functools.partial(step, i) for i in range(min(16, len(x.indices)))]
        return 0.0

    bench_kda_decode.gpu_ms = capture
    bench_kda_decode.verify_ms(16, 32, 4)
    yield "KDA verify, 16 x 4", captured
    for what, shape in (
        ("C4 decode, both compressors, 16", ("decode", "both", 4, 16, "all")),
        ("C128 decode, 16", ("decode", "main", 128, 16, "all")),
        ("C4 prefill, 8,192", ("prefill", "both", 4, 8192, "all")),
    ):
        parts = bench_dsv4_compressor.make_parts("paged", shape)
        yield (
            f"DeepSeek-V4 {what}",
            [bench_dsv4_compressor.together([part.call() for part in parts])],
        )
    pool = torch.randn(1 << 20, 576, dtype=torch.bfloat16, device="cuda")
    for heads, sizes in ((4, [8192]), (8, [8192] * 16)):
        mla = bench_mla_decode.Case(pool, heads, sizes)
        yield f"MLA decode, {len(sizes)} x {sizes[0]}, {heads} heads", bench_mla_decode.Ours()(mla)
    selection = bench_mla_decode.Ours()
    lengths = torch.full((64,), 1024, dtype=torch.int32, device="cuda")
    planner = MlaPlanner(chosen_mla(bench_mla_decode, selection, mla))
    plan = planner.plan(lengths)
    yield "MLA plan, 64", [functools.partial(planner.plan, lengths, out=plan)]
    layers: Any = getattr(bench_dsv4_attention, "LAYERS", (512,))  # older ones take its top-k alone
    sparse = bench_dsv4_attention.DecodeCase(64, 16, layers[0])
    yield "sparse MLA decode, 16", sparse.ours(("ours", None, {}, None))
    q, k, v = modes.inputs(4, 4, 4096)
    kinds = modes.random_kinds(4, 32, 32, 0.25)
    blocks = from_kinds(
        kinds[None], 4, uniform_sequences(1, 4096, 4096, q.device), 128, 128, has_partial=False
    )
    yield "block-sparse, 4,096", [functools.partial(block_sparse_attention, q, k, v, blocks)]


def chosen_mla(bench: Any, ours: Any, case: Any) -> Any:
    """The table's selection of MLA decode, as a checkout's benchmark asks for it."""
    if hasattr(ours, "selection"):
        return ours.selection(case)
    return bench.selection_of(bench.MlaSpec(case.heads, case.page_size))


def measure(output: Path) -> None:
    """The times of the checkout that this process imports, in us."""
    import torch

    from backend_core.testing.timing import graph_us, host_time_ms

    found, first = {}, {}
    for what, each in calls():
        found[what] = {"us": graph_us(each * max(1, 16 // len(each)), 21), "host_us": math.inf}
        first[what] = each[0]
    with torch.no_grad():
        for _, (what, call) in itertools.product(range(ROUNDS), first.items()):
            row = found[what]
            row["host_us"] = min(row["host_us"], 1e3 * host_time_ms(call, 60))
    output.write_text(json.dumps(found), encoding="utf-8")


def child(tree: Path) -> dict[str, dict[str, float]]:
    """The times of one process that imports ``tree``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "times.json")
        start = f"import sys; sys.path[0] = {str(tree)!r}; sys.argv = [{str(Path(__file__))!r}]"
        start += f"; import runpy; runpy.run_path({str(Path(__file__).resolve())!r})"
        start += f"['measure'](__import__('pathlib').Path({str(file)!r}))"
        command = [sys.executable, "-c", start]
        subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": search_path(tree)}, check=True
        )
        return dict(json.loads(file.read_text(encoding="utf-8")))


def search_path(tree: Path) -> str:
    """PYTHONPATH with ``tree`` first."""
    rest = [x for x in os.environ.get("PYTHONPATH", "").split(":") if x and Path(x) != HERE]
    return ":".join([str(tree), *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--before", type=Path, required=True)
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "after": HERE}
    for tree in trees.values():
        child(tree)
    times: dict[str, list[dict[str, dict[str, float]]]] = {side: [] for side in trees}
    for side in ORDER:
        times[side].append(child(trees[side]))
    rows = []
    for what in times["after"][0]:
        row: dict[str, Any] = {"what": what}
        for unit in ("us", "host_us"):
            for side in trees:
                row[f"{side}_{unit}"] = round(min(run[what][unit] for run in times[side]), 2)
        rows.append(row)
        print(row, flush=True)
    sys.path.insert(0, str(HERE))
    from backend_core.testing.records import write_record
    from backend_core.testing.timing import environment

    write_record(args.output, {**environment(), "rows": rows})


if __name__ == "__main__":
    main()
