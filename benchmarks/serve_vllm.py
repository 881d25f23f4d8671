"""Kimi-Linear with random weights in a real vLLM engine, upstream and with the flag.

    python -m benchmarks.serve_vllm pair CONFIG_DIR vllm033_kimi48b.json --flag KDA
    python -m benchmarks.serve_vllm run side.json --config CONFIG_DIR [--attention-backend KDA]

CONFIG_DIR holds the model's config.json; no checkpoint is needed. ``pair`` runs ``run`` per side,
one after the other on the GPU, each in a process with empty compile caches, and joins their files.
By default the engine runs as a server on an H200 does: its own graphs, its own prefix caching (no
prompt is asked twice but for tokens), 8,192 tokens per step, up to 1,024 sequences. ``--ranks`` are
GPUs of one host, which share the model by tensor parallelism.

``--layers``, ``--heads`` and ``--experts`` cut the model; four heads are those of one rank of eight
of Kimi-Linear-48B. ``--beside`` loads all sides at the same time, with small caches, and times them
one after the other; ``--variant`` adds a side: upstream with the graph sizes that the flag chooses
by itself, or the flag with another option.

``--drafts`` are looked up in prompt and answer, or with ``--draft-layer`` come from the model's own
MTP layer, whose weights and the embeddings are then drawn so that many drafts are right. A decode
step verifies the drafts of all sequences; the file holds how many were accepted.

Parts of ``run``, on one load of the model:

- first: the first request after the load.
- calls: prompts in, one token of each out; medians, and into which steps the engine cut them.
- decode: a step of 1, 16, 64 and 256 sequences after 128 tokens, and of up to 64 after 32k.
- shared: a step of 64 sequences behind one prompt of 8k.
- mixed: 64 requests of 300 to 5,000 tokens, 32 to 127 out, all at once, twice after one that is not
  timed.
- tokens: greedy ones for 64 prompts, all at once and one after the other.
- long_tokens, only where it is named: those for 16 prompts of 4,096 to 9,000 tokens, again from the
  prefix cache, and with other ends.
- crowd and long_crowd, only where they are named: more requests at once than have room
  (`benchmarks.crowd`).
- profile: of each rank, kernels and how busy the GPU is, in calls and in a step of 256 sequences.

Weights are drawn where vLLM loads them, before it derives others from them and captures graphs:
weights set later are not those that a captured graph reads.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from backend_core.engines.after_import import after_import
from benchmarks.engines import (
    decode_steps,
    decode_vllm,
    serve_agreement,
    serve_profile,
    serve_sides,
    serve_work,
)
from benchmarks.engines.serve_model import (
    copy_decode_weights,
    draw_weights,
    environment,
    model_directory,
    register_config,
    text_config,
    versions,
    with_dense_attention,
)
from benchmarks.engines.serve_work import BUDGET, SideFile, call_name, decode_name, row, say
from benchmarks.engines.vllm_server import plant
from kda_backend.engines import prefill_graphs

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions to workers of ours

SEQUENCES = 1024  # what `vllm serve` takes on an H200
PROFILED = ((1, 128), (1, 512), (1, 2048), (1, 8192))
PROFILED_DECODE = (256, 128)
PARTS = (
    *("first", "calls", "decode", "mixed", "tokens", "profile", "long", "shared", "long_tokens"),
    *serve_work.CROWDS,
)
CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))  # vLLM's own sizes on Hopper
BESIDE = {"kv_cache_memory_bytes": 8 * 2**30, "gpu_memory_utilization": 0.2}


def main() -> int:
    variants = (serve_work.DETERMINISTIC, serve_sides.UPSTREAM_GRAPHS)
    parser, two, _ = serve_sides.commands(__doc__, PARTS, variants)
    two.add_argument("--limit", type=float, default=540.0, help="for all sides, seconds")
    return serve_sides.started(parser, pair, run)


def pair(args: argparse.Namespace) -> int:
    sides = serve_sides.sides_of(args, ["--attention-backend", args.flag], [])
    module = "benchmarks.serve_vllm"
    spread = args.ranks if args.spread else 0
    return serve_sides.pair(
        module, sides, args.out, args.limit, is_beside=args.beside, spread_ranks=spread
    )


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` beside those that `drawn_engine` gives."""
    options: dict[str, Any] = dict(BESIDE) if args.turns and not args.own_gpu else {}
    if args.ranks > 1:
        options["tensor_parallel_size"] = args.ranks
    if args.state:
        options["mamba_ssm_cache_dtype"] = args.state
    if args.drafts:
        how: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        if args.draft_layer:  # of the whole configuration: vLLM knows a draft layer by its type
            how = {"method": "mtp", "model": model_directory(args)}
            linear = text_config(args).get("linear_attn_config", {})
            # Kimi-K3's records are vLLM's own
            options["use_replayssm"] = linear.get("use_full_rank_gate", False)
            # states that Kimi-K3's layers gather in a prefill of many requests are not in the rest
            options.setdefault("gpu_memory_utilization", 0.7)
        options["speculative_config"] = {"num_speculative_tokens": args.drafts, **how}
        options["disable_log_stats"] = False  # which count accepted drafts
        if "kv_cache_memory_bytes" in options:
            options["kv_cache_memory_bytes"] += 4 * 2**30  # states after drafted tokens
    if args.variant == serve_sides.UPSTREAM_GRAPHS:
        hidden_size = text_config(args)["hidden_size"]
        most = prefill_graphs.most_tokens(hidden_size, args.ranks, BUDGET)
        larger = [size for size in prefill_graphs.sizes(most) if size > CAPTURED[-1]]
        options["compilation_config"] = {"cudagraph_capture_sizes": [*CAPTURED, *larger]}
    common = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SEQUENCES}
    return {"max_model_len": 70000, **common, **options}


