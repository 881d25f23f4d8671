"""The work of one side of a serve benchmark.

`Asked` is an engine of either kind, and the functions below it are parts that both measure. A side
writes its file after every part (`SideFile`), so that a run that is cut off leaves what it has
measured. `serve_sides` runs the sides. Times are in ms.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import os
import random
import subprocess
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median_high as median
from typing import Any

from backend_core.testing.records import write_record
from benchmarks.engines import serve_agreement

CALLS = (
    *((1, 128), (1, 512), (1, 640), (1, 1024), (1, 2048), (1, 4096), (1, 8192)),
    *((8, 1024), (1, 32768)),
)
BUDGET = 8192
"""The most tokens of prompts in a step, as ``vllm serve`` has them on an H200."""
DECODE_SHORT = ((1, 128), (16, 128), (64, 128), (256, 128))
DECODE_LONG = ((1, 32768), (16, 32768), (64, 32768))
DECODE_S = 2.0  # for so long a decode step is timed again and again, and twice at least
SHARED_PROMPT = (64, 8192)  # requests that decode behind one system prompt
TURNS = 5
MIXED_REQUESTS, MIXED_PROMPT, MIXED_NEW = 64, (300, 5000), (32, 127)
LONG_PROMPT = (4096, 9000)
CROWDS = {"crowd": (384, 256, 384), "long_crowd": (256, 8192, 384)}
"""Requests, tokens of their prompts and new tokens of the parts that fill a server."""
_CROWD_S = {"crowd": 50.0, "long_crowd": 65.0}
DETERMINISTIC = "deterministic_prefix"  # a variant of the flag's side in both engines
BY_NAME = ("long_tokens", *CROWDS)  # parts that are only done where they are named
BEGINS = "begins: "  # a line of `crowd_parts`, before the requests
PATH = "KDA prefill by"  # how a line of `say_paths` begins
SAID = "| "  # how the lines of a child start that its parent shows


class Asked(ABC):
    """An engine with prompts that it has not seen before.

    Attributes:
        calls: prompts and tokens of each of the calls that are timed.
        turn: of sides that run beside each other.
        ranks: GPUs.
        drafts: that a step verifies of each sequence.
        most_running: requests that ran at a time in the last call; ``None`` where only the
            engine's log says so.
    """

    most_running: int | None = None
    calls: Sequence[tuple[int, int]] = CALLS
    turn: Turn | None = None
    ranks: int = 1
    drafts: int = 0

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def take(self, args: argparse.Namespace) -> None:
        """What the command line says of what is asked and of this process, before the engine."""
        self.calls, self.ranks, self.drafts = args.calls, args.ranks, args.drafts or 0
        self.turn = Turn(args.turns, is_alone=not args.own_gpu) if args.turns else None
        if args.variant == DETERMINISTIC:
            os.environ["KDA_DSV4_DETERMINISTIC_PREFIX"] = "1"
        if args.caches:
            os.environ.update(cache_folders(args.caches))

    @abstractmethod
    def generate(self, prompts: list[list[int]], new_tokens: list[int]) -> float:
        """Seconds in which the engine answers all prompts with greedy tokens."""

    @abstractmethod
    def greedy(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Of each prompt the tokens, and at each the two best and their log-probabilities."""

    @abstractmethod
    def forget(self) -> bool:
        """Empty the prefix cache; whether the engine was idle enough to do so."""

    @abstractmethod
    def drafted(self) -> dict[str, Any]:
        """Drafted and accepted tokens until now, and what more the engine says of drafts."""

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [prompt_of(self.rng, length) for _ in range(count)]

    def call(self, count: int, length: int) -> float:
        """Seconds of one token after each of ``count`` new prompts."""
        return self.generate(self.prompts(count, length), [1] * count)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    """Token ids of a prompt, in the range of ordinary tokens of Kimi-Linear's vocabulary."""
    return [rng.randrange(1000, 100000) for _ in range(length)]


