"""A real sglang server under the flag, saturated for minutes: answers, memory, latency.

    python -m benchmarks.load_sglang load_sglang.json --minutes 8 --budget 570

The recall checkpoint with prefix caching, and the traffic, the measurements and the demands of
``load_vllm`` (`benchmarks.engines.load_run`). The cache has room for 40 of the 256 requests, and
little is held back for tokens that they will generate, so that requests are retracted and computed
again, which is sglang's preemption.

The exit status is 1 where an answer was wrong, memory grew, nothing was retracted, or the server
did not come to rest.
"""

from __future__ import annotations

import argparse

from backend_core.testing.records import write_record
from benchmarks.engines import load_run
from benchmarks.engines.sglang_server import FLAGS, SglangServer

COUNTERS = load_run.Counters(
    preemptions="sglang:num_retracted_requests_total",
    hits="sglang:cached_tokens_total",
    held=("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    rest_s=60.0,  # gauges are told again every half a minute
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    load_run.add_arguments(parser, port=8151)
    parser.add_argument("--side", choices=FLAGS, default="flag")
    parser.add_argument("--tokens", type=int, default=56000, help="of the full-attention cache")
    parser.add_argument("--states", type=int, default=768, help="of KDA layers, prefixes' included")
    args = parser.parse_args()
    options = [
        *("--chunked-prefill-size", "2048", "--max-running-requests", "256"),
        *("--max-total-tokens", str(args.tokens), "--max-mamba-cache-size", str(args.states)),
        *("--schedule-conservativeness", "0.1", "--enable-metrics"),
        *FLAGS[args.side],
        *args.serve_option,
    ]
    log = args.out.with_name(f"{args.out.stem}_server.log")
    server = SglangServer(options, args.port, log, args.timeout)
    result = load_run.run("benchmarks/load_sglang.py", "sglang", server, COUNTERS, args)
    write_record(args.out, result)
    return load_run.show(result)


if __name__ == "__main__":
    raise SystemExit(main())
