"""A loaded server of any engine: what is measured of it, and what is asked of the result.

``load_vllm`` and ``load_sglang`` start their server and call `run`. Traffic is
`benchmarks.engines.load_traffic`'s. Every answer is judged. Memory of the GPU and of the server's
processes is read every two seconds, and the mean of its first minute under load is compared with
that of its last.
After the load the server must be idle, with an empty cache, and answer all questions again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend_cli.eval import recall_task as recall
from benchmarks.engines import load_traffic
from benchmarks.engines.vllm_server import RECALL, Server, versions
from benchmarks.recall_vllm import ask_all

SAMPLE_S = 2.0
GPU_GROWTH, HOST_GROWTH = 0.01, 0.05  # what counts as flat, of the first minute's mean
OWN_PAGES = ("Pss_Anon:", "Pss_Shmem:")  # lines of smaps_rollup
MINUTE = 60.0
AFTER_S = 45.0  # that the last answers, the rest, the questions and the server's end take


@dataclass(frozen=True)
class Counters:
    """An engine's names of its counters.

    Attributes:
        preemptions: requests that lost their place in the cache, and were computed again.
        hits: tokens that came from the prefix cache.
        held: what an idle server must have none of.
        rest_s: how long it may take until it says so.
    """

    preemptions: str
    hits: str
    held: tuple[str, ...]
    rest_s: float = 30.0


def add_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    """The options that every engine's script has."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for all, the server's start included: the load is shortened to whole minutes",
    )
    parser.add_argument("--port", type=int, default=port)
    parser.add_argument("--timeout", type=float, default=300.0, help="of a server's start, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--serve-option", action="append", default=[], help="one more argument of the server"
    )


def run(
    script: str, engine: str, server: Server, counters: Counters, args: argparse.Namespace
) -> dict[str, Any]:
    """Start the server, load it and judge it: the result.

    Raises:
        ValueError: fewer than two minutes are asked for, or left of the budget.
    """
    begin = time.monotonic()
    expect_minutes(args.minutes)
    result: dict[str, Any] = {
        "script": script,
        "engine": engine,
        "environment": versions(engine),
        "date": time.strftime("%Y-%m-%d"),
        "cycle": load_traffic.CYCLE,
        "kinds": load_traffic.KINDS,
    }
    with server:
        result |= {"command": server.shown(), "start_s": server.start_s}
        print(f"ready after {server.start_s:.0f} s", flush=True)
        result |= measure(server, counters, args, begin)
        result["log"] = server.said()
    result["verdict"] = verdict(result, counters)
    return result


def expect_minutes(minutes: float) -> float:
    """Raises ValueError for fewer than two minutes: the first and the last are compared."""
    if minutes < 2:
        raise ValueError(
            f"a load must take at least 2 minutes, since two are compared; got {minutes:g}"
        )
    return minutes


def minutes_left(minutes: float, budget: float | None, elapsed: float) -> float:
    """As many of ``minutes`` as fit into a budget of seconds of which ``elapsed`` are gone."""
    if budget is None:
        return minutes
    left = (budget - elapsed - AFTER_S) // MINUTE
    return expect_minutes(min(minutes, left))


def measure(
    server: Server, counters: Counters, args: argparse.Namespace, begin: float
) -> dict[str, Any]:
    """Ask the idle server, load it, ask it again. ``begin``: time.monotonic() of the command's
    start."""
    questions = recall.read_questions(RECALL / "questions.jsonl")
    shorts = asyncio.run(load_traffic.idle_answers(server.url, questions, args.seed))
    print(f"{len(shorts)} short prompts whose continuation is sure", flush=True)
    traffic = load_traffic.Traffic(questions, shorts, args.seed)
    before = server.counters()
    zero = time.monotonic()
    minutes = minutes_left(args.minutes, args.budget, zero - begin)
    print(f"{minutes:g} minutes of load", flush=True)
    gpu_mib(server.process.pid)  # fails here rather than in its thread
    with Memory(server.process.pid, zero) as memory:
        work = load_traffic.run(server.url, traffic, 60.0 * minutes, zero)
        finished = asyncio.run(work)
        seconds = time.monotonic() - zero
    rest = rested(server, counters)
    after = server.counters()
    again = ask_all(questions, server, 64, "after the load")
    wrong = [one for one in finished if not one.ok]
    return {
        "minutes": minutes,
        "seconds": seconds,
        "short_prompts": len(shorts),
        "requests": load_traffic.counts(finished),
        "wrong": [{"kind": w.kind, "at_s": w.start, "why": w.why} for w in wrong[:40]],
        "latency": list(load_traffic.by_minute(finished)),
        "memory": memory.by_minute(int(minutes)),
        "counters": {name: after[name] - before.get(name, 0.0) for name in after},
        "at_rest": rest,
        "after": {k: again[k] for k in ("right", "prompt_tokens", "seconds")},
    }