def first_part(side: SideFile, asked: Asked) -> None:
    """The first request after the load; other sides may still load beside it, or have compiled what
    it needs."""
    what = "first request, 1 × 2,048"
    side.part("first request", 10, lambda: side.add(row(what, "first", 1e3 * asked.call(1, 2048))))


def call_rows(
    side: SideFile, asked: Asked, details: Callable[[int, int], dict[str, Any]] = lambda *_: {}
) -> None:
    """Prompts in, one token of each out. ``details``: more of a row, by count and length."""
    for shape, times in call_times(asked.call, asked.calls).items():
        more = {"least_ms": min(times), **details(*shape), "runs_ms": times}
        side.add(row(call_name(*shape), "call", median(times), **more))


def tokens_parts(side: SideFile, asked: Asked, parts: list[str]) -> None:
    """The parts that compare tokens, of which none is timed."""
    if "tokens" in parts:
        tokens_part(side, asked)
    if "long_tokens" in parts:
        tokens_part(side, asked, LONG_PROMPT)


def tokens_part(side: SideFile, asked: Asked, long: tuple[int, int] | None = None) -> None:
    """Greedy tokens of prompts, all at once and one after the other.

    Args:
        long: lengths, from which to which, of 16 prompts that reach over blocks of the prefix
            cache, instead of 64 of mixed lengths. One after the other they resume from it, and they
            are asked with more behind them too.
    """
    name = "long_tokens" if long else "tokens"

    def work() -> dict[str, Any]:
        rng = random.Random(7)
        if long:
            lengths = [rng.randint(*long) for _ in range(serve_agreement.LONG_PROMPTS)]
        else:
            count = serve_agreement.PROMPTS
            lengths = [rng.randint(1, 40) ** 2 + rng.randint(1, 63) for _ in range(count)]
        batch = [prompt_of(rng, length) for length in lengths]
        together = asked.greedy(batch)
        until = time.time() + 5
        while not (long or asked.forget()):  # alone a prompt is to be read from its beginning
            if time.time() > until:
                raise TimeoutError("expected an empty prefix cache within 5 s")
            time.sleep(0.1)
        apart = [asked.greedy([one])[0] for one in batch]
        found: dict[str, Any] = {"lengths": lengths, "together": together, "apart": apart}
        if long:
            ends = [prompt_of(rng, rng.randint(5, 150)) for _ in batch]
            again = [one + end for one, end in zip(batch, ends, strict=True)]
            found["resumed"] = asked.greedy(again)
            if not any(row["cached"] for row in found["resumed"]):
                raise ValueError("expected prompts that resume from the prefix cache, got none")
        return found

    side.part(name, 15, work)
    if name in side.data:
        side.data[f"{name}_summary"] = serve_agreement.collapse(side.data[name])
        say(f"{name}: {side.data[f'{name}_summary']}")
    if asked.drafts:
        side.part("drafts", 0, asked.drafted)
        say(f"drafts: {side.data.get('drafts')}")


def call_name(count: int, length: int) -> str:
    return f"{count} × {length:,}"


def decode_name(count: int, length: int) -> str:
    return f"decode step, {count} × {length:,}"


def call_times(
    call: Callable[[int, int], float], shapes: Sequence[tuple[int, int]] = CALLS
) -> dict[tuple[int, int], list[float]]:
    """The times of every shape, in ms, measured in turns.

    A machine's host is slower for seconds at a time: in turns, such a time is shared by all shapes.
    The shorter a call, the more of it is the host's, and the oftener it is made.
    """
    for shape in shapes:
        for _ in range(2):
            call(*shape)
    found: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for _ in range(TURNS):
        for count, length in shapes:
            repeats = {128: 5, 512: 5, 640: 5, 2048: 7, 32768: 1}.get(length, 2)
            found[count, length] += [1e3 * call(count, length) for _ in range(repeats)]
    return found


