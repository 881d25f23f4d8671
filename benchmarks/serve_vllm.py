"""Kimi-Linear with random weights in a real vLLM engine on one GPU, upstream and with the flag.

    python -m benchmarks.serve_vllm pair CONFIG_DIR vllm033_kimi48b.json --flag KDA
    python -m benchmarks.serve_vllm run side.json --config CONFIG_DIR [--attention-backend KDA]

CONFIG_DIR holds the model's config.json; no checkpoint is needed. ``pair`` runs ``run`` per side,
one after the other on the GPU, each in a process with empty compile caches, and joins their files.
By default the engine runs as a server on an H200 does: its own graphs, its own prefix caching (no
prompt is asked twice), 8,192 tokens per step, up to 1,024 sequences.

Parts of ``run``, on one load of the model:

- first: the first request after the load.
- calls: prompts in, one token of each out; medians, and into which steps the engine cut them.
- decode: a step of 1, 16 and 64 sequences after 128 tokens and after 32k; kernels of a short one.
- mixed: 48 requests of 300 to 5,000 tokens, 32 to 127 out, all at once, twice after one that is not
  timed.
- router: how many distinct experts are chosen per layer. Random weights say nothing about a real
  server's time where the router chooses the same experts for all tokens.
- tokens: greedy ones for 64 prompts, all at once and 16 of them one after the other.
- profile: kernels, how busy the GPU is, and Python functions.

Weights are drawn where vLLM loads them, before it derives others from them and captures graphs:
weights set later are not those that a captured graph reads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median_high as median
from typing import Any

from benchmarks.engines import decode_vllm, serve_agreement, serve_profile, serve_work
from benchmarks.engines.serve_work import SideFile, call_name, prompt_of, row, say

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

BUDGET, SEQUENCES = 8192, 1024  # what `vllm serve` takes on an H200
PROFILED = ((1, 512), (1, 2048), (1, 8192))
HOST_CALL, HOST_CALLS = (1, 2048), 10
ROUTED, ROUTED_DECODES = (128, 512, 1024), 63
PARTS = ("first", "calls", "decode", "mixed", "router", "tokens", "profile", "long")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    two = commands.add_parser("pair", help="both sides")
    two.add_argument("config", type=Path)
    two.add_argument("out", type=Path)
    two.add_argument("--flag", default="KDA", help="of --attention-backend (CUSTOM before 0.32)")
    two.add_argument("--limit", type=float, default=540.0, help="for both sides, seconds")
    one = commands.add_parser("run", help="one side")
    one.add_argument("out", type=Path)
    one.add_argument("--config", type=Path, required=True)
    one.add_argument("--attention-backend")
    one.add_argument("--until", type=float, default=math.inf, help="no part starts later; time()")
    for command in (two, one):
        command.add_argument("--layers", type=int, default=27)
        command.add_argument(
            "--graphs",
            choices=("default", "decode", "none"),
            default="default",
            help="decode: CUDA graphs of decode steps alone, nothing compiled; none: eager",
        )
        command.add_argument(
            "--dense",
            action="store_true",
            help="no experts: with random weights their choice turns rounding into other tokens",
        )
        command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
        command.add_argument("--memory", type=float, help="share of the GPU's memory")
        command.add_argument("--no-prefix-caching", action="store_true")
    args = parser.parse_args()
    if not (args.config / "config.json").is_file():
        parser.error(f"expected a folder with a config.json, got {args.config}")
    return pair(args) if args.command == "pair" else run(args)


def pair(args: argparse.Namespace) -> int:
    common = ["--config", str(args.config), "--layers", str(args.layers), "--graphs", args.graphs]
    common += ["--parts", *args.parts]
    common += ["--dense"] if args.dense else []
    common += ["--no-prefix-caching"] if args.no_prefix_caching else []
    common += ["--memory", str(args.memory)] if args.memory else []
    # ours first: what fails in it shows before upstream's minutes are spent
    sides = {"flag": [*common, "--attention-backend", args.flag], "upstream": common}
    return serve_work.pair("benchmarks.serve_vllm", sides, args.out, args.limit, args.graphs)


def run(args: argparse.Namespace) -> int:
    begin = time.perf_counter()
    import vllm  # noqa: F401

    import_s = time.perf_counter() - begin
    while_loading = watch_load()
    begin = time.perf_counter()
    llm = load(args)
    load_s = time.perf_counter() - begin
    loading = {key: round(value, 2) for key, value in while_loading.items()}
    log = decode_vllm.StepLog(llm)
    head = {
        "head": versions(),
        "environment": environment(args),
        "engine": engine_of(llm),
        "layers": llm.apply_model(layer_classes)[0],
        "import_s": import_s,
        "memory_after_load_mib": serve_work.memory_used_mib(),
        "while_loading": loading,
        "compiled_after_load": watch_compilation(),
    }
    side = SideFile(args.out, args.until, head)
    say(f"{head['head']['engine']}, {head['engine']}")
    say(f"layers: {head['layers']}")
    if args.attention_backend and not any(k.startswith("kda_backend") for k in head["layers"]):
        raise SystemExit(
            f"expected KDA layers of kda_backend with --attention-backend {args.attention_backend},"
            f" got {head['layers']}"
        )
    side.add(row("model load", "load", 1e3 * load_s, **loading))
    measure(side, Asked(llm, log), args.parts)
    side.save()
    compiled = side.data["compiled_after_load"]
    ours = [name for name in compiled if any(part in name for part in serve_profile.OURS)]
    say(f"{len(compiled)} kernels compiled or tuned after load, {len(ours)} of them ours")
    return bool(side.data["failed"])


class Asked:
    """An engine with prompts that it has not seen before."""

    def __init__(self, llm: Any, log: decode_vllm.StepLog) -> None:
        self.llm, self.log = llm, log
        self.rng = random.Random(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [prompt_of(self.rng, length) for _ in range(count)]

    def call(self, count: int, length: int) -> float:
        """Seconds of one token after each of ``count`` new prompts."""
        return self.generate(self.prompts(count, length), 1)

    def generate(self, prompts: list[list[int]], new_tokens: int | list[int]) -> float:
        """Seconds in which the engine answers all prompts with greedy tokens."""
        import torch
        from vllm import SamplingParams

        numbers = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
        sampling = [
            SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False)
            for n in numbers
        ]
        batch = [{"prompt_token_ids": prompt} for prompt in prompts]
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.llm.generate(batch, sampling, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - start


def measure(side: SideFile, asked: Asked, parts: list[str]) -> None:
    """The parts in the order of their worth, as far as the time goes."""
    if "first" in parts:
        side.part("first request", 10, lambda: side.add(first_row(asked)))
    if "calls" in parts:
        side.part("calls", 25, lambda: call_rows(side, asked))
    if "decode" in parts:
        for count, length in serve_work.DECODE_SHORT:
            side.part(
                f"decode {count}", 5, lambda c=count, n=length: decode(side, asked, c, n, True)
            )
    if "mixed" in parts:
        load = lambda: side.add(serve_work.mixed_row(asked.generate))  # noqa: E731
        side.part("mixed load", 20, load)
    if "router" in parts:
        side.part("router", 5, lambda: router(asked))
    if "tokens" in parts:
        side.part("tokens", 8, lambda: greedy(asked))
        if "tokens" in side.data:
            side.data["tokens_summary"] = serve_agreement.collapse(side.data["tokens"])
            say(f"tokens: {side.data['tokens_summary']}")
    if "profile" in parts:
        side.part("profiles", 10, lambda: profiles(asked))
        side.part("host", 5, lambda: host(asked))
    if "long" in parts:
        for count, length in serve_work.DECODE_LONG:
            needs = 3 + 2.5e-5 * count * length
            side.part(
                f"decode {count}, long",
                needs,
                lambda c=count, n=length: decode(side, asked, c, n, False),
            )


def first_row(asked: Asked) -> dict[str, Any]:
    return row("first request, 1 × 2,048", "first", 1e3 * asked.call(1, 2048))


def call_rows(side: SideFile, asked: Asked) -> None:
    for (count, length), times in serve_work.call_times(asked.call).items():
        steps = asked.log.of(lambda c=count, n=length: asked.call(c, n))
        details = {"least_ms": min(times), "steps": [tokens for _, tokens in steps]}
        side.add(row(call_name(count, length), "call", median(times), **details, runs_ms=times))


def decode(side: SideFile, asked: Asked, count: int, length: int, kernels: bool) -> Any:
    prompts = asked.prompts(count, length)
    side.add(
        decode_vllm.step_row(
            asked.log, count, length, BUDGET, lambda new: asked.generate(prompts, new)
        )
    )
    if not kernels:
        return None
    others = [asked.prompts(count, length) for _ in range(2)]
    found = decode_vllm.kernels_of_a_step(lambda new: asked.generate(others.pop(), new))
    shown = {k: round(v, 3) for k, v in found.items() if k != "kernels"}
    say(f"  kernels of a decode step of {count}: {shown}")
    return found


def router(asked: Asked) -> dict[str, Any]:
    """Distinct experts per layer: of the first tokens of a prompt, and of a decode step."""
    with watch_router() as chosen:
        asked.call(1, BUDGET)
        prompt = [per_step[0] for per_step in chosen.values()]
        for per_step in chosen.values():
            per_step.clear()
        # one step reads the short prompts whole, the next decodes them beside a long prompt's piece
        short = asked.prompts(ROUTED_DECODES, 48)
        asked.generate([*short, *asked.prompts(1, 2 * BUDGET)], 3)
        steps = [per_step[1] for per_step in chosen.values() if len(per_step) > 1]
    found = experts_of(prompt, [ids[:ROUTED_DECODES] for ids in steps])
    for what, counts in found["distinct"].items():
        say(f"  experts chosen by {what}: mean {sum(counts) / len(counts):.0f}, {counts}")
    return found


def experts_of(prompt: list[Any], decodes: list[Any]) -> dict[str, Any]:
    """Counts per layer from expert ids ``[tokens, chosen]``, of a prompt and of a decode step.

    Raises:
        ValueError: no router was seen.
    """
    if not prompt:
        raise ValueError("expected the choices of at least one router, got none")
    windows = {f"the first {n} tokens": [ids[:n] for ids in prompt] for n in ROUTED}
    windows[f"{ROUTED_DECODES} decodes"] = decodes
    return {
        "chosen_per_token": int(prompt[0].shape[1]),
        "distinct": {
            what: [len(set(ids.flatten().tolist())) for ids in layers]
            for what, layers in windows.items()
            if layers
        },
        "largest_share": [max(ids.flatten().bincount().tolist()) / ids.shape[0] for ids in prompt],
    }


class watch_router:  # noqa: N801 (a context manager)
    """Collects each router's choices [tokens, chosen], on the host, where no graph is replayed."""

    def __enter__(self) -> dict[int, list[Any]]:
        from vllm.model_executor.layers.fused_moe.router import base_router, fused_moe_router

        classes = (fused_moe_router.FusedMoERouter, base_router.BaseRouter)
        self.owner = [
            c
            for c in classes
            if "select_experts" in vars(c)
            and not getattr(c.select_experts, "__isabstractmethod__", False)
        ][-1]
        self.select = select = self.owner.select_experts
        chosen: dict[int, list[Any]] = {}

        def watched(this: Any, *args: Any, **options: Any) -> Any:
            weights, ids = select(this, *args, **options)
            if ids.shape[0] > ROUTED[-1]:
                chosen.setdefault(id(this), []).append(ids.long().cpu())
            return weights, ids

        self.owner.select_experts = watched
        return chosen

    def __exit__(self, *_: object) -> None:
        self.owner.select_experts = self.select