def rested(server: Server, counters: Counters) -> dict[str, float]:
    """The idle server's holdings: requests, and the share of its cache in use.

    Waits until both are nothing, at most so long: an abort takes its time.
    """
    until = time.monotonic() + counters.rest_s
    while True:
        found = server.counters()
        held = {name.partition(":")[2]: found.get(name, 0.0) for name in counters.held}
        if not any(held.values()) or time.monotonic() > until:
            return held
        time.sleep(1)


class Memory:
    """Samples a process group's memory, on GPU and host, until the end of ``with``."""

    def __init__(self, group: int, zero: float) -> None:
        self.group, self.zero = group, zero
        self.samples: list[dict[str, float]] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def by_minute(self, minutes: int) -> list[dict[str, float]]:
        """The means of each minute. Raises ValueError where one has no sample."""
        ends = [(MINUTE * minute, MINUTE * (minute + 1)) for minute in range(minutes)]
        return [
            {name: mean_of(self.samples, name, *end) for name in ("gpu_mib", "host_mib")}
            for end in ends
        ]

    def _sample(self) -> None:
        while not self.stop.is_set():
            at = time.monotonic() - self.zero
            self.samples.append(
                {"at_s": at, "gpu_mib": gpu_mib(self.group), "host_mib": host_mib(self.group)}
            )
            self.stop.wait(SAMPLE_S)


def gpu_mib(group: int) -> float:
    """GPU memory of the processes of a group, in MiB.

    Raises:
        RuntimeError: nvidia-smi does not tell the memory of a process of the group.
    """
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory"]
    ask.append("--format=csv,noheader,nounits")
    told = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    sizes = []
    for pid, size in (line.split(", ") for line in told.splitlines()):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(int(pid)) == group:
                sizes.append(size)
    if not sizes or not all(size.isdigit() for size in sizes):
        raise RuntimeError(
            f"nvidia-smi must tell the GPU memory of the server's processes; it says {told!r}"
        )
    return float(sum(map(int, sizes)))


def host_mib(group: int) -> float:
    """Memory of the processes of a group in MiB without pages of files, in which other programs
    have a part; what the processes share counts once."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getpgid(int(folder.name)) == group:
                    lines = (folder / "smaps_rollup").read_text().splitlines()
                    total += sum(int(x.split()[1]) for x in lines if x.startswith(OWN_PAGES))
            except OSError:  # it has ended
                continue
    return total / 1024


def verdict(result: dict[str, Any], counters: Counters) -> dict[str, Any]:
    """The demands on the server, each with its finding and whether that is well."""
    asked = sum(row["requests"] for row in result["requests"].values())
    wrong = sum(row["wrong"] for row in result["requests"].values())
    found: dict[str, Any] = {
        "answers": {"well": wrong == 0 and asked > 0, "requests": asked, "wrong": wrong},
        "at rest": {"well": not any(result["at_rest"].values()), **result["at_rest"]},
        "afterwards": {"well": result["after"]["right"] == 320, **result["after"]},
    }
    preempted = result["counters"].get(counters.preemptions, 0.0)
    hits = result["counters"].get(counters.hits, 0.0)
    found["preemption and prefix hits"] = {
        "well": preempted > 0 and hits > 0,
        "preemptions": preempted,
        "tokens_hit": hits,
    }
    for name, limit in (("gpu_mib", GPU_GROWTH), ("host_mib", HOST_GROWTH)):
        first, *_, last = (minute[name] for minute in result["memory"])
        grown = last / first - 1
        row = {"well": grown <= limit, "first": first, "last": last, "growth": grown}
        found[f"memory, {name}"] = row
    found["latency"] = cliff(result["latency"])
    return found


def mean_of(samples: list[dict[str, float]], name: str, start: float, end: float) -> float:
    """The mean of a minute's samples. Raises ValueError where there are none."""
    values = [row[name] for row in samples if start <= row["at_s"] < end]
    if not values:
        raise ValueError(f"expected samples of {name} from {start:g} to {end:g} s, got none")
    return sum(values) / len(values)


def cliff(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median latency in the last minute over that in the first, for each concurrency."""
    ratios = {}
    for clients in {row["concurrency"] for row in rows}:
        medians = [row["latency_ms"] for row in rows if row["concurrency"] == clients]
        ratios[str(clients)] = medians[-1] / medians[0]
    return {"well": bool(ratios) and max(ratios.values()) < 1.5, "last_over_first": ratios}


def show(result: dict[str, Any]) -> int:
    """Print the table, last of all; the exit status, which is 1 where anything is not well."""
    for kind, row in result["requests"].items():
        print(f"{kind:10} {row['requests']:7} requests, {row['wrong']} wrong")
    for one in result["wrong"][:10]:
        print("  wrong:", json.dumps(one))
    for name, found in result["verdict"].items():
        print("well:" if found["well"] else "NOT WELL:", name, json.dumps(found))
    for row in result["latency"]:
        if row["minute"] in (0, int(result["minutes"]) - 1):
            ms = round(row["latency_ms"], 1)
            print(f"minute {row['minute']}, {row['concurrency']} at a time: {ms} ms")
    return not all(found["well"] for found in result["verdict"].values())
