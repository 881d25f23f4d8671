"""Block-sparse and 8-bit attention beside cuDNN, FlashAttention-3 and FlexAttention on one GPU.

Run as ``python -m benchmarks.bench_sparse_attention --peers FOLDER --out FILE``. First every mode
is compared with float64 on three families of inputs, then the works are timed: medians of
CUDA-graph replays, TFLOP/s of 4 D operations for each attended pair. A mode whose error exceeds its
bound is not timed, and the script then fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from backend_core.testing.timing import environment, graph_time_ms
from benchmarks import sparse_attention_peers as peers
from softmax_backend import reference_block_sparse as reference
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.launch_params_prefill import GluonPrefillParams, TritonPrefillParams
from softmax_backend.plan import intervals
from softmax_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from softmax_backend.plan.predicted import Choice, predict, recall
from softmax_backend.plan.sliding_tile import sliding_tile
from softmax_backend.plan.token_order import tile_order
from softmax_backend.run import block_sparse_int8, block_sparse_sm90
from softmax_backend.sage import predicted_attention, quantised_attention
from softmax_backend.variants import sage
from softmax_backend.variants.sage import SageMode

D = 128
SCALE = D**-0.5
Tensors = tuple[Tensor, Tensor, Tensor]
Timed = Callable[[], object]

MODES = {
    "per_warp": SageMode(),
    "per_thread": SageMode("per_thread"),
    "per_thread smooth_q": SageMode("per_thread", smooth_q=True),
    "per_thread 16-bit values": SageMode("per_thread", fp8_values=False),
    "per_warp no smooth_v": SageMode(smooth_v=False),
    "int4 range smooth_q": SageMode("per_thread", levels=7, smooth_q=True, fp8_values=False),
}
BOUNDS = {"triton": 3e-3, "gluon": 3e-3, "gluon in step": 3e-3, "int4 range smooth_q": 0.6}
"""Largest relative error allowed for normal inputs; 8-bit modes 6e-2."""


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
    error: float | None = None
    peer_errors: dict[str, float] = field(default_factory=dict)
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


def families() -> Iterator[tuple[str, Tensors]]:
    """Normal inputs, inputs with an offset in every channel, and with four channels eight times."""
    q, k, v = inputs(4, 2, 2000, 3000)
    yield "normal", (q, k, v)
    generator = torch.Generator("cuda").manual_seed(1)
    spread = ((q, 2.0), (k, 3.0), (v, 1.0))
    offsets = [
        s * torch.randn(x.shape[1], 1, D, generator=generator, device="cuda") for x, s in spread
    ]
    q2, k2, v2 = (x + o.to(x.dtype) for x, o in zip((q, k, v), offsets, strict=True))
    yield "channel offsets", (q2, k2, v2)
    wide = torch.ones(D, device="cuda", dtype=torch.bfloat16)
    wide[::32] = 8.0
    yield "four wide channels", (q * wide, k * wide, v)


def ours() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Every causal mode of ours."""

    def exact(path: str, ping_pong: bool = True) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            plan = intervals.causal(q.shape[2], k.shape[2], q.shape[1])
            if ping_pong:
                return block_sparse_attention(q, k, v, plan, path=path)[0]
            return gluon(q, k, v, plan, ping_pong=False)()

        return call

    def quantised(mode: SageMode) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            plan = intervals.causal(q.shape[2], k.shape[2], q.shape[1], block_m=64)
            return quantised_attention(q, k, v, plan, mode=mode)[0]

        return call

    found = {"triton": exact("triton"), "gluon": exact("gluon")}
    found["gluon in step"] = exact("gluon", ping_pong=False)
    return found | {name: quantised(mode) for name, mode in MODES.items()}


