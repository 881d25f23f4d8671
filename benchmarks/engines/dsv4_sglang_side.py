"""One process of `benchmarks.dsv4_engine_sglang`: a small model with random weights in sglang.

    python -m benchmarks.engines.dsv4_sglang_side {upstream,flag}[-eager|-mtp] OUT.json
        [--model {v4,v41}] [--heads N]

The model is sglang's own DeepSeek-V4 or V4.1 in bf16, as `benchmarks.engines.dsv4_model` configures
it, with 64 heads or as few as a rank has under tensor parallelism. V4.1 is the language model
alone, and all its layers run all tokens of a prompt, where sglang by default runs the last ones for
a prompt's end alone. mHC runs in sglang's torch and Triton code on every side, since TileLang may
be absent. The engine's scheduler is another process, in which
`benchmarks.engines.dsv4_sglang_plugin` acts. OUT.json is written after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

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
    continued,
    joined,
    model_directory,
    prompts,
)
from benchmarks.engines.vllm_server import plant

CACHE_TOKENS = 131072
CAPTURED = [1, 2, 4, 8, 16, 32, 64]  # requests of the graphs of decodes
FIRST_PORT = 21500
SWITCHES = {  # mHC in torch, weights in bf16
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_POST": "0",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "0",
    "SGLANG_DSV4_FP4_EXPERTS": "0",
    "TORCHDYNAMO_DISABLE": "1",  # mHC's torch functions are compiled in captures, once per layer
    "HF_HUB_OFFLINE": "1",
}

_begin = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("side", choices=SIDES + MTP_SIDES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=CONFIGS, default="v4")
    parser.add_argument("--heads", type=int, choices=HEADS, default=64)
    args = parser.parse_args()
    os.environ.update(switches(args.side))
    with tempfile.TemporaryDirectory() as place:
        plant(Path(place), "sglang.srt.plugins", "benchmarks.engines.dsv4_sglang_plugin:install")
        run(args.side, args.model, args.heads, args.out)


def switches(side: str) -> dict[str, str]:
    """Environment variables of a side's processes."""
    return SWITCHES | ({"KDA_DSV4_STRICT": "1"} if side.startswith("flag") else {})


def run(side: str, model: str, heads: int, out: Path) -> None:
    say("importing sglang")
    import sglang
    import torch

    result: dict[str, Any] = {
        "side": side,
        "model": model,
        "heads": heads,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "release": sglang.__version__,
    }
    say("building the engine")
    engine = sglang.Engine(**engine_arguments(side, model, heads))
    try:
        say("engine is ready")
        if side.endswith("eager"):
            engine.collective_rpc("dsv4_benchmark", what="compare")
        parts = {"tokens": prompts(), "tokens_from_cache": continued(prompts())}
        for part, batch in parts.items():
            result[part] = generate(engine, batch)
            result |= reported(engine)
            out.write_text(json.dumps(result) + "\n")
            say(part)
        if side == "upstream":  # whose two modes may have the same batches, and so the same bits
            flush(engine)
            for part, batch in parts.items():
                result[f"{part}_apart"] = joined([generate(engine, [one]) for one in batch])
            say("one by one")
        flush(engine)
        engine.collective_rpc("dsv4_benchmark", what="halve")
        result["other_weights"] = generate(engine, prompts())["tokens"]
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
        if engine.flush_cache().success:
            return
        time.sleep(1)
    raise RuntimeError("the prefix cache must be empty for other weights, and was not cleared")


def say(line: str) -> None:
    print(f"[{time.perf_counter() - _begin:6.1f} s] {line}", flush=True)


def engine_arguments(side: str, model: str, heads: int) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``."""
    arguments: dict[str, Any] = {
        "model_path": model_directory(model, heads),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8_e4m3",
        "context_length": MAX_LENGTH,
        "max_running_requests": REQUESTS,
        "chunked_prefill_size": BATCHED_TOKENS,
        "max_total_tokens": CACHE_TOKENS,
        "swa_full_tokens_ratio": 1.0,
        "mem_fraction_static": 0.85,  # other sides take of it; the pools' size is given above
        "enable_fp32_lm_head": True,  # in bf16 a twentieth of all tokens are ties
        "enable_decoder_swa_bounded_replay": False,
        "moe_runner_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_flashinfer_autotune": True,
        "cuda_graph_bs_decode": CAPTURED,
        "cuda_graph_max_bs_decode": REQUESTS,
        "nccl_port": FIRST_PORT + 10 * list(CONFIGS).index(model) + (SIDES + MTP_SIDES).index(side),
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
    """What the scheduler's process has seen."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "report.json"
        engine.collective_rpc("dsv4_benchmark", what="report", path=str(path))
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def generate(engine: Any, batch: list[list[int]]) -> dict[str, Any]:
    """Greedy tokens, the log-probabilities of each token's two best, tokens from the cache."""
    outputs = engine.generate(
        input_ids=batch,
        sampling_params={"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    facts = [output["meta_info"] for output in outputs]
    return {
        "lengths": [len(one) for one in batch],
        "cached": [one["cached_tokens"] for one in facts],
        "accepted": [one.get("spec_accept_length") for one in facts],
        "tokens": [list(output["output_ids"]) for output in outputs],
        "best": [
            [sorted((at[0] for at in two), reverse=True)[:2] for two in one["output_top_logprobs"]]
            for one in facts
        ],
    }


if __name__ == "__main__":
    main()
