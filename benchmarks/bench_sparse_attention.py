"""Block-sparse and 8-bit attention beside cuDNN, FlashAttention-3 and FlexAttention on one GPU.

Run as ``python -m benchmarks.bench_sparse_attention --peers FOLDER --out FILE``. First every mode
is compared with float64, then the works are timed: medians of
CUDA-graph replays, TFLOP/s of 4 D operations for each attended pair. A mode whose error exceeds its
bound is not timed, and the script then fails.

SageAttention 2, SpargeAttn and FastVideo's ``fastvideo-kernel`` (ThunderKittens) stand beside ours
where they are installed, timed by events; the result says in a sentence why one is absent.
``--growth`` adds rows over densities and numbers of tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend_core.tables.load import load_table
from backend_core.target import detect_target
from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import environment, graph_time_ms, stream_time_ms
from benchmarks.peers import sparse_attention as peers
from benchmarks.peers import sparse_attention_packages as packages
from benchmarks.peers.sparse_attention_packages import Packages
from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.launch_params import TABLES, TritonParams
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.plan.predicted import predict, recall
from block_sparse_backend.plan.sliding_tile import sliding_tile
from block_sparse_backend.plan.token_order import tile_order
from block_sparse_backend.sage import predicted_attention, quantised_attention
from block_sparse_backend.spec import SageMode
from block_sparse_backend.testing.cases import attention_of, quantiser

Timed = Callable[[], object]
Tensors = tuple[Tensor, Tensor, Tensor]
D = 128
SCALE = D**-0.5
MODES = {"int8": SageMode(), "int8, 16-bit values": SageMode(fp8_values=False)}
BOUNDS = {"triton": 3e-3, "gluon": 3e-3, "FA3": 3e-3}
"""Largest relative error; of 8-bit modes 6e-2."""


@dataclass
class Row:
    """One work: times in ms, ``ours_whole_ms`` with quantisation and prediction."""

    work: str
    shape: str
    density: float
    path: str
    ours_ms: float | None = None
    ours_whole_ms: float | None = None
    peers: dict[str, float] = field(default_factory=dict)
    mass_kept: float | None = None
    tflops: float | None = None


def inputs(heads: int, kv_heads: int, m: int, n: int | None = None, seed: int = 0) -> Tensors:
    """[1, H, L, D] views of [1, L, H, D] storage, bf16 normal."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(count: int, length: int) -> Tensor:
        x = torch.randn(1, length, count, D, generator=generator, device="cuda")
        return x.to(torch.bfloat16).transpose(1, 2)

    n = n or m
    return make(heads, m), make(kv_heads, n), make(kv_heads, n)


def random_kinds(heads: int, tiles: int, blocks: int, density: float) -> Tensor:
    """int8 [H, tiles, blocks]: as many blocks in every row, FULL."""
    generator = torch.Generator("cuda").manual_seed(0)
    score = torch.rand(heads, tiles, blocks, generator=generator, device="cuda")
    count = max(1, round(density * blocks))
    kept = score.topk(count, -1).indices
    return torch.zeros_like(score, dtype=torch.int8).scatter_(-1, kept, 1)


def errors(fa3: peers.Attend | None) -> dict[str, float]:
    """The relative error of each mode, and of FlashAttention-3, against float64: causal, fewer
    queries than keys."""
    q, k, v = inputs(4, 2, 2000, 3000)
    seen = torch.ones(2000, 3000, dtype=torch.bool, device="cuda").tril(1000)
    want, _ = reference.attention(q, k, v, seen, SCALE)
    plan, plan8 = (intervals.causal(2000, 3000, 4, block_m=m) for m in (128, 64))
    calls: dict[str, Callable[[], Tensor]] = {
        path: lambda path=path: block_sparse_attention(q, k, v, plan, path=path)[0]  # type: ignore[misc]
        for path in ("triton", "gluon")
    }
    for name, mode in MODES.items():
        calls[name] = lambda mode=mode: quantised_attention(q, k, v, plan8, mode=mode)[0]  # type: ignore[misc]
    if fa3 is not None:
        calls["FA3"] = lambda: fa3(q, k, v, True)
    found = {}
    for name, call in calls.items():
        try:
            found[name] = relative_error(call(), want)
        except Exception as reason:  # one mode's failure must not hide the others' results
            print(f"{name} failed: {str(reason)[:500]}", flush=True)
            found[name] = math.nan
        print(f"{name:26s} {found[name]:.2e}", flush=True)
    return found


