"""A decode step of Kimi-Linear-48B at long contexts in vLLM, upstream and with the flag.

    python -m benchmarks.mla_vllm pair CONFIG_DIR vllm_kimi48b_mla.json [--flag KDA]
    python -m benchmarks.mla_vllm run side.json --config CONFIG_DIR [--attention-backend KDA]

CONFIG_DIR holds the model's config.json; weights are drawn. ``pair`` runs ``run`` per side, one
after the other on one GPU, in vLLM's default graphs, and joins the sides' files. With the flag
both KDA and MLA layers are this package's where it is ahead. A third side, ``--sides kda_alone``,
has the flag with MLA left to vLLM: its difference to ``flag`` is what MLA contributes.

A step is timed as in `benchmarks.engines.decode_vllm`: between two calls of the scheduler that both
schedule one token of each sequence. Its time depends on lengths, not on values, so contexts are
made without a prefill (`benchmarks.engines.context_connector`); ``--prefill`` reads real prompts
instead.
Of every point the kernels of some steps follow, by CUPTI, after the time.

Before anything is timed, the flagged side checks in float64 one layer's decode of the batch sizes
that it will time, on pages of the engine's size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

from benchmarks import serve_vllm
from benchmarks.engines import decode_vllm, serve_profile, serve_work
from benchmarks.engines.serve_work import SideFile, prompt_of, row, say

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIDES = ("upstream", "kda_alone", "flag")
POINTS = ((1, 65536), (1, 8192), (16, 65536), (16, 8192), (64, 8192), (64, 65536))
SEQUENCES, BUDGET = 64, 2048
REPEATS = 3
# MLA's kernels, upstream's and ours, by parts of their names
MLA_KERNELS = ("FlashAttn", "flash::", "prepare_varlen", "mla_decode", "mla_combine", "split_plan")
LEFT_OUT = "left to vLLM by this benchmark"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    two = commands.add_parser("pair", help="both sides")
    two.add_argument("config", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--flag", default="KDA", help="of --attention-backend (CUSTOM before 0.32)")
    two.add_argument("--limit", type=float, default=560.0, help="for all sides, seconds")
    two.add_argument("--sides", nargs="+", choices=SIDES, default=["upstream", "flag"])
    one = commands.add_parser("run", help="one side")
    one.add_argument("out", type=Path)
    one.add_argument("--config", type=Path, required=True)
    one.add_argument("--attention-backend")
    one.add_argument("--without-mla", action="store_true", help="MLA is left to vLLM")
    one.add_argument("--until", type=float, default=math.inf, help="no part starts later; time()")
    for command in (two, one):
        command.add_argument("--prefill", action="store_true", help="contexts by real prompts")
        command.add_argument("--memory", type=float, default=0.96, help="share of the GPU's memory")
    args = parser.parse_args()
    if not (args.config / "config.json").is_file():
        parser.error(f"expected a folder with a config.json, got {args.config}")
    return pair(args) if args.command == "pair" else run(args)


def pair(args: argparse.Namespace) -> int:
    common = ["--config", str(args.config), "--memory", str(args.memory)]
    common += ["--prefill"] if args.prefill else []
    flagged = [*common, "--attention-backend", args.flag]
    options = {"upstream": common, "kda_alone": [*flagged, "--without-mla"], "flag": flagged}
    chosen = {side: options[side] for side in args.sides}
    failed = serve_work.pair("benchmarks.mla_vllm", chosen, args.out, args.limit, "default")
    # of an earlier call too
    files = {side: args.out.with_name(f"{args.out.stem}_{side}.json") for side in SIDES}
    found = {side: json.loads(file.read_text()) for side, file in files.items() if file.exists()}
    result = joined(found)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in table(result, list(found)):
        print(line)
    return failed


def joined(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result file: a row per batch and context, with every side's time in ms."""
    first = next(iter(sides.values()), {})
    rows = []
    for batch, context in POINTS:
        times = {
            f"{side}_ms": measured["ms"]
            for side, data in sides.items()
            for measured in data["rows"]
            if (measured["batch"], measured["context"]) == (batch, context)
        }
        if times:
            rows.append({"batch": batch, "context": context, **times})
    return {
        **first.get("head", {}),
        "script": "benchmarks/mla_vllm.py",
        "mode": "default",
        "context_by": first.get("context_by"),
        "rows": rows,
        "sides": sides,
    }


