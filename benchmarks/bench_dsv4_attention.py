"""DeepSeek-V4's sparse attention beside FlashMLA on one Hopper GPU: float64 first, then times.

    python benchmarks/bench_dsv4_attention.py --peers FOLDER \
        --output benchmarks/results/dsv4_attention_h200.json

Decode: one query token per request, a window of 128 rows from one cache and the rows of a
``Layer`` from another, all of 584-byte records in random order; sinks; bf16 output and natural LSE.
Layers of ratio 4 are timed in all variants, the others as the path table runs them. Prefill: each
query token with 128 or 640 rows: FlashMLA over rows of bf16 that were gathered and dequantised
before (not timed), ours over such rows and over the records.

FlashMLA decodes 64 or 128 heads on Hopper, so fewer are padded to 64, as vLLM does; its prefill
takes 8, 16 and 32. FOLDER holds ``vllm/_flashmla_C.abi3.so`` of the wheel vllm 0.33.0, whose
operators are called as ``vllm/third_party/flashmla/flash_mla_interface.py`` does.

Times are medians of CUDA-graph replays. A graph holds one call for each of several index lists that
together name more than 192 MB of rows, since in an engine the other layers evict the L2 cache; its
time is divided by their number. ``floor_us`` is the bytes of the named rows, the queries and the
outputs, over the rate of an elementwise kernel. Before, ``--processes`` side by side compile every
variant and compare it with float64.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.operator import forced
from backend_core.tables.load import load_table, shipped_directory
from backend_core.target import detect_target
from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import copy_bandwidth_gbs, environment, graph_us
from mla_backend import reference_sparse_mla as reference
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.launch_params import TABLES
from mla_backend.scratch import SplitScratch
from mla_backend.sparse_mla import SparseMlaSelection, selection_for, sparse_mla
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.testing import sparse_mla_cases as cases

Call = Callable[[], object]
SCALE = 512**-0.5
COLD_BYTES = 192e6
MAX_LISTS = 512
REPLAYS = 7
WINDOW = 128
HEADS = (8, 16, 32, 64)
BATCHES = (1, 16, 64, 128)
OTHER_BATCHES = (1, 4, 16, 64, 128)
PREFILLS = tuple(itertools.product((4096, 512), (8, 16, 32), (512, 0)))
"""(query tokens, heads, rows beside the window)"""
POOL_ROWS = 1 << 20
CHECK_SECONDS = 100.0
CHECKED = [(64, 128, [128, 0, 7, 65]), (64, 512, [512, 0, 33, 1])]
"""Of a check's caches the page size, the length of the lists, and how many entries count."""


class Layer(NamedTuple):
    """The second cache of a layer, and the lists into it."""

    name: str
    page_size: int
    """Rows of a page; 0 where the layer attends to its window alone."""
    topk: int
    mixed: bool = False
    """Whether 1 to ``topk`` entries count, in equal measure on a logarithmic scale."""


LAYERS = (Layer("ratio 4", 64, 512), Layer("ratio 4", 64, 1024))
OTHER_LAYERS = (
    Layer("ratio 4, mixed", 64, 1024, mixed=True),
    Layer("ratio 128", 2, 64),
    Layer("ratio 128", 2, 1024),
    Layer("ratio 128, mixed", 2, 1024, mixed=True),
    Layer("window", 0, 0),
)
Variant = tuple[str, str | None, dict[str, Any], int | None]
"""(name, path or the table's, parameters that are not the table's, splits or the plan's)."""


def variants_of(heads: int) -> list[Variant]:
    """The table's choice, then others: heads of an item, fetching warps, splits, and the Triton
    path."""
    found: list[Variant] = [("ours", None, {}, None)]
    for tile in (16, 32, 64):
        if tile > max(16, heads):
            continue
        for warps, registers in ((8, 128), (4, 168)) if tile < 64 else ((8, 96), (4, 144)):
            params = {"max_heads": tile, "fetch_warps": warps, "fetch_registers": registers}
            found.append((f"{tile} heads, {warps} warps", "gluon_sm90", params, None))
    found += [(f"{n} splits", "gluon_sm90", {}, n) for n in (2, 5, 8, 18)]
    tile = min(64, max(16, heads))
    found.append(("triton", "triton", {"block_kv": 64, "num_warps": 8, "block_rows": tile}, None))
    return found


