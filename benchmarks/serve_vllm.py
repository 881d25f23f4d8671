"""Kimi-Linear with drawn weights in a real vLLM engine on one GPU: engine calls, decode, tokens.

    python -m benchmarks.serve_vllm run CONFIG_DIR stock.json
    python -m benchmarks.serve_vllm run CONFIG_DIR kda.json --attention-backend CUSTOM
    python -m benchmarks.serve_vllm compare stock.json kda.json agreement.json

CONFIG_DIR holds the model's config.json; no checkpoint is needed. The parts of ``run``, on one load
of the model, each written as it comes:

- calls: full engine calls (prompt tokens in, one token out; medians), the GPU time by kernel and
  the host's time by function.
- decode: a decode step in CUDA graphs (``--graphs decode`` or ``full``): see `decode_vllm`.
- tokens: greedy ones for 64 prompts of mixed lengths, all at once and 16 of them one after the
  other.

``--graphs decode`` captures decode steps alone and compiles nothing: a prefill then runs the same
code as in eager mode, and MLA's metadata makes two small copies more a step. Every kernel that was
compiled or tuned after the model had been loaded is listed.

``compare`` pairs the calls and says where two runs' tokens part, and how close the two best tokens
were there; the same for one run's own two ways to batch, which differ by rounding alone: a
divergence is explained where the margin of stock's two best tokens is no larger than what rounding
moved between those two batchings of stock.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import os
import pstats
import random
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks import decode_vllm

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHAPES = ((1, 512), (1, 2048), (1, 8192), (8, 1024), (1, 32768))
PROFILED = ((1, 512), (1, 8192), (8, 1024))
OURS = ("kda_backend", "backend_core")
PROMPTS, APART, NEW_TOKENS = 64, 16, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("config_dir", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--attention-backend")
    one.add_argument("--layers", type=int, default=27)
    one.add_argument(
        "--graphs",
        choices=("none", "decode", "full"),
        default="none",
        help="full: torch.compile and all CUDA graphs, a server's default",
    )
    one.add_argument(
        "--dense",
        action="store_true",
        help="no experts: with drawn weights their choice turns rounding into other tokens",
    )
    one.add_argument(
        "--parts", nargs="+", choices=("calls", "decode", "tokens"), default=["calls", "tokens"]
    )
    one.add_argument("--memory", type=float, default=0.93, help="share of the GPU's memory")
    one.add_argument(
        "--kv-cache-gib", type=float, help="instead of what is left: for runs beside each other"
    )
    two = commands.add_parser("compare")
    for name in ("stock", "ours", "out"):
        two.add_argument(name, type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        compare(args)
    elif args.graphs == "none" and "decode" in args.parts:
        parser.error("decode steps are measured in CUDA graphs: --graphs decode or full")
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    llm = load(args)
    load_s = time.perf_counter() - begin
    compiled = watch_compilation()
    llm.apply_model(draw_weights)
    rng = random.Random(0)

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(length)]}

    def call(count: int, length: int) -> float:
        return seconds_of(llm, [prompt(length) for _ in range(count)], 1)

    result: dict[str, Any] = {
        "script": "benchmarks/serve_vllm.py",
        "environment": environment(args),
        "load_s": load_s,
        "first_prefill_s": call(1, 8192),
        "shapes": [],
        "profiles": [],
        "compiled_after_load": compiled,
    }

    def save() -> None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    if "calls" in args.parts:
        for count, length in SHAPES:
            result["shapes"].append(measured(count, length, call))
            save()
        for count, length in PROFILED:
            result["profiles"].append(profiled(count, length, call))
            save()
        result["host"] = host_profile(lambda: call(1, 512))
    if "decode" in args.parts:
        result["decode"] = []
        for batch in decode_vllm.BATCHES:
            batch_of = [prompt(decode_vllm.PROMPT) for _ in range(batch)]
            result["decode"].append(
                decode_vllm.step(batch, lambda new, batch=batch_of: seconds_of(llm, batch, new))
            )
            save()
    if "tokens" in args.parts:
        lengths = [rng.randint(1, 40) ** 2 + rng.randint(1, 63) for _ in range(PROMPTS)]
        result["greedy"] = greedy(llm, lengths, [prompt(length) for length in lengths])
    save()
    ours = [name for name in compiled if "kda_backend" in name]
    print(json.dumps({k: result[k] for k in ("load_s", "first_prefill_s")}))
    print(f"{len(compiled)} kernels compiled or tuned after load, {len(ours)} of them ours")
    for name in compiled:
        print("  ", name)


def load(args: argparse.Namespace) -> Any:
    from vllm import LLM

    arguments: dict[str, Any] = {}
    if args.attention_backend:
        arguments["attention_backend"] = args.attention_backend
    if args.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(args.kv_cache_gib * 2**30)
    if args.graphs == "decode":
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(decode_vllm.BATCHES),
        }
    return LLM(
        model=model_directory(args.config_dir, args.layers, args.dense),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=70000,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=args.memory,
        enforce_eager=args.graphs == "none",
        enable_prefix_caching=False,
        max_num_seqs=max(decode_vllm.BATCHES),
        seed=0,
        **arguments,
    )


def seconds_of(llm: Any, batch: list[dict[str, list[int]]], new_tokens: int) -> float:
    """A batch of prompts in, ``new_tokens`` greedy tokens of each out."""
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    llm.generate(batch, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measured(count: int, length: int, call: Any) -> dict[str, Any]:
    for _ in range(2):
        call(count, length)
    # the shorter the call, the more of it is the host's
    times = sorted(call(count, length) for _ in range(15 if length <= 2048 else 5))
    seconds = times[len(times) // 2]
    row = {
        "n": count,
        "length": length,
        "ms": 1e3 * seconds,
        "least_ms": 1e3 * times[0],
        "tokens_per_s": count * length / seconds,
    }
    print(json.dumps(row), flush=True)
    return row


def greedy(llm: Any, lengths: list[int], batch: list[dict[str, list[int]]]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, logprobs=2, ignore_eos=True, detokenize=False
    )
    together = llm.generate(batch, sampling, use_tqdm=False)
    apart = [llm.generate([one], sampling, use_tqdm=False)[0] for one in batch[:APART]]
    return {
        "lengths": lengths,
        "together": [tokens_of(output) for output in together],
        "apart": [tokens_of(output) for output in apart],
    }


def model_directory(config_dir: Path, layers: int, dense: bool) -> str:
    """The configuration with its first layers alone, as a model to load."""
    config = json.loads((config_dir / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if dense:
        config["first_k_dense_replace"] = layers
    linear = config["linear_attn_config"]
    for key in ("full_attn_layers", "kda_layers"):
        linear[key] = [layer for layer in linear[key] if layer <= layers]
    model = Path(tempfile.mkdtemp())
    (model / "config.json").write_text(json.dumps(config))
    return str(model)


def draw_weights(model: Any) -> None:
    """Weights at the scale of an initialised model: with vLLM's dummies every logit is about 0.

    Each parameter's values depend on its name alone, so that two runs have the same.
    """
    import torch

    for name, parameter in model.named_parameters():
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(zlib.crc32(name.encode()))
        x = parameter.data
        if name.endswith("A_log"):
            x.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):
            step = torch.empty_like(x).uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
            step.exp_()
            x.copy_(step + torch.log(-torch.expm1(-step)))
        elif "norm" in name:
            x.fill_(1.0)
        elif "conv1d" in name:
            x.uniform_(-0.5, 0.5, generator=generator)
        elif "bias" in name:
            x.zero_()
        elif x.is_floating_point():
            x.normal_(0.0, 0.02, generator=generator)
    for module in model.modules():
        # MLA keeps products of its weights for decode
        if type(module).__name__ == "MLAAttention":
            module.process_weights_after_loading(torch.bfloat16)


def watch_compilation() -> list[str]:
    """Names of the kernels that are compiled or tuned from now on; the list grows."""
    import triton
    from triton.runtime.autotuner import Autotuner

    found: list[str] = []

    def compiled(*args: Any, **kwargs: Any) -> None:
        fn = kwargs["fn"]
        found.append(f"compiled {fn.module}.{fn.name}")

    triton.knobs.runtime.jit_post_compile_hook = compiled
    bench = Autotuner._bench

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(f"tuned {getattr(self.base_fn, '__module__', '')}.{self.base_fn.__name__}")
        return bench(self, *args, **kwargs)

    Autotuner._bench = tuned
    try:
        from backend_core.launch import cuda as cuda_source
    except ModuleNotFoundError:
        return found
    construct = cuda_source.CudaKernel.__init__

    def constructed(self: Any, source: Path, name: str, *args: Any, **kwargs: Any) -> None:
        found.append(f"compiled kda_backend.{source.name}:{name}")
        construct(self, source, name, *args, **kwargs)

    cuda_source.CudaKernel.__init__ = constructed  # type: ignore[method-assign]
    return found


def profiled(count: int, length: int, call: Any) -> dict[str, Any]:
    kernels = decode_vllm.kernels_of(lambda: call(count, length))
    by_kernel = {name: us / 1e3 for name, (us, _) in kernels.items()}
    launches = sum(number for _, number in kernels.values())
    top = sorted(by_kernel.items(), key=lambda item: -item[1])[:40]
    total = sum(by_kernel.values())
    print(f"{count} x {length}: {total:.1f} ms on the GPU in {launches} launches;", flush=True)
    print("   ", "; ".join(f"{name[:48]} {ms:.2f}" for name, ms in top[:12]), flush=True)
    return {
        "n": count,
        "length": length,
        "gpu_ms": total,
        "launches": launches,
        "kernels_ms": dict(top),
    }


def host_profile(call: Any) -> list[dict[str, Any]]:
    """Python functions of 20 calls of one prompt of 512 tokens, by their own time."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        call()
    profile.disable()
    rows = []
    for (file, _, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items():
        parts = list(Path(file).with_suffix("").parts)
        if "site-packages" in parts:
            parts = parts[parts.index("site-packages") + 1 :]
        roots = [i for i, part in enumerate(parts) if part in ("vllm", "torch", "triton", *OURS)]
        where = ".".join(parts[roots[0] :] if roots else parts[-1:])
        rows.append(
            {
                "function": f"{where}:{name}",
                "calls": calls / 20,
                "own_ms": 1e3 * own / 20,
                "ms": 1e3 * total / 20,
            }
        )
    rows.sort(key=lambda row: -row["own_ms"])
    ours = sum(row["own_ms"] for row in rows if row["function"].startswith(OURS))
    total_ms = sum(row["own_ms"] for row in rows)
    print(f"host, with the profiler's own time: {total_ms:.1f} ms a call, {ours:.1f} in our files")
    return rows[:80]


def tokens_of(output: Any) -> dict[str, Any]:
    """Greedy tokens of one prompt; at each the two best tokens and their log-probabilities."""
    completion = output.outputs[0]
    best = [
        sorted(((entry.logprob, token) for token, entry in at.items()), reverse=True)[:2]
        for at in completion.logprobs
    ]
    return {
        "tokens": list(completion.token_ids),
        "best": [[token for _, token in pair] for pair in best],
        "logprobs": [[round(logprob, 5) for logprob, _ in pair] for pair in best],
    }


def compare(args: argparse.Namespace) -> None:
    stock, ours = (json.loads(path.read_text()) for path in (args.stock, args.ours))
    result: dict[str, Any] = {
        "script": "benchmarks/serve_vllm.py",
        "environment": ours["environment"],
        "new_tokens": NEW_TOKENS,
    }
    if "greedy" in stock and "greedy" in ours:
        a, b = stock["greedy"], ours["greedy"]
        if a["lengths"] != b["lengths"]:
            raise SystemExit(f"{args.stock} and {args.ours} are runs of different prompts")
        itself = agreement(a["together"][:APART], a["apart"], None)
        noise = itself["rounding_nats"]["max"]
        result |= {
            "prompts": len(a["lengths"]),
            "stock together and apart": itself,
            "ours together and apart": agreement(b["together"][:APART], b["apart"], noise),
            "stock and ours, together": agreement(a["together"], b["together"], noise),
            "stock and ours, apart": agreement(a["apart"], b["apart"], noise),
            "all margins of stock, median": median(
                [margin(row, i) for row in a["together"] for i in range(NEW_TOKENS)]
            ),
        }
    result["calls"] = [
        {
            "n": x["n"],
            "length": x["length"],
            "stock_ms": x["ms"],
            "ours_ms": y["ms"],
            "speedup": x["ms"] / y["ms"],
        }
        for x, y in zip(
            stock["shapes"], ours["shapes"], strict=False
        )  # a run may have been cut off
    ]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result.items():
        if isinstance(value, dict) and "same" in value:
            print(
                f"{name}: of {value['prompts']} prompts {value['same']} the same, first token"
                f" {value['first_token_same']}; {value['explained']} of {len(value['partings'])}"
                f" partings explained; rounding {value['rounding_nats']}"
            )
    for row in result["calls"]:
        print(f"{row['n']} x {row['length']}: {row['stock_ms']:.1f} -> {row['ours_ms']:.1f} ms")


def agreement(
    a: list[dict[str, Any]], b: list[dict[str, Any]], noise: float | None
) -> dict[str, Any]:
    """How many prompts have the same tokens, and why the others part.

    Up to where two runs part they have read the same tokens, so that the margin between the same
    two best tokens differs by rounding alone: ``rounding_nats``. A parting is explained where a's
    margin is at most ``noise``, or, without it, at most the largest of ``rounding_nats`` itself.
    """
    moved, partings = [], []
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        for i in range(NEW_TOKENS):
            if set(x["best"][i]) == set(y["best"][i]):
                same_order = x["best"][i] == y["best"][i]
                moved.append(abs(margin(x, i) - (1 if same_order else -1) * margin(y, i)))
            if x["tokens"][i] != y["tokens"][i]:
                partings.append({"prompt": number, "token": i, "margin_nats": margin(x, i)})
                break
    limit = noise if noise is not None else max(moved, default=0.0)
    return {
        "prompts": len(a),
        "same": len(a) - len(partings),
        "first_token_same": sum(
            x["tokens"][0] == y["tokens"][0] for x, y in zip(a, b, strict=True)
        ),
        "rounding_nats": {
            "positions": len(moved),
            "median": median(moved) if moved else 0.0,
            "max": max(moved, default=0.0),
        },
        "limit_nats": limit,
        "explained": sum(parting["margin_nats"] <= limit for parting in partings),
        "partings": partings,
    }


def margin(row: dict[str, Any], i: int) -> float:
    """How far the second best token is behind the best, in nats."""
    first, second = row["logprobs"][i]
    return float(first - second)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def environment(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import triton
    import vllm

    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(": ")[1] for line in info if line.startswith("model name")]
    return {
        "gpu": torch.cuda.get_device_name(),
        "cpu": cpu[0] if cpu else None,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": vllm.__version__,
        "attention_backend": args.attention_backend,
        "layers": args.layers,
        "graphs": args.graphs,
        "dense": args.dense,
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    main()
