"""Two trees of this repository beside each other: the same calls, the same inputs, alternating.

    git worktree add ../before 40464a6
    python benchmarks/redesign_pair.py --before ../before --after . \
        --commits 40464a6 $(git rev-parse --short HEAD) \
        --output benchmarks/results/redesign_pair_h200.json

Each tree has a process, and one of them works at a time. Both prepare an item (outputs are compared
bit by bit, and as a relative L2 difference where bits differ), then rounds of CUDA-graph replays
alternate between them, and the medians are written. Items: KDA prefill and decode at the shapes of
their benchmarks, the DeepSeek-V4 compressor at a few sizes, and the host's time per call of each.

The host's time depends on the core that a process runs on and on which process was started first.
So both processes run on one core, one at a time, and a second pair of processes, started
in the other order, measures it again: a row holds the least of each side's rounds.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from redesign_pair_items import Prepared, items  # beside this script, whichever tree is imported

SCRIPT = Path(__file__).resolve()
ROUNDS, REPLAYS, HOST_ROUNDS = 7, 5, 3


# ---- a worker: one tree ----


class Worker:
    """Answers the parent's requests, one JSON line each."""

    def __init__(self) -> None:
        self._items = items()
        self._stream = torch.cuda.Stream()
        self._prepared: Prepared | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, name: str) -> dict[str, Any]:
        self._graph = self._prepared = None
        torch.cuda.empty_cache()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._prepared = self._items[name]()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                for call in self._prepared.graph_calls:
                    call()
            self._graph.replay()
        torch.cuda.synchronize()
        return {"digests": [digest(x) for x in self._prepared.outputs]}

    def dump(self, file: str) -> dict[str, Any]:
        assert self._prepared is not None
        torch.save([x.cpu() for x in self._prepared.outputs], file)
        return {}

    def gpu_us(self) -> dict[str, Any]:
        """Median over replays of the graph, per call."""
        assert self._prepared is not None and self._graph is not None
        times = []
        with torch.cuda.stream(self._stream):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(1 + REPLAYS):
                begin.record()
                self._graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return {"us": 1e3 * statistics.median(times[1:]) / len(self._prepared.graph_calls)}

    def pin(self, core: int) -> dict[str, Any]:
        """Have this process run on one core."""
        os.sched_setaffinity(0, {core})
        return {}

    def host_us(self) -> dict[str, Any]:
        """Median time that the host spends in a call, the GPU's queue being short."""
        assert self._prepared is not None
        times = []
        calls = itertools.cycle(self._prepared.graph_calls)
        with torch.cuda.stream(self._stream):
            for _ in range(60):
                torch.cuda.synchronize()
                call = next(calls)
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        return {"us": 1e6 * statistics.median(times[10:])}


def digest(x: torch.Tensor) -> int:
    """A number that depends on every byte and its place."""
    data = x.contiguous().view(torch.uint8).flatten()
    data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    places = 2 * torch.arange(data.numel(), device=data.device) + 1
    return int(((data ^ (data >> 29)) * places).sum())


def serve(tree: Path) -> None:
    import backend_core

    home = Path(str(backend_core.__file__)).resolve().parent.parent
    if home != tree.resolve():
        raise SystemExit(f"backend_core must come from {tree}, got {home}")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not mix with the answers
    worker = Worker()
    with torch.inference_mode():  # as engines call
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            answer = getattr(worker, method)(*arguments)
            print(json.dumps(answer), file=answers, flush=True)


def warm(part: int, parts: int) -> None:
    """Compile what every ``parts``-th item needs: kernels stay in the caches on disk."""
    worker = Worker()
    for name in list(worker._items)[part::parts]:
        worker.prepare(name)


# ---- the parent ----


def environment_of(tree: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(tree)}


class Side:
    """The process of one tree."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--worker", str(tree)],
            cwd=tree,
            env=environment_of(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *request: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def get(self, *request: object) -> dict[str, Any]:
        self.ask(*request)
        return self.answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def warm_all(trees: list[Path], processes: int) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--warm", f"{part}/{processes}"],
            cwd=tree,
            env=environment_of(tree),
            stdout=subprocess.DEVNULL,
        )
        for tree in trees
        for part in range(processes)
    ]
    if failed := [process.returncode for process in started if process.wait()]:
        raise SystemExit(f"{len(failed)} of the processes that compile ended with {failed[0]}")


def alternate(sides: list[Side], method: str, rounds: int) -> list[list[float]]:
    """The times of both sides' rounds, which take turns in who is first."""
    times: list[list[float]] = [[], []]
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 == 0 else (1, 0):
            times[index].append(sides[index].get(method)["us"])
    return times


