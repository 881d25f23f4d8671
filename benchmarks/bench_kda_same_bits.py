"""Requests alone and among others, bits compared, and the price of bits that stay the same.

    python -m benchmarks.bench_kda_same_bits --output benchmarks/results/kda_same_bits_h200.json

First `tools.fuzz.kda_same_bits` draws so many requests of a layer (``requests``), puts each among
others in so many ways (``ways``), and counts those whose bits never change (``equal``); one that
differs ends the run, and is printed with its number. ``--processes`` share the requests. Then
``rows`` has times of decode steps (``decode``), of prefills (``prefill``) and of a layer's whole
prefill (``layer``) in µs: ``free_us`` as the table chooses by the size of the call,
``invariant_us`` with `KdaShape.batch_invariant`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backend_core.target import detect_target
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment, graph_time_ms
from benchmarks import bench_kda_decode, bench_kda_layer, bench_kda_prefill
from kda_backend.selection import select
from tools.fuzz import kda_same_bits
from tools.fuzz.batches import run_batch

HEADS = (32, 4)
BATCHES = (1, 8, 64, 256, 512)
LENGTHS = ([64], [512], [2048], [8192], [32768], [1024] * 8, [48] * 64, bench_kda_prefill.RAGGED)
Row = dict[str, Any]


def different(numbers: Sequence[int], seconds: float) -> tuple[int, list[str]]:
    """Draw requests by their numbers until none is left or so much time has passed; (drawn, those
    with other bits in words)."""
    target, device = detect_target(), torch.device("cuda")
    found: list[str] = []
    drawn, end = 0, time.perf_counter() + seconds
    for number in numbers:
        if time.perf_counter() > end:
            break
        outcome = run_batch(number, kda_same_bits.CASES, kda_same_bits.CASES, target, device)
        if outcome.status != "ok":
            found.append(f"{number}: {outcome.message}")
        drawn += 1
    return drawn, found


def different_in(processes: int, requests: int, seconds: float) -> tuple[int, list[str]]:
    """`different`, of the first ``requests``, which so many processes share."""
    shares = [range(first, requests, processes) for first in range(processes)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        parts = list(pool.map(different, shares, [seconds] * processes))
    return sum(drawn for drawn, _ in parts), [line for _, found in parts for line in found]


def rows() -> Iterator[Row]:
    """Both times of each size."""
    for heads, batch in itertools.product(HEADS, BATCHES):
        x = bench_kda_decode.make_layer(batch, heads)
        chosen = (
            bench_kda_decode.selection_of(heads, batch_invariant=invariant)
            for invariant in (False, True)
        )
        ms = (bench_kda_decode.gpu_ms(bench_kda_decode.ours(x, one), x) for one in chosen)
        yield row_of("decode", heads, f"{batch} sequences", *ms)
        torch.cuda.empty_cache()
    for heads, lens in itertools.product(HEADS, LENGTHS):
        case = bench_kda_prefill.draw(lens, heads, "init", None, seed=7)
        calls = (bench_kda_prefill.Ours(case, batch_invariant=x) for x in (False, True))
        yield row_of("prefill", heads, words(lens), *map(graph_time_ms, calls))
        made = bench_kda_layer.Layer(heads, lens, "cuda")
        layers: list[Callable[[], None]] = [
            functools.partial(
                made.run, select(detect_target(), replace(made.shape, batch_invariant=invariant))
            )
            for invariant in (False, True)
        ]
        yield row_of("layer", heads, words(lens), *map(graph_time_ms, layers))
        torch.cuda.empty_cache()


def row_of(what: str, heads: int, size: str, free_ms: float, invariant_ms: float) -> Row:
    times = {"free_us": round(1e3 * free_ms, 2), "invariant_us": round(1e3 * invariant_ms, 2)}
    return {"what": what, "H": heads, "size": size, **times}


def words(lens: list[int]) -> str:
    if len(set(lens)) > 1:
        return f"{len(lens)} ragged, {sum(lens):,} tokens"
    return f"{len(lens)} × {lens[0]:,} tokens" if len(lens) > 1 else f"{lens[0]:,} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most, of the requests")
    args = parser.parse_args()
    result: dict[str, Any] = dict(environment())
    drawn, found = different_in(args.processes, args.requests, args.seconds)
    equal = drawn - len(found)
    result |= {"requests": drawn, "ways": kda_same_bits.AMONG, "equal": equal, "rows": []}
    print(f"{equal} of {drawn} requests have the same bits in every batch", flush=True)
    if found:
        sys.exit("\n".join([*found[:20], "no times were taken"]))
    with torch.inference_mode():
        for row in rows():
            result["rows"].append(row)
            print(row, flush=True)
            write_record(args.output, result)


if __name__ == "__main__":
    main()
