"""The compressor's GPU time under other launch parameters: what a row of its table should hold.

    python benchmarks/sweep_dsv4_compressor.py --output sweep.json

Each variant is the shipped row for the operator's smallest grid with some parameters exchanged, on
the tensors of ``bench_dsv4_compressor.py``, every request at the end of a window. Processes of a
pool compile the variants first, side by side; then they are timed one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.operator import Selection, forced
from backend_core.tables.load import load_table, shipped_directory
from backend_core.tables.schema import UpstreamParams
from backend_core.target import detect_target
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment, graph_time_ms
from benchmarks.bench_dsv4_compressor import in_place_call, tokens_of
from benchmarks.empty_launch import empty_launch_ms
from dsv4_backend.launch_params import TABLES
from dsv4_backend.testing.steps import TimedStep, make_step

DECODE, PREFILL = (1, 16, 64, 256, 512), (1024, 8192, 65536)
Params = dict[str, int | str]


@dataclass(frozen=True)
class Variant:
    """Parameters in place of those of the operator's first shipped row of a kernel of ours."""

    operator: str
    params: tuple[tuple[str, int | str], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return PREFILL if self.operator.endswith("_prefill") else DECODE

    def selection(self) -> Selection[Any, Any]:
        target = detect_target()
        table = load_table(TABLES, target, directory=shipped_directory())
        row = next(
            row
            for row in table.rows
            if row.operator == self.operator and not isinstance(row.params, UpstreamParams)
        )
        params = dataclasses.replace(row.params, **dict(self.params))
        return forced(TABLES, target, None, dataclasses.replace(row, params=params))


def variants() -> Iterator[Variant]:
    def of(operator: str, options: Iterable[Params]) -> Iterator[Variant]:
        return (Variant(operator, tuple(params.items())) for params in options)

    pdl = ("wait", "release_after_wait", "release_first")
    prefetch = ("none", "load", "pool")
    yield from of("in_place_128", ({"num_warps": 1, "pdl": p} for p in pdl))
    for operator, warps in (("indexer_decode", (1, 2)), ("main_c4_decode", (2, 4))):
        yield from of(
            operator,
            (
                {"num_warps": w, "pdl": p, "prefetch": f, "block_w": 8}
                for w in warps
                for p in pdl
                for f in prefetch
            ),
        )
    c128 = ((4, 8, 0), (4, 8, 128), (2, 8, 0), (8, 8, 0), (4, 4, 0), (4, 16, 0))
    yield from of(
        "main_c128_decode",
        (
            {"splits": 1, "num_warps": w, "block_w": b, "pdl": p, "max_registers": r}
            for w, b, r in c128
            for p in pdl
        ),
    )
    yield from of(
        "main_c128_decode",
        (
            {"splits": s, "num_warps": w, "block_w": b, "pdl": "wait"}
            for s in (2, 4, 8)
            for w in (1, 2, 4, 8)
            for b in (16, 32, 64, 128)
            if b * 512 <= s * w * 32 * 64  # at most 64 values of kv and of score a thread
        ),
    )
    for operator in ("indexer_prefill", "main_c4_prefill"):
        yield from of(
            operator, ({"num_warps": w, "rows": r} for w in (1, 2, 4, 8) for r in (1, 2, 4))
        )
    yield from of(
        "main_c128_prefill",
        (
            {"num_warps": w, "block_w": b, "block_d": d}
            for w in (2, 4, 8)
            for b in (32, 64, 128)
            for d in (32, 64, 128)
        ),
    )


def step_of(variant: Variant, n: int) -> TimedStep:
    kind, _, phase = variant.operator.rpartition("_")
    ratio = 128 if kind == "main_c128" else 4
    return make_step(kind, *tokens_of(phase, n, ratio, "all"))


def call_of(variant: Variant, n: int) -> Callable[[], object]:
    selection = variant.selection()
    if variant.operator != "in_place_128":
        return step_of(variant, n).call(selection=selection)
    return in_place_call(n, selection=selection)


def written_by(variant: Variant) -> list[torch.Tensor]:
    """The records and state rows that a variant's call writes."""
    step = step_of(variant, variant.sizes[1])
    torch.cuda.synchronize()
    step.call(selection=variant.selection())()
    return [step.cache, step.state]


def differs(variant: Variant, wanted: list[torch.Tensor]) -> str | None:
    """States must be equal, and records but for what another order of a sum may round apart."""
    for got, want in zip(written_by(variant), wanted, strict=True):
        share = float((got != want).sum()) / float((want != 0).sum())
        if share > (1e-3 if want.dtype == torch.uint8 else 0.0):
            return f"{share:.4f} of a tensor differs from the first variant's"
    return None


def compile_variant(variant: Variant) -> str | None:
    """Call a variant once for each size, so that Triton's cache has its kernels; or what failed."""
    try:
        for n in variant.sizes:
            call_of(variant, n)()
        torch.cuda.synchronize()
    except Exception as error:  # one variant must not end the sweep
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=12, help="that compile side by side")
    args = parser.parse_args()

    todo = list(variants())
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        failures = pool.map(compile_variant, todo, chunksize=1)
    result: dict[str, object] = dict(environment())
    result["empty_launch_ms"] = empty_launch_ms()
    rows: list[dict[str, Any]] = []
    wanted: dict[str, list[torch.Tensor]] = {}
    for variant, failure in zip(todo, failures, strict=True):
        if failure is None and variant.operator != "in_place_128":
            if variant.operator in wanted:
                failure = differs(variant, wanted[variant.operator])
            else:
                wanted[variant.operator] = written_by(variant)
        times = {}
        if failure is None:
            times = {n: graph_time_ms(call_of(variant, n), replays=20) for n in variant.sizes}
        row = {"operator": variant.operator, "params": dict(variant.params)}
        rows.append(row | {"gpu_ms": times, "failure": failure})
        shown = failure or " ".join(f"{n}: {1e3 * ms:.2f}" for n, ms in times.items())
        print(variant.operator, dict(variant.params), "us", shown, flush=True)
    write_record(args.output, result | {"rows": rows})


if __name__ == "__main__":
    main()
