"""The compressor's GPU time under other launch parameters: what a row of its table should hold.

    python benchmarks/sweep_dsv4_compressor.py --output sweep.json

Each variant is the shipped table with some parameters exchanged, on the tensors of
``bench_dsv4_compressor.py``, every request at the end of a window. Processes of a pool compile the
variants first, side by side; then they are timed one after another.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.tables.select import load_table
from backend_core.target import detect_target
from backend_core.testing.timing import environment, graph_time_ms
from benchmarks.bench_dsv4_compressor import make_part, ours, ours_both, rope_table, tokens_of
from benchmarks.dsv4_peers import Part, empty_kernel, rows_calls
from dsv4_backend import selection as paths


@dataclass(frozen=True)
class Variant:
    """Parameters in place of the table's, for one part of one phase."""

    phase: str
    part: str  # main, indexer, both or indexer_rows
    ratio: int
    sizes: tuple[int, ...]
    params: tuple[tuple[str, str], ...]

    @property
    def feature(self) -> str:
        names = {"both": "pair", "indexer": "indexer", "indexer_rows": "in_place_128"}
        return names.get(self.part, f"main_c{self.ratio}")


def variants() -> list[Variant]:
    decode, prefill = (1, 16, 64, 256, 512), (1024, 8192, 65536)
    found = []

    def add(phase: str, part: str, ratio: int, *options: str) -> None:
        """Options are like ``"num_warps=4 pdl=1"``; all are combined with the table's rest."""
        sizes = decode if phase == "decode" else prefill
        for option in options:
            pairs = [pair.split("=") for pair in option.split()]
            params = tuple((name, value) for name, value in pairs)
            found.append(Variant(phase, part, ratio, sizes, params))

    early = "reads_early=true"
    add("decode", "indexer_rows", 4, *(f"num_warps=1 pdl={p}" for p in (2, 3)))
    add("decode", "indexer", 4, *(f"num_warps=1 pdl={p}" for p in (2, 3)))
    add("decode", "indexer", 4, *(f"num_warps=1 pdl={p} {early}" for p in (1, 2, 3)))
    add("decode", "indexer", 4, f"num_warps=2 pdl=3 {early}")
    add("decode", "indexer", 4, f"num_warps=1 pdl=3 {early} pools_early=true")
    for part in ("main", "both"):
        add("decode", part, 4, f"num_warps=4 block_w=8 pdl=3 {early} pools_early=true")
    add("decode", "main", 4, *(f"num_warps=4 block_w=8 pdl={p}" for p in (1, 2, 3)))
    add("decode", "main", 4, *(f"num_warps=4 block_w=8 pdl={p} {early}" for p in (1, 2, 3)))
    add("decode", "both", 4, *(f"num_warps=4 block_w=8 pdl={p}" for p in (1, 2, 3)))
    add("decode", "both", 4, *(f"num_warps=4 block_w=8 pdl={p} {early}" for p in (1, 2, 3)))
    lean = [f"num_warps=4 block_w=8 max_registers=64 pdl={p}" for p in (1, 2)]
    add("decode", "both", 4, *lean)
    c128 = ((4, 8, 1), (4, 8, 2), (4, 8, 3), (2, 8, 1), (8, 8, 1), (4, 4, 1), (4, 16, 1))
    add("decode", "main", 128, *(f"num_warps={w} block_w={b} pdl={p}" for w, b, p in c128))
    return found


def parts_of(variant: Variant, n: int) -> list[Part]:
    names = ("main", "indexer") if variant.part == "both" else (variant.part,)
    tokens = tokens_of(variant.phase, n, variant.ratio, "all")
    return [make_part(name, variant.ratio, *tokens) for name in names]


def calls_of(variant: Variant, n: int) -> Callable[[], object]:
    if variant.part == "indexer_rows":
        return rows_calls(n, rope_table())["ours"]
    parts = parts_of(variant, n)
    return ours(parts[0]) if len(parts) == 1 else ours_both(parts[0], parts[1])


def written_by(variant: Variant) -> list[torch.Tensor]:
    """The records and state rows that a variant's call writes."""
    parts = parts_of(variant, variant.sizes[1])
    torch.cuda.synchronize()
    (ours(parts[0]) if len(parts) == 1 else ours_both(parts[0], parts[1]))()
    return [tensor for part in parts for tensor in (part.cache, part.state)]


def differs(variant: Variant, wanted: list[torch.Tensor]) -> str | None:
    """States must be equal, and records but for what another order of a sum may round apart."""
    for got, want in zip(written_by(variant), wanted, strict=True):
        share = float((got != want).sum()) / float((want != 0).sum())
        if share > (1e-3 if want.dtype == torch.uint8 else 0.0):
            return f"{share:.4f} of a tensor differs from the first variant's"
    return None


@contextmanager
def table_of(variant: Variant) -> Iterator[None]:
    """The shipped table with the variant's parameters, in this process."""
    caches = (paths.decode_paths, paths.pair_paths, paths.prefill_paths, paths.in_place_paths)
    os.environ.pop("KDA_DSV4_CONFIG_DIR", None)
    table = load_table("dsv4", detect_target()).source
    text = with_params(table.read_text(), variant)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "dsv4" / table.name
        file.parent.mkdir()
        file.write_text(text)
        os.environ["KDA_DSV4_CONFIG_DIR"] = directory
        for cache in caches:
            cache.cache_clear()
        yield
        del os.environ["KDA_DSV4_CONFIG_DIR"]
        for cache in caches:
            cache.cache_clear()


