"""The compressor's GPU time under other launch parameters: what a row of its table should hold.

    python benchmarks/sweep_dsv4_compressor.py --output sweep.json

Each variant is the shipped table with some parameters exchanged, on the tensors of
``bench_dsv4_compressor.py``, every request at the end of a window. Processes of a pool compile the
variants first, side by side; then they are timed one after another.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.path_table import load_table
from backend_core.target import detect_target
from benchmarks.bench_dsv4_compressor import make_part, ours, ours_both, rope_table, tokens_of
from benchmarks.dsv4_peers import empty_kernel, rows_calls
from benchmarks.timing import environment, graph_time_ms
from dsv4_backend import paths


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

    add("decode", "indexer_rows", 4, *(f"num_warps=1 pdl={p}" for p in (0, 1, 2)))
    add("decode", "indexer", 4, *(f"num_warps={w} pdl={p}" for w in (1, 2, 4) for p in (0, 1, 2)))
    add("decode", "main", 4, *(f"num_warps={w} pdl={p}" for w in (4, 8) for p in (0, 1, 2)))
    add("decode", "main", 4, "num_warps=2", "num_warps=4 block_w=4")
    add("decode", "both", 4, *(f"num_warps={w} pdl={p}" for w in (4, 8) for p in (0, 1, 2)))
    lean = [f"block_w=2 max_registers={r}" for r in (64, 72)] + ["block_w=4 max_registers=72"]
    add("decode", "both", 4, *(f"num_warps=4 {v} pdl=1" for v in lean))
    add("decode", "both", 4, "num_warps=4 block_w=8 max_registers=64 pdl=1")
    c128 = ((2, 8), (2, 16), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (16, 32))
    add("decode", "main", 128, *(f"num_warps={w} block_w={b} pdl=1" for w, b in c128))
    add("prefill", "indexer", 4, *(f"num_warps={w} rows={r}" for w in (1, 2, 4) for r in (1, 4)))
    add("prefill", "main", 4, *(f"num_warps={w} rows={r}" for w in (4, 8) for r in (1, 2, 4)))
    add("prefill", "main", 4, "num_warps=4 rows=4 max_registers=80")
    splits = ((4, 64, 32), (4, 128, 32), (4, 64, 64), (8, 128, 64), (2, 64, 32), (2, 32, 64))
    shapes = [f"num_warps={w} block_w={b} block_d={d}" for w, b, d in splits]
    add("prefill", "main", 128, *(f"{s} rest_num_warps=4" for s in shapes))
    add("prefill", "main", 128, *(f"{s} rest_num_warps=1" for s in shapes[:2]))
    return found


def calls_of(variant: Variant, n: int) -> Callable[[], object]:
    if variant.part == "indexer_rows":
        return rows_calls(n, rope_table())["ours"]
    names = ("main", "indexer") if variant.part == "both" else (variant.part,)
    tokens = tokens_of(variant.phase, n, variant.ratio, "all")
    parts = [make_part(name, variant.ratio, *tokens) for name in names]
    return ours(parts[0]) if len(parts) == 1 else ours_both(parts[0], parts[1])


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
            row = re.sub(r"(?m)^(pdl|max_registers) = \w+\n", "", row)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=12, help="that compile side by side")
    args = parser.parse_args()

    todo = variants()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        failures = pool.map(compile_variant, todo, chunksize=1)
    result: dict[str, object] = environment()
    result["empty_launch_ms"] = graph_time_ms(lambda: empty_kernel[(1,)](rope_table()), calls=20)
    rows: list[dict[str, object]] = []
    for variant, failure in zip(todo, failures, strict=True):
        times = {}
        if failure is None:
            with table_of(variant):
                times = {n: graph_time_ms(calls_of(variant, n), replays=20) for n in variant.sizes}
        row = {"phase": variant.phase, "part": variant.part, "ratio": variant.ratio}
        rows.append(row | {"params": dict(variant.params), "gpu_ms": times, "failure": failure})
        shown = failure or " ".join(f"{n}: {1e3 * ms:.2f}" for n, ms in times.items())
        print(*row.values(), dict(variant.params), "us", shown, flush=True)
        args.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
