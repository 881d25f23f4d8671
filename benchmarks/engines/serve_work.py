"""The work of the serve benchmarks, and the parent that gives it to both sides.

`Asked` is an engine of either kind, and the functions below it are parts that both measure. `pair`
runs a benchmark's child process for each side: upstream, with the flag, and a variant of either
where one is asked for. Each child writes a file of its own after every part
(`SideFile`), so that a run that is cut off leaves what it has measured; the parent joins them into
rows of ``{"what", "kind", "upstream_ms", "flag_ms"}``. Times are in ms.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median_high as median
from typing import Any

from backend_core.testing.records import write_record
from benchmarks.engines import serve_agreement
from benchmarks.engines.vllm_server import end_group, is_row

CALLS = (
    *((1, 128), (1, 512), (1, 640), (1, 1024), (1, 2048), (1, 4096), (1, 8192)),
    *((8, 1024), (1, 32768)),
)
DECODE_SHORT = ((1, 128), (16, 128), (64, 128), (256, 128))
DECODE_LONG = ((1, 32768), (16, 32768), (64, 32768))
SHARED_PROMPT = (64, 8192)  # requests that decode behind one system prompt
TURNS = 5
MIXED_REQUESTS, MIXED_PROMPT, MIXED_NEW = 64, (300, 5000), (32, 127)
LONG_PROMPT = (4096, 9000)
CROWDS = {"crowd": (384, 256, 384), "long_crowd": (256, 8192, 384)}
"""Requests, tokens of their prompts and new tokens of the parts that fill a server."""
_CROWD_S = {"crowd": 50.0, "long_crowd": 65.0}
DETERMINISTIC = "deterministic_prefix"  # a variant of the flag's side in both engines
UPSTREAM_GRAPHS = "upstream_graphs"  # upstream with prefill graphs of the flag's sizes
WITHOUT_FLAG = ("upstream", UPSTREAM_GRAPHS)
BY_NAME = ("long_tokens", *CROWDS)  # parts that are only done where they are named
BEGINS = "begins: "  # a line of `crowd_parts`, before the requests
PATH = "KDA prefill by"  # how a line of `say_paths` begins
SIDES = ("upstream", "flag")
SAID = "| "  # how the lines of a child start that its parent shows
FIRST_SHARE = 0.43  # of the time for both sides
GRACE_S = 45.0  # what a child may take after its deadline for the part that it is in


class Asked(ABC):
    """An engine with prompts that it has not seen before.

    Attributes:
        calls: prompts and tokens of each of the calls that are timed.
        turn: of sides that run beside each other.
        ranks: GPUs.
        most_running: requests that ran at a time in the last call; ``None`` where only the
            engine's log says so.
    """

    most_running: int | None = None
    calls: Sequence[tuple[int, int]] = CALLS
    turn: Turn | None = None
    ranks: int = 1

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def take(self, args: argparse.Namespace) -> None:
        """What the command line says of what is asked and of this process, before the engine."""
        self.calls, self.ranks = args.calls, args.ranks
        self.turn = Turn(args.turns) if args.turns else None
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


class Turn:
    """Which of the sides that run beside each other may use the GPU, by a lock on a file: all of
    them, which load and compare tokens, or one, which is timed until its process ends."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def alone(self, until: float) -> None:
        """Wait until no other side works, at most until a ``time()``."""
        fcntl.flock(self.file, fcntl.LOCK_UN)
        while time.time() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)


def say_paths(operators: Any) -> None:
    """Print, for the log, which path each size of prefill takes, and whether a graph captures it.

    Args:
        operators: the module `kda_backend.operators`.
    """
    from backend_core.launch.streams import is_capturing

    choose = operators.path_of
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

    operators.path_of = path_of