def profiles(asked: Asked) -> list[dict[str, Any]]:
    found = []
    for count, length in PROFILED:
        profile = serve_profile.gpu_profile(lambda c=count, n=length: asked.call(c, n))
        found.append({"what": call_name(count, length), **profile})
        top = list(profile["kernels"].items())[:10]
        say(
            f"  {call_name(count, length)}: GPU {profile['gpu_ms']:.1f} ms in"
            f" {profile['launches']} launches, busy {profile['busy']:.0%} of"
            f" {profile['span_ms']:.1f} ms"
        )
        say("    " + "; ".join(f"{name[:44]} {ms:.2f} in {n}" for name, (ms, n) in top))
    return found


def host(asked: Asked) -> dict[str, Any]:
    found = serve_profile.host_profile(lambda: asked.call(*HOST_CALL), HOST_CALLS)
    say(f"  {call_name(*HOST_CALL)}, Python with its profiler: {found['all_ms']:.1f} ms a call,")
    say(f"    {found['ours_ms']:.1f} ms of it in this package's files; own time of functions:")
    top = found["functions"][:12]
    say("    " + "; ".join(f"{f['function'][-56:]} {f['own_ms']:.2f}" for f in top))
    return found


def greedy(asked: Asked) -> dict[str, Any]:
    from vllm import SamplingParams

    rng = random.Random(7)
    lengths = [rng.randint(1, 40) ** 2 + rng.randint(1, 63) for _ in range(serve_agreement.PROMPTS)]
    batch = [{"prompt_token_ids": prompt_of(rng, length)} for length in lengths]
    sampling = SamplingParams(
        max_tokens=serve_agreement.NEW_TOKENS,
        temperature=0.0,
        logprobs=2,
        ignore_eos=True,
        detokenize=False,
    )
    together = asked.llm.generate(batch, sampling, use_tqdm=False)
    first = batch[: serve_agreement.APART]
    apart = [asked.llm.generate([one], sampling, use_tqdm=False)[0] for one in first]
    return {
        "lengths": lengths,
        "together": [serve_agreement.tokens_of(output) for output in together],
        "apart": [serve_agreement.tokens_of(output) for output in apart],
    }


