"""Forms of prediction and of 8-bit attention beside the ones in use, on one GPU in 90 seconds.

Run as ``python -m benchmarks.bench_sparse_forms --out FILE``. A form is a set of the table's
parameters (`PredictionParams`, `Int8PrefillParams`). Each is first compared with float64 on inputs
whose seed is new in every run, with memory poisoned before it: scores on keys with a common part,
the plan against the largest of those scores, attention over a causal plan and over rows that differ
by head. Then the forms are timed by replays of a CUDA graph, in two rounds (``ms``, ``again_ms``).
A form that is wrong is named and not timed, and the script then fails.

Prediction is timed whole (``predict``) and in its parts, so that they add up; 8-bit attention with
quantisation, ``whole``, over the plan that it predicts. ``--roofline`` prints the least time of
each part of a prediction, which the result has as ``roofline_ms``; "all sums in registers" is of a
kernel that is not there, which would score 32 tiles with all blocks and select from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend_core.testing.timing import environment, graph_time_ms
from benchmarks.sparse_attention_modes import MODES, SCALE, D, families, inputs, random_kinds
from softmax_backend import reference_block_sparse as reference
from softmax_backend.launch_params_prefill import Int8PrefillParams, PredictionParams
from softmax_backend.plan import intervals, predicted
from softmax_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from softmax_backend.plan.choice import Choice
from softmax_backend.testing.prefill_cases import quantised_run
from softmax_backend.variants import sage
from softmax_backend.variants.column_stats import mean_of_sums
from softmax_backend.variants.pooled import Pooled, pool

BLOCKS = (64, 128)
HEADS = 24
"""As many in the checks as are timed: then it is the timed kernels that are checked."""
MODE = MODES["per_warp"]
ROOM = 2.0**-15
"""Largest error of a score, over the product of its factors' lengths."""
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
    "in use": Int8PrefillParams(64, 128, 4, 2, 168),
    "biased": Int8PrefillParams(64, 128, 4, 2, 168, "biased"),
}

HBM, L2, TF32, FP16, ISSUE = 4.8e12, 5.5e12, 4.94e14, 9.89e14, 132 * 4 * 1.755e9
"""Of an H200: bytes per second from memory (data sheet) and from L2 (assumed), dense products, and
instructions of warps."""
SELECT_INSTRUCTIONS = {"weights": (1600, 123), "logits": (1600, 89)}
"""Of ``select_blocks_kernel`` for 1,024 blocks and a share of them, by ``search``: outside of the
bisection and in each of its steps, counted in the machine code for sm_90; and STEPS of them, the
mean over rows of 900 normal scores."""
STEPS = 11