def seen_in(log: str) -> dict[str, Any]:
    """Of a side's log: by path the sizes of prefills, captured and eager, and sglang's steps.

    ``replayed`` counts the steps in graphs of as many tokens as no eager prefill had: there no
    Python of a KDA layer ran.
    """
    paths: dict[str, dict[str, list[int]]] = {}
    for name, tokens, how in re.findall(rf"{PATH} (\w+): (\d+) tokens, (captured|eager)", log):
        sizes = paths.setdefault(name, {"captured": [], "eager": []})[how]
        if int(tokens) not in sizes:
            sizes.append(int(tokens))
    eager = {size for sizes in paths.values() for size in sizes["eager"]}
    step = r"Prefill batch.*?#new-token: (\d+),.*?cuda graph: (True|False)"
    steps = [(int(tokens), graph == "True") for tokens, graph in re.findall(step, log)]
    counts = {"steps": len(steps), "in_graphs": sum(graph for _, graph in steps)}
    counts["replayed"] = sum(graph and tokens not in eager for tokens, graph in steps)
    return {"paths": paths, **({"prefill_steps": counts} if steps else {})}


def say(text: str) -> None:
    """A line that the parent shows too."""
    print(SAID + text, flush=True)


Command = Callable[[argparse.Namespace], int]


