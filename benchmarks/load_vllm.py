"""A real vLLM server under the flag, saturated for minutes: answers, memory, latency.

    python -m benchmarks.load_vllm load_vllm033.json --flag KDA --minutes 8

The recall checkpoint in vLLM's default mode, with prefix caching and a cache so small that requests
are preempted. Traffic is `benchmarks.load_traffic`'s: 1 to 256 requests at a time, prompts of 1 to
2,000 tokens, prefix hits, clients that leave in mid-stream. Every answer is judged. Memory of the
GPU and of the server's processes is read every two seconds; a minute that is like every other is
compared, first against last. After the load the server must be idle, with an empty cache, and
answer all questions again. ``benchmarks.plot_load`` draws the file.

The exit status is 1 where an answer was wrong, memory grew, or the server did not come to rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from backend_cli.eval import recall_task as recall
from benchmarks import load_traffic
from benchmarks.recall_vllm import ask_all
from benchmarks.vllm_server import HERE, Server, versions

SAMPLE_S = 2.0
GPU_GROWTH, HOST_GROWTH = 0.01, 0.05  # what counts as flat, of the first minute's mean
MINUTE = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--flag", default="KDA", help="of --attention-backend; '' for upstream")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--port", type=int, default=8150)
    parser.add_argument("--kv-cache-gib", type=float, default=0.12)  # 0.5 preempted nothing
    parser.add_argument("--timeout", type=float, default=300.0, help="of a server's start, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--serve-option", action="append", default=[], help="one more argument of vllm serve"
    )
    args = parser.parse_args()
    if args.minutes < 2:
        parser.error(f"--minutes must be at least 2, got {args.minutes:g}: two are compared")
    result: dict[str, Any] = {
        "script": "benchmarks/load_vllm.py",
        "environment": versions("vllm"),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": args.minutes,
        "cycle": load_traffic.CYCLE,
        "kinds": load_traffic.KINDS,
    }
    options = [
        *("--max-model-len", "4096", "--max-num-batched-tokens", "2048", "--max-num-seqs", "256"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--kv-cache-memory-bytes", str(int(args.kv_cache_gib * 2**30))),
        *(("--attention-backend", args.flag) if args.flag else ()),
        *args.serve_option,
    ]
    log = args.out.with_name(f"{args.out.stem}_server.log")
    with Server(options, args.port, log, args.timeout) as server:
        result |= {"command": server.shown(), "start_s": server.start_s}
        print(f"ready after {server.start_s:.0f} s", flush=True)
        result |= measure(server, args)
        result["log"] = server.said()
    result["verdict"] = verdict(result)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    return not all(found["well"] for found in result["verdict"].values())


def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Ask the idle server, load it, ask it again."""
    questions = recall.read_questions(HERE / "questions.jsonl")
    shorts = asyncio.run(load_traffic.idle_answers(server.url, questions, args.seed))
    print(f"{len(shorts)} short prompts whose continuation is sure", flush=True)
    traffic = load_traffic.Traffic(questions, shorts, args.seed)
    before = server.counters()
    zero = time.monotonic()
    with Memory(server.process.pid, zero) as memory:
        work = load_traffic.run(server.url, traffic, 60.0 * args.minutes, zero)
        finished = asyncio.run(work)
        seconds = time.monotonic() - zero
    rest = rested(server)
    after = server.counters()
    again = ask_all(questions, args.port, 64, "after the load")
    wrong = [one for one in finished if not one.ok]
    return {
        "seconds": seconds,
        "short_prompts": len(shorts),
        "requests": load_traffic.counts(finished),
        "wrong": [{"kind": w.kind, "at_s": w.start, "why": w.why} for w in wrong[:40]],
        "latency": list(load_traffic.by_minute(finished)),
        "memory": memory.samples,
        "counters": {name: after[name] - before.get(name, 0.0) for name in after},
        "at_rest": rest,
        "after": {k: again[k] for k in ("right", "prompt_tokens", "seconds")},
    }


def rested(server: Server, seconds: float = 30.0) -> dict[str, float]:
    """What the idle server still holds: requests, and the share of its cache in use.

    Waits until both are nothing, at most so long: an abort takes its time.
    """
    until = time.monotonic() + seconds
    while True:
        found = server.counters()
        held = {
            name: found.get(f"vllm:{name}", 0.0)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        if not any(held.values()) or time.monotonic() > until:
            return held
        time.sleep(1)


class Memory:
    """Samples the GPU's and a process group's memory until the end of ``with``."""

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

    def _sample(self) -> None:
        while not self.stop.is_set():
            at = time.monotonic() - self.zero
            row = {"at_s": at, "gpu_mib": gpu_mib(), "host_mib": host_mib(self.group)}
            self.samples.append(row)
            self.stop.wait(SAMPLE_S)


def gpu_mib() -> float:
    """Memory in use on the first GPU, of all processes, in MiB."""
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return float(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)


def host_mib(group: int) -> float:
    """Proportional memory of the processes of a group, in MiB; shared pages count once."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if os.getpgid(int(folder.name)) == group:
                    lines = (folder / "smaps_rollup").read_text().splitlines()
                    total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            except OSError:  # it has ended
                continue
    return total / 1024


def verdict(result: dict[str, Any]) -> dict[str, Any]:
    """What was asked of the server, each with what was found and whether that is well."""
    asked = sum(row["requests"] for row in result["requests"].values())
    wrong = sum(row["wrong"] for row in result["requests"].values())
    found: dict[str, Any] = {
        "answers": {"well": wrong == 0 and asked > 0, "requests": asked, "wrong": wrong},
        "at rest": {"well": not any(result["at_rest"].values()), **result["at_rest"]},
        "afterwards": {"well": result["after"]["right"] == 320, **result["after"]},
    }
    preempted = result["counters"].get("vllm:num_preemptions_total", 0.0)
    hits = result["counters"].get("vllm:prefix_cache_hits_total", 0.0)
    found["preemption and prefix hits"] = {
        "well": preempted > 0 and hits > 0,
        "preemptions": preempted,
        "tokens_hit": hits,
    }
    last_s = MINUTE * (result["minutes"] // 1)
    for name, limit in (("gpu_mib", GPU_GROWTH), ("host_mib", HOST_GROWTH)):
        first = mean_of(result["memory"], name, 0.0, MINUTE)
        last = mean_of(result["memory"], name, last_s - MINUTE, last_s)
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
        medians = [row["latency_ms"]["p50"] for row in rows if row["concurrency"] == clients]
        ratios[str(clients)] = medians[-1] / medians[0]
    return {"well": bool(ratios) and max(ratios.values()) < 1.5, "last_over_first": ratios}


def show(result: dict[str, Any]) -> None:
    """The table, last of what is printed."""
    for kind, row in result["requests"].items():
        print(f"{kind:10} {row['requests']:7} requests, {row['wrong']} wrong")
    for one in result["wrong"][:10]:
        print("  wrong:", json.dumps(one))
    for name, found in result["verdict"].items():
        print("well:" if found["well"] else "NOT WELL:", name, json.dumps(found))
    for row in result["latency"]:
        if row["minute"] in (0, int(result["minutes"]) - 1):
            ms = {k: round(v, 1) for k, v in row["latency_ms"].items()}
            print(f"minute {row['minute']}, {row['concurrency']} at a time: {ms} ms")


if __name__ == "__main__":
    raise SystemExit(main())