def load(args: argparse.Namespace) -> Any:
    """The engine, in this process."""
    from vllm import LLM

    register_loader()
    arguments: dict[str, Any] = {}
    if args.attention_backend:
        arguments["attention_backend"] = args.attention_backend
    if args.memory:
        arguments["gpu_memory_utilization"] = args.memory
    if args.no_prefix_caching:
        arguments["enable_prefix_caching"] = False
    if args.graphs == "decode":
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [count for count, _ in serve_work.DECODE_SHORT],
        }
    return LLM(
        model=model_directory(args.config, args.layers, args.dense),
        load_format="drawn",
        skip_tokenizer_init=True,
        max_model_len=70000,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQUENCES,
        enforce_eager=args.graphs == "none",
        seed=0,
        **arguments,
    )


def register_loader() -> None:
    """A load format ``drawn``, which fills a model with `draw_weights`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("drawn")
    class DrawnModelLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model)


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


def layer_classes(model: Any) -> dict[str, int]:
    """How many attention layers of which class a model has."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            found[kind] = found.get(kind, 0) + 1
    return found


def engine_of(llm: Any) -> dict[str, Any]:
    """The engine's settings after it has read its arguments: graphs, caching, blocks."""
    config = llm.llm_engine.vllm_config
    compilation, cache = config.compilation_config, config.cache_config
    sizes = compilation.cudagraph_capture_sizes or []
    return {
        "compilation_mode": str(compilation.mode),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "cudagraph_sizes": f"{len(sizes)} up to {max(sizes, default=0)}",
        "cute_dsl": importlib.util.find_spec("cutlass") is not None,
        "breakable": os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1",
        "model_runner_v2": bool(getattr(config, "use_v2_model_runner", False)),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "mamba_cache_mode": str(getattr(cache, "mamba_cache_mode", None)),
        "block_size": cache.block_size,
        "blocks": cache.num_gpu_blocks,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }


