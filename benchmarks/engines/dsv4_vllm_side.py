"""One process of `benchmarks.dsv4_engine_vllm`: a small model with random weights in vLLM.

    python -m benchmarks.engines.dsv4_vllm_side {upstream,flag}[-eager|-mtp] OUT.json
        [--model {v4,v41}] [--heads N]

The model is vLLM's own DeepSeek-V4 or V4.1 for CUDA in bf16, as `benchmarks.engines.dsv4_model`
configures it, with 64 heads or as few as a rank has under tensor parallelism. V4.1 is the language
model alone, and captures fewer sizes. Its last layer makes rows of its own: behind the last such
layer vLLM would run a prompt's last tokens alone, in graphs of their own.
mHC runs in vLLM's torch functions on every side, since TileLang need not be there; its warm-up is
off for this.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.engines.dsv4_model import (
    BATCHED_TOKENS,
    CONFIGS,
    DRAFTS,
    HEADS,
    MAX_LENGTH,
    MTP_SIDES,
    NEW_TOKENS,
    REQUESTS,
    SIDES,
    VOCABULARY,
    continued,
    draw_weights,
    halve_rows,
    joined,
    model_directory,
    prompts,
)

SWITCHES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

CAPTURED = {"v41": [1, 2, 4, 8, 16, 32, 64, 128]}  # tokens of graphs; of V4 the engine's choice
CACHE_BYTES = 2 << 30
MHC = {  # by module the functions of hyper-connections that it calls
    "v4": {
        "model": (
            *("mhc_pre_tilelang", "mhc_pre_broadcast_tilelang", "mhc_fused_post_pre_tilelang"),
            *("mhc_post_tilelang", "hc_head_fused_kernel_tilelang"),
        ),
        "mtp": ("mhc_post_tilelang", "hc_head_fused_kernel_tilelang"),
    },
    "v41": {
        "model": ("mhc_pre_delayed_tilelang", "mhc_post_tilelang"),
        "ops.mhc": ("mhc_fused_post_pre_delayed_tilelang",),
    },
}

_begin = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("side", choices=SIDES + MTP_SIDES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=CONFIGS, default="v4")
    parser.add_argument("--heads", type=int, choices=HEADS, default=64)
    args = parser.parse_args()
    flag, eager = args.side.startswith("flag"), args.side.endswith("eager")
    drafts = DRAFTS if args.side in MTP_SIDES else 0
    for switch, value in SWITCHES.items():
        os.environ.setdefault(switch, value)
    if flag:
        os.environ["KDA_DSV4_STRICT"] = "1"
    say("importing vllm")
    import torch
    import vllm

    result: dict[str, Any] = {
        "side": args.side,
        "model": args.model,
        "heads": args.heads,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "release": vllm.__version__,
    }
    prepare(flag, args.model)
    watch = attention = None
    if flag:
        attention = watch_attention(args.model)
    if flag and not eager:
        from benchmarks.engines.dsv4_vllm_watch import Watch

        watch = Watch(args.model)
    say("building the engine")
    llm = load(flag, eager, drafts, args.model, args.heads)
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    if drafts:  # the target's weights last: they share the embedding and the head
        draw_weights(runner.get_draft_model())
    draw_weights(runner.model)
    result["compressors"] = sorted(
        {type(m).__name__ for n, m in runner.model.named_modules() if n.endswith("compressor")}
    )
    config = llm.llm_engine.vllm_config
    sizes = [] if eager else list(config.compilation_config.cudagraph_capture_sizes)
    result["engine"] = {
        "model_runner_v2": bool(config.use_v2_model_runner),
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "capture_sizes": sizes,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
    }
    say(f"engine is ready: {result['engine']}, compressors {result['compressors']}")
    if attention is not None:
        attention.comparing = True  # what the profile run and captures read is uninitialised
    if watch is not None:
        watch.attach(runner, config)
    try:
        parts = {"tokens": prompts(), "tokens_from_cache": continued(prompts())}
        for part, batch in parts.items():
            result[part] = generate(llm, batch)
            say(part)
        if args.side == "upstream":  # whose two modes may have the same batches, so the same bits
            empty_cache(llm)
            for part, batch in parts.items():
                result[f"{part}_apart"] = joined([generate(llm, [one]) for one in batch])
            say("one by one")
        if watch is not None:
            sweep(llm.llm_engine, sizes, prefills=not drafts)
            watch.detach()
        result["other_weights"] = other_weights(llm, runner.model)
        say("done")
    finally:  # what was found until something failed
        if watch is not None:
            result["records"] = watch.report()
        if attention is not None:
            result["attention"] = attention.report()
        args.out.write_text(json.dumps(result) + "\n")


def watch_attention(name: str) -> Any:
    """Sees which attention runs from now on; made before the engine."""
    import importlib

    from benchmarks.engines.dsv4_attention import AttentionWatch
    from mla_backend.engines import vllm_sparse
    from mla_backend.engines.seam_list import DECODE, PREFILL

    watch = AttentionWatch()
    watch.ours(vllm_sparse)
    flashmla: Any = importlib.import_module(f"vllm.models.deepseek_{name}.nvidia.flashmla")
    for call in (DECODE, PREFILL):
        setattr(flashmla, call, watch.theirs(call, getattr(flashmla, call)))
    return watch


def say(line: str) -> None:
    print(f"[{time.perf_counter() - _begin:6.1f} s] {line}", flush=True)


def prepare(flag: bool, name: str) -> None:
    """Load plug-ins and put the engine's own torch functions in the place of mHC's.

    Raises:
        RuntimeError: the engine's other kernels lack what they need.
    """
    import importlib

    import vllm
    from vllm.plugins import load_general_plugins
    from vllm.utils.import_utils import has_cutedsl, has_deep_gemm

    load_general_plugins()
    if flag:
        from backend_core.engines import entry

        entry.vllm.dsv4()
        entry.vllm.mla()
    if not has_deep_gemm():
        raise RuntimeError("the indexer of vllm needs DeepGEMM, and none can be imported")
    if name == "v4" and not has_cutedsl():
        raise RuntimeError("the main compressor of vllm needs CuTe DSL, and none can be imported")
    functions = mhc_functions()
    for part, names in MHC[name].items():
        module = importlib.import_module(f"vllm.models.deepseek_{name}.nvidia.{part}")
        for function in names:
            if not hasattr(module, function):
                raise RuntimeError(f"{module.__name__} must have {function}, to be replaced")
            setattr(module, function, functions[function])
    if name == "v41":  # the language model without the images' tower around it
        model = importlib.import_module("vllm.models.deepseek_v41.nvidia.model")
        architecture = CONFIGS[name]["architectures"][0]
        vllm.ModelRegistry.register_model(architecture, model.DeepseekV41LLMForCausalLM)
    warm_up_before_capture()


def mhc_functions() -> dict[str, Any]:
    """The functions of the model's hyper-connections, by the names that it calls."""
    import torch
    from vllm.model_executor.kernels.mhc.torch import (
        mhc_post_torch,
        mhc_pre_delayed_torch,
        mhc_pre_torch,
    )

    def norm(x: Any, weight: Any, eps: float) -> Any:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def pre(residual: Any, *terms: Any, n_splits: int = 1, **options: Any) -> Any:
        post, comb, x = mhc_pre_torch(residual, *terms[:8])
        return post, comb, norm(x, options["norm_weight"], options["norm_eps"])

    def pre_broadcast(x: Any, fn: Any, *terms: Any, fn_broadcast: Any, **options: Any) -> Any:
        del fn_broadcast  # the weights summed over equal streams
        streams = fn.shape[1] // x.shape[-1]
        residual = x.unsqueeze(1).expand(-1, streams, -1).contiguous()
        return residual, *pre(residual, fn, *terms, **options)

    def post_pre(
        x: Any, residual: Any, post: Any, comb: Any, *terms: Any, tile_n: int, **options: Any
    ) -> Any:
        residual = mhc_post_torch(x, residual, post, comb)
        return residual, *pre(residual, *terms, **options)

    def pre_delayed(
        residual: Any, *terms: Any, norm_weight: Any, norm_eps: float, **options: Any
    ) -> Any:
        post, comb, x, mix = mhc_pre_delayed_torch(residual, *terms, **options)
        return post, comb, norm(x, norm_weight, norm_eps), mix

    def post_pre_delayed(
        x: Any, residual: Any, post: Any, comb: Any, *terms: Any, capture_aux: bool, **options: Any
    ) -> Any:
        residual = mhc_post_torch(x, residual, post, comb)
        return residual, *pre_delayed(residual, *terms, **options), x.new_empty(0, x.shape[1])

    def head(x: Any, fn: Any, scale: Any, base: Any, rms_eps: float, eps: float) -> Any:
        y = x.flatten(1).float()
        mixes = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + rms_eps)) @ fn.t()
        weights = torch.sigmoid(mixes * scale + base) + eps
        return (weights.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)

    return {
        "mhc_pre_tilelang": pre,
        "mhc_pre_broadcast_tilelang": pre_broadcast,
        "mhc_fused_post_pre_tilelang": post_pre,
        "mhc_pre_delayed_tilelang": pre_delayed,
        "mhc_fused_post_pre_delayed_tilelang": post_pre_delayed,
        "mhc_post_tilelang": mhc_post_torch,
        "hc_head_fused_kernel_tilelang": head,
    }


