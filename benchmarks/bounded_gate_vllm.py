"""Kimi-K3 and GLM-5.3-Flash with random weights in a real vLLM engine on one GPU, both sides.

    python -m benchmarks.bounded_gate_vllm pair benchmarks/results/vllm033_bounded_gate.json
    python -m benchmarks.bounded_gate_vllm run side.json --model k3 [--attention-backend KDA]

No checkpoint is needed: the configurations, four layers of which three are KDA's, are in a file.
The engine runs in its default mode: its own graphs and prefix caching. ``pair`` runs, in a process
each, upstream and the flag:

- k3_small, glm_small, beside each other, since nothing is timed: greedy tokens of 64 prompts of
  mixed lengths, all at once and one after the other; then of prompts that reach over blocks of the
  prefix cache, again from it and with other ends.
- k3, one after the other: Kimi-K3's hidden size, its 96 heads of 128 channels and its MLA, with a
  small dense MLP. Prefill calls, and by the profiler the time in which the GPU runs what its KDA
  layers launch in such a call, with and without their projections.

Upstream's prefill of these models on Hopper is FlashKDA. GLM's hyper-connections and its sparse
indexer need packages that not every machine has and are left out: its attention is dense here.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

from backend_core.testing.records import write_record
from benchmarks import serve_vllm
from benchmarks.engines import decode_vllm, serve_profile, serve_sides, serve_work
from benchmarks.engines.serve_work import SideFile, call_name, row, say

CALLS = ((1, 2048), (1, 8192), (8, 1024))
WARM_UP, REPEATS, PROFILED = 2, 15, 3
BUDGET = 8192
SMALL = ("k3_small", "glm_small")
RANGES = ("KDA layers", "KDA cores")
PARTS_S = {"small": 330.0, "k3": 150.0}  # a side's deadline after its start

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "engines" / "configs" / "bounded_gate_vllm.json").read_text()
)


def main() -> int:
    parser, two, one = serve_sides.commands(__doc__)
    two.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    one.add_argument("--model", choices=CONFIGS, required=True)
    return serve_sides.started(parser, pair, run)


def pair(args: argparse.Namespace) -> int:
    sides: dict[str, list[str]] = {"upstream": [], "flag": ["--attention-backend", args.flag]}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    failed: list[str] = []

    def side(model: str, name: str, seconds: float) -> None:
        label, options = f"{model}_{name}", ["--model", model, *sides[name]]
        until = time.time() + seconds
        data = serve_sides.run_side("benchmarks.bounded_gate_vllm", label, options, args.out, until)
        if data is not None:
            found[model, name] = data
        if data is None or data["failed"]:
            failed.append(label)

    serve_sides.beside(
        functools.partial(side, model, name, PARTS_S["small"])
        for model in SMALL
        if model in args.models
        for name in sides
    )
    if "k3" in args.models:
        for name in sides:
            side("k3", name, PARTS_S["k3"])
    result = joined(found)
    write_record(args.out, result)
    show(result)
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs beside {args.out}")
    return len(failed) + sum(not verdict["explained"] for verdict in result["verdicts"])


def joined(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Rows and agreement of every model, of which both sides may be there."""
    head: dict[str, Any] = next((data["head"] for data in found.values()), {})
    result: dict[str, Any] = {
        **head,
        "script": "benchmarks/bounded_gate_vllm.py",
        "mode": "default",
        "rows": [],
        "verdicts": [],
        "models": {},
    }
    for model in CONFIGS:
        own = {name: found[model, name] for name in ("upstream", "flag") if (model, name) in found}
        if not own:
            continue
        both = serve_sides.join(own)
        result["rows"] += [{"model": model, **r} for r in both["rows"]]
        kept: dict[str, Any] = {
            name: both[name] for name in ("agreement", "agreement_long") if name in both
        }
        result["models"][model] = {"config": CONFIGS[model], "sides": both["sides"], **kept}
        for name, agreement in kept.items():
            lengths = ", long prompts" if name == "agreement_long" else ""
            for what, value in agreement.items():
                if what.startswith("upstream and flag"):
                    partings = len(value["partings"])
                    verdict = {"model": model, "what": what + lengths, "same": value["same"]}
                    verdict |= {"prompts": value["prompts"], "partings": partings}
                    explained = value["explained"] == partings
                    result["verdicts"].append({**verdict, "explained": explained})
    return result


def show(result: dict[str, Any]) -> None:
    """Each model's tokens and table."""
    for model, data in result["models"].items():
        print(f"== {model}")
        for name, side in data["sides"].items():
            print(f"{name}: {side['layers']}, {side.get('long_tokens_summary')}")
        serve_sides.show({**data, "rows": [r for r in result["rows"] if r["model"] == model]})


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    llm = load(args)
    log = decode_vllm.StepLog(llm)
    head = {
        **serve_vllm.head_of(llm),
        "model": args.model,
        "attention_backend": args.attention_backend,
        "prefill_backend": llm.apply_model(prefill_backend)[0],
    }
    side = SideFile(args.out, args.until, head)
    say(f"{args.model}: {head['head']['engine']}, {head['engine']}")
    say(f"upstream's prefill would be {head['prefill_backend']}")
    serve_vllm.expect_layers(head["layers"], bool(args.attention_backend), 3)
    side.add(row("model load", "load", 1e3 * (time.perf_counter() - begin)))
    asked = serve_vllm.Asked()
    asked.llm, asked.log = llm, log
    if args.model in SMALL:
        block = llm.llm_engine.engine_core.engine_core.scheduler.block_size
        serve_work.tokens_part(side, asked)
        serve_work.tokens_part(side, asked, (2 * block + 70, 3 * block - 1))
    else:
        side.part("calls", 30, lambda: timed(side, asked))
        llm.apply_model(mark_ranges)
        for count, length in CALLS:
            side.part(
                f"profile of {call_name(count, length)}",
                5,
                functools.partial(profiled, side, asked, count, length),
            )
    side.save()
    return bool(side.data["failed"])


