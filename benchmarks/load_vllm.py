"""A real vLLM server under the flag, saturated for minutes: answers, memory, latency.

    python -m benchmarks.load_vllm load_vllm033.json --flag KDA --minutes 8 --budget 570

The recall checkpoint in vLLM's default mode, with prefix caching and a cache so small that requests
are preempted: a block holds 128 tokens of MLA or one state of KDA, and no block is kept free.
Traffic is `benchmarks.engines.load_traffic`'s: 1 to 256 requests at a time, prompts of 1 to 2,000
tokens, prefix hits, clients that leave in mid-stream.
`benchmarks.engines.load_run` says what is measured and asked.

The exit status is 1 where an answer was wrong, memory grew, nothing was preempted, or the server
did not come to rest.
"""

from __future__ import annotations

import argparse

from backend_core.testing.records import write_record
from benchmarks.engines import load_run
from benchmarks.engines.vllm_server import Server

COUNTERS = load_run.Counters(
    preemptions="vllm:num_preemptions_total",
    hits="vllm:prefix_cache_hits_total",
    held=(
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "vllm:kv_cache_usage_perc",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    load_run.add_arguments(parser, port=8150)
    parser.add_argument("--flag", default="KDA", help="of --attention-backend; '' for upstream")
    parser.add_argument("--kv-cache-gib", type=float, default=0.12)  # 0.5 preempted nothing
    args = parser.parse_args()
    options = [
        *("--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--max-num-seqs", "256"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--kv-cache-memory-bytes", str(int(args.kv_cache_gib * 2**30))),
        *("--gpu-memory-utilization", "0.1"),  # what must be free at the start, beside others
        *(("--attention-backend", args.flag) if args.flag else ()),
        *args.serve_option,
    ]
    log = args.out.with_name(f"{args.out.stem}_server.log")
    server = Server(options, args.port, log, args.timeout)
    result = load_run.run("benchmarks/load_vllm.py", "vllm", server, COUNTERS, args)
    write_record(args.out, result)
    return load_run.show(result)


if __name__ == "__main__":
    raise SystemExit(main())