def difference(sides: list[Side]) -> float:
    """The largest relative L2 difference of an output between the sides."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for index, side in enumerate(sides):
            side.get("dump", f"{folder}/{index}")
            found.append(torch.load(f"{folder}/{index}"))
    worst = 0.0
    for a, b in zip(*found, strict=True):
        a, b = a.double(), b.double()
        worst = max(worst, float((a - b).norm() / a.norm()))
    return worst


def measure(sides: list[Side], selected: list[str]) -> Iterator[tuple[dict[str, Any], float]]:
    """(row, difference of the outputs) of each item: time on the GPU, then the host's."""
    for name in selected:
        for side in sides:
            side.ask("prepare", name)
        answers = [side.answer()["digests"] for side in sides]
        differs = 0.0 if answers[0] == answers[1] else difference(sides)
        before, after = map(statistics.median, alternate(sides, "gpu_us", ROUNDS))
        yield {"what": name, "before_us": round(before, 3), "after_us": round(after, 3)}, differs
        before, after = map(min, alternate(sides, "host_us", HOST_ROUNDS))
        row = {"what": f"host: {name}", "before_us": round(before, 2), "after_us": round(after, 2)}
        yield row, differs


def measure_host(sides: list[Side], selected: list[str]) -> Iterator[tuple[str, list[float]]]:
    """(item, least host time of each side)."""
    for name in selected:
        for side in sides:
            side.ask("prepare", name)
        for side in sides:
            side.answer()
        yield name, [min(times) for times in alternate(sides, "host_us", HOST_ROUNDS)]


def start(trees: list[Path], first: int) -> list[Side]:
    """The processes of both trees, in the trees' order, that of ``first`` started first; on one
    core."""
    sides: dict[int, Side] = {}
    for index in (first, 1 - first):
        sides[index] = Side(trees[index])
        sides[index].get("pin", max(os.sched_getaffinity(0)))
    return [sides[0], sides[1]]


def print_table(rows: list[dict[str, Any]], differences: dict[str, float]) -> None:
    """Per kind of item: how many, the geometric mean and the largest of after over before."""
    kinds: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        words = row["what"].split()
        kind = " ".join(words[: 3 if words[0] == "host:" else 2])
        kinds.setdefault(kind, []).append((row["after_us"] / row["before_us"], row["what"]))
    for kind, ratios in kinds.items():
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
        worst, where = max(ratios)
        print(f"{kind:26s} {len(ratios):3d} mean {mean:.3f} worst {worst:.3f} {where}")
    for name, differs in differences.items():
        print(f"outputs differ by {differs:.1e}: {name}")
    print(f"{len(differences)} items with outputs that differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, help="a checkout")
    parser.add_argument("--after", type=Path, help="a checkout")
    parser.add_argument("--commits", nargs=2, help="what the two checkouts hold")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="items whose name contains this")
    parser.add_argument("--processes", type=int, default=6, help="per tree, to compile first")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker)
        return
    if args.warm:
        warm(*map(int, args.warm.split("/")))
        return
    if not (args.before and args.after and args.commits and args.output):
        parser.error("--before, --after, --commits and --output are needed")
    trees = [args.before.resolve(), args.after.resolve()]
    begin = time.monotonic()
    if args.processes:
        warm_all(trees, args.processes)
        print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    sides = start(trees, first=0)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "script": "benchmarks/redesign_pair.py",
        "before": args.commits[0],
        "after": args.commits[1],
    }
    rows: list[dict[str, Any]] = []
    differences: dict[str, float] = {}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    selected = [name for name in items() if args.only in name]
    for row, differs in measure(sides, selected):
        rows.append(row)
        if differs and not row["what"].startswith("host:"):
            differences[row["what"]] = differs
        if len(rows) % 20 == 0:
            print(f"{len(rows)} rows, {time.monotonic() - begin:.0f} s", flush=True)
        result |= {"outputs_that_differ": differences, "rows": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    for side in sides:
        side.close()
    sides = start(trees, first=1)
    of_host = {row["what"]: row for row in rows}
    for name, (before, after) in measure_host(sides, selected):
        row = of_host[f"host: {name}"]
        row["before_us"] = min(row["before_us"], round(before, 2))
        row["after_us"] = min(row["after_us"], round(after, 2))
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for side in sides:
        side.close()
    print_table(rows, differences)


if __name__ == "__main__":
    main()
