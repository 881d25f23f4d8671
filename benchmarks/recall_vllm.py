"""The recall checkpoint through the OpenAI endpoint of real vLLM servers, upstream and flagged.

    python -m benchmarks.recall_vllm OUT.json --flag KDA [--only upstream flag ...] [--beside 4]
    python -m benchmarks.recall_vllm OUT.json --checkpoint benchmarks/recall/checkpoint_bounded

The second checkpoint has Kimi-K3's gates, and vLLM serves it with Kimi-K3's own KDA layer.

Each server runs in vLLM's default mode, with chunked prefill (512 tokens per step, prompts have up
to 2,000) and prefix caching, so that its steps mix decodes with pieces of prefills. The items are
asked with 1, 16 and 64 requests at a time, then once more from the cache. Accuracy is exact match.
Besides upstream and the flag alone there is one server for each of these:

- short: the only captured graphs have 512 tokens, so that every piece of a prompt and every step of
  decodes is shorter than each of them and is padded.
- segments: prompts whole, and a table of which prefills from 256 tokens on run by segments of 128,
  so that answers, and states in the prefix cache, go through the ends of segments.
- ngram: drafts from the prompt, which this task accepts.
- states: the same, of which the layers keep states in every case; in vLLM 0.33 they have records
  on Hopper.
- fp8: the KV cache in fp8.
- sleep: asked, put to sleep and woken, asked, weights reloaded, asked, put to sleep without its
  weights, woken, reloaded and asked.
- whole: prompts in one step, so that prefills run in graphs of up to 2,048 tokens.
- tp2: two GPUs; tp2_ngram: with drafts from the prompt.
- tp4, tp8: four and eight GPUs, of a checkpoint with as many heads or more
  (`benchmarks.recall.widen`).
- canary: the flagged server with every state that a prefill leaves transposed, ``[K, V]`` for
  ``[V, K]``: it shows that these questions notice. It is asked once.

``--beside N`` runs N servers at a time on the GPU: times then say nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from backend_cli.eval import recall_task as recall
from backend_core.tables.load import shipped_directory
from backend_core.testing.records import write_record
from benchmarks.engines.vllm_server import (
    RECALL,
    Server,
    completion,
    end_with_servers,
    plug_in,
    versions,
)

CONCURRENCY = (1, 16, 64)
ROUNDS = (*((f"salt {n}", n) for n in CONCURRENCY), ("salt 64", 64))  # one salt, one cache
WRONG_KEPT = 10  # wrong answers of a round that are kept
SERVER_S = 150.0  # a start with kernels to compile, and the rounds
CANARY = "kda_dsv4_canary"
PLANTED = {"canary": "transpose_states", "mla_canary": "zero_mla_decodes"}

Request = tuple[str, dict[str, Any]]
"""The path and the body of an HTTP call."""


@dataclass(frozen=True)
class Variant:
    """One server: how a result calls it, its options, and what is done to it.

    ``then``: after the first rounds, HTTP calls as (what they amount to, (path, body) ...), each
    followed by a round at the highest concurrency.
    """

    title: str
    options: tuple[str, ...] = ()
    flagged: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    rounds: tuple[tuple[str, int], ...] = ROUNDS
    then: tuple[tuple[str, tuple[Request, ...]], ...] = ()


_DRAFTS = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,'
    ' "prompt_lookup_min": 2}',
)
_RELOAD = ("/collective_rpc", {"method": "reload_weights"})
VARIANTS = {
    "upstream": Variant("upstream", flagged=False),
    "flag": Variant("flag"),
    "short": Variant(
        "flag, graphs of 512 tokens alone",
        ("--compilation-config", '{"cudagraph_capture_sizes": [512]}'),
    ),
    "segments": Variant("flag, segments of 128 tokens", ("--max-num-batched-tokens", "4096")),
    "ngram": Variant("flag, ngram drafts", _DRAFTS),
    "states": Variant(
        "flag, ngram drafts with states",
        _DRAFTS,
        environment=(("KDA_DSV4_DRAFT_RECORDS", "0"),),
    ),
    "fp8": Variant(  # 0.33 asks for fp8 queries, the flag or not, and has them on Blackwell alone
        "flag, fp8 KV cache",
        (
            *("--kv-cache-dtype", "fp8"),
            *("--attention-config", '{"use_prefill_query_quantization": true}'),
        ),
    ),
    "sleep": Variant(
        "flag, after sleep and reload",
        ("--enable-sleep-mode",),
        environment=(("VLLM_SERVER_DEV_MODE", "1"),),
        rounds=(("salt 64", 64),),
        then=(
            ("sleep and wake", (("/sleep?level=1", {}), ("/wake_up", {}))),
            ("reload of weights", (_RELOAD,)),
            (
                "sleep without weights, wake, reload",
                (("/sleep?level=2", {}), ("/wake_up", {}), _RELOAD),
            ),
        ),
    ),
    "whole": Variant("flag, prompts whole", ("--max-num-batched-tokens", "4096")),
    "tp2": Variant("flag, two GPUs", ("--tensor-parallel-size", "2")),
    "tp2_ngram": Variant("flag, two GPUs, ngram drafts", ("--tensor-parallel-size", "2", *_DRAFTS)),
    "tp4": Variant("flag, four GPUs", ("--tensor-parallel-size", "4")),
    "tp8": Variant("flag, eight GPUs", ("--tensor-parallel-size", "8")),
    "canary": Variant("canary", rounds=(("salt 64", 64),)),
    "mla_canary": Variant("canary of MLA decode", rounds=(("salt 64", 64),)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    default = [name for name in VARIANTS if not name.startswith("tp")]
    add_arguments(parser, VARIANTS, default, port=8123)
    parser.add_argument("--flag", default="KDA", help="of --attention-backend")
    parser.add_argument("--checkpoint", type=Path, default=RECALL / "checkpoint")
    parser.add_argument("--kv-cache-gib", type=float, default=6.0, help="of each server")
    args = parser.parse_args()
    head = {
        "script": "benchmarks/recall_vllm.py",
        "environment": versions("vllm"),
        "checkpoint": args.checkpoint.name,
    }
    return serve_all(head, VARIANTS, args, measure)


def add_arguments(
    parser: argparse.ArgumentParser, variants: Mapping[str, Variant], default: list[str], port: int
) -> None:
    """The arguments that both engines' scripts have."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--only", nargs="+", choices=tuple(variants), default=default)
    parser.add_argument("--beside", type=int, default=1, help="servers at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a server's start, seconds")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="one more argument of the servers"
    )


