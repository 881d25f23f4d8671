"""One process of `benchmarks.dsv4_engine_sglang`: a small DeepSeek-V4 of random weights in sglang.

    python -m benchmarks.engines.dsv4_sglang_side {upstream,flag}[-eager|-mtp] OUT.json

The model, its weights and its prompts are those of `benchmarks.engines.dsv4_vllm_side`, with 64
heads, which sglang's FlashMLA takes on one GPU. On both sides mHC runs in torch, since TileLang may
be absent, and so do the indexer's logits where DeepGEMM is absent;
`benchmarks.engines.dsv4_sglang_plugin` makes these changes in the engine's scheduler, which is
another process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines.dsv4_vllm_side import (
    BATCHED_TOKENS,
    DRAFTS,
    MAX_LENGTH,
    MODEL,
    MTP_SIDES,
    REQUESTS,
    SIDES,
    continued,
    prompts,
)
from benchmarks.engines.sglang_server import plant

PLUGIN = "kda_dsv4_dsv4_benchmark"
CACHE_TOKENS = 131072
SWITCHES = {  # mHC and the output projection in torch, weights in bf16
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_DSV4_MHC_PREWARM": "0",
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "TORCHDYNAMO_DISABLE": "1",  # mHC's torch functions are compiled in captures, once per layer
    "HF_HUB_OFFLINE": "1",
}

_begin = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("side", choices=(*SIDES, *MTP_SIDES))
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    os.environ.update(switches(args.side))
    with tempfile.TemporaryDirectory() as place:
        plant(Path(place), PLUGIN, "benchmarks.engines.dsv4_sglang_plugin:install")
        run(args.side, args.out)


def switches(side: str) -> dict[str, str]:
    """Environment variables of a side's processes."""
    found = dict(SWITCHES)
    if importlib.util.find_spec("deep_gemm") is None:
        found["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "1"
    if side.startswith("flag"):
        found["KDA_DSV4_STRICT"] = "1"
    return found


def run(side: str, out: Path) -> None:
    say("importing sglang")
    import sglang
    import torch

    result: dict[str, Any] = {
        "side": side,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "release": sglang.__version__,
    }
    say("building the engine")
    engine = sglang.Engine(**engine_arguments(side))
    try:
        say("engine is ready")
        result["tokens"] = generate(engine, prompts(), "tokens")
        result["tokens_from_cache"] = generate(
            engine, continued(prompts()), "tokens from the cache"
        )
        result["engine"] = reported(engine)
        say(f"{result['engine']}")
        flush(engine)
        engine.collective_rpc("dsv4_benchmark", what="halve")
        result["other_weights"] = generate(engine, prompts(), "tokens with other weights")["tokens"]
        out.write_text(json.dumps(result) + "\n")
        say("done")
    finally:
        engine.shutdown()


def flush(engine: Any) -> None:
    """Empty the prefix cache.

    Raises:
        RuntimeError: the engine is busy and does not.
    """
    for _ in range(10):
        if getattr(engine.flush_cache(), "success", False):
            return
        time.sleep(1)
    raise RuntimeError("the prefix cache must be empty for other weights, and was not cleared")


def say(line: str) -> None:
    print(f"[{time.perf_counter() - _begin:6.1f} s] {line}", flush=True)


def engine_arguments(side: str) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``."""
    directory = Path(tempfile.mkdtemp())
    (directory / "config.json").write_text(json.dumps(MODEL))
    arguments: dict[str, Any] = {
        "model_path": str(directory),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e4m3",
        "context_length": MAX_LENGTH,
        "max_running_requests": REQUESTS,
        "chunked_prefill_size": BATCHED_TOKENS,
        "max_total_tokens": CACHE_TOKENS,
        "swa_full_tokens_ratio": 1.0,
        "mem_fraction_static": 0.9,  # other sides take of it; the pools' size is given above
        "enable_fp32_lm_head": True,  # in bf16 a twentieth of all tokens are ties
        "moe_runner_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_max_bs_decode": REQUESTS,
        "random_seed": 0,
        "watchdog_timeout": 600.0,
        "log_level": "info",
    }
    if side.startswith("flag"):
        arguments["attention_backend"] = "dsv4"
    if side.endswith("eager"):
        arguments["disable_cuda_graph"] = True
    if side in MTP_SIDES:
        arguments |= {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": DRAFTS,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": DRAFTS + 1,
        }
    return arguments


def reported(engine: Any) -> dict[str, Any]:
    """The scheduler process's report of its engine."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "report.json"
        engine.collective_rpc("dsv4_benchmark", what="report", path=str(path))
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def generate(engine: Any, batch: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Greedy tokens, the log-probabilities of each token's two best, tokens from the cache."""
    outputs = engine.generate(
        input_ids=[one["tokens"] for one in batch],
        sampling_params=[sampling(one["new"]) for one in batch],
        return_logprob=True,
        top_logprobs_num=2,
    )
    say(what)
    facts = [output["meta_info"] for output in outputs]
    return {
        "lengths": [len(one["tokens"]) for one in batch],
        "cached": [one.get("cached_tokens") or 0 for one in facts],
        "accepted": [one.get("spec_accept_length") for one in facts],
        "tokens": [list(output["output_ids"]) for output in outputs],
        "best": [
            [sorted((at[0] for at in two), reverse=True)[:2] for two in one["output_top_logprobs"]]
            for one in facts
        ],
    }


def sampling(new: int) -> dict[str, Any]:
    return {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}


if __name__ == "__main__":
    main()