def check(fa3: peers.Attend | None, modes: set[str]) -> tuple[list[dict[str, object]], set[str]]:
    """Relative errors of every mode and peer against float64, and the modes that are wrong."""
    rows, wrong = [], set()
    for family, (q, k, v) in families():
        offset = k.shape[2] - q.shape[2]
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda").tril(offset)
        want, _ = reference.attention(q, k, v, seen, SCALE)
        calls = {name: call for name, call in ours().items() if name in modes or not modes}
        if fa3 is not None:
            calls["FA3"] = lambda q, k, v: fa3(q, k, v, True)
        for name, call in calls.items():
            try:
                got = call(q, k, v)
                error = float((got.double() - want).norm() / want.norm())
            except Exception as reason:  # one mode's failure must not hide the others' results
                print(f"{name} failed: {str(reason)[:500]}", flush=True)
                error = float("nan")
            rows.append({"family": family, "mode": name, "error": error})
            print(f"{family:20s} {name:26s} {error:.2e}", flush=True)
            if family == "normal" and not error < BOUNDS.get(name, 6e-2):
                wrong.add(name)
    return rows, wrong


def check_plans() -> float:
    """Random rows that differ by head, with an empty one, through the Hopper kernel."""
    q, k, v = inputs(4, 4, 1100, 1300, seed=3)
    kinds = random_kinds(4, 9, 11, 0.4, seed=3)
    kinds[0, 2] = 0
    kinds[..., -1] *= 2
    plan = from_kinds(kinds[None], 4, uniform_sequences(1, 1100, 1300, q.device), 128, 128)
    seen = reference.elements_seen(plan).cuda()
    want, want_lse = reference.attention(q, k, v, seen, SCALE)
    out = torch.full_like(q, torch.nan)
    out, lse = block_sparse_attention(q, k, v, plan, out=out)
    dead = want_lse.isneginf()
    if not torch.equal(lse.isneginf(), dead):
        return float("nan")
    lse_error = float((lse - want_lse)[~dead].abs().max())
    return max(float((out.double() - want).norm() / want.norm()), lse_error)


def random_kinds(heads: int, tiles: int, blocks: int, density: float, seed: int = 0) -> Tensor:
    """int8 [H, tiles, blocks]: as many blocks in every row, FULL."""
    generator = torch.Generator("cuda").manual_seed(seed)
    score = torch.rand(heads, tiles, blocks, generator=generator, device="cuda")
    count = max(1, round(density * blocks))
    kept = score.topk(count, -1).indices
    return torch.zeros_like(score, dtype=torch.int8).scatter_(-1, kept, 1)


def gluon(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, ping_pong: bool
) -> Callable[[], Tensor]:
    """A call of the Hopper kernel with or without turns."""
    params = GluonPrefillParams(plan.block_n, 2, 240, ping_pong)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], device="cuda")

    def call() -> Tensor:
        block_sparse_sm90.run(q, k, v, plan, SCALE, out, lse, params)
        return out

    return call


def timed(call: Timed, flops: float = 0.0, name: str = "") -> float | None:
    """Median ms, or ``None`` where the call fails; printed at once."""
    try:
        ms = graph_time_ms(call, replays=5, calls=1)
    except Exception as reason:  # a peer that cannot run here must not end the others
        print(f"    {name}: failed, {str(reason)[:300]}", flush=True)
        return None
    rate = f"{flops / ms / 1e9:7.0f} TFLOP/s" if flops else ""
    print(f"    {name:34s} {ms:9.3f} ms {rate}", flush=True)
    return ms


