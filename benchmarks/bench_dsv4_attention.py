"""DeepSeek-V4's sparse attention beside FlashMLA on one Hopper GPU: float64 first, then times.

    python benchmarks/bench_dsv4_attention.py --peers FOLDER \
        --output benchmarks/results/dsv4_attention_h200.json

Decode: one query token per request, a window of 128 rows from one cache and ``topk`` rows from
another, both of 584-byte records in pages of 64, in random order; sinks; bf16 output and natural
LSE. Prefill: 4,096 query tokens, each with 128 + ``topk`` rows: FlashMLA over rows of bf16 that
were gathered and dequantised before (not timed), ours over such rows and over the records.

FlashMLA decodes 64 or 128 heads on Hopper, so fewer are padded to 64, as vLLM does; its prefill
takes 8, 16 and 32. FOLDER holds ``vllm/_flashmla_C.abi3.so`` of the wheel vllm 0.33.0, whose
operators are called as ``vllm/third_party/flashmla/flash_mla_interface.py`` does.

Times are medians of CUDA-graph replays. A graph holds one call for each of several index lists that
together name more than 192 MB of rows, since in an engine the other layers evict the L2 cache; its
time is divided by their number. ``floor_us`` is the bytes of the named rows, the queries and the
outputs, over the rate of an elementwise kernel. ``--jobs`` processes check and compile before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.operator import forced
from backend_core.tables.select import load_table, shipped_directory
from backend_core.target import detect_target
from backend_core.testing.timing import copy_bandwidth_gbs, environment, graph_us
from softmax_backend import reference_sparse_mla as reference
from softmax_backend.contract.sparse_mla import NamedRows
from softmax_backend.launch_params import TABLES
from softmax_backend.scratch import Scratch
from softmax_backend.sparse_mla import SparseMlaSelection, selection_for, sparse_mla
from softmax_backend.spec_sparse_mla import SparseMlaSpec
from softmax_backend.testing import sparse_mla_cases as cases

Call = Callable[[], object]
SCALE = 512**-0.5
COLD_BYTES = 192e6
MAX_LISTS = 512
WINDOW = 128
HEADS = (8, 16, 32, 64)
BATCHES = (1, 16, 64, 128)
TOPKS = (512, 1024)
PREFILL_TOKENS = 4096
PREFILL_HEADS = (16, 32)
POOL_PAGES = 16384
SHARD_SECONDS = 100.0
DECODE_WRONG, PREFILL_WRONG = 1, 2
PREFILL = "rows of bf16"
Variant = tuple[str, str | None, dict[str, Any], int | None]
"""(name, path or the table's, parameters that are not the table's, splits or the plan's)."""


def variants_of(heads: int) -> list[Variant]:
    """The table's choice, then others: fetching warps x rows in their registers, heads of an item,
    splits, and the Triton path."""
    fetch = {
        "8x64": {"fetch_warps": 8, "fetch_rows": 64, "fetch_registers": 152},
        "8x32": {"fetch_warps": 8, "fetch_rows": 32, "fetch_registers": 128},
        "4x32": {"fetch_warps": 4, "fetch_rows": 32, "fetch_registers": 168},
    }
    found: list[Variant] = [("ours", None, {}, None)]
    for tile in (16, 32, 64):
        if tile > max(16, heads):
            continue
        for name, params in fetch.items():
            registers = params["fetch_registers"]
            if tile == 64:
                registers = 96 if params["fetch_warps"] == 8 else 144
            chosen = {**params, "fetch_registers": registers, "max_heads": tile}
            found.append((f"{tile} heads, {name}", "gluon_sm90", chosen, None))
    found.append(("2 stages", "gluon_sm90", {"num_stages": 2}, None))
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
    row = next(
        r
        for r in table.rows
        if (r.operator, r.name) == ("sparse_mla", path) and needs <= r.features
    )
    row = dataclasses.replace(row, params=dataclasses.replace(row.params, **params))
    return forced(TABLES, target, spec, row)


# ---------------------------------------------------------------- correctness, in several processes


def check_jobs() -> list[tuple[str, Callable[[], str | None]]]:
    """Checks by name; each gives what is wrong, or ``None``."""
    device = torch.device("cuda", 0)
    jobs: list[tuple[str, Callable[[], str | None]]] = []

    def add(
        name: str, path: str, splits: int | None, heads: int, lists: Any, **options: Any
    ) -> None:
        def job() -> str | None:
            case = cases.make_case(heads, lists, device=device, seed=len(name), **options)
            chosen = selection_of(case.spec, ("", path, {}, None))
            got = cases.run_case(case, chosen, splits)
            torch.cuda.synchronize()
            return cases.disagreement(got, cases.expected(case))

        jobs.append((f"{path}: {name}, {heads} heads, {splits} splits", job))

    both = [(64, 128, [128, 0, 7, 65]), (64, 512, [512, 0, 33, 1])]
    for path in ("gluon_sm90", "triton"):
        for heads in (1, 8, 16, 20, 32, 64, 128):
            add("both lists", path, 1, heads, both, requests=4, has_sinks=True)
            add("both lists", path, 3, heads, both, requests=4, has_sinks=True)
        add("plan's", path, None, 16, both, requests=4)
        for tokens in (2, 3, 4):
            add(f"{tokens} tokens", path, 2, 8, [(64, 100, None), (2, 200, [200, 3, 0])],
                tokens=tokens, has_sinks=True)  # fmt: skip
        add("window alone", path, 2, 16, [(256, 200, None)])
        add("pages of 61", path, 1, 16, [(61, 130, [130, 0, 2])])
        add("far pages", path, 1, 16, [(64, 130, None)], page_bytes=64 * 584 + 4096)
        add("nothing named", path, 1, 16, both, requests=4, invalid=1.0, has_sinks=True)
        add("nothing named", path, 3, 16, both, requests=4, invalid=1.0, has_sinks=True)
        add("many requests", path, None, 16, [(64, 128, None), (64, 64, None)], requests=321)
        jobs.append((f"{path}: every code", lambda path=path: _every_code(path, device)))
        jobs.append((f"{path}: canaries", lambda path=path: _canaries(path, device)))
        jobs.append((f"{path}: {PREFILL}", lambda path=path: _prefill_check(path, device)))
    return jobs


def _every_code(path: str, device: torch.device) -> str | None:
    """All finite codes under scales from 2^-97 to 2^7, as the only row of a token."""
    rows = torch.zeros(1, 64, 512)
    cache = cases.write_records(rows)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    cache.as_strided((64, 576), (576, 1))[:, :448] = torch.cat([codes, codes[:192]])[None]
    scales = (torch.arange(64) * 2 + 8).clamp(30, 134).to(torch.uint8)
    cache.as_strided((64, 8), (8, 1), 64 * 576)[:] = scales[:, None]
    want = reference.read_records(cache).view(64, 512).float().bfloat16()
    indices = torch.arange(64, dtype=torch.int32).view(64, 1, 1).to(device)
    q = torch.zeros(64, 1, 8, 512, dtype=torch.bfloat16, device=device)
    spec = SparseMlaSpec(8, page_size=64)
    memory = cache.as_strided((cache.stride(0),), (1,)).to(device)
    moved = memory.as_strided(cache.shape, cache.stride())
    out, _ = sparse_mla(
        q,
        NamedRows(moved, indices),
        selection_of(spec, ("", path, {}, None)),
        scale=SCALE,
        splits=1,
    )
    wrong = int((out[:, 0, 0].cpu() != want).sum())
    return f"{wrong} values of {want.numel()} are not equal" if wrong else None


def _canaries(path: str, device: torch.device) -> str | None:
    """Planted mistakes: scales in another order, a tail off by one, a forgotten sink."""
    for name in ("scales", "tail", "sink"):
        case = cases.make_case(8, [(64, 100, None)], device=device, has_sinks=True, seed=3)
        chosen = selection_of(case.spec, ("", path, {}, None))
        want = cases.expected(case)
        if found := cases.disagreement(cases.run_case(case, chosen, 1), want):
            return f"before {name}: {found}"
        cache = case.rows.cache
        scales = cache.as_strided((cache.shape[0], 64, 8), (cache.stride(0), 8, 1), 64 * 576)
        if name == "scales":
            scales[..., :7] = scales[..., :7].flip(-1).clone()
        elif name == "tail":
            scales[:] = scales.roll(1, dims=1).clone()
        else:
            case.sinks = None
        if cases.disagreement(cases.run_case(case, chosen, 1), want) is None:
            return f"{name} is not seen"
    return None


def _prefill_check(path: str, device: torch.device) -> str | None:
    generator = torch.Generator(device=device).manual_seed(1)
    for heads in (8, 16, 32, 64):
        kv = 0.1 * torch.randn(600, 512, device=device, generator=generator).bfloat16()
        q = 8 * torch.randn(9, 1, heads, 512, device=device, generator=generator).bfloat16()
        indices = torch.randint(-20, 650, (9, 1, 200), device=device, generator=generator).int()
        lengths = torch.tensor([200, 0, 64, 65, 1, 199, 128, 3, 200], device=device).int()
        sinks = torch.randn(heads, device=device, generator=generator)
        largest = torch.full((9, 1, heads), math.nan, device=device)
        spec = SparseMlaSpec(heads, "bf16_rows")
        got = sparse_mla(
            q, NamedRows(kv, indices, lengths), selection_of(spec, ("", path, {}, None)),
            scale=SCALE, sinks=sinks, max_logits=largest,
        )  # fmt: skip
        want = reference.sparse_mla(q, [(kv, indices, lengths)], SCALE, sinks=sinks)
        if found := cases.disagreement(got, want[:2]):
            return f"{heads} heads: {found}"
        if not torch.allclose(largest.double(), want[2], atol=1e-5, rtol=1e-4):
            return f"{heads} heads: largest logits"
    return None


def run_shard(shard: int, of: int, variants_of: Callable[[int], list[Variant]]) -> None:
    """Every ``of``-th check, then the launches of the times that have not been compiled yet."""
    wrong = 0
    for i, (name, job) in enumerate(check_jobs()):
        if i % of != shard:
            continue
        try:
            found = job()
        except Exception as error:  # the others' results count too
            found = f"{type(error).__name__}: {str(error)[:300]}"
        if found:
            wrong |= PREFILL_WRONG if name.endswith(PREFILL) else DECODE_WRONG
            print(f"WRONG {name}: {found}", flush=True)
    warm = [(variant, heads) for heads in HEADS for variant in variants_of(heads)]
    for i, (variant, heads) in enumerate(warm):
        if i % of != shard:
            continue
        case = DecodeCase(heads, 2, 512, pages=64, lists=1)
        try:
            for splits in (1, 2) if variant[3] is None else (min(variant[3], 2),):
                case.ours((variant[0], variant[1], variant[2], splits))[0]()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"no {variant[0]}, {heads} heads: {str(error)[:200]}", flush=True)
    sys.exit(wrong)