def watch_load() -> dict[str, float]:
    """Seconds that go into Triton's tuning and compilation from now on; tuning compiles too."""
    import triton
    from triton.runtime.autotuner import Autotuner

    spent = {"tuning_s": 0.0, "tuned_configurations": 0, "compile_s": 0.0, "compiled": 0}
    bench: Callable[..., Any] = Autotuner._bench

    def tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return bench(self, *args, **kwargs)
        finally:
            spent["tuning_s"] += time.perf_counter() - begin
            spent["tuned_configurations"] += 1

    def compiled(*, times: Any, cache_hit: bool, **_: Any) -> None:
        spent["compile_s"] += 0.0 if cache_hit else times.total / 1e6
        spent["compiled"] += not cache_hit

    Autotuner._bench = tuned
    triton.knobs.compilation.listener = compiled
    return spent


def watch_compilation() -> list[str]:
    """Names of the kernels that are compiled or tuned from now on; the list grows."""
    import triton
    from triton.runtime.autotuner import Autotuner

    found: list[str] = []

    def compiled(*args: Any, **kwargs: Any) -> None:
        fn = kwargs["fn"]
        found.append(f"compiled {fn.module}.{fn.name}")

    triton.knobs.runtime.jit_post_compile_hook = compiled
    bench: Callable[..., Any] = Autotuner._bench

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


def versions() -> dict[str, str]:
    import torch
    import triton
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(),
        "engine": f"vllm {vllm.__version__}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def environment(args: argparse.Namespace) -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(": ")[1] for line in info if line.startswith("model name")]
    return {
        "cpu": cpu[0] if cpu else None,
        "cores": os.cpu_count(),
        "attention_backend": args.attention_backend,
        "layers": args.layers,
        "graphs": args.graphs,
        "dense": args.dense,
    }


if __name__ == "__main__":
    raise SystemExit(main())