def timed_again(steps: Callable[[], list[float]]) -> list[float]:
    """The times of ``steps``, called for `DECODE_S`: a host is slow for longer than a few steps."""
    until = time.perf_counter() + DECODE_S
    times = steps() + steps()
    while time.perf_counter() < until:
        times += steps()
    return times


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
    what = f"mixed load of {MIXED_REQUESTS} requests"
    return row(what, "mixed", sum(timed) / len(timed), runs_ms=timed, first_ms=first)


def before_the_turn(side: SideFile, asked: Asked, parts: list[str]) -> None:
    """What sides that load beside each other do at the same time: tokens, and what a crowd's first
    requests compile."""
    tokens_parts(side, asked, parts)
    for name in CROWDS:
        if name in parts:
            _, length, _ = CROWDS[name]
            asked.generate(asked.prompts(8, length), [8] * 8)


def crowd_parts(side: SideFile, asked: Asked, parts: list[str]) -> None:
    """More requests at once than a server has room for: the tokens that it writes in a second."""
    for name, seconds in _CROWD_S.items():
        if name in parts:
            side.part(name, seconds, functools.partial(_crowd, side, asked, name))


def _crowd(side: SideFile, asked: Asked, name: str) -> None:
    count, length, new_tokens = CROWDS[name]
    asked.generate(asked.prompts(8, length), [8] * 8)
    prompts = asked.prompts(count, length)
    what = f"{count} requests at once, {length:,} in and {new_tokens} out"
    say(f"{BEGINS}{what}")
    seconds = asked.generate(prompts, [new_tokens] * count)
    rate = count * new_tokens / seconds
    side.add(row(what, "crowd", 1e3 * seconds, tokens_per_s=rate, running=asked.most_running))


def gpus(count: int) -> list[str]:
    """The first ``count`` GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ValueError: it may use fewer.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = [str(i) for i in range(count)] if named is None else named.split(",")
    if len(found) < count:
        raise ValueError(f"expected {count} GPUs, got CUDA_VISIBLE_DEVICES={named}")
    return found[:count]


def memory_used_mib() -> int | None:
    """Of this process's first GPU, by all processes; ``None`` without nvidia-smi."""
    (gpu,) = gpus(1)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", gpu]
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


class Turn:
    """When the sides that run beside each other are timed, by a lock on a file that all of them
    share while they load and compare tokens.

    Attributes:
        is_alone: each is timed while no other works, and keeps the lock until its process ends;
            otherwise all are timed at the same time, each on a GPU of its own.
    """

    def __init__(self, path: Path, *, is_alone: bool = True) -> None:
        self.file, self.is_alone = path.open("a"), is_alone
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def take(self, until: float) -> None:
        """Wait until no other side loads, or is timed alone, at most until a ``time()``."""
        fcntl.flock(self.file, fcntl.LOCK_UN)
        while time.time() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        if not self.is_alone:
            fcntl.flock(self.file, fcntl.LOCK_UN)


def say_paths(paths: Any) -> None:
    """Print, for the log, which path each size of prefill takes, and whether a graph captures it.

    Args:
        paths: the module `kda_backend.prefill.paths`.
    """
    from backend_core.launch.streams import is_capturing

    choose = paths.path_of
    seen: set[tuple[Any, ...]] = set()

    def path_of(selection: Any, tokens: Any, step_plan: Any, state: Any) -> Any:
        size, longest = tokens.q.shape[1], step_plan.max_tokens
        is_captured = is_capturing(tokens.q.device)
        call = id(selection), size, step_plan.num_chunks, longest, is_captured
        if call not in seen:
            seen.add(call)
            name = selection.prefill.row(step_plan.num_chunks * tokens.v.shape[2], longest).name
            how = "captured" if is_captured else "eager"
            print(f"{PATH} {name}: {size} tokens, {how}", flush=True)
        return choose(selection, tokens, step_plan, state)

    paths.path_of = path_of


def say(text: str) -> None:
    """A line that the parent shows too."""
    print(SAID + text, flush=True)


def cache_folders(place: Path) -> dict[str, str]:
    """The environment that has an engine keep what it compiles in a folder."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
    return {name: str(place.absolute() / name.lower()) for name in names}