def table(result: dict[str, Any], sides: list[str]) -> list[str]:
    """Times of each side, and upstream's over the flag's, last."""
    head = "".join(f"{side:>12}" for side in sides)
    lines = [f"{'batch':>6}{'context':>9}{head}{'ratio':>8}   (ms)"]
    for r in result["rows"]:
        cells = [
            f"{r[f'{side}_ms']:12.3f}" if f"{side}_ms" in r else f"{'-':>12}" for side in sides
        ]
        known = "upstream_ms" in r and "flag_ms" in r
        ratio = f"{r['upstream_ms'] / r['flag_ms']:8.3f}" if known else ""
        lines.append(f"{r['batch']:6}{r['context']:9}{''.join(cells)}{ratio}")
    return lines


def run(args: argparse.Namespace) -> int:
    if args.without_mla:
        leave_mla_to_vllm()
    begin = time.perf_counter()
    llm = load(args)
    load_s = time.perf_counter() - begin
    log = decode_vllm.StepLog(llm)
    head = {
        "head": serve_vllm.versions(),
        "engine": serve_vllm.engine_of(llm),
        "layers": llm.apply_model(serve_vllm.layer_classes)[0],
        "mla": llm.apply_model(mla_classes)[0],
        "load_s": load_s,
        "context_by": "prefill" if args.prefill else "benchmarks/engines/context_connector.py",
    }
    side = SideFile(args.out, args.until, head)
    say(f"loaded in {load_s:.0f} s: {head['engine']}")
    say(f"MLA: {head['mla']}")
    ours = any("softmax_backend" in name for name in head["mla"])
    expected = bool(args.attention_backend) and not args.without_mla
    if ours != expected:
        raise SystemExit(
            f"expected MLA {'of softmax_backend' if expected else 'of vLLM'}, got {head['mla']}"
        )
    if ours:
        side.part("check", 20, lambda: check(head["engine"]["block_size"]))
        if "check" in side.data["failed"]:
            return 1
    for batch, context in POINTS:
        needs = 8 + (3e-5 * batch * context if args.prefill else 2e-6 * batch * context)
        name = f"{batch} x {context}"
        side.part(name, needs, lambda b=batch, c=context: point(side, llm, log, b, c))
    side.save()
    return bool(side.data["failed"])


def load(args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    serve_vllm.register_loader()
    arguments: dict[str, Any] = {}
    if args.attention_backend:
        arguments["attention_backend"] = args.attention_backend
    if not args.prefill:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="ContextConnector",
            kv_connector_module_path="benchmarks.engines.context_connector",
            kv_role="kv_both",
        )
    return LLM(
        model=serve_vllm.model_directory(args.config, 27, dense=False),
        load_format="drawn",
        skip_tokenizer_init=True,
        max_model_len=66000,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        seed=0,
        **arguments,
    )


def leave_mla_to_vllm() -> None:
    """Have this family decline every layer of this process."""
    from softmax_backend.engines import vllm as adapter

    adapter.choose = lambda request: LEFT_OUT  # the claim is made of it when vLLM registers


def mla_classes(model: Any) -> dict[str, int]:
    """How many layers have which MLA implementation."""
    found: dict[str, int] = {}
    for module in model.modules():
        impl = getattr(module, "impl", None)
        if impl is not None and hasattr(impl, "forward_mqa"):
            kind = f"{type(impl).__module__}.{type(impl).__qualname__}"
            found[kind] = found.get(kind, 0) + 1
    return found


