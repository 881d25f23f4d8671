"""Kimi-Linear with random weights in a real sglang engine, upstream and with the flag.

    python -m benchmarks.serve_sglang pair CONFIG_DIR sglang_kimi48b.json [--budget 585]
    python -m benchmarks.serve_sglang run side.json --config CONFIG_DIR [--flag]

The twin of `benchmarks.serve_vllm`, with the same prompts, rows, options and file; other models'
configurations are in `engines/configs/` and run without their vision towers. The engine runs in its
default mode, on sglang's triton backend for full attention on both sides, which needs no library of
FlashAttention; ``--full-attention`` names another. Its scheduler is another process, in which a
plug-in draws the weights as sglang initialises them and writes down when each step begins. Kernels
come from sglang's own profiler.

``--budget`` is of the whole command, both loads of the model included. A part that would not end in
time is left out and named in ``left_out``, and what has been measured is in the file.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engines import (
    decode_steps,
    serve_agreement,
    serve_profile,
    serve_sides,
    serve_work,
)
from benchmarks.engines.serve_model import (
    draw_weights,
    environment,
    model_directory,
    text_config,
    versions,
)
from benchmarks.engines.serve_work import BUDGET, SideFile, call_name, decode_name, row, say
from benchmarks.engines.vllm_server import plant
from benchmarks.serve_vllm import say_paths_of_layers
from kda_backend.engines import prefill_graphs

os.environ.setdefault("HF_HUB_OFFLINE", "1")

STEP_LOG = "KDA_DSV4_STEP_LOG"  # the folder of `SchedulerLog`
PREFILL = 2**31  # tokens of a step that reads prompts, in a log: more than any that decodes
PROFILED = ((1, 128), (1, 512), (1, 2048), (1, 8192))
PROFILED_DECODE = (16, 128)  # more may have no room where they draft
DECODES = (*serve_work.DECODE_SHORT, *serve_work.DECODE_LONG)
SERVED = "KDA layers on"  # of the line that this package writes at model load
FULL_ATTENTION = ("default", "triton")  # sglang's own choice of MLA, which is fa3 on Hopper
PARTS = (
    *("first", "calls", "decode", "mixed", "tokens", "profile", "long_tokens"),
    *serve_work.CROWDS,
)
NO_GRAPHS = "no_prefill_graphs"  # a variant of the flag's side
BESIDE = {"mem_fraction_static": 0.85, "max_total_tokens": 400000, "max_mamba_cache_size": 400}
TOWERS = {
    "kimi_k3": ("KimiK3VisionTower", "KimiK3MultiModalProjector"),
    "glm5_next": ("Glm5NextVisionModel",),
}


def main() -> int:
    variants = (NO_GRAPHS, serve_work.DETERMINISTIC, serve_sides.UPSTREAM_GRAPHS)
    parser, two, one = serve_sides.commands(__doc__, PARTS, variants, vllm=False)
    two.add_argument("--budget", type=float, default=585.0, help="seconds, of the whole command")
    one.add_argument("--flag", action="store_true")
    for command in (two, one):
        command.add_argument(
            "--full-attention",
            choices=FULL_ATTENTION,
            default="triton",
            help="of MLA, on all sides",
        )
    return serve_sides.started(parser, pair, run)


def pair(args: argparse.Namespace) -> int:
    limit = args.budget - serve_sides.GRACE_S
    if limit < 120:
        raise SystemExit(f"--budget must be at least 165 s for two loads, got {args.budget:g}")
    sides = serve_sides.sides_of(args, ["--flag"], ["--full-attention", args.full_attention])
    return serve_sides.pair(
        *("benchmarks.serve_sglang", sides, args.out, limit, SERVED),
        is_beside=args.beside,
        spread_ranks=args.ranks if args.spread else 0,
    )


def run(args: argparse.Namespace) -> int:
    asked = Asked()
    asked.take(args)
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as steps:
        plant(Path(place), "sglang.srt.plugins", "benchmarks.serve_sglang:draw_at_load")
        os.environ[STEP_LOG] = steps
        asked.log = SchedulerLog(Path(steps), asked.drafts)
        if args.variant == serve_sides.UPSTREAM_GRAPHS:
            # captured, upstream's kernel takes logits for step sizes: its layers break the graph
            os.environ["SGLANG_DISABLE_KDA_PREFILL_GRAPH_EXTEND"] = "1"
        say("importing sglang")
        import sglang

        say(f"sglang {sglang.__version__} imported; loading the model")
        begin = time.perf_counter()
        asked.engine = engine = sglang.Engine(**engine_arguments(args))
        load_s = time.perf_counter() - begin
        say(f"loaded in {load_s:.0f} s")
        info = engine.get_server_info()
        head: dict[str, Any] = {
            "script": "benchmarks/serve_sglang.py",
            "head": versions("sglang"),
            "environment": environment(args, "kda" if args.flag else None),
            "engine": engine_of(info),
            "memory_after_load_mib": serve_work.memory_used_mib(),
        }
        side = SideFile(args.out, args.until, head)
        say(f"{head['head']['engine']}, {head['engine']}")
        side.add(row("model load", "load", 1e3 * load_s))
        try:
            measure(side, asked, args.parts, room_of(info))
        finally:
            side.save()
            engine.shutdown()
    return bool(side.data["failed"])


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``."""
    arguments: dict[str, Any] = {
        "model_path": model_directory(args),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_multimodal": False,
        "context_length": 70000,
        "dtype": "bfloat16",
        "random_seed": 0,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "info",
    }
    if args.full_attention != "default":
        arguments["prefill_attention_backend"] = args.full_attention
        arguments["decode_attention_backend"] = args.full_attention
    if args.flag:
        arguments["attention_backend"] = "kda"
    if args.ranks > 1:
        arguments["tp_size"] = args.ranks
    if args.state:
        arguments["mamba_ssm_dtype"] = args.state
    if args.drafts:
        arguments["speculative_algorithm"] = "NGRAM"
        arguments["speculative_num_draft_tokens"] = 1 + args.drafts
        arguments["speculative_ngram_max_bfs_breadth"] = 1
        # sglang's own are 48 with drafts; its attention's logits take 16 GiB for 64 of GLM's
        arguments["max_running_requests"] = 64 if args.draft_layer else 128
    if args.drafts and args.draft_layer:
        arguments["speculative_algorithm"] = "NEXTN"
        arguments["speculative_draft_model_path"] = arguments["model_path"]
        arguments["speculative_num_steps"] = args.drafts
        arguments["speculative_eagle_topk"] = 1
        # what sglang's attention keeps for graphs of drafts is outside of this share
        arguments["mem_fraction_static"] = 0.45
    if args.variant == NO_GRAPHS:
        arguments["disable_prefill_cuda_graph"] = True
    if args.variant == serve_sides.UPSTREAM_GRAPHS:
        text = text_config(args)
        most = prefill_graphs.most_tokens(text["hidden_size"], args.ranks, BUDGET)
        if text.get("q_lora_rank") is not None:
            from kda_backend.engines.sglang_prefill_graphs import ABSORBED_TOKENS

            most = ABSORBED_TOKENS  # the MLA layers of such models stay in the graphs
        arguments["cuda_graph_backend_prefill"] = "breakable"
        arguments["cuda_graph_bs_prefill"] = prefill_graphs.sizes(most)
        arguments["cuda_graph_max_bs_prefill"] = most
    return {**arguments, **(BESIDE if args.turns and not args.own_gpu else {})}


