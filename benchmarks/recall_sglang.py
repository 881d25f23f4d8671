"""The recall checkpoint through the OpenAI endpoint of real sglang servers, upstream and flagged.

    python -m benchmarks.recall_sglang OUT.json [--only upstream flag ...] [--beside 4]
        [--budget 590]

Each server prefills at most 512 tokens a step (prompts have up to 2,000), so that requests meet in
the middle of their prompts, and keeps prefixes with the states of their KDA layers. The items are
asked with 1, 16 and 64 requests at a time, then once more from the cache. Accuracy is exact match.
The full-attention layers run on sglang's triton backend, which needs no library of FlashAttention.
Besides upstream and the flag alone there is one server for each of these:

- short: the only captured graph is of 64 requests, so that every step of fewer is padded. sglang
  captures no prefills of models with MLA.
- drafts: three tokens looked up in the prompt and in earlier answers, as a chain, which this
  package verifies. The log must show that some were accepted.
- states: the same drafts, with states in every case; on Hopper there are records in their place.
- fp8: the cache of the MLA layers in fp8.
- sleep: the server is asked; its memory is released, with the weights kept on the host; it resumes
  and is asked again; its weights are read again and it is asked a third time. This needs
  torch_memory_saver.
- sleep_empty: the same, but nothing is kept: memory is released, the server resumes, its weights
  are read again and it is asked.
- whole: prompts in one step, so that prefills run in graphs of more than 1,024 tokens, which their
  MLA layers break as a whole.
- tp2: two GPUs, and tp2_drafts with the drafts. They run only if they are named, as do tp4 and tp8,
  of a checkpoint with as many heads or more (`benchmarks.recall.widen`).
- upstream_mla, mla: pages of 64 tokens and MLA on FlashAttention 3 of sglang-kernel; ``mla`` runs
  decodes on this package where it is ahead. They run only if they are named.

``--beside N`` runs N servers at the same time on the GPU; their times then mean nothing.
``--budget`` is the time for the whole command: a server that would not end in time is left out. The
file is written after each server, so it has what the others answered.
"""

from __future__ import annotations

import argparse
import math
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend_cli.eval import recall_task as recall
from benchmarks.engines.sglang_server import FLAGS, SglangServer
from benchmarks.engines.vllm_server import RECALL, is_row, versions
from benchmarks.recall_vllm import Request, Variant, add_arguments, mla_of, rounds_of, serve_all

SERVED = "KDA layers on"  # of the line that this package writes at model load
CHAINS = "the longest path of each tree"  # of the line of n-gram drafts
MODEL = RECALL / "checkpoint"


@dataclass(frozen=True)
class SglangVariant(Variant):
    """As `Variant`.

    Attributes:
        drafts: its log must show accepted ones.
        by_name: it needs what not every machine has, and runs only if it is named.
    """

    drafts: bool = False
    by_name: bool = False