def timed(call: Timed, flops: float = 0.0, name: str = "", in_graph: bool = True) -> float | None:
    """Median ms, or ``None`` where the call fails; printed at once."""
    try:
        ms = graph_time_ms(call, replays=5, calls=1) if in_graph else stream_time_ms(call)
    except Exception as reason:  # a peer that cannot run here must not end the others
        print(f"    {name}: failed, {str(reason)[:300]}", flush=True)
        return None
    rate = f"{flops / ms / 1e9:7.0f} TFLOP/s" if flops else ""
    print(f"    {name:34s} {ms:9.3f} ms {rate}", flush=True)
    return ms


def agrees(name: str, call: Callable[[], Tensor], ours: Tensor) -> bool:
    """Whether a peer computes what we compute, but for rounding; says so where it does not."""
    try:
        error = relative_error(call(), ours)
    except Exception as reason:
        print(f"    {name}: failed, {str(reason)[:300]}", flush=True)
        return False
    if error > 0.02:
        print(f"    {name}: left out, its output differs from ours by {error:.3f}", flush=True)
    return error <= 0.02


def beside(calls: dict[str, Timed], flops: float = 0.0) -> dict[str, float]:
    """Times of built peers: their kernels are not on the stream that a graph captures."""
    found = {name: timed(call, flops, name, in_graph=False) for name, call in calls.items()}
    return {name: ms for name, ms in found.items() if ms is not None}


