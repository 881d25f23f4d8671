"""The work of the serve benchmarks, and the parent that gives it to both sides.

`Asked` is an engine of either kind, and the functions below it are parts that both measure. `pair`
runs a benchmark's child process twice, one after the other on the GPU: upstream, then with the
flag. Each child writes a file of its own after every part (`SideFile`), so that a run that is
cut off leaves what it has measured; the parent joins the two into rows of
``{"what", "kind", "upstream_ms", "flag_ms"}``. Times are in ms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median_high as median
from typing import Any

from backend_core.testing.records import write_record
from benchmarks.engines import serve_agreement

CALLS = (
    *((1, 128), (1, 512), (1, 640), (1, 1024), (1, 2048), (1, 8192)),
    *((8, 1024), (1, 32768)),
)
DECODE_SHORT = ((1, 128), (16, 128), (64, 128))
DECODE_LONG = ((1, 32768), (16, 32768), (64, 32768))
SHARED_PROMPT = (64, 8192)  # requests that decode behind one system prompt
TURNS = 5
MIXED_REQUESTS, MIXED_PROMPT, MIXED_NEW = 48, (300, 5000), (32, 127)
SIDES = ("upstream", "flag")
SAID = "| "  # how the lines of a child start that its parent shows
FIRST_SHARE = 0.43  # of the time for both sides
GRACE_S = 45.0  # what a child may take after its deadline for the part that it is in


class Asked(ABC):
    """An engine with prompts that it has not seen before."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    @abstractmethod
    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        """Seconds in which the engine answers all prompts with greedy tokens."""

    @abstractmethod
    def greedy(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Of each prompt the tokens, and at each the two best and their log-probabilities."""

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [prompt_of(self.rng, length) for _ in range(count)]

    def call(self, count: int, length: int) -> float:
        """Seconds of one token after each of ``count`` new prompts."""
        return self.generate(self.prompts(count, length), [1] * count)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """Token ids of a prompt, in the range of ordinary tokens of Kimi-Linear's vocabulary."""
    return [rng.randrange(1000, 100000) for _ in range(length)]


def first_part(side: SideFile, asked: Asked) -> None:
    """The first request after the load."""
    what = "first request, 1 × 2,048"
    side.part("first request", 10, lambda: side.add(row(what, "first", 1e3 * asked.call(1, 2048))))


def call_rows(
    side: SideFile, asked: Asked, details: Callable[[int, int], dict[str, Any]] = lambda *_: {}
) -> None:
    """Prompts in, one token of each out. ``details``: more of a row, by count and length."""
    for shape, times in call_times(asked.call).items():
        more = {"least_ms": min(times), **details(*shape), "runs_ms": times}
        side.add(row(call_name(*shape), "call", median(times), **more))


def tokens_part(side: SideFile, asked: Asked) -> None:
    """Greedy tokens of 64 prompts, all at once and 16 of them one after the other."""

    def work() -> dict[str, Any]:
        rng = random.Random(7)
        count = serve_agreement.PROMPTS
        lengths = [rng.randint(1, 40) ** 2 + rng.randint(1, 63) for _ in range(count)]
        batch = [prompt_of(rng, length) for length in lengths]
        together = asked.greedy(batch)
        apart = [asked.greedy([one])[0] for one in batch[: serve_agreement.APART]]
        return {"lengths": lengths, "together": together, "apart": apart}

    side.part("tokens", 8, work)
    if "tokens" in side.data:
        side.data["tokens_summary"] = serve_agreement.collapse(side.data["tokens"])
        say(f"tokens: {side.data['tokens_summary']}")


def call_name(count: int, length: int) -> str:
    return f"{count} × {length:,}"


def decode_name(count: int, length: int) -> str:
    return f"decode step, {count} × {length:,}"


def call_times(call: Callable[[int, int], float]) -> dict[tuple[int, int], list[float]]:
    """The times of every shape of `CALLS`, in ms, measured in turns.

    A machine's host is slower for seconds at a time: in turns, such a time is shared by all shapes.
    The shorter a call, the more of it is the host's, and the oftener it is made.
    """
    for shape in CALLS:
        for _ in range(2):
            call(*shape)
    found: dict[tuple[int, int], list[float]] = {shape: [] for shape in CALLS}
    for _ in range(TURNS):
        for count, length in CALLS:
            repeats = {128: 5, 512: 5, 640: 5, 2048: 7, 32768: 1}.get(length, 2)
            found[count, length] += [1e3 * call(count, length) for _ in range(repeats)]
    return found


def mixed_part(side: SideFile, asked: Asked) -> None:
    """All requests of the mixed load at once."""
    side.part("mixed load", 20, lambda: side.add(mixed_row(asked.generate)))


def mixed_row(generate: Callable[[list[list[int]], list[int]], float]) -> dict[str, Any]:
    """The mixed load, timed twice with other requests, after one that is not timed.

    An engine still compiles for batches that it has not seen, and the caches of what is compiled so
    may be shared with the side that ran before.
    """
    seconds = []
    for seed in (0, 1, 2):
        rng = random.Random(seed)
        lengths = [rng.randint(*MIXED_PROMPT) for _ in range(MIXED_REQUESTS)]
        new_tokens = [rng.randint(*MIXED_NEW) for _ in range(MIXED_REQUESTS)]
        seconds.append(generate([prompt_of(rng, length) for length in lengths], new_tokens))
    first, *timed = (1e3 * x for x in seconds)
    what = "mixed load of 48 requests"
    return row(what, "mixed", sum(timed) / len(timed), runs_ms=timed, first_ms=first)


def memory_used_mib() -> int | None:
    """Of the GPU, by all processes; ``None`` without nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True)
        return int(found.stdout.split()[0])
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


def row(what: str, kind: str, ms: float, **details: Any) -> dict[str, Any]:
    """One measurement of one side. Rows of both sides are joined by ``what``."""
    return {"what": what, "kind": kind, "ms": ms, **details}


class SideFile:
    """A side's file, written after every part.

    A part that the time left does not allow is named in ``left_out``; one that raises is named in
    ``failed`` with its last line, and the others go on, because a load of the model costs more
    than they do. The parent's exit status says so.
    """

    def __init__(self, path: Path, until: float, head: dict[str, Any]) -> None:
        self.path, self.until = path, until
        self.data: dict[str, Any] = {**head, "rows": [], "left_out": [], "failed": {}}
        self.save()

    def save(self) -> None:
        write_record(self.path, self.data)

    def add(self, measured: dict[str, Any]) -> None:
        """One row more."""
        self.data["rows"].append(measured)
        self.save()
        shown = {k: v for k, v in measured.items() if k not in ("what", "ms", "kind", "runs_ms")}
        say(f"  {measured['what']}: {measured['ms']:.2f} ms {shown or ''}")

    def leave_out(self, name: str, why: str) -> None:
        """Name a part that is not done."""
        self.data["left_out"].append(name)
        say(f"{name}: left out, {why}")
        self.save()

    def part(self, name: str, needs_s: float, work: Callable[[], Any]) -> None:
        """Do a part that is expected to take ``needs_s``; what it returns is kept by its name."""
        left = self.until - time.time()
        if left < needs_s:
            self.leave_out(name, f"{left:.0f} s are left and {needs_s:.0f} expected")
            return
        begin = time.perf_counter()
        try:
            found = work()
        except Exception as error:
            self.data["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
            say(f"{name}: failed with {type(error).__name__}: {error}"[:300])
            traceback.print_exc()
        else:
            if found is not None:
                self.data[name] = found
            say(f"{name}: {time.perf_counter() - begin:.1f} s")
        self.save()


def say(text: str) -> None:
    """A line that the parent shows too."""
    print(SAID + text, flush=True)


Command = Callable[[argparse.Namespace], int]


def commands(
    doc: str, *, config: bool = True, vllm: bool = True
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parsers of a script, of ``pair``, which is both sides, and of ``run``, which is one, with
    the arguments that `run_side` gives.

    Args:
        config: a folder with the model's config.json.
        vllm: the flag is vLLM's.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    found = parser.add_subparsers(dest="command", required=True)
    two, one = found.add_parser("pair", help="both sides"), found.add_parser("run", help="one side")
    if config:
        two.add_argument("config", type=Path)
        one.add_argument("--config", type=Path, required=True)
    for command in (two, one):
        command.add_argument("out", type=Path)
    one.add_argument("--until", type=float, default=math.inf, help="no part starts later; time()")
    if vllm:
        two.add_argument(
            "--flag", default="KDA", help="of --attention-backend (CUSTOM before 0.32)"
        )
        one.add_argument("--attention-backend")
    return parser, two, one


def started(parser: argparse.ArgumentParser, pair: Command, run: Command) -> int:
    """Run the command that was asked for; its exit status."""
    args = parser.parse_args()
    folder = getattr(args, "config", None)
    if folder is not None and not (folder / "config.json").is_file():
        parser.error(f"expected a folder with a config.json, got {folder}")
    return pair(args) if args.command == "pair" else run(args)


def run_side(
    module: str, label: str, options: list[str], out: Path, until: float
) -> dict[str, Any] | None:
    """Run ``python -m module run SIDE.json --until TIME OPTIONS``.

    Returns:
        What its file holds, with ``said``; ``None`` where it left none. An exit status that its
        file does not explain is in ``failed``.
    """
    file = out.with_name(f"{out.stem}_{label}.json")
    file.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", module, "run", str(file), *options]
    said: list[str] = []
    code = child([*command, "--until", str(until)], label, out, until + GRACE_S, said)
    if code:
        print(f"{label}: exit status {code}", flush=True)
    if not file.exists():
        return None
    found: dict[str, Any] = {**json.loads(file.read_text()), "said": said}
    if code and not found["failed"]:
        found["failed"]["process"] = f"exit status {code}"
    return found


def beside(calls: Iterable[Callable[[], None]]) -> None:
    """Run sides at the same time, each in a thread that waits for its process."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def join(sides: dict[str, Any]) -> dict[str, Any]:
    """Rows of both sides by their names, and what each side says of itself."""
    first = next(iter(sides.values()), {})
    times = {side: {r["what"]: r for r in data["rows"]} for side, data in sides.items()}
    rows = []
    for what in dict.fromkeys(what for by in times.values() for what in by):
        found = {side: by[what] for side, by in times.items() if what in by}
        kind = next(iter(found.values()))["kind"]
        pair_of = {
            f"{side}_{name}": found[side][name]
            for name in ("ms", "least_ms")
            for side in SIDES
            if side in found and name in found[side]
        }
        rows.append({"what": what, "kind": kind, **pair_of})
    kept = {side: {k: v for k, v in data.items() if k != "tokens"} for side, data in sides.items()}
    result = {**first.get("head", {}), "rows": rows, "sides": kept}
    if all("tokens" in sides.get(side, {}) for side in SIDES):
        result["agreement"] = serve_agreement.compared(*(sides[side]["tokens"] for side in SIDES))
    return result


def pair(
    module: str,
    options: dict[str, list[str]],
    out: Path,
    limit_s: float,
    served: str = "",
    joined: Callable[[dict[str, Any]], dict[str, Any]] = join,
) -> int:
    """Run each side of a benchmark, one after the other, and join their files.

    Args:
        options: of each side's command.
        limit_s: seconds for both sides; the last part begun may take `GRACE_S` more.
        served: what the flag's side must have printed of this package.
        joined: the result file of what the sides left.

    Returns:
        The number of sides that failed or left parts out by failing.
    """
    start = time.time()
    failed = 0
    result: dict[str, Any] = {}
    document = joined(result)
    for number, (side, own) in enumerate(options.items()):
        # the flag's side comes first, and tunes and compiles less in its load
        until = start + limit_s * (1.0 if number + 1 == len(options) else FIRST_SHARE)
        found = run_side(module, side, own, out, until)
        if found is None:
            failed += 1
            break  # a side alone is no pair
        result[side] = found
        if side == "flag" and not any(served in line for line in found["said"] or [""]):
            found["failed"]["served"] = f"expected a line with {served!r} in the log"
        failed += bool(found["failed"])
        document = {"script": script_of(module), "mode": "default", **joined(result)}
        write_record(out, document)
    show(document)
    return failed


def script_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def child(command: list[str], side: str, out: Path, until: float, said: list[str]) -> int:
    """Run one side with compile caches of its own; what it prints goes to a log beside ``out``,
    and its lines about this package are added to ``said``."""
    print(f"== {side}", flush=True)
    log = out.with_name(f"{out.stem}_{side}.log")
    last: list[str] = []
    with tempfile.TemporaryDirectory() as caches, log.open("w") as sink:
        names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
        own = {name: str(Path(caches) / name.lower()) for name in names}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **own},
        )
        clock = threading.Timer(max(1.0, until - time.time()), process.kill)
        clock.start()
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            last = [*last[-39:], line.rstrip()]
            own_line = "kda-dsv4" in line
            if own_line and len(said) < 40:
                said.append(line.rstrip()[:300])
            if line.startswith(SAID) or own_line:
                print(line.rstrip()[:300], flush=True)
        code = process.wait()
        clock.cancel()
    if code:
        print("\n".join(last), flush=True)
    return code


def show(result: dict[str, Any]) -> None:
    """The table, last of what is printed."""
    print(f"{'':28}{'upstream':>12}{'flag':>12}{'ratio':>8}   (ms)")
    for r in result["rows"]:
        a, b = (r.get(f"{side}_ms") for side in SIDES)
        cells = [f"{x:12.2f}" if x is not None else f"{'-':>12}" for x in (a, b)]
        ratio = f"{a / b:8.2f}" if a is not None and b is not None else ""
        print(f"{r['what']:28}{cells[0]}{cells[1]}{ratio}")
    for line in serve_agreement.said(result.get("agreement", {})):
        print(line)
    for side, data in result["sides"].items():
        for what in ("left_out", "failed"):
            if data[what]:
                print(f"{side}, {what.replace('_', ' ')}: {data[what]}")