def exact_rows(
    work: str, x: Tensors, plan: BlockPlan, share: float, kinds: Tensor | None, is_causal: bool,
    fa3: peers.Attend | None, not_timed: set[str],
) -> Iterator[Row]:  # fmt: skip
    """One work in bf16: our paths and the peers'. ``share``: attended pairs."""
    q, k, v = x
    flops = 4.0 * D * q.shape[1] * q.shape[2] * k.shape[2] * share
    shape = f"{q.shape[2]} tokens, {q.shape[1]} heads"
    print(f"{work}, {shape}", flush=True)
    found: dict[str, float] = {}
    dense: list[tuple[str, Timed]] = [("cuDNN", lambda: peers.cudnn(q, k, v, is_causal))]
    if fa3 is not None:
        dense.append(("FA3", lambda: fa3(q, k, v, is_causal)))
    for name, call in dense if kinds is None else []:
        ms = timed(call, flops, name)
        if ms is not None:
            found[name] = ms
    if not is_causal:
        ms = timed(lambda: peers.flex(q, k, v, kinds, is_causal), flops, "FlexAttention")
        if ms is not None:
            found["FlexAttention"] = ms
    calls: dict[str, Timed] = {
        "gluon": gluon(q, k, v, plan, True),
        "gluon in step": gluon(q, k, v, plan, False),
        "triton": lambda: block_sparse_attention(q, k, v, plan, path="triton"),
    }
    for path, call in calls.items():
        if path in not_timed:
            continue
        ms = timed(call, flops, path)
        rate = flops / ms / 1e9 if ms else None
        yield Row(work, shape, share, path, ms, ms, found, tflops=rate)


def int8_rows(work: str, x: Tensors, plan: BlockPlan, share: float) -> Iterator[Row]:
    """One work in 8 bits: the kernel alone and the whole call."""
    q, k, v = x
    flops = 4.0 * D * q.shape[1] * q.shape[2] * k.shape[2] * share
    shape = f"{q.shape[2]} tokens, {q.shape[1]} heads"
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    params = TritonPrefillParams(plan.block_m, plan.block_n, 4, 2, max_registers=168)
    for name in ("per_warp", "per_thread"):
        mode = MODES[name]
        ready = sage.quantise(q, k, v, mode, SCALE, plan.block_n, "triton")
        kernel = timed(
            lambda: block_sparse_int8.run(ready, plan, SCALE, 0, out, lse, params),  # noqa: B023
            flops,
            f"int8 {name}",
        )
        if name == "per_warp":
            alone = timed(
                lambda: sage.quantise(q, k, v, mode, SCALE, plan.block_n, "triton"),  # noqa: B023
                name="quantisation",
            )
            yield Row(f"quantisation, {work}", shape, 1.0, "int8 per_warp", alone, alone)
        whole = timed(
            lambda: quantised_attention(q, k, v, plan, mode=mode, out=out),  # noqa: B023
            flops,
            f"int8 {name} whole",
        )
        yield Row(
            work, shape, share, f"int8 {name}", kernel, whole,
            tflops=flops / kernel / 1e9 if kernel else None,
        )  # fmt: skip


def predicted_row(x: Tensors, topk: float) -> Iterator[Row]:
    """Prediction, quantisation and attention in one call, and the prediction alone."""
    q, k, v = x
    tokens = f"{q.shape[2]} tokens, {q.shape[1]} heads"
    out = torch.empty_like(q)
    alone = timed(lambda: predict(q, k, topk=topk), name=f"prediction, topk {topk}")
    plan = predict(q, k, topk=topk)

    def whole() -> object:
        return predicted_attention(q, k, v, Choice(topk=topk), out=out)

    ms = timed(whole, name="predicted, int8 per_warp whole")
    share = plan.density()
    few = tuple(t[:, :2, :8192] for t in x)
    kept = float(recall(predict(few[0], few[1], topk=topk, block_m=128), few[0], few[1]).mean())
    yield Row("predicted 8-bit", tokens, share, "int8 per_warp", None, ms, mass_kept=kept)
    yield Row("prediction", tokens, share, "triton", alone, alone)


