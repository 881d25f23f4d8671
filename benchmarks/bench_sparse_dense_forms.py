"""Forms of the Gluon kernels for Hopper of block-sparse attention beside the one in use.

Run as ``python -m benchmarks.bench_sparse_dense_forms --out FILE`` on one GPU; with ``--peers``,
the folder of vLLM's ``_vllm_fa3_C.abi3.so``, FlashAttention-3 stands beside dense and causal rows.
Two to four minutes with 16 CPU cores.

A form is a set of the table's parameters (`GluonPrefillParams`). Each is first compiled and
compared with float64 in a process of its own, all at once (``--check FORM``): causal attention with
cut ends, rows that differ by head with an empty one, and packed sequences with keys in pages, each
once more with queries eight times as large, whose maxima move more. ``same_bits`` says whether the
outputs are those of the form in use. A form that is wrong is named and not timed, and the script
then fails.

The others are timed one after another, forwards and then backwards (``ms``, ``again_ms``); dense
rows by events, since they take a quarter of a second, the rest by replays of CUDA graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from backend_core.testing.timing import environment, graph_time_ms
from benchmarks.peers import sparse_attention as peers
from benchmarks.sparse_attention_modes import SCALE, D, Tensors, inputs, random_kinds
from softmax_backend import reference_block_sparse as reference
from softmax_backend.launch_params import TABLES
from softmax_backend.launch_params_prefill import GluonPrefillParams
from softmax_backend.plan import intervals
from softmax_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from softmax_backend.plan.sliding_tile import sliding_tile
from softmax_backend.plan.token_order import tile_order
from softmax_backend.run import block_sparse_sm90
from softmax_backend.variants import masks

CHECK_SECONDS = 180.0
"""For the checks of all forms, which compile and run side by side."""
ROOM = 3e-3
"""Largest relative error of the output; bf16's rounding is 2e-3. Of the LSE it is the largest
difference."""


def _form(stages: int = 2, **on: bool) -> GluonPrefillParams:
    return GluonPrefillParams(128, stages, 240, **({"ping_pong": False} | on))


TURNS = {"ping_pong": True}
NAMED = TURNS | {"named_turns": True}
EARLY = {"early_softmax": True}
LAZY = EARLY | {"lazy_rescale": True}
AHEAD = {"keys_ahead": True}
FORMS = {
    "no turns": _form(),
    "turns": _form(**TURNS),
    "turns, 3 stages": _form(3, **TURNS),
    "early": _form(**EARLY),
    "turns, early": _form(**TURNS, **EARLY),
    "named turns, early": _form(**NAMED, **EARLY),
    "lazy": _form(**LAZY),
    "turns, lazy": _form(**TURNS, **LAZY),
    "lazy, ahead, 3 stages": _form(3, **LAZY, **AHEAD),
    "turns, lazy, ahead, 3 stages": _form(3, **TURNS, **LAZY, **AHEAD),
    "named turns, lazy, ahead, 3 stages": _form(3, **NAMED, **LAZY, **AHEAD),
}
"""Every "lazy" one is "early" too. "no turns" is the table's row of 2026-11-22."""
PACKED = ("no turns", "turns", "turns, lazy")
"""The forms in which packed sequences are checked and timed."""


def in_use() -> str:
    """The form of the table's row."""
    rows = load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    params = next(r.params for r in rows if (r.operator, r.name) == ("block_sparse", "gluon"))
    return next(name for name, form in FORMS.items() if form == params)


def with_causal_mask(plan: BlockPlan) -> BlockPlan:
    """The same plan without PARTIAL blocks, for the kernel that is compiled for causal ones."""
    if plan.has_partial:
        raise ValueError("expected a plan without PARTIAL blocks")
    return dataclasses.replace(plan, mask=masks.causal)


