"""Requests of an engine alone and among others: the same text and the same logarithms of
probabilities, to the last bit that a server writes.

Both engines' scripts ask the questions of the recall checkpoint for `NEW_TOKENS` greedy tokens and
the log-probabilities of the `LIKELIEST` of each. The first server is asked one question at a time;
every other round, of this server or another one, is compared with these answers. Questions that are
not compared come in between, so that steps have other sizes and neighbours.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from backend_cli.eval import recall_task as recall
from backend_core.testing.records import write_record
from benchmarks.engines.vllm_server import (
    RECALL,
    Server,
    completion,
    end_with_servers,
    versions,
)

NEW_TOKENS, LIKELIEST, NEIGHBOURS = 32, 5, 60


@dataclass(frozen=True)
class Variant:
    """A server.

    Attributes:
        what: how a result calls its rounds.
        options: of its own.
        rounds: (what more, requests at a time, whether the salt is the one of the round before).
        environment: further variables.
        preemptions: the counter of requests that were preempted, which its rows then have.
    """

    what: str
    options: tuple[str, ...] = ()
    rounds: tuple[tuple[str, int, bool], ...] = (("", 64, False),)
    environment: tuple[tuple[str, str], ...] = ()
    preemptions: str = ""


FIRST = (
    ("alone, once more", 1, False),
    ("8 at a time", 8, False),
    ("64 at a time", 64, False),
    ("64 at a time, in another order", 64, False),
    ("64 at a time, prompts that were served before", 64, True),
)
"""The rounds of the first server, after it was asked one question at a time."""


def arguments(description: str, variants: Mapping[str, Variant], port: int) -> argparse.Namespace:
    """The command line of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--checkpoint", type=Path, default=RECALL / "checkpoint")
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--only", nargs="+", choices=tuple(variants), default=list(variants))
    parser.add_argument("--beside", type=int, default=1, help="servers at a time")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a server's start, seconds")
    return parser.parse_args()


def compare(
    script: str,
    engine: str,
    args: argparse.Namespace,
    variants: Mapping[str, Variant],
    server_of: Callable[[Variant, argparse.Namespace, int, Path], Server],
    served: str,
) -> int:
    """Ask all servers and write ``rows`` {"what", "requests", "equal"}; the exit status.

    Args:
        variants: the first is the one that all are compared with.
        served: of a line of a server's log, which says that its KDA layers are served here.

    Raises:
        RuntimeError: the KDA layers of a server are not served here.
    """
    end_with_servers()
    questions = recall.read_questions(RECALL / "questions.jsonl").head(args.requests + NEIGHBOURS)
    prompts = [recall.encode(questions.prompt(item)) for item in questions.items]
    alone: Future[list[str]] = Future()
    lock = Lock()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in args.only}
    result: dict[str, Any] = {
        "script": script,
        "environment": versions(engine),
        "date": time.strftime("%Y-%m-%d"),
        "ranks": args.ranks,
        "rows": [],
        "log": {},
    }

    def write() -> None:
        with lock:
            result["rows"] = [row for name in args.only for row in rows[name]]
            write_record(args.out, result)

    def one(number: int, name: str) -> None:
        variant, rng = variants[name], random.Random(number)
        log = args.out.with_name(f"{args.out.stem}_{name}.log")
        with server_of(variant, args, args.port + 20 * number, log) as server:
            if number == 0:
                alone.set_result(
                    answers(server, prompts[: args.requests], 1, "alone", random.Random(0))
                )
            want = alone.result()
            salt = f"{name} 0"
            for n, (more, at_once, again) in enumerate(variant.rounds):
                salt = salt if again else f"{name} {n}"
                got = answers(server, prompts, at_once, salt, rng)
                equal = sum(x == y for x, y in zip(want, got, strict=False))
                what = ", ".join(part for part in (variant.what, more) if part)
                row: dict[str, Any] = {"what": what, "requests": len(want), "equal": equal}
                if variant.preemptions:
                    row["preemptions"] = server.counters().get(variant.preemptions, 0.0)
                rows[name].append(row)
                print(row, flush=True)
                write()
        said = log.read_text(errors="replace")
        if served not in said:
            raise RuntimeError(f"expected a line with {served!r} in {log.name}")
        result["log"][name] = server.said()
        write()

    with ThreadPoolExecutor(args.beside) as pool:
        calls = [pool.submit(one, *numbered) for numbered in enumerate(args.only)]
        if (error := calls[0].exception()) is not None and not alone.done():
            alone.set_exception(error)
        for call in calls:
            call.result()
    return int(any(row["equal"] < row["requests"] for row in result["rows"]))


def answers(
    server: Server, prompts: list[list[int]], at_once: int, salt: str, rng: random.Random
) -> list[str]:
    """What a server says to each prompt, asked in a random order."""
    order = rng.sample(range(len(prompts)), len(prompts))

    def ask(n: int) -> str:
        body = completion(prompts[n], salt, NEW_TOKENS, logprobs=LIKELIEST, ignore_eos=True)
        choice = Server.post(server, "/v1/completions", body)["choices"][0]
        return json.dumps([choice["text"], choice.get("logprobs")], sort_keys=True)

    with ThreadPoolExecutor(at_once) as pool:
        said = dict(zip(order, pool.map(ask, order), strict=True))
    return [said[n] for n in range(len(prompts))]