def point(side: SideFile, llm: Any, log: decode_vllm.StepLog, batch: int, context: int) -> Any:
    """A row of one batch and context, and the kernels of its steps."""
    rng = random.Random(batch + context)
    prompts = [prompt_of(rng, context) for _ in range(batch)]
    asked = serve_vllm.Asked(llm, log)
    prefill_steps = decode_vllm.steps_of_prefill(batch, context, BUDGET) if batch > 1 else 0
    new_tokens = decode_vllm.STEPS + 8
    if side.data["context_by"] == "prefill":
        new_tokens += prefill_steps
    runs = []
    for _ in range(1 if side.data["context_by"] == "prefill" else REPEATS):
        steps = log.of(lambda: asked.generate(prompts, new_tokens))
        runs.append(decode_vllm.pure_steps_ms(steps, batch))
    medians = sorted(decode_vllm.median(times) for times in runs)
    measured = row(
        f"{batch} x {context}",
        "decode",
        medians[len(medians) // 2],
        least_ms=min(min(times) for times in runs),
        runs_ms=medians,
        batch=batch,
        context=context,
    )
    side.add(measured)
    if side.data["context_by"] == "prefill":
        return None
    kernels = kernels_of_a_step(lambda new: asked.generate(prompts, new))
    shown = {name: [round(x, 4) for x in at] for name, at in kernels["mla"].items()}
    say(f"    GPU {kernels['gpu_ms']:.3f} ms in {kernels['launches']:.0f} launches; MLA: {shown}")
    return kernels


def kernels_of_a_step(generate: Any) -> dict[str, Any]:
    """[ms, launches] by kernel of one step, by the difference of two profiles."""
    steps = decode_vllm.PROFILED
    longer, shorter = (serve_profile.kernels_of(lambda n=n: generate(n)) for n in (2 + steps, 2))
    found = {
        name: [(at[i] - shorter.get(name, (0.0, 0))[i]) / steps for i in (0, 1)]
        for name, at in longer.items()
    }
    of_mla = {k: v for k, v in found.items() if any(part in k for part in MLA_KERNELS)}
    return {
        "gpu_ms": sum(ms for ms, _ in found.values()),
        "launches": sum(count for _, count in found.values()),
        "mla_ms": sum(ms for ms, _ in of_mla.values()),
        "mla": {name[:90]: at for name, at in of_mla.items()},
    }


def check(page_size: int) -> dict[str, float]:
    """Relative errors of a decode against float64, by batch: 32 heads, ragged, NaN between them.

    The first plan of each batch is captured with its calls in a CUDA graph, and the graph is
    replayed for other lengths that are planned into it; planning must not wait for the GPU.

    Raises:
        ValueError: an error is above 1 %.
    """
    import torch

    from backend_core.target import detect_target
    from softmax_backend.engines.mla_decoder import MlaDecoder

    device = torch.device("cuda")
    decoder = MlaDecoder(
        detect_target(device),
        device,
        heads=32,
        page_size=page_size,
        kernel="fa3",
        query_tokens=(1,),
        max_requests=SEQUENCES,
    )
    decoder.warm_up()
    found = {}
    for requests in (1, 4, 16):
        pages = 1 + 5 * requests
        generator = torch.Generator(device).manual_seed(requests)
        cache = torch.full(
            (pages, page_size, 576), float("nan"), dtype=torch.bfloat16, device=device
        )
        table = torch.zeros(requests, 5, dtype=torch.int32, device=device)
        lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        q = torch.randn(requests, 32, 576, generator=generator, device=device).bfloat16()
        step = decoder.step(lengths, table, 1)
        parts = (*q.split((512, 64), -1), *cache.split((512, 64), -1))
        step.attend(*parts, 192**-0.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = step.attend(*parts, 192**-0.5)
        rng = random.Random(requests)
        drawn = [rng.randint(1, 5 * page_size) for _ in range(requests)]
        drawn[-1] = 0 if requests > 1 else drawn[-1]
        for request, length in enumerate(drawn):
            for number in range(-(-length // page_size)):
                page = 1 + 5 * request + number
                table[request, number] = page
                rows = min(page_size, length - number * page_size)
                cache[page, :rows].normal_(generator=generator)
        lengths.copy_(torch.tensor(drawn, dtype=torch.int32))
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoder.step(lengths, table, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph.replay()
        found[str(requests)] = worst(out, q, cache, table, drawn)
    say(f"  check: relative errors against float64 by batch {found}")
    if not max(found.values()) < 0.01:
        raise ValueError(f"relative errors must be below 0.01, got {found}")
    return found


def worst(out: Any, q: Any, cache: Any, table: Any, lengths: list[int]) -> float:
    """The largest relative error of a request's output; infinite where an empty one is not 0."""
    errors = []
    for request, length in enumerate(lengths):
        if not length:
            errors.append(0.0 if bool((out[request] == 0).all()) else math.inf)
            continue
        pages = table[request, : -(-length // cache.shape[1])].long()
        keys = cache[pages].flatten(0, 1)[:length].double()
        s = q[request].double() @ keys.T * 192**-0.5
        want = s.softmax(-1) @ keys[:, :512]
        errors.append(float((out[request].double() - want).norm() / want.norm()))
    return max(errors) if not any(map(math.isnan, errors)) else math.inf


if __name__ == "__main__":
    raise SystemExit(main())