def warm_up_before_capture() -> None:
    """Run the indexer's long way once before graphs are captured, which compiles its kernels.

    Outside of a capture vLLM takes a short way for short contexts, inside never; its warm-up,
    which compiles the long way's kernels, is the one that is off.
    """
    import torch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    capture = GPUModelRunner.capture_model

    def capture_model(self: Any, *args: Any, **options: Any) -> Any:
        say("warm-up")
        for tokens in (self.max_num_reqs, self.max_num_reqs * 2):
            with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
                self._dummy_run(tokens)
        torch.cuda.synchronize()
        say("capture")
        return capture(self, *args, **options)

    GPUModelRunner.capture_model = capture_model


def load(flag: bool, eager: bool, drafts: int, name: str, heads: int) -> Any:
    from vllm import LLM

    from backend_core.engines import flag_name

    sizes = {} if eager else {"cudagraph_capture_sizes": CAPTURED.get(name)}
    return LLM(
        model=model_directory(name, heads),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        max_model_len=MAX_LENGTH,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=BATCHED_TOKENS,
        kv_cache_memory_bytes=CACHE_BYTES,
        gpu_memory_utilization=0.1,
        enable_prefix_caching=True,
        enforce_eager=eager,
        kernel_config={"enable_jit_warmup": False},
        hf_overrides={"head_dtype": "float32"},  # in bf16 a twentieth of all tokens are ties
        seed=0,
        compilation_config={k: v for k, v in sizes.items() if v},
        **({"attention_backend": flag_name("vllm", "dsv4")} if flag else {}),
        **(
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}}
            if drafts
            else {}
        ),
    )