_SLEEP: tuple[Request, ...] = (
    ("/release_memory_occupation", {}),
    ("/resume_memory_occupation", {}),
)
_RELOAD = ("/update_weights_from_disk", {"model_path": str(MODEL)})
_MLA = ("--page-size", "64")
_DRAFTS = (
    *("--speculative-algorithm", "NGRAM", "--speculative-ngram-max-bfs-breadth", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
VARIANTS = {
    "upstream": SglangVariant("upstream", tuple(FLAGS["upstream"]), flagged=False),
    "flag": SglangVariant("flag", tuple(FLAGS["flag"])),
    "short": SglangVariant(
        "flag, a graph of 64 requests alone", (*FLAGS["flag"], "--cuda-graph-bs-decode", "64")
    ),
    "no_prefill_graphs": SglangVariant(
        "flag, no prefill graphs", (*FLAGS["flag"], "--disable-prefill-cuda-graph")
    ),
    "drafts": SglangVariant(
        "flag, ngram drafts",
        (*FLAGS["flag"], *_DRAFTS),
        drafts=True,
    ),
    "upstream_drafts": SglangVariant(
        "upstream, ngram drafts", (*FLAGS["upstream"], *_DRAFTS), flagged=False, drafts=True
    ),
    "drafts_no_prefill_graphs": SglangVariant(
        "flag, ngram drafts, no prefill graphs",
        (*FLAGS["flag"], *_DRAFTS, "--disable-prefill-cuda-graph"),
        drafts=True,
    ),
    "states": SglangVariant(
        "flag, ngram drafts with states",
        (*FLAGS["flag"], *_DRAFTS),
        drafts=True,
        environment=(("KDA_DSV4_DRAFT_RECORDS", "0"),),
    ),
    "fp8": SglangVariant("flag, fp8 KV cache", (*FLAGS["flag"], "--kv-cache-dtype", "fp8_e4m3")),
    "sleep": SglangVariant(
        "flag, after sleep and reload",
        (*FLAGS["flag"], "--enable-memory-saver", "--enable-weights-cpu-backup"),
        rounds=(("salt 64", 64),),
        then=(("sleep and wake", _SLEEP), ("reload of weights", (_RELOAD,))),
    ),
    "sleep_empty": SglangVariant(
        "flag, after sleep without weights",
        (*FLAGS["flag"], "--enable-memory-saver"),
        rounds=(("salt 64", 64),),
        then=(("sleep without weights, wake, reload", (*_SLEEP, _RELOAD)),),
    ),
    "whole": SglangVariant(
        "flag, prompts whole", (*FLAGS["flag"], "--chunked-prefill-size", "4096")
    ),
    "tp2": SglangVariant("flag, two GPUs", (*FLAGS["flag"], "--tp-size", "2"), by_name=True),
    "tp2_drafts": SglangVariant(
        "flag, two GPUs, ngram drafts",
        (*FLAGS["flag"], "--tp-size", "2", *_DRAFTS),
        drafts=True,
        by_name=True,
    ),
    "tp4": SglangVariant("flag, four GPUs", (*FLAGS["flag"], "--tp-size", "4"), by_name=True),
    "tp8": SglangVariant("flag, eight GPUs", (*FLAGS["flag"], "--tp-size", "8"), by_name=True),
    "upstream_mla": SglangVariant(
        "upstream, pages of 64",
        _MLA,
        flagged=False,
        by_name=True,
    ),
    "mla": SglangVariant(
        "flag, pages of 64",
        ("--attention-backend", "kda", *_MLA),
        by_name=True,
    ),
}
DEFAULT = [n for n, one in VARIANTS.items() if not one.by_name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser, VARIANTS, DEFAULT, port=8124)
    parser.add_argument("--checkpoint", type=Path, default=MODEL)
    parser.add_argument("--budget", type=float, help="seconds, of the whole command")
    args = parser.parse_args()
    args.until = math.inf if args.budget is None else time.monotonic() + args.budget - 10.0
    head = {"script": "benchmarks/recall_sglang.py", "environment": versions("sglang")}
    return serve_all(head, VARIANTS, args, measure, args.until)


def server_of(
    name: str, port: int, log: Path, timeout: float, more: list[str], model: Path = MODEL
) -> SglangServer:
    """A server of `VARIANTS`, not started. ``more`` come last, where they count."""
    options = [
        *("--chunked-prefill-size", "512", "--max-running-requests", "64"),
        # room for the prefixes of all items, and for other servers on the GPU
        *("--max-total-tokens", "1000000", "--max-mamba-cache-size", "4000"),
        *("--mem-fraction-static", "0.85"),  # what the others take is of the rest
        *VARIANTS[name].options,
        *more,
    ]
    environment = dict(VARIANTS[name].environment)
    return SglangServer(options, port, log, timeout, environment, model)


def measure(
    questions: recall.QuestionSet, name: str, args: argparse.Namespace, port: int
) -> dict[str, Any]:
    """Start a server, ask it everything at each concurrency and after each call, stop it.

    Raises:
        RuntimeError: it did not start, did not answer, was not served here, or time was up.
    """
    variant = VARIANTS[name]
    log = args.out.with_name(f"{args.out.stem}_{name}.log")
    left = args.until - time.monotonic()
    print(f"== {name}: starting a server, its log is {log.name}", flush=True)
    start = min(args.timeout, left)
    with server_of(name, port, log, start, args.serve_option, args.checkpoint) as server:
        print(f"{name}: ready after {server.start_s:.0f} s", flush=True)
        clock = threading.Timer(min(args.until - time.monotonic(), 3600.0), server.__exit__)
        clock.start()
        try:
            rows = rounds_of(variant, questions, server, args.until)
        finally:
            clock.cancel()
        start_s, command = server.start_s, server.shown()
    text = log.read_text(errors="replace")
    said = [line for line in text.splitlines() if "kda-dsv4" in line]
    if variant.flagged and not any(SERVED in line for line in said):
        raise RuntimeError(f"expected a line with {SERVED!r} in the log, got {said[:5]}")
    if variant.flagged and variant.drafts and not any(CHAINS in line for line in said):
        raise RuntimeError(f"expected a line with {CHAINS!r} in the log, got {said[:5]}")
    accepted = accepted_tokens(text)
    if variant.drafts and accepted is None:
        raise RuntimeError("expected lines with an accept len above 1 in the log, got none")
    return {
        "command": command,
        "start_s": start_s,
        "rounds": rows,
        "mla": mla_of(said),
        "most_tokens_per_verification": accepted,
        "log": [line for line in said if not is_row(line)],
    }


def accepted_tokens(log: str) -> float | None:
    """The most tokens per request and verification that a line of the log tells of, the one that
    needs no draft included; ``None`` where no draft was accepted."""
    most = max((float(found) for found in re.findall(r"accept len: ([\d.]+)", log)), default=1.0)
    return most if most > 1.0 else None


if __name__ == "__main__":
    raise SystemExit(main())