def random_plan(heads: int, m: int, n: int, density: float, has_empty: bool = False) -> BlockPlan:
    kinds = random_kinds(heads, -(-m // 128), n // 128, density)
    if has_empty:
        kinds[0, 2] = 0
    sequences = uniform_sequences(1, m, n, kinds.device)
    plan = from_kinds(kinds[None], heads, sequences, 128, 128, has_partial=False)
    return with_causal_mask(plan)


def packed_plan(lengths: list[int], heads: int) -> tuple[BlockPlan, Tensor]:
    """Causal sequences with keys in pages of 128 tokens, in random order: also those pages."""
    sizes = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    cu = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    counts = -(-sizes // 128)
    indptr = (counts.cumsum(0) - counts).int()
    pages = torch.randperm(int(counts.sum()), device="cuda").int()
    longest = max(lengths)
    return intervals.paged(cu, sizes, indptr, pages, 128, longest, longest, heads), pages


def paged(x: Tensor, lengths: list[int], pages: Tensor) -> Tensor:
    """[1, Hkv, L, D] as [pages, 128, Hkv, D]; beyond the end of a sequence there is NaN."""
    parts = [
        torch.nn.functional.pad(part, (0, 0, 0, -part.shape[2] % 128), value=math.nan)
        for part in x.split(lengths, 2)
    ]
    rows = torch.cat(parts, 2)[0].transpose(0, 1).reshape(-1, 128, x.shape[1], D)
    return torch.empty_like(rows).index_copy_(0, pages.long(), rows)


def attend(x: Tensors, plan: BlockPlan, params: GluonPrefillParams) -> Callable[[], Tensors]:
    """A call of the kernel into memory of NaN: (output, LSE)."""
    q, k, v = x
    out = torch.full_like(q, math.nan)
    lse = torch.full(q.shape[:3], math.nan, device="cuda")
    run = block_sparse_sm90.run_packed if plan.is_packed else block_sparse_sm90.run

    def call() -> Any:
        run(q, k, v, plan, SCALE, out, lse, params)
        return out, lse

    return call


def wanted(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """float64, head after head; output 0 and LSE -inf where a query sees nothing."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    outs, lses = [], []
    for h in range(heads):
        one = (x[:, i : i + 1] for x, i in ((q, h), (k, h // group), (v, h // group)))
        out, lse = reference.attention(*one, seen[h % len(seen)][None], SCALE)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def cases(is_packed: bool) -> Iterator[tuple[str, Tensors, BlockPlan, tuple[Tensor, Tensor]]]:
    """What every form is checked on, with the float64 result."""
    for factor in (1.0, 8.0):
        q, k, v = inputs(8, 2, 1500, 2300, seed=1)
        q = q * factor
        seen = torch.ones(1500, 2300, dtype=torch.bool, device="cuda").tril(800)
        yield (
            f"causal, {factor}",
            (q, k, v),
            intervals.causal(1500, 2300, 8),
            wanted(q, k, v, seen[None]),
        )
        q, k, v = inputs(24, 24, 2500, 1024, seed=2)
        q = q * factor
        plan = random_plan(24, 2500, 1024, 0.4, has_empty=True)
        yield (
            f"rows, {factor}",
            (q, k, v),
            plan,
            wanted(q, k, v, reference.elements_seen(plan).cuda()),
        )
        if not is_packed:
            continue
        lengths = [700, 1, 129, 1280]
        q, k, v = inputs(8, 2, sum(lengths), seed=3)
        q = q * factor
        plan, pages = packed_plan(lengths, 8)
        found = [
            wanted(*part, torch.ones(n, n, dtype=torch.bool, device="cuda").tril()[None])
            for n, *part in zip(lengths, *(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        ]
        x = q, paged(k, lengths, pages), paged(v, lengths, pages)
        yield f"packed, {factor}", x, plan, (
            torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2),
        )  # fmt: skip


def check(name: str) -> dict[str, Any]:
    """Errors of a form by case, and whether it has the bits of the form in use."""
    result: dict[str, Any] = {"form": name, "errors": {}, "same_bits": True}
    for case, x, plan, (want, want_lse) in cases(name in PACKED):
        dead = want_lse.isneginf()
        worst = 0.0
        call, used = attend(x, plan, FORMS[name]), attend(x, plan, FORMS[in_use()])
        for _ in range(2):
            out, lse = call()
            if not torch.equal(lse.isneginf(), dead) or bool((out[dead] != 0).any()):
                worst = math.nan
                break
            error = float((out.double() - want)[~dead].norm() / want[~dead].norm())
            worst = max(worst, error, float((lse - want_lse)[~dead].abs().max()), key=_or_nan)
        theirs, _ = used()
        result["same_bits"] &= bool(torch.equal(theirs, out))
        result["errors"][case] = worst
    return result


def _or_nan(error: float) -> float:
    return math.inf if math.isnan(error) else error


def check_all(names: list[str], seconds: float) -> list[dict[str, Any]]:
    """``check`` of each form in a process of its own; a form whose process fails has NaN."""
    begun = {
        name: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_sparse_dense_forms", "--check", name],
            env=os.environ | {"OMP_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    end = time.monotonic() + seconds
    found = []
    for name, process in begun.items():
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
            one = json.loads(out.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError) as reason:
            process.kill()  # a barrier that nobody completes never ends
            text = err[-400:] if isinstance(reason, (IndexError, ValueError)) else str(reason)
            print(f"{name} failed: {text}", flush=True)
            one = {"form": name, "errors": {"process": math.nan}, "same_bits": False}
        found.append(one)
        worst = max(one["errors"].values(), key=_or_nan)
        note = "" if worst < ROOM else "WRONG"
        bits = "same bits" if one["same_bits"] else "other bits"
        print(f"{name:36s} {worst:.2e} {bits} {note}", flush=True)
    return found


def events_ms(call: Callable[[], object], repeats: int = 2) -> float:
    """Median of single calls on the current stream, for calls beside which a launch is nothing."""
    call()
    times = []
    for _ in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


Work = tuple[str, float, dict[str, Callable[[], object]]]
"""Name, operations, and a call of each form and peer."""


def works(fa3: peers.Attend | None, right: list[str], tokens: int) -> Iterator[Work]:
    """The most telling first."""

    def calls(x: Tensors, plan: BlockPlan, names: list[str]) -> dict[str, Callable[[], object]]:
        return {name: attend(x, plan, FORMS[name]) for name in names}

    def flops(heads: int, m: int, n: int, share: float) -> float:
        return 4.0 * D * heads * m * n * share

    for t in (16384, 65536):
        x = inputs(32, 8, t)
        found = calls(x, intervals.causal(t, t, 32), right)
        if fa3 is not None:
            found["FA3"] = functools.partial(fa3, *x, True)
        yield f"causal {t}", flops(32, t, t, 0.5), found
    lengths = [8192] * 8
    q, k, v = inputs(32, 8, sum(lengths))
    plan, pages = packed_plan(lengths, 32)
    x = q, paged(k, lengths, pages), paged(v, lengths, pages)
    names = [name for name in PACKED if name in right]
    yield "paged causal 8 x 8192", flops(32, 65536, 8192, 0.5), calls(x, plan, names)
    x = inputs(24, 24, tokens)
    found = calls(x, with_causal_mask(intervals.dense(tokens, tokens, 24)), right)
    if fa3 is not None:
        found["FA3"] = functools.partial(fa3, *x, False)
    yield f"dense {tokens}", flops(24, tokens, tokens, 1.0), found
    order = tile_order((tokens // 3840, 48, 80), (6, 8, 8))
    plan = sliding_tile(order, [(3, 3, 3)], 24)
    if len(order.slot_of) == tokens and not plan.has_partial:
        plan = with_causal_mask(plan)
        share = plan.density()
        yield "sliding tiles (3,3,3)", flops(24, tokens, tokens, share), calls(x, plan, right)
    plan = random_plan(24, tokens, tokens, 0.25)
    share = plan.density()
    yield "random blocks 0.25", flops(24, tokens, tokens, share), calls(x, plan, right)


def timed(work: Work, result: dict[str, Any]) -> None:
    """Every call, forwards and backwards."""
    name, flops, calls = work
    clock = functools.partial(graph_time_ms, replays=9 if flops < 1e13 else 3, calls=1)
    if name.startswith("dense"):
        clock = events_ms  # type: ignore[assignment]
    rounds: list[dict[str, float]] = []
    for order in (list(calls), list(reversed(calls))):
        rounds.append({form: clock(calls[form]) for form in order})
    for form in calls:
        ms, again = rounds[0][form], rounds[1][form]
        rate = flops / min(ms, again) / 1e9
        row = {"work": name, "form": form, "ms": ms, "again_ms": again, "tflops": rate}
        result["rows"].append(row)


def table(rows: list[dict[str, Any]], used: str) -> Iterator[str]:
    """Times, and over those of the form in use and of FA3 (the better of two each)."""
    times = f"{'ms':>9s} {'again':>9s} {'TFLOP/s':>8s}"
    yield f"{'work':22s} {'form':36s} {times} {'speed':>6s}  of FA3"
    for work, group in itertools.groupby(rows, key=lambda row: row["work"]):
        found = list(group)
        best = {row["form"]: min(row["ms"], row["again_ms"]) for row in found}
        for row in found:
            mine = best[row["form"]]
            speed = best.get(used, math.nan) / mine
            of_fa3 = f"{best['FA3'] / mine:7.3f}" if "FA3" in best else ""
            times = f"{row['ms']:9.3f} {row['again_ms']:9.3f} {row['tflops']:8.0f}"
            yield f"{work:22s} {row['form']:36s} {times} {speed:6.3f} {of_fa3}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", type=Path, help="folder of _vllm_fa3_C.abi3.so")
    parser.add_argument("--check", metavar="FORM", help="only compare this form; prints JSON")
    parser.add_argument("--tokens", type=int, default=115200, help="of dense and sparse rows")
    parser.add_argument("--seconds", type=float, default=80.0, help="start no row after these")
    options = parser.parse_args()
    if options.check is not None:
        print(json.dumps(check(options.check)))
        return 0
    if options.out is None:
        parser.error("expected --out FILE")
    begin = time.monotonic()
    try:
        fa3 = None if options.peers is None else peers.load_fa3(options.peers)
    except OSError as reason:
        print(f"FA3 not loaded: {reason}")
        fa3 = None
    result: dict[str, Any] = environment() | {"used": in_use(), "rows": []}
    result["forms"] = {name: dataclasses.asdict(form) for name, form in FORMS.items()}
    result["checks"] = check_all(list(FORMS), CHECK_SECONDS)
    right = [
        one["form"] for one in result["checks"] if max(one["errors"].values(), key=_or_nan) < ROOM
    ]
    result["wrong"] = [name for name in FORMS if name not in right]
    print(f"checked in {time.monotonic() - begin:.0f} s", flush=True)
    for work in works(fa3, right, options.tokens):
        timed(work, result)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{work[0]} at {time.monotonic() - begin:.0f} s", flush=True)
        torch.cuda.empty_cache()
        if time.monotonic() - begin > options.seconds:
            print("time is up")
            break
    print("\n".join(table(result["rows"], result["used"])))
    if result["wrong"]:
        print(f"wrong: {', '.join(result['wrong'])}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