def sampling(new: int, logprobs: int | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=logprobs
    )


def generate(llm: Any, batch: list[list[int]]) -> dict[str, Any]:
    """Greedy tokens, the log-probabilities of each token's two best, tokens from the cache."""
    outputs = llm.generate(
        [{"prompt_token_ids": one} for one in batch],
        sampling(NEW_TOKENS, logprobs=2),
        use_tqdm=False,
    )
    return {
        "lengths": [len(one) for one in batch],
        "cached": [output.num_cached_tokens or 0 for output in outputs],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "best": [
            [sorted((x.logprob for x in step.values()), reverse=True)[:2] for step in one]
            for one in (output.outputs[0].logprobs for output in outputs)
        ],
    }


def sweep(engine: Any, sizes: list[int], *, prefills: bool) -> None:
    """Batches of each captured size: decodes, prefills alone and beside decodes; these from their
    beginning, after a chunk, and after a prefix from the cache."""
    rng = random.Random(2)
    number = 0

    def add(tokens: list[int], new: int = 1) -> str:
        nonlocal number
        number += 1
        engine.add_request(f"sweep-{number}", {"prompt_token_ids": tokens}, sampling(new))
        return f"sweep-{number}"

    def drawn(count: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(count)]

    def run(waiting: set[str]) -> None:
        while waiting:
            waiting -= {output.request_id for output in engine.step() if output.finished}

    for size in (size for size in sizes if size <= REQUESTS):
        run({add(drawn(1 + i % 7), new=4) for i in range(size)})
    say("decodes")
    if not prefills:
        return
    prefix = drawn(768)
    run({add(prefix)})
    for decodes in (0, 1, 3):
        beside = [add(drawn(130 + 61 * i), new=1200) for i in range(decodes)]
        if decodes:
            run({add(drawn(5), new=8)})  # until all of them decode
        for size in sizes:
            count = size - decodes
            if count < 1:
                continue
            run({add(drawn(count))})
            run({add(drawn(BATCHED_TOKENS - decodes + count))})
            run({add(prefix + drawn(count))})
            if count >= 8:
                run({add(drawn(count // 3)), add(drawn(count - count // 3))})
                run({add(drawn(count - 3))})  # padded to the graph's size
        engine.abort_request(beside)
        while engine.has_unfinished_requests():
            engine.step()
        say(f"prefills beside {decodes} decodes")


def other_weights(llm: Any, model: Any) -> list[list[int]]:
    """Tokens with compressed rows of half the size: that they differ shows that rows matter."""
    import torch

    empty_cache(llm)
    with torch.inference_mode():
        halve_rows(model)
    tokens: list[list[int]] = generate(llm, prompts())["tokens"]
    say("tokens with other weights")
    return tokens


def empty_cache(llm: Any) -> None:
    """Empty the prefix cache.

    Raises:
        RuntimeError: the engine does not.
    """
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache must be empty for what follows, and was not cleared")


if __name__ == "__main__":
    main()
