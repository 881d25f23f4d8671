"""Forms of prediction and of 8-bit attention beside the ones in use, on one GPU in 90 seconds.

Run as ``python -m benchmarks.bench_sparse_forms --out FILE``. A form is a set of the table's
parameters (`PredictionParams`, `Int8Params`). Each is first compared with float64 on inputs
whose seed is new in every run, with memory poisoned before it: the blocks that a prediction keeps
by the attention that they have, attention over a causal plan and over rows that differ by head.
Then the forms are timed by replays of a CUDA graph, in two rounds (``ms``, ``again_ms``). A form
that is wrong is named and not timed, and the script then fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend_core.testing.records import write_record
from backend_core.testing.timing import environment, graph_time_ms
from benchmarks.sparse_attention_modes import MODES, SCALE, D, families, inputs, random_kinds
from block_sparse_backend import reference
from block_sparse_backend.launch_params import Int8Params, PredictionParams
from block_sparse_backend.plan import intervals, predicted
from block_sparse_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from block_sparse_backend.testing.cases import elements_seen, quantised_run
from block_sparse_backend.variants import sage

BLOCKS = (64, 128)
HEADS = 24
"""As many in the checks as are timed: then it is the timed kernels that are checked."""
MODE = MODES["per_warp"]
KEPT_ROOM = 2.0**-15
"""Largest share of the attention that the kept blocks may have less than the best ones."""
TOPK = 0.25
INT8_ROOM = 6e-2
ALL = PredictionParams("fp16x3", "middle", "logits", 256)
PREDICTIONS = {
    "in use": PredictionParams(),
    "logits": PredictionParams(search="logits"),
    "middle": PredictionParams(centre="middle"),
    "fp16x3": PredictionParams(product="fp16x3"),
    "order 256": PredictionParams(order_step=256),
    "all, exact": dataclasses.replace(ALL, product="exact"),
    "all, fp16x3, 64 columns": ALL,
}
INT8 = {
    "in use": Int8Params(64, 128, 4, 2, 168),
    "biased": Int8Params(64, 128, 4, 2, 168, "biased"),
}


class Poisoned:
    """Memory from ``torch.empty`` holds NaN, or the largest integer, inside."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def plan_errors(params: PredictionParams, seed: int) -> float:
    """Of predicted attention in float64, the share by which the kept blocks have less than the
    largest would. Keys have a common part ten times what tells them apart, which no softmax sees.
    """
    worst = 0.0
    for m, n in ((2000, 16000), (130, 1000)):
        q, k, _ = inputs(HEADS, HEADS, m, n, seed=seed)
        k = k + 10 * torch.randn(1, HEADS, 1, D, device="cuda").to(k)
        q_mean, k_mean = (
            torch.stack([part.double().mean(2) for part in t.split(block, 2)], 2)
            for t, block in zip((q, k), BLOCKS, strict=True)
        )
        k_mean = k_mean - k_mean.mean(2, keepdim=True)
        weight = (SCALE * q_mean @ k_mean.mT).softmax(-1)[0]
        tiles, blocks = weight.shape[1:]
        plan = predicted.predict(q, k, topk=TOPK, params=params)
        kept = kept_blocks(plan, HEADS * tiles, blocks).view(weight.shape)
        count = math.ceil(TOPK * blocks)
        if not bool((kept.sum(-1) == count).all()):
            return math.inf
        best = weight.topk(count, -1).values.sum(-1)
        worst = max(worst, float((1 - (weight * kept).sum(-1) / best).max()))
    return worst


def kept_blocks(plan: BlockPlan, rows: int, blocks: int) -> Tensor:
    """bool [rows, blocks] on the GPU."""
    begin, end = plan.rows[:, 0].long(), plan.rows[:, 2].long()
    place = torch.arange(blocks, device="cuda")[None] + begin[:, None]
    used = place < end[:, None]
    kept = torch.zeros(rows, blocks + 1, dtype=torch.bool, device="cuda")
    cols = torch.where(used, plan.cols[place.clamp(max=len(plan.cols) - 1)].long(), blocks)
    return kept.scatter_(1, cols, True)[:, :blocks]


def int8_errors(params: Int8Params, seed: int) -> float:
    """Of outputs beside float64, the largest relative one; NaN where an LSE is not."""
    bm, bn = params.block_m, params.block_n
    worst = 0.0
    m, n = 1100, 1280
    q, k, v = inputs(HEADS, HEADS, m, n, seed=seed)
    kinds = random_kinds(HEADS, -(-m // bm), n // bn, 0.4, seed=seed)
    kinds[0, 2] = 0
    sequences = uniform_sequences(1, m, n, q.device)
    uneven = from_kinds(kinds[None], HEADS, sequences, bm, bn, has_partial=False)
    seen = elements_seen(uneven).cuda()
    cases = [("normal", (q, k, v), uneven, seen)]
    for family, (q, k, v) in families(seed + 1):
        m, n = q.shape[2], k.shape[2]
        plan = intervals.causal(m, n, q.shape[1], block_m=bm, block_n=bn)
        seen = torch.ones(m, n, dtype=torch.bool, device="cuda").tril(n - m)
        cases.append((family, (q, k, v), plan, seen))
    for family, (q, k, v), plan, seen in cases:
        x = sage.quantise(q, k, v, MODE, SCALE, bn, "triton")
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:3], torch.nan, device="cuda")
        quantised_run(x, plan, params)(x, plan, SCALE, out, lse)
        want, want_lse = reference.attention(q, k, v, seen, SCALE)
        dead = want_lse.isneginf()
        if not torch.equal(lse.isneginf(), dead) or bool(lse[~dead].isnan().any()):
            return math.nan
        if family == "normal" and not float((lse - want_lse)[~dead].abs().max()) < 0.25:
            return math.nan
        error = float((out.double() - want).norm() / want.norm())
        if not error < INT8_ROOM:
            return error
        worst = max(worst, error)
    return worst