def draw_at_load() -> None:
    """Have sglang's loader of dummy weights draw them at the scale of an initialised model, leave
    vision towers out, say which paths prefills take, and log the scheduler's steps."""
    from backend_core.engines.after_import import after_import

    def exchange(loader: Any) -> None:
        loader.initialize_dummy_weights = draw_weights

    after_import("sglang.srt.model_loader.loader", exchange)
    for model, towers in TOWERS.items():
        leave_out = functools.partial(without_towers, towers=towers)
        after_import(f"sglang.srt.models.{model}", leave_out)
    say_paths_of_layers()
    after_import("sglang.srt.managers.scheduler", log_steps)


def log_steps(module: Any) -> None:
    """Have sglang's scheduler write when each step begins and how many sequences it decodes, 0 for
    a step that reads prompts: a file for each process, in the folder of `STEP_LOG`."""
    upstream = module.Scheduler.run_batch

    @functools.cache
    def file() -> Any:
        return (Path(os.environ[STEP_LOG]) / str(os.getpid())).open("w", buffering=1)

    @functools.wraps(upstream)
    def run_batch(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        mode = batch.forward_mode
        if not mode.is_idle():
            decodes = mode.is_decode() or mode.is_target_verify()
            file().write(f"{time.perf_counter()} {len(batch.reqs) if decodes else 0}\n")
        return upstream(self, batch, *args, **options)

    module.Scheduler.run_batch = run_batch


class SchedulerLog:
    """When sglang's scheduler began which steps; the clock is one for all processes.

    Args:
        folder: where `log_steps` writes; drafts: that a step verifies of each sequence.
    """

    def __init__(self, folder: Path, drafts: int = 0) -> None:
        self._folder, self._drafts = folder, drafts

    def of(self, call: Callable[[], Any]) -> list[tuple[float, int]]:
        """The steps of a call: (time in s, tokens), `PREFILL` tokens where prompts are read.

        Raises:
            RuntimeError: no scheduler has written anything.
        """
        begin = time.perf_counter()
        call()
        files = sorted(self._folder.iterdir())  # of several ranks any one
        if not files:
            raise RuntimeError(f"expected a log of sglang's scheduler in {self._folder}, got none")
        *lines, _ = files[0].read_text().split("\n")
        steps = ((float(at), int(number)) for at, number in map(str.split, lines))
        each = 1 + self._drafts
        return [(at, each * number or PREFILL) for at, number in steps if at >= begin]


def without_towers(module: Any, towers: tuple[str, ...]) -> None:
    """Put modules without weights in the place of a model's vision towers."""
    import torch

    class NoTower(torch.nn.Identity):
        def precompile_fused_rope(self) -> bool:
            return False

        precompile_attention_backend = precompile_fused_rope

    for name in towers:
        setattr(module, name, NoTower)


class Asked(serve_work.Asked):
    """An engine whose scheduler is another process."""

    engine: Any
    log: SchedulerLog

    def __init__(self) -> None:
        super().__init__()
        self.counted = {"draft": 0, "accepted": 0}

    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        begin = time.perf_counter()
        self.engine.generate(input_ids=prompts, sampling_params=sampling(new_tokens))
        return time.perf_counter() - begin

    def greedy(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        outputs = self.engine.generate(
            input_ids=prompts,
            sampling_params=sampling([serve_agreement.NEW_TOKENS] * len(prompts)),
            return_logprob=True,
            top_logprobs_num=2,
        )
        for name, key in (("draft", "proposed"), ("accepted", "correct")):
            found = (output["meta_info"].get(f"spec_num_{key}_drafts", 0) for output in outputs)
            self.counted[name] += sum(found)
        return [tokens_of(output) for output in outputs]

    def drafted(self) -> dict[str, Any]:
        return dict(self.counted)

    def forget(self) -> bool:
        return bool(self.engine.flush_cache().success)


def sampling(new_tokens: list[int]) -> list[dict[str, Any]]:
    return [{"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True} for n in new_tokens]


def room_of(info: dict[str, Any]) -> tuple[float, float]:
    """Requests that run at a time, and tokens of the cache; infinity where it names none."""
    state = (info.get("internal_states") or [{}])[0]
    requests = state.get("effective_max_running_requests_per_dp")
    return requests or math.inf, info.get("max_total_num_tokens") or math.inf


def measure(
    side: SideFile,
    asked: Asked,
    parts: list[str],
    room: tuple[float, float] = (math.inf, math.inf),
) -> None:
    """The parts in the order of their worth, as far as the time and the caches' room go."""
    if "first" in parts:  # what upstream compiles there takes longer than the rest of a turn
        serve_work.first_part(side, asked)
    if asked.turn is not None:
        serve_work.before_the_turn(side, asked, parts)
        asked.turn.take(side.until)
    if "calls" in parts:
        side.part("calls", 25, lambda: serve_work.call_rows(side, asked))
    if "mixed" in parts:
        serve_work.mixed_part(side, asked)
    serve_work.crowd_parts(side, asked, parts)
    if asked.turn is None:
        serve_work.tokens_parts(side, asked, parts)
    if "profile" in parts:
        side.part("profiles", 30, lambda: profiles(asked))
    if "decode" in parts:
        for count, length in DECODES:
            new = new_tokens(count, length, asked.drafts)
            if count > room[0] or count * (length + new) > room[1]:
                name = decode_name(count, length)
                side.leave_out(name, f"{room[0]:,} requests and {room[1]:,} tokens have room")
                continue
            side.part(
                decode_name(count, length),
                4 + 2.5e-5 * count * length,
                functools.partial(add_step, side, asked, count, length),
            )


def new_tokens(count: int, length: int, drafts: int = 0) -> int:
    """As `decode_steps.new_tokens`, and more, as requests begin to decode while others come."""
    return decode_steps.new_tokens(count, length, BUDGET, drafts) + (1 + drafts) * (count // 2)


def add_step(side: SideFile, asked: Asked, count: int, length: int) -> None:
    """The row of a decode step."""
    new = [new_tokens(count, length, asked.drafts)] * count
    work = functools.partial(asked.generate, asked.prompts(count, length), new)
    name = decode_name(count, length)
    side.add(decode_steps.step_row(asked.log, count, work, name, asked.drafts))


def tokens_of(output: dict[str, Any]) -> dict[str, Any]:
    """As `serve_agreement.tokens_of`, of what sglang returns."""
    best = [
        sorted(((at[0], at[1]) for at in two), reverse=True)[:2]
        for two in output["meta_info"]["output_top_logprobs"]
    ]
    return {
        "tokens": list(output["output_ids"]),
        "best": [[token for _, token in pair] for pair in best],
        "logprobs": [[round(logprob, 5) for logprob, _ in pair] for pair in best],
        "cached": output["meta_info"]["cached_tokens"],
    }


def profiles(asked: Asked) -> list[dict[str, Any]]:
    """Of each call and of a decode step, the profile of each rank."""
    found = []
    for count, length in PROFILED:
        _, ranks = traced(asked, functools.partial(asked.call, count, length))
        found += serve_profile.shown(
            call_name(count, length), [serve_profile.summary(spans) for spans in ranks]
        )
    count, length = PROFILED_DECODE
    new = [new_tokens(count, length, asked.drafts)] * count
    work = functools.partial(asked.generate, asked.prompts(count, length), new)
    steps, ranks = traced(asked, functools.partial(asked.log.of, work))
    tokens = count * (1 + asked.drafts)
    times = decode_steps.pure_steps_ms(steps, tokens)
    left = 1e3 * (steps[-1][0] - max(at for at, number in steps if number == tokens))
    cut = (serve_profile.last(spans, sum(times), left) for spans in ranks)
    own = [serve_profile.summary(spans, len(times)) for spans in cut]
    return found + serve_profile.shown(decode_name(count, length), own)


def traced(asked: Asked, run: Callable[[], Any]) -> tuple[Any, list[list[serve_profile.Span]]]:
    """What ``run`` returns, and the kernels and copies of each rank meanwhile."""
    with tempfile.TemporaryDirectory() as place:
        asked.engine.start_profile(output_dir=place, activities=["GPU"])
        returned = run()
        asked.engine.stop_profile()
        return returned, traces(Path(place), asked.ranks, 30.0)


def traces(place: Path, ranks: int, seconds: float) -> list[list[serve_profile.Span]]:
    """Kernels and copies of each rank, of the traces that sglang leaves in a folder.

    Raises:
        TimeoutError: there are not as many whole traces in time.
    """
    until = time.monotonic() + seconds
    found: dict[Path, list[serve_profile.Span]] = {}
    while len(found) < ranks:
        if time.monotonic() > until:
            got = f"got {len(found)}"
            raise TimeoutError(f"expected {ranks} in {place} within {seconds:.0f} s, {got}")
        for file in set(place.rglob("*.trace.json.gz")) - set(found):
            try:
                events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            except (OSError, EOFError, ValueError):
                continue  # it is still written
            found[file] = [
                (event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
                for event in events
                if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
            ]
        time.sleep(0.2)
    return [found[file] for file in sorted(found)]


def engine_of(info: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings after it has read its arguments."""
    names = (
        *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
        *("linear_attn_backend", "disable_cuda_graph", "cuda_graph_max_bs_decode"),
        *("disable_prefill_cuda_graph", "chunked_prefill_size", "disable_radix_cache"),
        *("mamba_radix_cache_strategy", "disable_overlap_schedule", "max_mamba_cache_size"),
        *("max_total_num_tokens", "effective_max_running_requests_per_dp", "page_size"),
        "mem_fraction_static",
    )
    state = (info.get("internal_states") or [{}])[0]
    found = {name: info[name] for name in names if name in info}
    return {**found, **{name: state[name] for name in names if state.get(name) is not None}}


if __name__ == "__main__":
    raise SystemExit(main())