def selection_of(spec: SparseMlaSpec, variant: Variant) -> SparseMlaSelection:
    """The table's selection, or one of a path with other parameters."""
    _, path, params, _ = variant
    device = torch.device("cuda", 0)
    if path is None:
        return selection_for(device, spec)
    target = detect_target(device)
    table = load_table(TABLES, target, directory=shipped_directory())
    needs = spec.requires()
    *_, row = (  # the one for the most query tokens
        r
        for r in table.rows
        if (r.operator, r.name) == ("sparse_mla", path) and needs <= r.features
    )
    row = dataclasses.replace(row, params=dataclasses.replace(row.params, **params))
    return forced(TABLES, target, spec, row)


def fault(task: tuple[str, int, Variant]) -> str | None:
    """What a variant gets wrong beside float64: decode, prefill over records, or over rows."""
    phase, heads, variant = task
    splits = None if variant[3] is None else min(variant[3], 3)
    try:
        found = row_fault(heads, variant) if phase == "rows" else None
        if phase != "rows":
            lists: Any = CHECKED if phase == "decode" else CHECKED[1:]
            case = cases.make_case(
                heads, lists, requests=4, has_sinks=True, device=torch.device("cuda", 0)
            )
            got = cases.run_case(case, selection_of(case.spec, variant), splits)
            found = cases.disagreement(got, cases.expected(case))
    except Exception as error:  # the others' results count too
        found = f"{type(error).__name__}: {str(error)[:300]}"
        if variant[1] is not None:  # parameters that do not fit this many heads are not timed
            print(f"no {variant[0]} in {phase}, {heads} heads: {found}", flush=True)
            return None
    return f"{phase}, {variant[0]}, {heads} heads: {found}" if found else None


def row_fault(heads: int, variant: Variant) -> str | None:
    """Prefill over rows of bf16."""
    device = torch.device("cuda", 0)
    generator = torch.Generator(device=device).manual_seed(1)
    kv = 0.1 * torch.randn(600, 512, device=device, generator=generator).bfloat16()
    q = 8 * torch.randn(9, 1, heads, 512, device=device, generator=generator).bfloat16()
    indices = torch.randint(-20, 650, (9, 1, 200), device=device, generator=generator).int()
    lengths = torch.tensor([200, 0, 64, 65, 1, 199, 128, 3, 200], device=device).int()
    sinks = torch.randn(heads, device=device, generator=generator)
    chosen = selection_of(SparseMlaSpec(heads, "bf16_rows"), variant)
    got = sparse_mla(q, NamedRows(kv, indices, lengths), chosen, scale=SCALE, sinks=sinks)
    want = reference.sparse_mla(q, [(kv, indices, lengths)], SCALE, sinks=sinks)
    return cases.disagreement(got, want)


def faults(processes: int) -> list[str]:
    """What is wrong, of every variant that will be timed; they are compiled meanwhile."""
    tasks = [("decode", n, variant) for n in HEADS for variant in variants_of(n)]
    for n in sorted({heads for _, heads, _ in PREFILLS}):
        tasks += [("rows", n, ("ours", None, {}, None)), ("rows", n, ("", "triton", {}, None))]
        tasks += [("records", n, v) for v in variants_of(n) if v[3] is None]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.map_async(fault, tasks, chunksize=1).get(CHECK_SECONDS + 3 * len(tasks))
    return [line for line in found if line is not None]