def checked(
    name: str, part: str, check: Callable[[], float], limit: float, result: dict[str, Any]
) -> bool:
    """Whether a form is right; its error goes into the result."""
    try:
        with Poisoned():
            error = check()
    except Exception as reason:  # one form's failure must not hide the others' results
        print(f"{part} {name} failed: {str(reason)[:400]}", flush=True)
        error = math.nan
    result["errors"].append({"part": part, "form": name, "error": error, "allowed": limit})
    is_right = error <= limit
    print(f"{part:10s} {name:32s} {error:.2e} {'' if is_right else 'WRONG'}", flush=True)
    if not is_right:
        result["wrong"].append(f"{part}: {name}")
    return is_right


def timed(part: str, calls: Mapping[str, Callable[[], object]], result: dict[str, Any]) -> None:
    """Every call in two rounds."""
    rounds: list[dict[str, float]] = []
    for _ in range(2):
        rounds.append({name: graph_time_ms(call, 5, 1) for name, call in calls.items()})
    for name in calls:
        row = {"part": part, "form": name, "ms": rounds[0][name], "again_ms": rounds[1][name]}
        result["rows"].append(row)
        print(f"    {part:12s} {name:32s} {row['ms']:9.4f} {row['again_ms']:9.4f} ms", flush=True)


def int8_calls(
    x: tuple[Tensor, Tensor, Tensor], density: float, forms: dict[str, Int8Params]
) -> dict[str, Callable[[], object]]:
    """The kernel alone over the same pairs of tokens for every form."""
    q, k, v = x
    t, heads = q.shape[2], q.shape[1]
    kinds = random_kinds(heads, -(-t // 128), -(-t // 128), density)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
    calls: dict[str, Callable[[], object]] = {}
    ready: dict[int, sage.Quantised] = {}
    plans: dict[tuple[int, int], BlockPlan] = {}
    for name, params in forms.items():
        size = bm, bn = params.block_m, params.block_n
        if size not in plans:
            fine = kinds.repeat_interleave(128 // bm, 1).repeat_interleave(128 // bn, 2)
            fine = fine[:, : -(-t // bm), : -(-t // bn)]
            sequences = uniform_sequences(1, t, t, kinds.device)
            plans[size] = from_kinds(fine[None], heads, sequences, bm, bn, has_partial=False)
        if bn not in ready:
            ready[bn] = sage.quantise(q, k, v, MODE, SCALE, bn, "triton")
        run = quantised_run(ready[bn], plans[size], params)
        calls[name] = functools.partial(run, ready[bn], plans[size], SCALE, out, lse)
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=115200)
    options = parser.parse_args()
    begin = time.monotonic()
    seed = int.from_bytes(os.urandom(3), "big")
    shape = f"{options.tokens} tokens, {HEADS} heads"
    result: dict[str, Any] = environment() | {"shape": shape, "topk": TOPK, "seed": seed}
    result |= {"errors": [], "wrong": [], "rows": []}
    result["forms"] = {
        "prediction": {name: dataclasses.asdict(form) for name, form in PREDICTIONS.items()},
        "8-bit": {name: dataclasses.asdict(form) for name, form in INT8.items()},
    }
    predictions = {
        name: form
        for name, form in PREDICTIONS.items()
        if checked(name, "plan", functools.partial(plan_errors, form, seed), KEPT_ROOM, result)
    }
    forms = {
        name: form
        for name, form in INT8.items()
        if checked(name, "8-bit", functools.partial(int8_errors, form, seed), INT8_ROOM, result)
    }
    x = inputs(HEADS, HEADS, options.tokens, seed=seed)
    whole = {
        name: functools.partial(predicted.predict, *x[:2], topk=TOPK, params=form)
        for name, form in predictions.items()
    }
    timed("prediction", whole, result)
    for part, density in (("8-bit 0.25", 0.25), ("8-bit dense", 1.0)):
        timed(part, int8_calls(x, density, forms), result)
        torch.cuda.empty_cache()
    write_record(options.out, result)
    print(f"{shape}, {time.monotonic() - begin:.0f} s")
    if result["wrong"]:
        print(f"wrong: {', '.join(result['wrong'])}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
