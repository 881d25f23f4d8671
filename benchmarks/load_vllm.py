"""A real vLLM server under the flag, saturated for minutes: answers, memory, latency.

    python -m benchmarks.load_vllm load_vllm033.json --flag KDA --minutes 8 --budget 570

The recall checkpoint in vLLM's default mode, with prefix caching and a cache so small that
requests are preempted (`Cache`). Traffic is `benchmarks.engines.load_traffic`'s: 1 to 256 requests
at a time, prompts of 1 to 2,000 tokens, prefix hits, clients that leave in mid-stream.
`benchmarks.engines.load_run` says what is measured and asked.

The exit status is 1 where an answer was wrong, memory grew, nothing was preempted, or the server
did not come to rest.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import load_run
from benchmarks.engines.vllm_server import RECALL, Server

COUNTERS = load_run.Counters(
    preemptions="vllm:num_preemptions_total",
    hits="vllm:prefix_cache_hits_total",
    held=(
        *("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "vllm:kv_cache_usage_perc",
    ),
)


@dataclass(frozen=True)
class Cache:
    """How vLLM cuts cache memory for a model of KDA and MLA layers, with prefix caching.

    A block of MLA holds the fewest tokens, a multiple of 128, whose latents are no smaller than
    the two states of a KDA layer; a state takes a whole block. With one MLA layer every layer has
    blocks of its own (vLLM 0.33: `v1/core/kv_cache_planning.py`). Requests are admitted while
    blocks for their prompt are free, and none are kept free (``watermark`` 0): with more requests
    waiting than fit, the next block of a request that decodes preempts another.

    Attributes:
        block_tokens: of an MLA layer.
        block_bytes: of any layer.
        state_blocks: of a request at any time, at least.
        blocks: in the cache.
    """

    block_tokens: int
    block_bytes: int
    state_blocks: int
    blocks: int

    @classmethod
    def of(cls, config: dict[str, Any], memory: int) -> Cache:
        """``config``: a checkpoint's; memory: in bytes. State fp32, everything else bf16."""
        linear = config["linear_attn_config"]
        heads, dim = linear["num_heads"], linear["head_dim"]
        window = linear["short_conv_kernel_size"] - 1
        state = 4 * heads * dim * dim + 2 * 3 * heads * dim * window
        token = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
        block_tokens = 128 * -(-state // (128 * token))
        block_bytes = block_tokens * token
        return cls(block_tokens, block_bytes, len(linear["kda_layers"]), memory // block_bytes)

    def requests_of(self, tokens: int) -> int:
        """How many requests of so many tokens are in the cache at once, at most."""
        return self.blocks // (-(-tokens // self.block_tokens) + self.state_blocks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    load_run.add_arguments(parser, port=8150)
    parser.add_argument("--flag", default="KDA", help="of --attention-backend; '' for upstream")
    parser.add_argument("--kv-cache-gib", type=float, default=0.12)  # 0.5 preempted nothing
    args = parser.parse_args()
    memory = int(args.kv_cache_gib * 2**30)
    cache = Cache.of(json.loads((RECALL / "checkpoint" / "config.json").read_text()), memory)
    print(f"{cache}, so {cache.requests_of(1350)} requests of 1,350 tokens at a time", flush=True)
    options = [
        *("--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--max-num-seqs", "256"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--kv-cache-memory-bytes", str(memory)),
        *("--gpu-memory-utilization", "0.1"),  # what must be free at the start, beside others
        *(("--attention-backend", args.flag) if args.flag else ()),
        *args.serve_option,
    ]
    log = args.out.with_name(f"{args.out.stem}_server.log")
    server = Server(options, args.port, log, args.timeout)
    result = load_run.run("benchmarks/load_vllm.py", "vllm", server, COUNTERS, args)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return load_run.show(result)


if __name__ == "__main__":
    raise SystemExit(main())