def _failed(shard: subprocess.Popen[bytes], until: float) -> int:
    """The faults that a process found; all cases if it did not end in time."""
    try:
        code = shard.wait(max(until - time.perf_counter(), 1))
        return code if 0 <= code <= 3 else DECODE_WRONG | PREFILL_WRONG
    except subprocess.TimeoutExpired:
        shard.kill()
        print(f"process {shard.args!r} did not end: a launch hangs", flush=True)
        return DECODE_WRONG | PREFILL_WRONG


# ---------------------------------------------------------------- times


class DecodeCase:
    """One step of requests, with several index lists over one pool of pages."""

    def __init__(
        self, heads: int, batch: int, topk: int, pages: int = POOL_PAGES, lists: int = MAX_LISTS
    ) -> None:
        self.heads, self.batch, self.topk = heads, batch, topk
        self.row_bytes = batch * (WINDOW + topk) * 584
        self.bytes = self.row_bytes + batch * heads * 2 * 1024
        count = max(1, min(lists, 1 + int(COLD_BYTES / self.row_bytes)))
        self.caches = [_pool(pages), _pool(pages)]
        rows = pages * 64

        def indices(width: int) -> list[torch.Tensor]:
            shape = (count, batch, 1, width)
            return list(torch.randint(0, rows, shape, device="cuda", dtype=torch.int32))

        self.lists = list(zip(indices(WINDOW), indices(topk), strict=True))
        self.lengths = torch.full((batch,), WINDOW, dtype=torch.int32, device="cuda")
        self.extra_lengths = torch.full((batch,), topk, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, 1, heads, 512, device="cuda").bfloat16()
        self.sinks = torch.randn(heads, device="cuda")
        self.result: tuple[torch.Tensor, ...] = ()

    def ours(self, variant: Variant) -> list[Call]:
        spec = SparseMlaSpec(self.heads, page_size=64, extra_page_size=64)
        chosen = selection_of(spec, variant)
        out = torch.full_like(self.q, math.nan)
        lse = torch.full(self.q.shape[:3], math.nan, device="cuda")
        scratch = Scratch(out.device)
        self.result = (out, lse)

        def call(own: torch.Tensor, extra: torch.Tensor) -> None:
            sparse_mla(
                self.q,
                NamedRows(self.caches[0], own, self.lengths),
                chosen,
                scale=SCALE,
                extra=NamedRows(self.caches[1], extra, self.extra_lengths),
                sinks=self.sinks,
                out=out,
                lse=lse,
                splits=variant[3],
                scratch=scratch,
            )

        return [lambda own=own, extra=extra: call(own, extra) for own, extra in self.lists]

    def flashmla(self) -> list[Call]:
        ops = torch.ops._flashmla_C
        padded = 64 if self.heads <= 64 else 128
        q = torch.zeros(self.batch, 1, padded, 512, dtype=torch.bfloat16, device="cuda")
        q[:, :, : self.heads] = self.q
        sinks = torch.zeros(padded, device="cuda")
        sinks[: self.heads] = self.sinks
        out = torch.empty_like(q)
        own_cache, extra_cache = (cache.unsqueeze(-2) for cache in self.caches)
        own, extra = self.lists[0]
        plan = ops.sparse_decode_fwd(
            q, own_cache, own, self.lengths, sinks, None, None, extra_cache, extra,
            self.extra_lengths, 512, SCALE, out, False,
        )[2:4]  # fmt: skip

        def call(own: torch.Tensor, extra: torch.Tensor) -> None:
            lse = ops.sparse_decode_fwd(
                q, own_cache, own, self.lengths, sinks, *plan, extra_cache, extra,
                self.extra_lengths, 512, SCALE, out, False,
            )[1]  # fmt: skip
            self.result = (out[:, :, : self.heads], lse[:, : self.heads].transpose(1, 2))

        return [lambda own=own, extra=extra: call(own, extra) for own, extra in self.lists]