def run(args: argparse.Namespace) -> int:
    asked = Asked()
    asked.take(args)
    import vllm  # noqa: F401

    begin = time.perf_counter()
    say_paths_of_layers()
    with tempfile.TemporaryDirectory() as place:
        if args.ranks > 1:
            plant(Path(place), "vllm.general_plugins", "benchmarks.serve_vllm:draw_at_load")
        model = model_directory(args, only_text=True)
        llm = drawn_engine(args.attention_backend, model, **engine_arguments(args))
    load_s = time.perf_counter() - begin
    asked.llm, asked.log = llm, decode_vllm.StepLog(llm)
    head = {
        **head_of(llm),
        "environment": environment(args, args.attention_backend),
        "memory_after_load_mib": serve_work.memory_used_mib(),
    }
    side = SideFile(args.out, args.until, head)
    say(f"{head['head']['engine']}, {head['engine']}")
    expect_layers(head["layers"], bool(args.attention_backend))
    side.add(row("model load", "load", 1e3 * load_s))
    measure(side, asked, args.parts)
    side.save()
    return bool(side.data["failed"])


def expect_layers(layers: dict[str, int], flag: bool, least: int = 1) -> None:
    """End the program where the KDA layers, ``least`` of them or more, are not the asked side's."""
    say(f"layers: {layers}")
    ours = sum(count for kind, count in layers.items() if kind.startswith("kda_backend"))
    if ours < least if flag else ours:
        side = "kda_backend" if flag else "vLLM"
        raise SystemExit(f"expected KDA layers of {side}, got {layers}")