def commands(
    doc: str,
    parts: Sequence[str] = (),
    variants: Sequence[str] = (),
    *,
    vllm: bool = True,
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, argparse.ArgumentParser]:
    """The parsers of a script, of ``pair``, which is all sides, and of ``run``, which is one, with
    the arguments that `run_side` gives.

    Args:
        parts: of a script that takes a folder with the model's config.json; `BY_NAME` are not done
            by default.
        variants: of the flag's side, and `UPSTREAM_GRAPHS`.
        vllm: the flag is vLLM's.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    found = parser.add_subparsers(dest="command", required=True)
    two, one = found.add_parser("pair", help="all sides"), found.add_parser("run", help="one side")
    if parts:
        two.add_argument("config", type=Path)
        one.add_argument("--config", type=Path, required=True)
    for command in (two, one):
        command.add_argument("out", type=Path)
        if not parts:
            continue
        default = [part for part in parts if part not in BY_NAME]
        command.add_argument("--parts", nargs="+", choices=parts, default=default)
        command.add_argument("--layers", type=int, default=27, help="the model's first ones")
        command.add_argument("--heads", type=int, help="of each attention layer")
        command.add_argument("--experts", type=int, help="of each layer, or 0")
        command.add_argument("--calls", nargs="+", type=shape, default=CALLS, help="as 1x512")
        command.add_argument("--ranks", type=int, default=1, help="GPUs, by tensor parallelism")
        command.add_argument("--variant", choices=variants, help="one more side")
        command.add_argument("--caches", type=Path, help="of what is compiled, kept; else empty")
    if parts:
        two.add_argument("--beside", action="store_true", help="load all sides at the same time")
        two.add_argument("--spread", action="store_true", help="each side on GPUs of its own")
        one.add_argument("--state", help="dtype of KDA's states")
        one.add_argument("--drafts", type=int, help="tokens looked up in prompt and answer")
        one.add_argument("--turns", type=Path, help="the lock of sides beside each other")
        one.add_argument("--own-gpu", action="store_true", help="which those sides do not share")
    one.add_argument("--until", type=float, default=math.inf, help="no part starts later; time()")
    if vllm:
        two.add_argument("--flag", default="KDA", help="--attention-backend's")
        one.add_argument("--attention-backend")
    return parser, two, one


def shape(text: str) -> tuple[int, int]:
    """Prompts and tokens of a call, from ``1x512``."""
    count, length = map(int, text.split("x"))
    return count, length


def sides_of(args: argparse.Namespace, flag: list[str], more: list[str]) -> dict[str, list[str]]:
    """The options of each side's ``run``, with those that ``pair`` was given too.

    Args:
        flag: what turns this package on; more: of all sides.
    """
    common = ["--config", str(args.config), "--parts", *args.parts, *more]
    common += ["--calls", *(f"{count}x{length}" for count, length in args.calls)]
    for name in ("layers", "heads", "experts", "caches", "ranks"):
        if getattr(args, name) is not None:
            common += [f"--{name}", str(getattr(args, name))]
    # ours first: what fails in it shows before upstream's minutes are spent
    sides = {"flag": [*common, *flag], "upstream": common}
    if args.variant:
        own = [] if args.variant in WITHOUT_FLAG else flag
        sides[args.variant] = [*common, *own, "--variant", args.variant]
    return sides


def started(parser: argparse.ArgumentParser, pair: Command, run: Command) -> int:
    """Run the command that was asked for; its exit status."""
    args = parser.parse_args()
    folder = getattr(args, "config", None)
    if folder is not None and not (folder / "config.json").is_file():
        parser.error(f"expected a folder with a config.json, got {folder}")
    return pair(args) if args.command == "pair" else run(args)


def run_side(
    module: str,
    label: str,
    options: list[str],
    out: Path,
    until: float,
    variables: dict[str, str] | None = None,
) -> dict[str, Any] | None:
    """Run ``python -m module run SIDE.json --until TIME OPTIONS``, with further ``variables``.

    Returns:
        What its file holds, with ``said``; ``None`` where it left none. An exit status that its
        file does not explain is in ``failed``.
    """
    file = out.with_name(f"{out.stem}_{label}.json")
    file.unlink(missing_ok=True)
    command = [sys.executable, "-u", "-m", module, "run", str(file), *options]
    said: list[str] = []
    command += ["--until", str(until)]
    code = child(command, label, out, until + GRACE_S, said, variables or {})
    if code:
        print(f"{label}: exit status {code}", flush=True)
    if not file.exists():
        return None
    log = out.with_name(f"{out.stem}_{label}.log").read_text(errors="replace")
    found: dict[str, Any] = {**json.loads(file.read_text()), **seen_in(log), "said": said}
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
    """Rows of all sides by their names, and what each side says of itself."""
    first: dict[str, Any] = next(iter(sides.values()), {})
    times = {side: {r["what"]: r for r in data["rows"]} for side, data in sides.items()}
    rows = []
    for what in dict.fromkeys(what for by in times.values() for what in by):
        found = {side: by[what] for side, by in times.items() if what in by}
        kind = next(iter(found.values()))["kind"]
        pair_of = {
            f"{side}_{name}": found[side][name]
            for name in ("ms", "least_ms")
            for side in names_of(sides)
            if side in found and name in found[side]
        }
        rows.append({"what": what, "kind": kind, **pair_of})
    compared = {"tokens": "agreement", "long_tokens": "agreement_long"}
    kept = {
        side: {k: v for k, v in data.items() if k not in compared} for side, data in sides.items()
    }
    result = {**first.get("head", {}), "rows": rows, "sides": kept}
    upstream: dict[str, Any] = sides.get("upstream", {})
    limit = serve_agreement.rounding([upstream[part] for part in compared if part in upstream])
    for part, name in compared.items():
        asked = {side: sides[side][part] for side in names_of(sides) if part in sides[side]}
        if all(side in asked for side in SIDES):
            result[name] = serve_agreement.compared(**asked, limit=limit)
    return result


def names_of(sides: dict[str, Any]) -> list[str]:
    """Upstream, the flag, then the variants."""
    return [*(s for s in SIDES if s in sides), *(s for s in sides if s not in SIDES)]


def pair(
    module: str,
    options: dict[str, list[str]],
    out: Path,
    limit_s: float,
    served: str = "",
    is_beside: bool = False,
    spread_ranks: int = 0,
) -> int:
    """Run each side of a benchmark and join their files.

    Args:
        options: of each side's command.
        limit_s: seconds for all sides; the last part begun may take `GRACE_S` more.
        served: what a side with the flag must have printed of this package.
        is_beside: all at the same time, else one after the other.
        spread_ranks: all at the same time, each on so many GPUs of its own; 0 to share them.

    Returns:
        The number of sides that failed or left parts out by failing.
    """
    start = time.time()
    found: dict[str, Any] = {}

    def run_one(side: str, own: list[str], until: float) -> None:
        first = [*options].index(side) * spread_ranks
        gpus = ",".join(str(first + i) for i in range(spread_ranks))
        variables = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        data = run_side(module, side, own, out, until, variables)
        if data is None:
            return
        if side not in WITHOUT_FLAG and not any(served in line for line in data["said"] or [""]):
            data["failed"]["served"] = f"expected a line with {served!r} in the log"
        found[side] = data
        script = f"{module.replace('.', '/')}.py"
        document = {"script": script, "mode": "default", **join(found)}
        write_record(out, {**document, "beside": True} if is_beside else document)

    if spread_ranks:
        beside(
            functools.partial(run_one, side, own, start + limit_s) for side, own in options.items()
        )
    elif is_beside:
        turns = out.with_name(f"{out.stem}.turns")
        beside(
            functools.partial(run_one, side, [*own, "--turns", str(turns)], start + limit_s)
            for side, own in options.items()
        )
        turns.unlink(missing_ok=True)
    else:
        for number, (side, own) in enumerate(options.items(), 1):
            # the flag's side comes first, and tunes and compiles less in its load
            share = 1.0 if number == len(options) else FIRST_SHARE * 2 * number / len(options)
            run_one(side, own, start + limit_s * share)
            if side not in found:
                break  # a side alone is no pair
    show(join(found))
    return sum(bool(found[side]["failed"]) if side in found else 1 for side in options)


def cache_folders(place: Path) -> dict[str, str]:
    """The environment that has an engine keep what it compiles in a folder."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")
    return {name: str(place.absolute() / name.lower()) for name in names}