_pools: dict[int, torch.Tensor] = {}


def _pool(pages: int) -> torch.Tensor:
    """A cache of records of random numbers."""
    if pages not in _pools:
        few = cases.write_records(torch.randn(256, 64, 512, device="cuda"))
        memory = few.as_strided((256, few.stride(0)), (few.stride(0), 1))
        whole = memory.repeat(-(-pages // 256), 1)[:pages].contiguous()
        _pools[pages] = whole.as_strided((pages, 64, 584), few.stride())
    return _pools[pages]


def time_decode(
    heads: int, batch: int, topk: int, variants: list[Variant], peers: bool, replays: int
) -> dict[str, Any]:
    """One row: every variant and the peer, each compared with ours."""
    case = DecodeCase(heads, batch, topk)
    times: dict[str, float] = {}
    first: torch.Tensor | None = None
    agree: dict[str, float] = {}
    for variant in variants:
        if variant[3] is not None and variant[3] > 2 + (WINDOW + topk) // 64:
            continue
        try:
            calls = case.ours(variant)
            times[variant[0]] = graph_us(calls, replays)
            calls[0]()
        except Exception as error:
            print(f"no {variant[0]}, {heads} heads: {str(error)[:120]}", flush=True)
            continue
        result = case.result[0].float().clone()
        first = result if first is None else first
        agree[variant[0]] = relative_error(result, first)
    if peers:
        calls = case.flashmla()
        times["flashmla"] = graph_us(calls, replays)
        calls[0]()
        if first is not None:
            agree["flashmla"] = relative_error(case.result[0].float(), first)
    return {
        "phase": "decode", "heads": heads, "batch": batch, "topk": topk, "bytes": case.bytes,
        "times": times, "disagreement": agree,
    }  # fmt: skip


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def time_prefill(heads: int, topk: int, peers: bool, replays: int) -> dict[str, Any]:
    """4,096 tokens over a pool of rows that fits L2, as the last tokens of a prompt have it."""
    tokens, width = PREFILL_TOKENS, WINDOW + topk
    pages = 128
    cache = _pool(256)[:pages]
    rows = reference.read_records(cache).view(-1, 512).bfloat16()
    q = torch.randn(tokens, 1, heads, 512, device="cuda").bfloat16()
    indices = torch.randint(0, pages * 64, (tokens, 1, width), device="cuda", dtype=torch.int32)
    lengths = torch.full((tokens,), width, dtype=torch.int32, device="cuda")
    sinks = torch.randn(heads, device="cuda")
    out = torch.empty_like(q)
    lse = torch.empty(tokens, 1, heads, device="cuda")
    largest = torch.empty_like(lse)
    plain = SparseMlaSpec(heads, "bf16_rows")
    paged = SparseMlaSpec(heads, page_size=64)
    calls: dict[str, Call] = {}
    for name, path in (("ours", None), ("triton", "triton")):
        chosen = selection_of(plain, ("", path, {}, None))
        calls[name] = lambda chosen=chosen: sparse_mla(
            q, NamedRows(rows, indices, lengths), chosen, scale=SCALE, sinks=sinks, out=out,
            lse=lse, max_logits=largest,
        )  # fmt: skip
    for variant in variants_of(heads):
        if variant[3] is None and variant[1] != "triton":
            chosen = selection_of(paged, variant)
            calls[f"records, {variant[0]}"] = lambda chosen=chosen: sparse_mla(
                q, NamedRows(cache, indices, lengths), chosen, scale=SCALE, sinks=sinks, out=out,
                lse=lse,
            )  # fmt: skip
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
            times[name] = graph_us([call] * 2, replays)
        except Exception as error:
            print(f"no {name} in prefill, {heads} heads: {str(error)[:200]}", flush=True)
            continue
        result = out.float().clone()
        first = result if first is None else first
        agree[name] = relative_error(result, first)
    return {
        "phase": "prefill", "heads": heads, "batch": tokens, "topk": topk,
        "bytes": rows.nbytes + 2 * q.nbytes, "times": times, "disagreement": agree,
    }  # fmt: skip


def finished(row: dict[str, Any], rate: float) -> dict[str, Any]:
    times = row["times"]
    return {
        "phase": row["phase"],
        "heads": row["heads"],
        "batch": row["batch"],
        "topk": row["topk"],
        "ours_gpu_us": _rounded(times.get("ours")),
        "flashmla_gpu_us": _rounded(times.get("flashmla")),
        "floor_us": _rounded(row["bytes"] / rate / 1e3),
        "variants_us": {name: _rounded(t) for name, t in times.items() if name != "flashmla"},
        "disagreement": {name: float(f"{x:.1e}") for name, x in row["disagreement"].items()},
    }


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 2)


def summary(rows: list[dict[str, Any]]) -> None:
    """FlashMLA over ours by phase and heads, and each variant over ours."""
    for phase, heads in dict.fromkeys((row["phase"], row["heads"]) for row in rows):
        chosen = [row for row in rows if (row["phase"], row["heads"]) == (phase, heads)]
        ratios = {
            name: [row["times"][name] / row["times"]["ours"] for row in chosen
                   if name in row["times"] and "ours" in row["times"]]
            for name in dict.fromkeys(name for row in chosen for name in row["times"])
        }  # fmt: skip
        means = {
            name: math.exp(statistics.fmean(math.log(x) for x in ratio))
            for name, ratio in ratios.items()
            if ratio and name != "ours"
        }
        least = min(ratios.get("flashmla") or [math.nan])
        shown = ", ".join(f"{name} {x:.2f}" for name, x in means.items())
        print(f"{phase} {heads} heads, over ours: {shown} (flashmla least {least:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peers", type=Path, help="holds vllm/_flashmla_C.abi3.so")
    parser.add_argument("--heads", default=",".join(map(str, HEADS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--topks", default=",".join(map(str, TOPKS)))
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--table-only", action="store_true", help="time the table's choice alone")
    parser.add_argument("--shard", type=int)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    few = 0 if arguments.check_only else 1 if arguments.table_only else None

    def chosen(heads: int) -> list[Variant]:
        return variants_of(heads)[:few]

    if arguments.shard is not None:
        run_shard(arguments.shard, arguments.jobs, chosen)
    begin = time.perf_counter()
    command = [sys.executable, *sys.argv]
    shards = [subprocess.Popen([*command, "--shard", str(i)]) for i in range(arguments.jobs)]
    wrong = 0
    for shard in shards:
        wrong |= _failed(shard, begin + SHARD_SECONDS)
    phases = [
        name
        for name, bit in (("decode", DECODE_WRONG), ("prefill", PREFILL_WRONG))
        if not wrong & bit
    ]
    print(f"{len(check_jobs())} checks, right: {' and '.join(phases) or 'nothing'},"
          f" {time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    if arguments.check_only or not phases:
        sys.exit(wrong)
    if arguments.peers:
        torch.ops.load_library(str(arguments.peers / "vllm" / "_flashmla_C.abi3.so"))
    rate = copy_bandwidth_gbs()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {**environment(), "copy_gbs": round(rate, 1)}

    def record(row: dict[str, Any]) -> None:
        rows.append(row)
        shown = " ".join(f"{name}={t:.1f}" for name, t in row["times"].items())
        print(f"{row['phase']} h{row['heads']} b{row['batch']} k{row['topk']}"
              f" floor={row['bytes'] / rate / 1e3:.1f} {shown}", flush=True)  # fmt: skip
        if arguments.output:
            document["rows"] = [finished(row, rate) for row in rows]
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")

    peers = arguments.peers is not None
    for heads in map(int, arguments.heads.split(",") if "decode" in phases else ()):
        for batch in map(int, arguments.batches.split(",")):
            for topk in map(int, arguments.topks.split(",")):
                record(time_decode(heads, batch, topk, chosen(heads), peers, arguments.replays))
    for heads in PREFILL_HEADS if "prefill" in phases else ():
        record(time_prefill(heads, 512, peers, arguments.replays))
    summary(rows)
    print(f"{time.perf_counter() - begin:.0f} s")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
