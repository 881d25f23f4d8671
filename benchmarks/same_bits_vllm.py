"""Requests in vLLM under ``VLLM_BATCH_INVARIANT=1`` with the flag: bits alone and among others.

    python -m benchmarks.same_bits_vllm benchmarks/results/same_bits_vllm033.json

200 questions with up to 2,000 tokens are asked one at a time, and then in random batches, in eager
steps, in graphs of other sizes, with prompts in steps of 192 to 4,096 tokens and after preemption;
``--ranks 2`` has each server on two GPUs. A row has the number of requests, and of those with the
text and log-probabilities that they have alone (`benchmarks.engines.same_bits`). vLLM's prefix
cache is off in this mode. A request that was preempted runs its answer so far as a prompt, whose
bits may differ.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.engines.same_bits import FIRST, Variant, arguments, compare
from benchmarks.engines.vllm_server import Server

VARIANTS = {
    "first": Variant("", rounds=FIRST),
    "eager": Variant("without CUDA graphs", ("--enforce-eager",)),
    "graphs": Variant(
        "graphs of 512 tokens alone",
        ("--compilation-config", '{"cudagraph_capture_sizes": [512]}'),
    ),
    "short": Variant("steps of 192 tokens", ("--max-num-batched-tokens", "192")),
    "whole": Variant("prompts whole", ("--max-num-batched-tokens", "4096")),
    "preempted": Variant(
        "after preemption",
        ("--num-gpu-blocks-override", "60", "--max-num-seqs", "60"),
        preemptions="vllm:num_preemptions_total",
    ),
}


def server_of(variant: Variant, args: argparse.Namespace, port: int, log: Path) -> Server:
    options = [
        *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
        *("--kv-cache-memory-bytes", str(6 * 2**30), "--gpu-memory-utilization", "0.1"),
        *("--attention-backend", "KDA", "--tensor-parallel-size", str(args.ranks)),
        *variant.options,
    ]
    variables = {"VLLM_BATCH_INVARIANT": "1", "KDA_DSV4_STRICT": "1", **dict(variant.environment)}
    return Server(options, port, log, args.timeout, variables, args.checkpoint)


def main() -> int:
    assert __doc__ is not None
    args = arguments(__doc__.split("\n\n")[0], VARIANTS, 8125)
    return compare(
        "benchmarks/same_bits_vllm.py", "vllm", args, VARIANTS, server_of, "KDA layers on"
    )


if __name__ == "__main__":
    raise SystemExit(main())
