"""Requests in sglang under ``--enable-deterministic-inference`` with the flag: bits alone and among
others.

    python -m benchmarks.same_bits_sglang benchmarks/results/same_bits_sglang.json

As `benchmarks.same_bits_vllm`; prompts that were served before resume from sglang's prefix cache.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.engines.same_bits import FIRST, Variant, arguments, compare
from benchmarks.engines.sglang_server import FLAGS, SglangServer

VARIANTS = {
    "first": Variant("", rounds=FIRST),
    "eager": Variant("without CUDA graphs", ("--disable-cuda-graph",)),
    "graphs": Variant("a graph of 64 requests alone", ("--cuda-graph-bs-decode", "64")),
    "short": Variant("steps of 128 tokens", ("--chunked-prefill-size", "128")),
    "whole": Variant("prompts whole", ("--chunked-prefill-size", "4096")),
    "preempted": Variant(
        "after retraction",
        environment=(("SGLANG_TEST_RETRACT", "1"),),
        preemptions="sglang:num_retracted_requests_total",
    ),
}


def server_of(variant: Variant, args: argparse.Namespace, port: int, log: Path) -> SglangServer:
    options = [
        *("--chunked-prefill-size", "512", "--max-running-requests", "64"),
        *("--max-total-tokens", "1000000", "--max-mamba-cache-size", "4000"),
        *("--mem-fraction-static", "0.85"),  # what other servers take is of the rest
        *("--enable-deterministic-inference", "--enable-metrics", *FLAGS["flag"]),
        *("--tp-size", str(args.ranks)),
        *variant.options,
    ]
    variables = {"KDA_DSV4_STRICT": "1", **dict(variant.environment)}
    return SglangServer(options, port, log, args.timeout, variables, args.checkpoint)


def main() -> int:
    assert __doc__ is not None
    args = arguments(__doc__.split("\n\n")[0], VARIANTS, 8126)
    return compare(
        "benchmarks/same_bits_sglang.py", "sglang", args, VARIANTS, server_of, "KDA layers on"
    )


if __name__ == "__main__":
    raise SystemExit(main())