def with_params(text: str, variant: Variant) -> str:
    """A table's text with the variant's parameters set, or added, in the rows it concerns."""
    rows = text.split("[[path]]")
    for i, row in enumerate(rows):
        if f'phase = "{variant.phase}"' in row and f'"{variant.feature}"' in row:
            row = re.sub(r"(?m)^(pdl|max_registers|reads_early|pools_early) = \w+\n", "", row)
            for name, value in variant.params:
                row = re.sub(rf"(?m)^{name} = \w+\n", "", row)
                row = row.replace("[path.params]\n", f"[path.params]\n{name} = {value}\n")
            rows[i] = row
    return "[[path]]".join(rows)


def compile_variant(variant: Variant) -> str | None:
    """Call a variant once for each size, so that Triton's cache has its kernels; or what failed."""
    try:
        with table_of(variant):
            for n in variant.sizes:
                calls_of(variant, n)()
            torch.cuda.synchronize()
    except Exception as error:  # one variant must not end the sweep
        return f"{type(error).__name__}: {error}"
    return None


BUCKETS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((1, 16, 64), 128),
    ((256,), 256),
    ((512,), None),
)
"""Sizes that stand for decode steps of up to so many requests."""


def best_rows(rows: list[dict[str, Any]]) -> list[tuple[int | None, dict[str, Any]]]:
    """Of one part's rows of the sweep the fastest for each bucket, neighbours that agree as one."""
    found: list[tuple[int | None, dict[str, Any]]] = []
    for sizes, bound in BUCKETS:
        times = {i: math.prod(row["gpu_ms"][n] for n in sizes) for i, row in enumerate(rows)}
        best = rows[min(times, key=lambda i: times[i])]
        if found and found[-1][1] is best:
            found.pop()
        found.append((bound, best))
    return found


def chosen_table(text: str, rows: list[dict[str, Any]], result: dict[str, object]) -> str:
    """The table's text with the decode rows of every part of the sweep replaced by the fastest."""
    head, *blocks = text.split("[[path]]")
    for feature in dict.fromkeys(row["feature"] for row in rows if row["phase"] == "decode"):
        timed = [row for row in rows if row["feature"] == feature and not row["failure"]]
        name = "in_registers" if feature.startswith("in_place") else "one_launch"
        blocks = [
            block
            for block in blocks
            if not ('phase = "decode"' in block and f'features = ["{feature}"]' in block)
        ]
        for bound, row in best_rows(timed):
            params = "".join(f"{key} = {value}\n" for key, value in row["params"].items())
            if feature in ("indexer", "main_c4", "pair") and "block_w" not in row["params"]:
                params += "block_w = 8\n"
            limit = "" if bound is None else f"max_grid = {bound}\n"
            blocks.append(
                f'\nphase = "decode"\nname = "{name}"\n{limit}features = ["{feature}"]\n'
                f'measured = true\nsource = "benchmarks/results/dsv4_sweep_decode_h200.json"\n'
                f'gpu = "{result["gpu"]}"\ndate = "{result["date"]}"\n[path.params]\n{params}\n'
            )

    def place(block: str) -> tuple[bool, float]:
        bound = re.search(r"max_grid = (\d+)", block)
        return 'phase = "decode"' in block, int(bound[1]) if bound else math.inf

    blocks = [block.rstrip("\n") + "\n\n" for block in sorted(blocks, key=place)]
    return "[[path]]".join([head, *blocks]).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--table", type=Path, help="where to write the table that the times choose")
    parser.add_argument("--processes", type=int, default=12, help="that compile side by side")
    args = parser.parse_args()

    todo = variants()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        failures = pool.map(compile_variant, todo, chunksize=1)
    result: dict[str, object] = environment()
    result["empty_launch_ms"] = graph_time_ms(lambda: empty_kernel[(1,)](rope_table()), calls=20)
    rows: list[dict[str, Any]] = []
    wanted: dict[tuple[str, str], list[torch.Tensor]] = {}
    for variant, compile_failure in zip(todo, failures, strict=True):
        times = {}
        failure = compile_failure
        if failure is None and variant.part != "indexer_rows":
            with table_of(variant):
                key = (variant.phase, variant.feature)
                if key in wanted:
                    failure = differs(variant, wanted[key])
                else:
                    wanted[key] = written_by(variant)
        if failure is None:
            with table_of(variant):
                times = {n: graph_time_ms(calls_of(variant, n), replays=20) for n in variant.sizes}
        row: dict[str, Any] = {
            "phase": variant.phase,
            "part": variant.part,
            "ratio": variant.ratio,
        }
        rows.append(row | {"params": dict(variant.params), "gpu_ms": times, "failure": failure})
        rows[-1] |= {"feature": variant.feature}
        shown = failure or " ".join(f"{n}: {1e3 * ms:.2f}" for n, ms in times.items())
        print(*row.values(), dict(variant.params), "us", shown, flush=True)
    args.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    if args.table is not None:
        shipped = load_table("dsv4", detect_target()).source.read_text()
        args.table.write_text(chosen_table(shipped, rows, result))


if __name__ == "__main__":
    main()
