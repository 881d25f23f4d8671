"""The sides of a serve benchmark: their commands, the processes that run them, and the joined file.

`pair` runs a benchmark's child process for each side: upstream, with the flag, and a variant of
either where one is asked for. The parent joins their files (`serve_work.SideFile`) into rows of
``{"what", "kind", "upstream_ms", "flag_ms"}``. Times are in ms.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from backend_core.testing.records import write_record
from benchmarks.engines import serve_agreement
from benchmarks.engines.serve_work import BY_NAME, CALLS, PATH, SAID, cache_folders, gpus
from benchmarks.engines.vllm_server import end_group, is_row

UPSTREAM_GRAPHS = "upstream_graphs"  # upstream with prefill graphs of the flag's sizes
WITHOUT_FLAG = ("upstream", UPSTREAM_GRAPHS)
SIDES = ("upstream", "flag")
FIRST_SHARE = 0.43  # of the time for both sides
GRACE_S = 45.0  # what a child may take after its deadline for the part that it is in
WRITING = threading.Lock()
"""Held by a side that adds itself to the file of all: two may end at the same time."""


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
        command.add_argument("--drafts", type=int, help="tokens looked up in prompt and answer")
        command.add_argument("--draft-layer", action="store_true", help="the model's own drafts")
        command.add_argument("--caches", type=Path, help="of what is compiled, kept; else empty")
    if parts:
        two.add_argument("--beside", action="store_true", help="load all sides at the same time")
        two.add_argument("--spread", action="store_true", help="each side on GPUs of its own")
        one.add_argument("--state", help="dtype of KDA's states")
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
    for name in ("layers", "heads", "experts", "caches", "ranks", "drafts"):
        if getattr(args, name) is not None:
            common += [f"--{name}", str(getattr(args, name))]
    common += ["--draft-layer"] * args.draft_layer
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
    if getattr(args, "draft_layer", False) and not args.drafts:
        parser.error("expected --drafts beside --draft-layer, which says who drafts, got none")
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
        own_gpus = gpus(len(options) * spread_ranks)[first : first + spread_ranks]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(own_gpus)} if own_gpus else {}
        data = run_side(module, side, own, out, until, variables)
        if data is None:
            return
        if side not in WITHOUT_FLAG and not any(served in line for line in data["said"] or [""]):
            data["failed"]["served"] = f"expected a line with {served!r} in the log"
        script = f"{module.replace('.', '/')}.py"
        with WRITING:
            found[side] = data
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
                # in one piece, as another side's may be printed at the same time
                print(f"{line.rstrip()[:300]}\n", end="", flush=True)
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


def seen_in(log: str) -> dict[str, Any]:
    """Of a side's log: by path the sizes of prefills, captured and eager, and sglang's steps and
    its buffers of states after drafted tokens.

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
    states = re.findall(r"intermediate_ssm_state_cache size: ([\d.]+)GB", log)
    return {
        "paths": paths,
        **({"prefill_steps": counts} if steps else {}),
        **({"states_of_drafts_gib": float(states[-1])} if states else {}),
    }