def child(
    command: list[str],
    side: str,
    out: Path,
    until: float,
    said: list[str],
    variables: dict[str, str],
) -> int:
    """Run one side with compile caches of its own; what it prints goes to a log beside ``out``,
    and its lines about this package are added to ``said``."""
    print(f"== {side}", flush=True)
    log = out.with_name(f"{out.stem}_{side}.log")
    last: list[str] = []
    with tempfile.TemporaryDirectory() as caches, log.open("w") as sink:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **cache_folders(Path(caches)), **variables},
            start_new_session=True,
        )
        clock = threading.Timer(max(1.0, until - time.time()), end_group, (process,))
        clock.start()
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            last = [*last[-39:], line.rstrip()]
            own_line = "kda-dsv4" in line
            if own_line and len(said) < 40 and not is_row(line):
                said.append(line.rstrip()[:300])
            if line.startswith(SAID) or own_line:
                print(line.rstrip()[:300], flush=True)
        code = process.wait()
        clock.cancel()
        end_group(process)
    if code:
        print("\n".join(last), flush=True)
    return code


def show(result: dict[str, Any]) -> None:
    """The table, last of what is printed."""
    names = names_of(result["sides"])
    print(f"{'':28}" + "".join(f"{name:>22}" for name in names) + f"{'ratio':>8}   (ms)")
    for r in result["rows"]:
        times = [r.get(f"{name}_ms") for name in names]
        cells = "".join(f"{x:22.2f}" if x is not None else f"{'-':>22}" for x in times)
        a, b = (r.get(f"{side}_ms") for side in SIDES)
        ratio = f"{a / b:8.2f}" if a is not None and b is not None else ""
        print(f"{r['what']:28}{cells}{ratio}")
    for name in ("agreement", "agreement_long"):
        for line in serve_agreement.said(result.get(name, {})):
            print(line)
    for side, data in result["sides"].items():
        for what in ("left_out", "failed", "prefill_steps"):
            if data.get(what):
                print(f"{side}, {what.replace('_', ' ')}: {data[what]}")
        for path, sizes in data.get("paths", {}).items():
            how = {how: f"{len(of)} up to {max(of)}" for how, of in sizes.items() if of}
            print(f"{side}, sizes of prefills by {path}: {how}")