class DecodeCase:
    """One step of requests, with several index lists over one pool of pages."""

    def __init__(self, heads: int, batch: int, layer: Layer) -> None:
        self.heads, self.batch, self.layer = heads, batch, layer
        generator = torch.Generator().manual_seed(0)
        own = torch.full((batch,), WINDOW, dtype=torch.int32)
        extra = torch.full((batch,), layer.topk, dtype=torch.int32)
        if layer.mixed:
            extra = torch.exp2(
                torch.rand(batch, generator=generator) * math.log2(layer.topk + 1)
            ).int()
        row_bytes = int(own.sum() + extra.sum()) * 584
        self.bytes = row_bytes + batch * heads * 2 * 1024
        self.lengths, self.extra_lengths = own.cuda(), extra.cuda()
        count = max(1, min(MAX_LISTS, 1 + int(COLD_BYTES / row_bytes)))

        def indices(width: int) -> list[torch.Tensor]:
            shape = (count, batch, 1, width)
            return list(torch.randint(0, POOL_ROWS, shape, device="cuda", dtype=torch.int32))

        self.cache, self.own = _pool(64), indices(WINDOW)
        self.extra_cache, self.extra = _pool(layer.page_size), indices(layer.topk)
        self.q = torch.randn(batch, 1, heads, 512, device="cuda").bfloat16()
        self.sinks = torch.randn(heads, device="cuda")
        self.result: tuple[torch.Tensor, ...] = ()

    def ours(self, variant: Variant) -> list[Call]:
        spec = SparseMlaSpec(self.heads, page_size=64, extra_page_size=self.layer.page_size)
        chosen = selection_of(spec, variant)
        out = torch.full_like(self.q, math.nan)
        lse = torch.full(self.q.shape[:3], math.nan, device="cuda")
        scratch = SplitScratch(out.device)
        self.result = (out, lse)

        def call(own: torch.Tensor, extra: torch.Tensor) -> None:
            second = None
            if self.layer.topk:
                second = NamedRows(self.extra_cache, extra, self.extra_lengths)
            sparse_mla(
                self.q,
                NamedRows(self.cache, own, self.lengths),
                chosen,
                scale=SCALE,
                extra=second,
                sinks=self.sinks,
                out=out,
                lse=lse,
                splits=variant[3],
                scratch=scratch,
            )

        return [functools.partial(call, *lists) for lists in zip(self.own, self.extra, strict=True)]

    def flashmla(self) -> list[Call]:
        decode = torch.ops._flashmla_C.sparse_decode_fwd
        padded = 64 if self.heads <= 64 else 128
        q = torch.zeros(self.batch, 1, padded, 512, dtype=torch.bfloat16, device="cuda")
        q[:, :, : self.heads] = self.q
        sinks = torch.zeros(padded, device="cuda")
        sinks[: self.heads] = self.sinks
        out = torch.empty_like(q)
        cache, extra_cache = self.cache.unsqueeze(-2), self.extra_cache.unsqueeze(-2)

        def run(own: torch.Tensor, extra: torch.Tensor, plan: tuple[Any, ...]) -> tuple[Any, ...]:
            second = (extra_cache, extra, self.extra_lengths)
            options = second if self.layer.topk else (None, None, None)
            result = decode(
                q, cache, own, self.lengths, sinks, *plan, *options, 512, SCALE, out, False
            )
            self.result = (out[:, :, : self.heads], result[1][:, : self.heads].transpose(1, 2))
            return tuple(result)

        plan = run(self.own[0], self.extra[0], (None, None))[2:4]
        return [
            functools.partial(run, *lists, plan) for lists in zip(self.own, self.extra, strict=True)
        ]