def roofline(tokens: int) -> dict[str, dict[str, float]]:
    """The least time of each part of a prediction, in ms, by what bounds it."""
    tiles, blocks = -(-tokens // BLOCKS[0]), -(-tokens // BLOCKS[1])
    pairs = HEADS * tiles * blocks
    sums = 4.0 * HEADS * D * (tiles + blocks)
    # what programs of 128 tiles by so many blocks read of the sums, each for itself
    again = {cols: 4.0 * D * pairs * (1 / cols + 1 / 128) for cols in (64, 128)}
    kept = 4.0 * pairs / 4 + 32.0 * HEADS * tiles
    rows = HEADS * tiles / ISSUE
    found = {
        "pool": {"memory": (2.0 * 2 * HEADS * tokens * D + sums) / HBM},
        "mean of keys": {"memory": 4.0 * HEADS * D * blocks / HBM},
        "scores, three TF32": {"L2": again[64] / L2, "products": 6.0 * D * pairs / TF32},
        "scores, three fp16": {"L2": again[128] / L2, "products": 6.0 * D * pairs / FP16},
        "all sums in registers": {"L2": 4.0 * D * pairs * (1 / 32) / L2},
    }
    for search, (fixed, step) in SELECT_INSTRUCTIONS.items():
        found[f"selection on {search}"] = {
            "memory": (4.0 * pairs + kept) / HBM,
            "issue": rows * (fixed + STEPS * step),
        }
    for name, bounds in found.items():
        if name.startswith("scores"):
            bounds["memory"] = 4.0 * pairs / HBM
    return {
        name: {by: round(1e3 * seconds, 4) for by, seconds in bounds.items()}
        for name, bounds in found.items()
    }


class Poisoned:
    """Memory from ``torch.empty`` holds NaN, or the largest integer, inside."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def score_errors(params: PredictionParams, seed: int) -> float:
    """Of scores beside float64, the largest over what is allowed: above 1 is wrong. Keys have a
    common part ten times what tells them apart, which a number of each row may stand for."""
    worst = 0.0
    for m, n in ((2000, 16000), (130, 1000)):
        q, k, _ = inputs(HEADS, HEADS, m, n, seed=seed)
        k = k + 10 * torch.randn(1, HEADS, 1, D, device="cuda").to(k)
        x = pool(q, k, BLOCKS, False, True, "triton", params.centre)
        got = predicted.scores(x, False, SCALE, params)[..., : x.k_sums.shape[2]].double()
        q_mean, k_mean = (
            torch.stack([part.double().mean(2) for part in t.split(block, 2)], 2)
            for t, block in zip((q, k), BLOCKS, strict=True)
        )
        k_mean = k_mean - k_mean[:, :, k_mean.shape[2] // 2, None]
        gap = got - SCALE * q_mean @ k_mean.mT
        gap = gap - gap.median(-1, keepdim=True).values
        room = SCALE * q_mean.norm(dim=-1).mean() * k_mean.norm(dim=-1).mean()
        error = float((gap.abs().amax() / (2 * room * ROOM)).nan_to_num(math.inf))
        worst = max(worst, error)
    return worst


def plan_errors(params: PredictionParams, seed: int) -> float:
    """The share of rows whose plan is not the largest of the scores that it was made from."""
    q, k, _ = inputs(HEADS, HEADS, 2000, 16000, seed=seed)
    x = pool(q, k, BLOCKS, False, True, "triton", params.centre)
    tiles, blocks = x.q_sums.shape[2], x.k_sums.shape[2]
    found = predicted.scores(x, False, SCALE * math.log2(math.e), params)[..., :blocks]
    found = found - found.amax(-1, keepdim=True)
    weight = found if params.search == "logits" else torch.exp2(found)
    wrong = []
    for choice in (Choice(topk=0.25), Choice(cdf=0.6)):
        plan = predicted.from_pooled(x, choice, SCALE, "triton", params)
        kept = kept_blocks(plan, tiles * q.shape[1], blocks).view(found.shape)
        ordered = weight.sort(-1, descending=True).values
        if choice.topk is not None:
            count = torch.full(found.shape[:3], math.ceil(choice.topk * blocks), device="cuda")
        else:
            p = torch.exp2(found).double().sort(-1, descending=True).values
            count = (p.cumsum(-1) < 0.6 * p.sum(-1, keepdim=True)).sum(-1) + 1
        least = ordered.gather(-1, count[..., None] - 1)
        same = kept == (weight >= least)
        if choice.topk is None:  # where sums of fp32 and float64 part, one block may
            same |= ((~same).sum(-1, keepdim=True) <= 1).expand_as(same)
        elif params.search == "weights":  # exp2 of a GPU and torch's may part two near ones
            same |= ((~same).sum(-1, keepdim=True) <= 2).expand_as(same)
        wrong.append(float((~same.all(-1)).float().mean()))
        lengths = (plan.rows[:, 2] - plan.rows[:, 0])[plan.work[:, 3].long()].view(HEADS, tiles)
        is_order = (
            bool((lengths.diff() <= 0).all()) and len(plan.work[:, 3].unique()) == HEADS * tiles
        )
        wrong.append(0.0 if is_order else 1.0)
    return max(wrong)


def kept_blocks(plan: BlockPlan, rows: int, blocks: int) -> Tensor:
    """bool [rows, blocks] on the GPU."""
    begin, end = plan.rows[:, 0].long(), plan.rows[:, 2].long()
    place = torch.arange(blocks, device="cuda")[None] + begin[:, None]
    used = place < end[:, None]
    kept = torch.zeros(rows, blocks + 1, dtype=torch.bool, device="cuda")
    cols = torch.where(used, plan.cols[place.clamp(max=len(plan.cols) - 1)].long(), blocks)
    return kept.scatter_(1, cols, True)[:, :blocks]


def int8_errors(params: Int8PrefillParams, seed: int) -> float:
    """Of outputs beside float64, the largest relative one; NaN where an LSE is not."""
    bm, bn = params.block_m, params.block_n
    worst = 0.0
    m, n = 1100, 1280
    q, k, v = inputs(HEADS, HEADS, m, n, seed=seed)
    kinds = random_kinds(HEADS, -(-m // bm), n // bn, 0.4, seed=seed)
    kinds[0, 2] = 0
    sequences = uniform_sequences(1, m, n, q.device)
    uneven = from_kinds(kinds[None], HEADS, sequences, bm, bn, has_partial=False)
    seen = reference.elements_seen(uneven).cuda()
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
        position = k.shape[2] - q.shape[2]
        quantised_run(x, plan, params)(x, plan, SCALE, position, out, lse)
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


def timed(part: str, calls: dict[str, Callable[[], object]], result: dict[str, Any]) -> None:
    """Every call in two rounds."""
    rounds: list[dict[str, float]] = []
    for _ in range(2):
        rounds.append({name: graph_time_ms(call, 5, 1) for name, call in calls.items()})
    for name in calls:
        row = {"part": part, "form": name, "ms": rounds[0][name], "again_ms": rounds[1][name]}
        result["rows"].append(row)
        print(f"    {part:12s} {name:32s} {row['ms']:9.4f} {row['again_ms']:9.4f} ms", flush=True)


def prediction_calls(
    q: Tensor, k: Tensor, forms: dict[str, PredictionParams]
) -> dict[str, dict[str, Callable[[], object]]]:
    """By part: the pooling, its mean, the scores of each form, and the whole."""
    pooled = {
        centre: pool(q, k, BLOCKS, False, True, "triton", centre) for centre in ("mean", "middle")
    }
    sums = pooled["mean"].k_sums

    def score(params: PredictionParams) -> Callable[[], object]:
        return lambda: predicted.scores(pooled[params.centre], False, SCALE, params)

    def plan(params: PredictionParams) -> Callable[[], object]:
        x = pooled[params.centre]
        return lambda: predicted.from_pooled(x, Choice(topk=0.25), SCALE, "triton", params)

    def whole(params: PredictionParams) -> Callable[[], object]:
        return functools.partial(predicted.predict, q, k, topk=0.25, params=params)

    return {
        "pool": {"q and k": lambda: pool(q, k, BLOCKS, False, True, "triton", "middle")},
        "mean": {"of keys": lambda: mean_of_sums(sums.flatten(0, 1), k.shape[2], k.shape[1])},
        "scores": {name: score(params) for name, params in forms.items()},
        "from pooled": {name: plan(params) for name, params in forms.items()},
        "prediction": {name: whole(params) for name, params in forms.items()},
    }


def int8_calls(
    x: tuple[Tensor, Tensor, Tensor], density: float, forms: dict[str, Int8PrefillParams]
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
        calls[name] = functools.partial(run, ready[bn], plans[size], SCALE, 0, out, lse)
    return calls


def whole_call(
    x: tuple[Tensor, Tensor, Tensor], topk: float, params: Int8PrefillParams
) -> Callable[[], object]:
    """Quantisation, prediction and attention, as ``sage.predicted_attention`` does them."""
    q, k, v = x
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")

    def call() -> Tensor:
        pooled = Pooled.empty(q, k, params.block_m, params.block_n, False)
        ready = sage.quantise(q, k, v, MODE, SCALE, params.block_n, "triton", pooled)
        plan = predicted.from_pooled(pooled, Choice(topk=topk), SCALE, "triton", params.prediction)
        quantised_run(ready, plan, params)(ready, plan, SCALE, 0, out, lse)
        return out

    return call


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--roofline", action="store_true", help="print it alone; needs no GPU")
    parser.add_argument("--tokens", type=int, default=115200)
    parser.add_argument("--seconds", type=float, default=80.0, help="start no part after these")
    options = parser.parse_args()
    if options.roofline:
        print(json.dumps(roofline(options.tokens), indent=1))
        return 0
    if options.out is None:
        parser.error("expected --out FILE or --roofline")
    begin = time.monotonic()
    seed = int.from_bytes(os.urandom(3), "big")
    shape = f"{options.tokens} tokens, {HEADS} heads"
    result: dict[str, Any] = environment() | {"shape": shape, "topk": 0.25, "seed": seed}
    result |= {"errors": [], "wrong": [], "rows": [], "roofline_ms": roofline(options.tokens)}
    result["forms"] = {
        "prediction": {name: dataclasses.asdict(form) for name, form in PREDICTIONS.items()},
        "8-bit": {name: dataclasses.asdict(form) for name, form in INT8.items()},
    }
    predictions = {
        name: form
        for name, form in PREDICTIONS.items()
        if checked(name, "scores", functools.partial(score_errors, form, seed), 1.0, result)
        and checked(name, "plan", functools.partial(plan_errors, form, seed), 0.0, result)
    }
    forms = {
        name: form
        for name, form in INT8.items()
        if checked(name, "8-bit", functools.partial(int8_errors, form, seed), INT8_ROOM, result)
    }
    x = inputs(HEADS, HEADS, options.tokens, seed=seed)
    works: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {
        part: lambda calls=calls: calls  # type: ignore[misc]
        for part, calls in prediction_calls(x[0], x[1], predictions).items()
    }
    works["8-bit 0.25"] = lambda: int8_calls(x, 0.25, forms)
    best = {n: f for n, f in forms.items() if n in ("in use", "biased")}
    plans = {n: f for n, f in predictions.items() if n in ("in use", "all, fp16x3, 64 columns")}
    works["whole 0.25"] = lambda: {
        f"{a}; {b}": whole_call(x, 0.25, dataclasses.replace(form, prediction=plan))
        for a, form in best.items()
        for b, plan in plans.items()
        if a == "in use" or b != "in use"
    }
    works["8-bit dense"] = lambda: int8_calls(x, 1.0, best)
    for part, make in works.items():
        if time.monotonic() - begin > options.seconds:
            print(f"time is up before {part}", flush=True)
            break
        timed(part, make(), result)
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{shape}, {time.monotonic() - begin:.0f} s; ms, ms again, over the form in use")
    first = {row["part"]: row["ms"] for row in reversed(result["rows"])}
    for row in result["rows"]:
        share = row["ms"] / first[row["part"]]
        times = f"{row['ms']:9.4f} {row['again_ms']:9.4f} {share:6.3f}"
        print(f"{row['part']:12s} {row['form']:34s} {times}")
    if result["wrong"]:
        print(f"wrong: {', '.join(result['wrong'])}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
