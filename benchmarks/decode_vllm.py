"""A decode step of Kimi-Linear in a real vLLM engine, stock or with this backend, in CUDA graphs.

    python -m benchmarks.decode_vllm run CONFIG_DIR stock.json
    python -m benchmarks.decode_vllm run CONFIG_DIR kda.json --attention-backend CUSTOM
    python -m benchmarks.decode_vllm compare stock.json kda.json vllm_kimi48b_decode.json

CONFIG_DIR holds the model's config.json; weights are vLLM's dummies, which are random, so that
tokens choose their experts. The engine captures whole decode steps (FULL_DECODE_ONLY, without
torch.compile unless --compile). A step's time is that of one generation less that of a shorter one
with the same prompts, over the difference of their tokens; its GPU time is the kernels of one
generation's steps, from the profiler.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.serve_vllm import environment, model_directory

BATCHES = (1, 16, 64)
PROMPT, SHORT, LONG, PROFILED = 128, 16, 144, 8
# what of a step's kernels is a KDA layer between its projections, by parts of their names
KDA_KERNELS = ("causal_conv1d_update", "kda", "decode_step", "recurrent", "rms_norm_gated",
               "layer_norm_gated", "gated_norm")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    import torch
    from vllm import LLM, SamplingParams

    llm_arguments: dict[str, Any] = {}
    if args.attention_backend:
        llm_arguments["attention_backend"] = args.attention_backend
    if not args.compile:
        llm_arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    begin = time.perf_counter()
    llm = LLM(
        model=model_directory(args.config_dir, args.layers, dense=False),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.93,
        enable_prefix_caching=False,
        max_num_seqs=max(BATCHES),
        seed=0,
        **llm_arguments,
    )
    result: dict[str, Any] = {
        "environment": environment(args) | {"compile": args.compile},
        "load_s": time.perf_counter() - begin,
        "rows": [],
    }
    rng = random.Random(0)
    prompts = [
        {"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(PROMPT)]}
        for _ in range(max(BATCHES))
    ]

    def generate(batch: int, tokens: int) -> float:
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts[:batch], sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for batch in BATCHES:
        generate(batch, SHORT)
        times = sorted(
            (generate(batch, LONG) - generate(batch, SHORT)) / (LONG - SHORT) for _ in range(3)
        )
        row = {"batch": batch, "step_ms": 1e3 * times[1], "all_ms": [1e3 * t for t in times]}
        row |= kernels_of_a_step(lambda tokens, batch=batch: generate(batch, tokens))
        result["rows"].append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "kernels_us"}), flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def kernels_of_a_step(generate: Any) -> dict[str, Any]:
    """GPU time by kernel, of ``PROFILED`` steps by the difference of two profiles."""
    longer, shorter = profile_of(generate, 2 + PROFILED), profile_of(generate, 2)
    by_kernel = {
        name: [(at[0] - shorter.get(name, (0.0, 0))[0]) / PROFILED,
               (at[1] - shorter.get(name, (0.0, 0))[1]) / PROFILED]
        for name, at in longer.items()
    }  # fmt: skip
    kda = [v for name, v in by_kernel.items() if any(part in name for part in KDA_KERNELS)]
    top = sorted(by_kernel.items(), key=lambda item: -item[1][0])[:40]
    return {
        "gpu_ms": sum(us for us, _ in by_kernel.values()) / 1e3,
        "launches": sum(count for _, count in by_kernel.values()),
        "kda_us": sum(us for us, _ in kda),
        "kda_launches": sum(count for _, count in kda),
        "kernels_us": dict(top),
    }


def profile_of(generate: Any, tokens: int) -> dict[str, tuple[float, int]]:
    """Kernel name -> (us, launches) of a generation."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        generate(tokens)
    found: dict[str, tuple[float, int]] = {}
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us, count = found.get(event.name, (0.0, 0))
            found[event.name] = (us + event.device_time, count + 1)
    return found


def compare(args: argparse.Namespace) -> None:
    stock, ours = (json.loads(path.read_text()) for path in (args.stock, args.ours))
    rows = [
        {
            "batch": a["batch"],
            "stock_ms": a["step_ms"],
            "ours_ms": b["step_ms"],
            **{
                f"{who}_{key}": row[key]
                for key in ("gpu_ms", "launches", "kda_us", "kda_launches")
                for who, row in (("stock", a), ("ours", b))
            },
        }
        for a, b in zip(stock["rows"], ours["rows"], strict=True)
    ]
    result = {
        "environment": ours["environment"],
        "prompt_tokens": PROMPT,
        "rows": rows,
        "kernels_us": {
            name: {row["batch"]: row["kernels_us"] for row in run["rows"]}
            for name, run in (("stock", stock), ("ours", ours))
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"batch {row['batch']}: step {row['stock_ms']:.2f} -> {row['ours_ms']:.2f} ms, GPU"
            f" {row['stock_gpu_ms']:.2f} -> {row['ours_gpu_ms']:.2f} ms, KDA between projections"
            f" {row['stock_kda_us']:.0f} us in {row['stock_kda_launches']:.0f} launches ->"
            f" {row['ours_kda_us']:.0f} us in {row['ours_kda_launches']:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("config_dir", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--attention-backend")
    one.add_argument("--layers", type=int, default=27)
    one.add_argument("--compile", action="store_true", help="torch.compile too, a server's default")
    two = commands.add_parser("compare")
    for name in ("stock", "ours", "out"):
        two.add_argument(name, type=Path)
    args = parser.parse_args()
    args.graphs, args.dense = True, False
    if args.command == "run":
        run(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