@functools.cache
def _pool(page_size: int) -> torch.Tensor:
    """A cache of ``POOL_ROWS`` records of random numbers; of 1 row for a page size of 0."""
    size, rows = (page_size, POOL_ROWS) if page_size else (1, 1)
    pages = rows // size
    few = cases.write_records(torch.randn(min(pages, 16384 // size), size, 512, device="cuda"))
    memory = few.as_strided((len(few), few.stride(0)), (few.stride(0), 1))
    whole = memory.repeat(pages // len(few), 1)
    return whole.as_strided((pages, size, 584), few.stride())


def time_decode(heads: int, batch: int, layer: Layer, peers: bool) -> dict[str, Any]:
    """One row: the variants and the peer, each compared with ours."""
    case = DecodeCase(heads, batch, layer)
    times: dict[str, float] = {}
    first: torch.Tensor | None = None
    agree: dict[str, float] = {}
    for variant in variants_of(heads) if layer in LAYERS else variants_of(heads)[:1]:
        if variant[3] is not None and variant[3] > 2 + (WINDOW + layer.topk) // 64:
            continue
        try:
            calls = case.ours(variant)
            times[variant[0]] = graph_us(calls, REPLAYS)
            calls[0]()
        except Exception as error:
            print(f"no {variant[0]}, {heads} heads: {str(error)[:120]}", flush=True)
            continue
        result = case.result[0].float().clone()
        first = result if first is None else first
        agree[variant[0]] = relative_error(result, first)
    if peers:
        calls = case.flashmla()
        times["flashmla"] = graph_us(calls, REPLAYS)
        calls[0]()
        if first is not None:
            agree["flashmla"] = relative_error(case.result[0].float(), first)
    return {
        "phase": "decode", "layer": layer.name, "heads": heads, "batch": batch, "topk": layer.topk,
        "bytes": case.bytes, "times": times, "disagreement": agree,
    }  # fmt: skip


def time_prefill(tokens: int, heads: int, topk: int, peers: bool) -> dict[str, Any]:
    """Over a pool of rows that fits L2, as the last tokens of a prompt have it."""
    width, pages = WINDOW + topk, 128
    cache = _pool(64)[:pages]
    rows = reference.read_records(cache).view(-1, 512).bfloat16()
    q = torch.randn(tokens, 1, heads, 512, device="cuda").bfloat16()
    indices = torch.randint(0, pages * 64, (tokens, 1, width), device="cuda", dtype=torch.int32)
    lengths = torch.full((tokens,), width, dtype=torch.int32, device="cuda")
    sinks = torch.randn(heads, device="cuda")
    out = torch.empty_like(q)
    lse = torch.empty(tokens, 1, heads, device="cuda")
    plain = SparseMlaSpec(heads, "bf16_rows")
    paged = SparseMlaSpec(heads, page_size=64)

    def call_ours(cache: torch.Tensor, chosen: SparseMlaSelection) -> None:
        named = NamedRows(cache, indices, lengths)
        sparse_mla(q, named, chosen, scale=SCALE, sinks=sinks, out=out, lse=lse)

    calls: dict[str, Call] = {}
    for name, path in (("ours", None), ("triton", "triton")):
        chosen = selection_of(plain, ("", path, {}, None))
        calls[name] = functools.partial(call_ours, rows, chosen)
    for variant in variants_of(heads):
        if variant[3] is None and variant[1] != "triton":
            chosen = selection_of(paged, variant)
            calls[f"records, {variant[0]}"] = functools.partial(call_ours, cache, chosen)
    if peers:
        ops = torch.ops._flashmla_C
        kv, squeezed, flat = rows.unsqueeze(1), q.squeeze(1), out.squeeze(1)
        calls["flashmla"] = lambda: ops.sparse_prefill_fwd(
            squeezed, kv, indices, SCALE, 512, sinks, lengths, flat
        )
    times, agree = {}, {}
    first: torch.Tensor | None = None
    for name, call in calls.items():
        try:
            times[name] = graph_us([call] * 2, REPLAYS)
        except Exception as error:
            print(f"no {name} in prefill, {heads} heads: {str(error)[:200]}", flush=True)
            continue
        result = out.float().clone()
        first = result if first is None else first
        agree[name] = relative_error(result, first)
    return {
        "phase": "prefill", "layer": "ratio 4" if topk else "window", "heads": heads,
        "batch": tokens, "topk": topk, "bytes": rows.nbytes + 2 * q.nbytes, "times": times,
        "disagreement": agree,
    }  # fmt: skip


def finished(row: dict[str, Any], rate: float) -> dict[str, Any]:
    times = row["times"]
    return {
        "phase": row["phase"],
        "layer": row["layer"],
        "heads": row["heads"],
        "batch": row["batch"],
        "topk": row["topk"],
        "ours_gpu_us": _rounded(times.get("ours")),
        "flashmla_gpu_us": _rounded(times.get("flashmla")),
        "floor_us": _rounded(row["bytes"] / rate / 1e3),
        "variants_us": {name: _rounded(t) for name, t in times.items() if name != "flashmla"},
        "disagreement": float(f"{max(row['disagreement'].values(), default=0.0):.1e}"),
    }


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peers", type=Path, help="holds vllm/_flashmla_C.abi3.so")
    parser.add_argument("--processes", type=int, default=12, help="that check side by side")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    if wrong := faults(arguments.processes):
        sys.exit("\n".join(["wrong against float64:", *wrong]))
    print(f"all variants are right, {time.perf_counter() - begin:.0f} s", flush=True)
    if arguments.peers:
        torch.ops.load_library(str(arguments.peers / "vllm" / "_flashmla_C.abi3.so"))
    rate = copy_bandwidth_gbs()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {**environment(), "copy_gbs": round(rate, 1)}

    def record(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = " ".join(f"{name}={t:.1f}" for name, t in row["times"].items())
        print(f"{row['phase']} {row['layer']} h{row['heads']} b{row['batch']} k{row['topk']}"
              f" floor={row['bytes'] / rate / 1e3:.1f} {shown}", flush=True)  # fmt: skip
        if arguments.output:
            document["rows"] = [finished(row, rate) for row in rows]
            write_record(arguments.output, document)

    peers = arguments.peers is not None
    for layers, batches in ((OTHER_LAYERS, OTHER_BATCHES), (LAYERS, BATCHES)):
        for heads, batch, layer in itertools.product(HEADS, batches, layers):
            record(time_decode(heads, batch, layer, peers))
    for size in PREFILLS:
        record(time_prefill(*size, peers))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