class Asked(serve_work.Asked):
    """An engine in this process, and the log of its steps."""

    llm: Any
    log: decode_vllm.StepLog

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        import torch

        asked = self.requests(prompts, new_tokens)
        torch.cuda.synchronize()
        self.log.most_running = 0
        start = time.perf_counter()
        self.llm.generate(*asked, use_tqdm=False)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.most_running = self.log.most_running
        return seconds

    def greedy(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        asked = self.requests(prompts, [serve_agreement.NEW_TOKENS] * len(prompts), logprobs=2)
        outputs = self.llm.generate(*asked, use_tqdm=False)
        return [serve_agreement.tokens_of(output) for output in outputs]

    def drafted(self) -> dict[str, Any]:
        """With `decode_vllm.draft_memory_kib`."""
        values = {metric.name: getattr(metric, "value", None) for metric in self.llm.get_metrics()}
        of = "vllm:spec_decode_num_{}_tokens"
        found = {name: values[of.format(name)] for name in ("draft", "accepted")}
        return {**found, **self.llm.collective_rpc(decode_vllm.draft_memory_kib)[0]}

    def forget(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def requests(
        self, prompts: list[list[int]], new_tokens: list[int], logprobs: int | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Prompts and sampling, greedy, as ``LLM.generate`` takes them."""
        from vllm import SamplingParams

        common: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        sampling = [SamplingParams(max_tokens=n, logprobs=logprobs, **common) for n in new_tokens]
        return [{"prompt_token_ids": prompt} for prompt in prompts], sampling


def measure(side: SideFile, asked: Asked, parts: list[str]) -> None:
    """The parts in the order of their worth, as far as the time goes."""

    def steps(count: int, length: int) -> dict[str, Any]:
        cut = asked.log.of(lambda: asked.call(count, length))
        return {"steps": [tokens for _, tokens in cut]}

    if "first" in parts:  # what upstream compiles there takes longer than the rest of a turn
        serve_work.first_part(side, asked)
    if asked.turn is not None:
        serve_work.before_the_turn(side, asked, parts)
        asked.turn.take(side.until)
    if "calls" in parts:
        side.part("calls", 25, lambda: serve_work.call_rows(side, asked, steps))
    if "decode" in parts:
        for count, length in serve_work.DECODE_SHORT:
            work = functools.partial(decode, side, asked, count, length)
            side.part(f"decode {count}", 5, work)
    if "mixed" in parts:
        serve_work.mixed_part(side, asked)
    serve_work.crowd_parts(side, asked, parts)
    if asked.turn is None:
        serve_work.tokens_parts(side, asked, parts)
    if "profile" in parts:
        side.part("profiles", 10, lambda: profiles(asked))
    if "long" in parts:
        for count, length in serve_work.DECODE_LONG:
            work = functools.partial(decode, side, asked, count, length)
            side.part(f"decode {count}, long", 3 + 2.5e-5 * count * length, work)
    if "shared" in parts:
        side.part("shared prompt", 15, lambda: behind_one_prompt(side, asked))


def behind_one_prompt(side: SideFile, asked: Asked) -> None:
    """A decode step of requests of 128 tokens each behind one prompt, which is cached."""
    count, length = serve_work.SHARED_PROMPT
    (first,) = asked.prompts(1, length)
    asked.generate([first], [1])
    prompts = [first + own for own in asked.prompts(count, 128)]
    what = f"{decode_name(count, length)} of one prompt"
    new = [decode_steps.new_tokens(count, 128, BUDGET)] * count
    work = functools.partial(asked.generate, prompts, new)
    side.add(decode_steps.step_row(asked.log, count, work, what))


def decode(side: SideFile, asked: Asked, count: int, length: int) -> None:
    new = [decode_steps.new_tokens(count, length, BUDGET, asked.drafts)] * count
    work = functools.partial(asked.generate, asked.prompts(count, length), new)
    name = decode_name(count, length)
    side.add(decode_steps.step_row(asked.log, count, work, name, asked.drafts))


def profiles(asked: Asked) -> list[dict[str, Any]]:
    """Of each call and of a decode step, the profile of each rank."""
    found = []
    for shape in PROFILED:
        asked.call(*shape)
        asked.llm.collective_rpc(begin_trace)
        asked.call(*shape)
        ranks = asked.llm.collective_rpc(end_trace)
        found += serve_profile.shown(call_name(*shape), ranks)
    count, length = PROFILED_DECODE
    new = [decode_steps.new_tokens(count, length, BUDGET, asked.drafts)] * count
    work = functools.partial(asked.generate, asked.prompts(count, length), new)
    asked.llm.collective_rpc(begin_trace)
    steps = decode_steps.pure_steps_ms(asked.log.of(work), count * (1 + asked.drafts))
    ranks = asked.llm.collective_rpc(end_trace, args=(sum(steps), len(steps)))
    return found + serve_profile.shown(decode_name(count, length), ranks)


def begin_trace(worker: Any) -> None:
    worker.trace = serve_profile.Trace()


def end_trace(worker: Any, last_ms: float = math.inf, steps: int = 1) -> dict[str, Any]:
    spans = worker.__dict__.pop("trace").spans()
    return serve_profile.summary(serve_profile.last(spans, last_ms), steps)


def drawn_engine(attention_backend: str | None, model: str, **options: Any) -> Any:
    """An engine in this process with random weights."""
    from vllm import LLM

    register_loader()
    register_config(Path(model))
    if attention_backend:
        options["attention_backend"] = attention_backend
    options |= {"load_format": "drawn", "hf_overrides": with_dense_attention}
    return LLM(model=model, skip_tokenizer_init=True, seed=0, **options)


def draw_at_load() -> None:
    """In a worker's process: the weights of `drawn_engine`, and the paths of prefills."""
    register_loader()
    say_paths_of_layers()


def say_paths_of_layers() -> None:
    """Have this package's prefills say which paths they take."""
    after_import("kda_backend.prefill.paths", serve_work.say_paths)


def head_of(llm: Any) -> dict[str, Any]:
    """The head of a side's file."""
    layers = llm.apply_model(layer_classes)[0]
    return {"head": versions("vllm"), "engine": engine_of(llm), "layers": layers}


def register_loader() -> None:
    """A load format ``drawn``, which fills a model with `draw_weights`; GLM's draft layer, for
    which vLLM makes an indexer's buffer where attention is dense too, goes without it."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("drawn")
    class DrawnModelLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model)
            copy_decode_weights(model)

    def exchange(mtp: Any) -> None:
        layer = mtp.Glm5NextDecoderLayer
        mtp.get_sparse_topk_buffer_width = lambda config: 0
        mtp.Glm5NextDecoderLayer = lambda **given: layer(**{**given, "topk_indices_buffer": None})

    after_import("vllm.models.glm5next.common.mtp", exchange)


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


if __name__ == "__main__":
    raise SystemExit(main())
