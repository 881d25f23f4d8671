"""A decode step of Kimi-Linear-48B at long contexts in vLLM, upstream and with the flag.

    python -m benchmarks.mla_vllm pair CONFIG_DIR vllm_kimi48b_mla.json [--flag KDA]
    python -m benchmarks.mla_vllm run side.json --config CONFIG_DIR [--attention-backend KDA]

CONFIG_DIR holds the model's config.json; weights are drawn. ``pair`` runs ``run`` per side, one
after the other on one GPU, in vLLM's default graphs, and joins the sides' files. With the flag
both KDA and MLA layers are this package's where it is ahead.

A step is timed as in `benchmarks.engines.decode_vllm`: between two calls of the scheduler that both
schedule one token of each sequence. Its time depends on lengths, not on values, so contexts are
made without a prefill (`benchmarks.engines.context_connector`). Of every point the kernels of some
steps follow, by CUPTI, after the time.

Before anything is timed, the flagged side checks MLA decode as ``kda-dsv4 check`` does.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch

from benchmarks import serve_vllm
from benchmarks.engines import decode_vllm, serve_work
from benchmarks.engines.serve_work import SideFile, prompt_of, row, say

POINTS = ((1, 65536), (1, 8192), (16, 65536), (16, 8192), (64, 8192), (64, 65536))
SEQUENCES, BUDGET = 64, 2048
REPEATS = 3
# MLA's kernels, upstream's and ours, by parts of their names
MLA_KERNELS = ("FlashAttn", "flash::", "prepare_varlen", "mla_decode", "mla_combine", "split_plan")
CONTEXT_BY = "benchmarks/engines/context_connector.py"


def main() -> int:
    parser, two, _ = serve_work.commands(__doc__)
    two.add_argument("--limit", type=float, default=560.0, help="for both sides, seconds")
    return serve_work.started(parser, pair, run)


def pair(args: argparse.Namespace) -> int:
    common = ["--config", str(args.config)]
    sides = {"upstream": common, "flag": [*common, "--attention-backend", args.flag]}
    module = "benchmarks.mla_vllm"
    return serve_work.pair(module, sides, args.out, args.limit, joined=joined)


def joined(sides: dict[str, Any]) -> dict[str, Any]:
    """The result file: a row per batch and context, with every side's time in ms."""
    found = serve_work.join(sides)
    for one in found["rows"]:
        one["batch"], one["context"] = map(int, one["what"].split(" x "))
    return {**found, "context_by": CONTEXT_BY}


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    llm = load(args)
    load_s = time.perf_counter() - begin
    log = decode_vllm.StepLog(llm)
    head = {
        **serve_vllm.head_of(llm),
        "mla": llm.apply_model(mla_classes)[0],
        "load_s": load_s,
        "context_by": CONTEXT_BY,
    }
    side = SideFile(args.out, args.until, head)
    say(f"loaded in {load_s:.0f} s: {head['engine']}")
    say(f"MLA: {head['mla']}")
    ours = any("mla_backend" in name for name in head["mla"])
    if ours != bool(args.attention_backend):
        owner = "vLLM" if ours else "mla_backend"
        raise SystemExit(f"expected MLA of {owner}, got {head['mla']}")
    if ours:
        side.part("check", 20, lambda: check(head["engine"]["block_size"]))
        if "check" in side.data["failed"]:
            return 1
    for batch, context in POINTS:
        needs = 8 + 2e-6 * batch * context
        name = f"{batch} x {context}"
        side.part(name, needs, lambda b=batch, c=context: point(side, llm, log, b, c))
    side.save()
    return bool(side.data["failed"])


def load(args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm.config import KVTransferConfig

    return serve_vllm.drawn_engine(
        args.attention_backend,
        serve_vllm.model_directory(args.config, serve_vllm.LAYERS),
        max_model_len=66000,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
        gpu_memory_utilization=0.96,
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ContextConnector",
            kv_connector_module_path="benchmarks.engines.context_connector",
            kv_role="kv_both",
        ),
    )


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
    new_tokens = [decode_vllm.STEPS + 8] * batch
    runs = []
    for _ in range(REPEATS):
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
    kernels = decode_vllm.kernels_of_a_step(lambda new: asked.generate(prompts, [new] * batch))
    totals, of_mla = decode_vllm.part_of_a_step(kernels, "mla", MLA_KERNELS)
    shown = {name: [round(x, 4) for x in at] for name, at in of_mla.items()}
    say(f"    GPU {totals['gpu_ms']:.3f} ms in {totals['launches']:.0f} launches; MLA: {shown}")
    return {**totals, "mla": {name[:90]: at for name, at in of_mla.items()}}


def check(page_size: int) -> dict[str, float]:
    """Errors of MLA decode beside float64 over the allowed ones, by the family's own check.

    Raises:
        ValueError: one is above 1.
    """
    from backend_core.target import detect_target
    from mla_backend.api import select_mla_decode
    from mla_backend.spec import MlaSpec
    from mla_backend.testing.checks import check_cases

    target = detect_target()
    found = {}
    for path in select_mla_decode(target, MlaSpec(32, page_size)).rows:
        for name, call in check_cases(path).items():
            error, allowed = call(target, torch.device("cuda"))
            found[f"{path.name}, {name}"] = error / allowed
    say(f"  check: errors over the allowed ones {found}")
    if not max(found.values()) <= 1.0:
        raise ValueError(f"errors over the allowed ones must be at most 1, got {found}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