def rows(fa3: peers.Attend | None, sizes: dict[str, int], not_timed: set[str]) -> Iterator[Row]:
    """All works, the most telling first."""
    t = sizes["video"]
    x = inputs(24, 24, t)
    yield from exact_rows("dense", x, intervals.dense(t, t, 24), 1.0, None, False, fa3, not_timed)
    dense8 = intervals.dense(t, t, 24, block_m=64)
    yield from int8_rows("dense 8-bit", x, dense8, 1.0)
    kinds = random_kinds(24, -(-t // 128), -(-t // 128), 0.25)
    sequences = uniform_sequences(1, t, t, kinds.device)
    plan = from_kinds(kinds[None], 24, sequences, 128, 128, has_partial=False)
    share = plan.density()
    yield from exact_rows("random blocks", x, plan, share, kinds, False, None, not_timed)
    fine = kinds.repeat_interleave(2, 1)
    plan8 = from_kinds(fine[None], 24, sequences, 64, 128, has_partial=False)
    yield from int8_rows("random blocks 8-bit", x, plan8, share)
    yield from predicted_row(x, 0.25)
    canvas = (t // 3840, 48, 80)
    order = tile_order(canvas, (6, 8, 8))
    if len(order.slot_of) == t == len(order.index):
        plan = sliding_tile(order, [(3, 3, 3)], 24)
        share = plan.density()
        row = plan.rows.long()
        yield from exact_rows(
            "sliding tiles (3,3,3)", x, plan, share, _kinds(plan, row), False, None, not_timed
        )
        plan8 = sliding_tile(order, [(3, 3, 3)], 24, block_m=64)
        yield from int8_rows("sliding tiles (3,3,3) 8-bit", x, plan8, share)
    del x
    for tokens in (sizes["short"], sizes["long"]):
        x = inputs(32, 8, tokens)
        plan = intervals.causal(tokens, tokens, 32)
        yield from exact_rows("causal", x, plan, 0.5, None, True, fa3, not_timed)
        yield from int8_rows(
            "causal 8-bit", x, intervals.causal(tokens, tokens, 32, block_m=64), 0.5
        )


def _kinds(plan: BlockPlan, row: Tensor) -> Tensor:
    """int8 [1, tiles, blocks] of a plan whose heads share their rows, for FlexAttention."""
    tiles = len(row)
    kinds = torch.zeros(tiles, int(plan.sequences[0, 4]) // plan.block_n, dtype=torch.int8)
    cols, bounds = plan.cols.cpu().long(), row.cpu().tolist()
    for i, (begin, _, end, _) in enumerate(bounds):
        kinds[i, cols[begin:end]] = 1
    return kinds.cuda()[None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder of _vllm_fa3_C.abi3.so")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--video", type=int, default=115200)
    parser.add_argument("--check", nargs="*", help="only compare these modes (none: all)")
    parser.add_argument("--skip", nargs="*", default=[], help="modes neither compared nor timed")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no row after these")
    options = parser.parse_args()
    begin = time.monotonic()
    try:
        fa3 = None if options.peers is None else peers.load_fa3(options.peers)
    except OSError as reason:
        print(f"FA3 not loaded: {reason}")
        fa3 = None
    chosen = set(ours() if not options.check else options.check) - set(options.skip)
    errors, wrong = check(fa3, chosen)
    if options.check is not None:
        return 1 if wrong else 0
    plan_error = check_plans()
    print(f"random rows, an empty one, cut ends: {plan_error:.2e}", flush=True)
    if not plan_error < 3e-3:
        wrong.add("gluon")
    found: list[Row] = []
    result = environment() | {"errors": errors, "plan_error": plan_error, "wrong": sorted(wrong)}
    not_timed = wrong | set(options.skip)
    sizes = {"video": options.video, "short": 16384, "long": 65536}
    for row in rows(fa3, sizes, not_timed):
        found.append(row)
        result["rows"] = [dataclasses.asdict(r) for r in found]
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if time.monotonic() - begin > options.seconds:
            print("time is up")
            break
    print(
        f"{'work':28s} {'path':18s} {'density':>7s} {'ms':>9s} {'whole':>9s} {'TFLOP/s':>8s}  peers"
    )
    for r in found:
        numbers = [f"{x:9.3f}" if x else " " * 9 for x in (r.ours_ms, r.ours_whole_ms)]
        beside = ", ".join(f"{name} {ms:.2f}" for name, ms in r.peers.items())
        rate = f"{r.tflops:8.0f}" if r.tflops else " " * 8
        print(f"{r.work:28s} {r.path:18s} {r.density:7.3f} {' '.join(numbers)} {rate}  {beside}")
    if wrong:
        print(f"wrong: {sorted(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