def serve_all(
    head: dict[str, Any],
    variants: Mapping[str, Variant],
    args: argparse.Namespace,
    measure: Callable[[recall.QuestionSet, str, argparse.Namespace, int], dict[str, Any]],
    until: float = math.inf,
) -> int:
    """Measure the servers of ``args.only`` and write the file after each; the exit status.

    A server that would not end before ``until``, by time.monotonic(), is left out.
    """
    end_with_servers()
    questions = recall.read_questions(RECALL / "questions.jsonl").head(args.items)
    result: dict[str, Any] = {
        **head,
        "items": args.items,
        "serve_options": args.serve_option,
        "date": time.strftime("%Y-%m-%d"),
        "servers": {},
        "failed": {},
        "left_out": [],
    }
    lock = Lock()

    def one(numbered: tuple[int, str]) -> None:
        number, name = numbered
        title, left = variants[name].title, until - time.monotonic()
        found, why = None, ""
        if left >= SERVER_S:
            try:
                # each port of a server's own, and those that it opens beside it
                found = measure(questions, name, args, args.port + 20 * number)
            except Exception as error:  # the others go on
                print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
                why = f"{type(error).__name__}: {error}"[:4000]
        with lock:
            if found is not None:
                result["servers"][title] = found
                order = [one.title for one in variants.values() if one.title in result["servers"]]
                result["servers"] = {t: result["servers"][t] for t in order}
            elif why:
                result["failed"][title] = why
            else:
                print(f"{name}: left out, {left:.0f} s are left of {SERVER_S:.0f}", flush=True)
                result["left_out"].append(title)
            write_record(args.out, result)

    with ThreadPoolExecutor(args.beside) as pool:
        list(pool.map(one, enumerate(args.only)))
    for line in table(result):
        print(line)
    return bool(result["failed"] or result["left_out"])


def table(result: dict[str, Any]) -> list[str]:
    """A line per round; what is left out and failures last."""
    lines = []
    for title, server in result["servers"].items():
        if server["mla"] is not None:
            lines.append(f"{title}: {server['mla']}")
        for asked in server["rounds"]:
            after = f", after {asked['after']}" if "after" in asked else ""
            lines.append(
                f"{title}{after}: {asked['right']} of {result['items']} at"
                f" {asked['concurrency']}, {asked['cached_prompt_tokens']:,} tokens from the cache"
            )
    lines += [f"{title}: left out" for title in result["left_out"]]
    return lines + [f"{title}: FAILED, {why[:300]}" for title, why in result["failed"].items()]


def transpose_states() -> None:
    """Have every prefill of this process leave its states as ``[K, V]``."""
    from kda_backend import layer

    prefill = layer.prefill

    def planted(*args: Any, **options: Any) -> None:
        prefill(*args, **options)
        states, slots = args[4].write, args[4].indices
        # also in a capture: rows without a slot stay what they are, in the null block
        rows = states[slots.clamp(min=0).long()]
        kept = (slots < 0)[:, None, None, None]
        states[slots.clamp(min=0).long()] = rows.where(kept, rows.mT)

    layer.prefill = planted


def zero_mla_decodes() -> None:
    """Have every MLA decode of this package in this process be 0."""
    from mla_backend.engines.mla_decoder import MlaStep

    attend = MlaStep.attend

    def planted(*args: Any, **options: Any) -> Any:
        out, lse = attend(*args, **options)
        return out.zero_(), lse

    MlaStep.attend = planted  # type: ignore[method-assign]