def exact_rows(
    work: str, x: Tensors, plan: BlockPlan, share: float, kinds: Tensor | None, is_causal: bool,
    fa3: peers.Attend | None, not_timed: set[str], others: dict[str, Timed] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """One work in bf16: our paths and the peers'. ``share``: attended pairs."""
    q, k, v = x
    flops = 4.0 * D * q.shape[1] * q.shape[2] * k.shape[2] * share
    shape = f"{q.shape[2]} tokens, {q.shape[1]} heads"
    print(f"{work}, {shape}", flush=True)
    found: dict[str, float] = {}
    exact: dict[str, Callable[[], Tensor]] = {}
    if kinds is None:
        exact["cuDNN"] = lambda: peers.cudnn(q, k, v, is_causal)
        if fa3 is not None:
            exact["FA3"] = lambda: fa3(q, k, v, is_causal)
    if not is_causal:
        exact["FlexAttention"] = peers.flex(q, k, v, kinds, is_causal)
    ours = block_sparse_attention(q, k, v, plan)[0]
    for name, call in exact.items():
        ms = timed(call, flops, name) if agrees(name, call, ours) else None
        if ms is not None:
            found[name] = ms
    found |= beside(others or {}, flops)
    calls: dict[str, Timed] = {
        path: functools.partial(block_sparse_attention, q, k, v, plan, path=path)
        for path in ("gluon", "triton")
    }
    for path, own in calls.items():
        if path in not_timed:
            continue
        ms = timed(own, flops, path)
        rate = flops / ms / 1e9 if ms else None
        yield Row(work, shape, share, path, ms, ms, found, tflops=rate)


def int8_params(plan: BlockPlan) -> TritonParams:
    """The table's parameters for a plan's blocks."""
    rows = load_table(TABLES, detect_target()).rows
    of_rows = (row.params for row in rows if row.operator == "block_sparse_int8")
    blocks = (plan.block_m, plan.block_n)
    return next(x for x in of_rows if isinstance(x, TritonParams) and x.blocks == blocks)


def int8_rows(
    work: str, x: Tensors, plan: BlockPlan, share: float, others: dict[str, Timed] | None = None
) -> Iterator[Row]:
    """One work in 8 bits: the kernel alone and the whole call."""
    q, k, v = x
    flops = 4.0 * D * q.shape[1] * q.shape[2] * k.shape[2] * share
    shape = f"{q.shape[2]} tokens, {q.shape[1]} heads"
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    params = int8_params(plan)
    print(f"{work}, {shape}", flush=True)
    found = beside(others or {}, flops)
    for name in MODES:
        mode = MODES[name]
        quantise = quantiser(q, k, v, mode, plan.block_n)
        ready, _ = quantise(q, k, v, SCALE, None)
        kernel = timed(
            functools.partial(attention_of(ready, plan, params), ready, plan, SCALE, out, lse),
            flops,
            name,
        )
        whole = timed(
            lambda: quantised_attention(q, k, v, plan, mode=mode, out=out),  # noqa: B023
            flops,
            f"{name} whole",
        )
        yield Row(
            work, shape, share, name, kernel, whole, found,
            tflops=flops / kernel / 1e9 if kernel else None,
        )  # fmt: skip


def predicted_row(x: Tensors, topk: float, built: Packages) -> Iterator[Row]:
    """Prediction, quantisation and attention in one call, and the prediction alone."""
    q, k, v = x
    tokens = f"{q.shape[2]} tokens, {q.shape[1]} heads"
    out = torch.empty_like(q)
    alone = timed(lambda: predict(q, k, topk=topk), name=f"prediction, topk {topk}")
    plan = predict(q, k, topk=topk)

    def whole() -> object:
        return predicted_attention(q, k, v, Choice(topk=topk), out=out)

    ms = timed(whole, name="predicted, int8 whole")
    share = plan.density()
    few = tuple(t[:, :2, :8192] for t in x)
    kept = float(recall(predict(few[0], few[1], topk=topk, block_m=128), few[0], few[1]).mean())
    found = beside(packages.beside_predicted(built, x, topk))
    yield Row("predicted 8-bit", tokens, share, "int8", None, ms, found, mass_kept=kept)
    yield Row("prediction", tokens, share, "triton", alone, alone)


def rows(
    fa3: peers.Attend | None, built: Packages, sizes: dict[str, int], not_timed: set[str]
) -> Iterator[Row]:
    """All works, the most telling first."""
    t = sizes["video"]
    x = inputs(24, 24, t)
    yield from exact_rows("dense", x, intervals.dense(t, t, 24), 1.0, None, False, fa3, not_timed)
    dense8 = intervals.dense(t, t, 24, block_m=64)
    yield from int8_rows("dense 8-bit", x, dense8, 1.0, packages.beside_dense(built, x, False))
    yield from block_rows(x, 0.25, built, not_timed)
    yield from predicted_row(x, 0.25, built)
    yield from sliding_rows(x, (t // 3840, 48, 80), built, not_timed)
    del x
    for tokens in (sizes["short"], sizes["long"]):
        x = inputs(32, 8, tokens)
        plan = intervals.causal(tokens, tokens, 32)
        yield from exact_rows("causal", x, plan, 0.5, None, True, fa3, not_timed)
        plan = intervals.causal(tokens, tokens, 32, block_m=64)
        others = packages.beside_dense(built, x, True)
        yield from int8_rows("causal 8-bit", x, plan, 0.5, others)
    yield from packed_rows(not_timed)
    if built.sta is not None:
        x = inputs(24, 24, math.prod(packages.STA_CANVAS))
        yield from sliding_rows(x, packages.STA_CANVAS, built, not_timed)


def block_rows(x: Tensors, density: float, built: Packages, not_timed: set[str]) -> Iterator[Row]:
    """Blocks at random that differ by head."""
    t, heads = x[0].shape[2], x[0].shape[1]
    kinds = random_kinds(heads, -(-t // 128), -(-t // 128), density)
    sequences = uniform_sequences(1, t, t, kinds.device)
    plan = from_kinds(kinds[None], heads, sequences, 128, 128, has_partial=False)
    share = plan.density()
    yield from exact_rows("random blocks", x, plan, share, kinds, False, None, not_timed)
    fine = kinds.repeat_interleave(2, 1)
    plan8 = from_kinds(fine[None], heads, sequences, 64, 128, has_partial=False)
    others = packages.beside_map(built, x, fine[None].bool())
    yield from int8_rows("random blocks 8-bit", x, plan8, share, others)


def sliding_rows(
    x: Tensors, canvas: tuple[int, int, int], built: Packages, not_timed: set[str]
) -> Iterator[Row]:
    """Windows of (3, 3, 3) tiles of 6 x 8 x 8; nothing where they do not fill the tokens."""
    order = tile_order(canvas, (6, 8, 8))
    if not len(order.slot_of) == x[0].shape[2] == len(order.index):
        return
    plan = sliding_tile(order, [(3, 3, 3)], 24)
    share, work = plan.density(), "sliding tiles (3,3,3)"
    kinds = _kinds(plan, plan.rows.long())
    others = packages.beside_tiles(built, x, canvas)
    yield from exact_rows(work, x, plan, share, kinds, False, None, not_timed, others)
    plan8 = sliding_tile(order, [(3, 3, 3)], 24, block_m=64)
    yield from int8_rows(f"{work} 8-bit", x, plan8, share)


def packed_rows(not_timed: set[str]) -> Iterator[Row]:
    """Eight causal sequences one after another."""
    length, count = 8192, 8
    tokens = length * count
    q, k, v = inputs(32, 8, tokens)
    flops = 0.5 * 4.0 * D * 32 * length * tokens
    cu = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    plan = intervals.ragged(cu, cu, length, length, 32)
    shape = f"{tokens} tokens, 32 heads"
    print(f"packed causal, {shape}", flush=True)
    out = torch.empty_like(q)
    for path in ("gluon", "triton"):
        if path in not_timed:
            continue

        def call(path: str = path) -> object:
            return block_sparse_attention(q, k, v, plan, path=path, out=out)

        ms = timed(call, flops, path)
        tflops = flops / ms / 1e9 if ms else None
        yield Row("packed causal", shape, 0.5, path, ms, ms, tflops=tflops)


def growth_rows(built: Packages, video: int, not_timed: set[str]) -> Iterator[Row]:
    """Random blocks over densities, and over tokens at one density in four."""
    not_timed = not_timed | {"triton"}
    for tokens in (8192, 16384, 32768, 65536):
        yield from block_rows(inputs(24, 24, tokens), 0.25, built, not_timed)
    x = inputs(24, 24, video)
    for density in (0.05, 0.1, 0.5, 0.75, 1.0):
        yield from block_rows(x, density, built, not_timed)


def _kinds(plan: BlockPlan, row: Tensor) -> Tensor:
    """int8 [1, tiles, blocks] of a plan whose heads share their rows, for FlexAttention."""
    tiles = len(row)
    kinds = torch.zeros(tiles, int(plan.sequences[0, 4]) // plan.block_n, dtype=torch.int8)
    cols, bounds = plan.cols.cpu().long(), row.cpu().tolist()
    for i, (begin, _, end, _) in enumerate(bounds):
        kinds[i, cols[begin:end]] = 1
    return kinds.cuda()[None]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder of _vllm_fa3_C.abi3.so")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--video", type=int, default=115200)
    parser.add_argument("--growth", action="store_true", help="rows over densities and tokens")
    return parser.parse_args()


def load_packages() -> tuple[Packages, dict[str, float]]:
    """The peers that are installed and right, and their errors."""
    built = packages.load()
    found = packages.errors(built, inputs, random_kinds(2, 32, 16, 0.4) > 0)
    built = packages.trusted(built, found)
    for name, sentence in built.absent:
        print(f"{name}: {sentence}", flush=True)
    for name, error in found.items():
        print(f"{'normal':20s} {name:40s} {error:.2e}", flush=True)
    return built, found


def main() -> int:
    options = arguments()
    try:
        fa3 = None if options.peers is None else peers.load_fa3(options.peers)
    except OSError as reason:
        print(f"FA3 not loaded: {reason}")
        fa3 = None
    found_errors = errors(fa3)
    wrong = {name for name, x in found_errors.items() if not x < BOUNDS.get(name, 6e-2)}
    built, built_errors = load_packages()
    found: list[Row] = []
    result: dict[str, Any] = environment() | {"errors": found_errors, "wrong": sorted(wrong)}
    result |= {"not_built": dict(built.absent), "errors_of_built_peers": built_errors}
    sizes = {"video": options.video, "short": 16384, "long": 65536}
    works = rows(fa3, built, sizes, wrong)
    if options.growth:
        works = itertools.chain(works, growth_rows(built, options.video, wrong))
    for row in works:
        found.append(row)
        result["rows"] = [dataclasses.asdict(row) for row in found]
        write_record(options.out, result)
    if wrong:
        print(f"wrong: {sorted(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