def timed(side: SideFile, asked: Any) -> None:
    """Medians of prefill calls, measured in turns, so that a slow moment is shared by all."""
    times: dict[tuple[int, int], list[float]] = {call: [] for call in CALLS}
    for turn in range(WARM_UP + REPEATS):
        for call, own in times.items():
            took = 1e3 * asked.call(*call)
            if turn >= WARM_UP:
                own.append(took)
    for (count, length), own in times.items():
        what = call_name(count, length)
        side.add(row(what, "call", median_high(own), least_ms=min(own), runs_ms=own))


def load(args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(CONFIGS[args.model]))
    small = args.model in SMALL
    options: dict[str, Any] = {}
    if small:  # four engines share the GPU
        options |= {"kv_cache_memory_bytes": 4 * 2**30, "gpu_memory_utilization": 0.2}
    return serve_vllm.drawn_engine(
        args.attention_backend,
        str(model),
        max_model_len=16384,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=64 if small else 256,
        enable_prefix_caching=True,
        **options,
    )


def prefill_backend(model: Any) -> list[str]:
    """The prefill kernels that upstream's KDA layers have chosen, used or not."""
    layers = [module for module in model.modules() if hasattr(module, "kda_prefill_backend")]
    return sorted({str(layer.kda_prefill_backend) for layer in layers})


def mark_ranges(model: Any) -> int:
    """Name what each KDA layer launches, with and without its projections, for the profiler."""
    from torch.profiler import record_function

    def ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with record_function(name):
                return function(*args, **options)

        return call

    layers = [m for m in model.modules() if hasattr(m, "A_log") and hasattr(m, "_forward")]
    for layer in layers:
        layer.forward = ranged(RANGES[0], layer.forward)
        layer._forward = ranged(RANGES[1], layer._forward)
    return len(layers)


def profiled(side: SideFile, asked: Any, count: int, length: int) -> None:
    """GPU time of the KDA layers in a call, the median of some."""
    calls = [gpu_ms_of_ranges(lambda: asked.call(count, length)) for _ in range(PROFILED)]
    for name in RANGES:
        busy = [found[name].busy_ms for found in calls]
        own = calls[-1][name].kernels
        what = f"{name}, {call_name(count, length)}"
        launches = sum(n for _, n in own.values())
        side.add(row(what, "gpu", median_high(busy), launches=launches, runs_ms=busy))
    shown = list(serve_profile.longest(calls[-1][RANGES[1]].kernels).items())[:8]
    say("    " + "; ".join(f"{name[:48]} {ms:.3f} in {n}" for name, (ms, n) in shown))


class RangeTime(NamedTuple):
    """A range's launches: the time in which any of them ran, and kernel name -> (ms, launches).

    Kernels may run beside each other, so that their times add up to more than ``busy_ms``.
    """

    busy_ms: float
    kernels: dict[str, tuple[float, int]]


def gpu_ms_of_ranges(call: Callable[[], Any]) -> dict[str, RangeTime]:
    """For each of `RANGES`, what is launched within.

    A kernel belongs to the range in which the host launched it, whenever it ran.

    Raises:
        ValueError: a range launched nothing that the profiler saw.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        call()
        torch.cuda.synchronize()
    events = record.profiler.kineto_results.events()
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in RANGES}
    launched: dict[int, int] = {}
    ran: list[tuple[int, str, int, int]] = []
    for event in events:
        name, start, took = event.name(), event.start_ns(), event.duration_ns()
        if event.device_type() == cuda:
            if name not in spans:
                ran.append((event.correlation_id(), name, start, took))
        elif name in spans:
            spans[name].append((start, start + took))
        elif name.startswith(("cudaLaunch", "cuLaunch", "cudaMem", "cuMem")):
            launched[event.correlation_id()] = start
    return attributed(spans, launched, ran)


def attributed(
    spans: dict[str, list[tuple[int, int]]],
    launched: dict[int, int],
    ran: list[tuple[int, str, int, int]],
) -> dict[str, RangeTime]:
    """Of host ranges, launch times by correlation and (correlation, kernel, start, ns), what
    `gpu_ms_of_ranges` returns."""
    found: dict[str, RangeTime] = {}
    for name, own in spans.items():
        kernels: dict[str, tuple[float, int]] = {}
        busy, until = 0, 0
        for correlation, kernel, start, took in sorted(ran, key=lambda event: event[2]):
            at = launched.get(correlation)
            if at is not None and any(begin <= at <= end for begin, end in own):
                ms, number = kernels.get(kernel, (0.0, 0))
                kernels[kernel] = (ms + took / 1e6, number + 1)
                busy += max(0, start + took - max(start, until))
                until = max(until, start + took)
        if not kernels:
            raise ValueError(f"expected kernels launched by {name}, got none in {len(own)} ranges")
        found[name] = RangeTime(busy / 1e6, kernels)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