def mla_of(said: list[str]) -> str | None:
    """Who decodes a server's MLA layers, in its own words; ``None`` where it says nothing."""
    found = [
        line.partition("kda-dsv4-backend: ")[2]
        for line in said
        if "MLA layers are served by" in line or "MLA layers stay on" in line
    ]
    return found[0] if found else None


def measure(
    questions: recall.QuestionSet, name: str, args: argparse.Namespace, port: int
) -> dict[str, Any]:
    """Start a server, ask it everything at each concurrency, stop it."""
    variant = VARIANTS[name]
    options = [
        *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        # the share is only what must be free at the start, beside the other servers
        *("--kv-cache-memory-bytes", str(int(args.kv_cache_gib * 2**30))),
        *("--gpu-memory-utilization", "0.1"),
        *(("--attention-backend", args.flag) if variant.flagged else ()),
        *variant.options,
        *args.serve_option,
    ]
    variables = dict(variant.environment)
    log = args.out.with_name(f"{args.out.stem}_{name}.log")
    with tempfile.TemporaryDirectory() as place:
        if name in PLANTED:
            function = f"benchmarks.recall_vllm:{PLANTED[name]}"
            variables["PYTHONPATH"] = plug_in(Path(place), CANARY, "vllm.general_plugins", function)
        if name == "segments":
            write_short_segments(Path(place))
            variables["KDA_DSV4_CONFIG_DIR"] = place
        with Server(options, port, log, args.timeout, variables, args.checkpoint) as server:
            print(f"{name}: ready after {server.start_s:.0f} s", flush=True)
            rows = rounds_of(variant, questions, server)
            counters = server.counters()
    return {
        "command": server.shown(),
        "start_s": server.start_s,
        "rounds": rows,
        "counters": counters,
        "mla": mla_of(server.log.read_text(errors="replace").splitlines()),
        "log": server.said(),
    }


def write_short_segments(folder: Path) -> None:
    """Hopper's table into ``folder``, with segments of 128 tokens for prefills of 256 and more."""
    own = folder / "kda" / "nvidia_sm90.toml"
    own.parent.mkdir()
    text = (shipped_directory() / own.relative_to(folder)).read_text()
    for key, value in (("min_longest", 256), ("segment_chunks", 2)):
        text, found = re.subn(rf"^{key} = \d+\b.*$", f"{key} = {value}", text, flags=re.M)
        if found != 1:
            raise ValueError(f"{own.name} must have one row with {key}, got {found}")
    own.write_text(text)


def rounds_of(
    variant: Variant, questions: recall.QuestionSet, server: Server, until: float = math.inf
) -> list[dict[str, Any]]:
    """Ask a server, and after each thing that is then done to it; a row per round.

    Raises:
        RuntimeError: it did not answer; the message has its last lines.
    """
    rows: list[dict[str, Any]] = []

    def asked(salt: str, number: int, **how: str) -> None:
        rows.append({**how, **ask_all(questions, server, number, salt)})
        shown = {k: v for k, v in rows[-1].items() if k != "wrong"}
        print(f"{variant.title}: {json.dumps(shown)}", flush=True)

    try:
        for salt, number in variant.rounds:
            asked(salt, number)
        for after, calls in variant.then:
            for path, body in calls:
                server.post(path, body)
            asked(*variant.rounds[-1], after=after)
    except (OSError, ValueError) as error:
        ended = "time was up" if time.monotonic() >= until else str(error)
        raise RuntimeError(
            f"{ended} after {len(rows)} rounds; the server's last lines:\n{server.last_lines(40)}"
        ) from error
    return rows


def ask_all(
    questions: recall.QuestionSet, server: Server, concurrency: int, salt: str
) -> dict[str, Any]:
    prompts = [recall.encode(questions.prompt(item)) for item in questions.items]
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda prompt: ask(prompt, server, salt), prompts))
    seconds = time.perf_counter() - begin
    score = recall.score(questions, [text for text, _ in answers])
    wrong = (
        (number, recall.extract_answer(text))
        for number, ((text, _), right) in enumerate(zip(answers, score.right, strict=True))
        if not right
    )
    return {
        "concurrency": concurrency,
        "accuracy": score.accuracy,
        "right": sum(score.right),
        "seconds": seconds,
        "cached_prompt_tokens": sum(cached for _, cached in answers),
        "prompt_tokens": sum(map(len, prompts)),
        "wrong": dict(itertools.islice(wrong, WRONG_KEPT)),
    }


def ask(prompt: list[int], server: Server, salt: str) -> tuple[str, int]:
    """The greedy completion of a prompt, and how many of its tokens came from the cache."""
    body = completion(prompt, salt, stop=[recall.TERMINATOR])
    answer = Server.post(server, "/v1/completions", body)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


if __name__ == "__main__":
    raise SystemExit(main())
