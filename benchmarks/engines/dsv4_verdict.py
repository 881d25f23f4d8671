"""What `dsv4_engine_vllm` and `dsv4_engine_sglang` share: processes, tokens, attention, file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backend_core.testing.records import write_record
from benchmarks.engines.dsv4_model import CONFIGS, HEADS, MTP_SIDES, SIDES

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "dsv4_engines_h200.json"
NAMES = {"v4": "", "v41": "DeepSeek-V4.1, "}


class Verdict:
    """Rows for the result file, and what is wrong in sentences."""

    def __init__(self, engine: str, release: str) -> None:
        self.engine, self.release = engine, release
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def row(self, mode: str, check: str, equal: int, of: int, must: bool = True) -> None:
        """``must``: fewer than all are a problem."""
        where = {"engine": self.engine, "release": self.release, "mode": mode}
        self.rows.append({**where, "check": check, "equal": equal, "of": of})
        if must and (equal != of or not of):
            self.problems.append(f"{mode.split(';')[0]}: {check}: {equal} of {of}")


def add_arguments(parser: argparse.ArgumentParser, engine: str) -> None:
    """The arguments that both scripts have."""
    parser.add_argument("out", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--logs", type=Path, default=Path(f"/tmp/dsv4_engine_{engine}"))
    parser.add_argument("--model", choices=CONFIGS, default="v4")
    parser.add_argument("--heads", type=int, choices=HEADS, default=64, help="of the attention")
    parser.add_argument("--mtp", action="store_true", help="two drafts per token besides")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for all processes")


def conclude(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    module: str,
    judge: Callable[[dict[str, Any]], Verdict],
) -> None:
    """Run the sides, each in a process of ``module``; print and write what they amount to.

    Raises:
        SystemExit: always; 1 where a side failed or a check did.
    """
    if args.mtp and args.model != "v4":
        parser.error("--mtp needs --model v4: V4.1's drafts come from another kind of model")
    args.logs.mkdir(parents=True, exist_ok=True)
    wanted = SIDES + MTP_SIDES if args.mtp else SIDES
    command = ["-m", module, "--model", args.model, "--heads", str(args.heads)]
    sides, unfinished = run(wanted, args.logs, command, args.limit)
    if missing := [side for side in SIDES if "tokens" not in sides.get(side, {})]:
        for name, side in sides.items():
            for failure in side.get("records", {}).get("failures", []):
                print(f"{name}: {failure}")
        print(f"no result file: {', '.join(missing)} gave no tokens")
        raise SystemExit(1)
    verdict = judge(sides)
    problems = verdict.problems + [f"{side} did not run to the end" for side in unfinished]
    for row in verdict.rows:
        print(f"{row['equal']:>10} of {row['of']:>10}  {row['mode']}: {row['check']}")
    write(args.out, sides["upstream"]["gpu"], verdict.rows)
    for problem in problems:
        print("FAILED:", problem)
    raise SystemExit(1 if problems else 0)


def run(
    names: Sequence[str], logs: Path, command: Sequence[str], limit: float
) -> tuple[dict[str, Any], list[str]]:
    """The sides' results, and which did not come to their end; of these the end of the log."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    if "CUDA_HOME" not in environment and Path("/usr/local/cuda/bin/nvcc").exists():
        environment["CUDA_HOME"] = "/usr/local/cuda"  # DeepGEMM compiles with its nvcc
    deadline = time.monotonic() + limit
    running = {}
    for name in names:
        out = logs / f"{name}.json"
        out.unlink(missing_ok=True)
        log = (logs / f"{name}.log").open("w")
        running[name] = subprocess.Popen(
            [sys.executable, *command, name, str(out)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    results, unfinished = {}, []
    for name, process in running.items():
        try:
            status: Any = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = f"more than {limit:.0f} s"
            process.send_signal(signal.SIGINT)  # it writes what it found
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        log_text = (logs / f"{name}.log").read_text(errors="replace")
        own = [line for line in log_text.splitlines() if line.startswith("[") and " s] " in line]
        print(f"== {name}: status {status}", *own, sep="\n", flush=True)
        if (logs / f"{name}.json").exists():
            results[name] = json.loads((logs / f"{name}.json").read_text())
        if status != 0:
            unfinished.append(name)
            print(f"-- end of the log of {name}", *log_text.splitlines()[-45:], sep="\n")
    return results, unfinished


def compare_tokens(verdict: Verdict, sides: dict[str, Any], modes: dict[str, str]) -> None:
    """Tokens of upstream beside the flag's, plainly and where rounding may decide; and whether
    they can show anything. Rounding may decide up to what upstream moves itself in the same
    prompts, plain or continued, between its two modes and where they were asked one by one.
    ``modes``: by the suffix of the sides' names."""
    for suffix, mode in modes.items():
        one, other = sides["upstream" + suffix], sides["flag" + suffix]
        for part, what in (
            ("tokens", "greedy tokens of 64 prompts, upstream and flag"),
            ("tokens_from_cache", "the same continued from the prefix cache, upstream and flag"),
        ):
            plain, padded = sides["upstream"], sides["upstream-eager"]
            if any(part not in side for side in (one, other, plain, padded)):
                verdict.problems.append(f"{mode.split(';')[0]}: no {part} of all sides")
                continue
            pairs = zip(one[part]["tokens"], other[part]["tokens"], strict=True)
            same, of = sum(x == y for x, y in pairs), len(one[part]["tokens"])
            verdict.row(mode, what, same, of, False)
            parted = partings(one[part], other[part])
            again = [padded[part], *(plain[x] for x in (f"{part}_apart",) if x in plain)]
            moved = max(rounding(plain[part], other) for other in again)
            close = sum(gap <= moved for *_, gap in parted)
            limit = f"{moved:.3f} (what other batches move in upstream)"
            verdict.row(mode, f"{what}, or parted at a gap up to {limit}", same + close, of)
            for i, at, gap in parted:
                length = one[part]["lengths"][i]
                print(f"{what}: prompt {i} of {length} parts at {at}, upstream's gap {gap:.5f}")
    for name in ("upstream", "flag"):
        pair = [sides[name + suffix]["tokens"]["tokens"] for suffix in ("", "-eager")]
        equal = sum(x == y for x, y in zip(*pair, strict=True))
        check = (
            f"greedy tokens of 64 prompts, {name} default and {name} eager (padded batches round"
        )
        check += " otherwise; not required)"
        verdict.row(modes[""], check, equal, len(pair[0]), False)
    for name, side in sides.items():
        if "other_weights" not in side:
            continue  # it is listed as one that did not run to the end
        if not any(side["tokens_from_cache"]["cached"]):
            verdict.problems.append(f"{name}: no prompt was continued from the prefix cache")
        pairs = zip(side["other_weights"], side["tokens"]["tokens"], strict=True)
        changed = sum(x != y for x, y in pairs)
        print(f"{name}: with compressed rows of half the size {changed} prompts get other tokens")
        if changed < 16:
            verdict.problems.append(f"{name}: tokens hardly depend on compressed rows")


def attention_rows(flag: dict[str, Any], mode: str, verdict: Verdict) -> None:
    """The attention that ran, and a row for each phase in which ours was compared with FlashMLA."""
    name, seen = flag["side"], flag["attention"]
    print(f"{name}: attention calls {seen['calls']}")
    for what, sizes in seen["captured"].items():
        print(f"{name}: captured with {what}, of {sizes} query tokens")
    for phase, (close, of) in seen["rows"].items():
        if of:
            what = f"rows of our sparse attention beside FlashMLA's on the same input, {phase}s"
            verdict.row(
                mode, f"{what}, worst {seen['worst'][phase]:.4f} of a row's largest", close, of
            )
    ours = {phase for phase, calls in seen["calls"].items() if calls.get("ours", 0)}
    wanted = {"decode", "prefill"}
    if flag["heads"] == 64:  # decodes of few requests, which eager steps here may not have
        wanted = set() if name.endswith("eager") else {"decode"}
    if missing := wanted - ours:
        verdict.problems.append(
            f"{name}: no {' and no '.join(sorted(missing))} ran on our sparse attention"
        )
    if not any(what.startswith("decode ours") for what in seen["captured"]) and "eager" not in name:
        verdict.problems.append(f"{name}: no graph holds our sparse attention")


def gap(best: list[list[float]], at: int) -> float:
    """How far apart in log-probability a token's two best are."""
    first, second = best[at]
    return first - second


def rounding(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The most that the gap of a token's two best differs, up to where the tokens part."""
    most = 0.0
    for i, (x, y) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        for at, (a, b) in enumerate(zip(x, y, strict=True)):
            if a != b:
                break
            most = max(most, abs(gap(one["best"][i], at) - gap(other["best"][i], at)))
    return most


def partings(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Prompts whose tokens part, the new token where they do, and the first side's gap there."""
    found = []
    for i, (x, y) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        if x != y:
            at = next(k for k, (a, b) in enumerate(zip(x, y, strict=True)) if a != b)
            found.append((i, at, gap(one["best"][i], at)))
    return found


def write(out: Path, gpu: str, rows: list[dict[str, Any]]) -> None:
    """The result file, with what it has of other engines, releases, models, heads and modes."""
    ours = {run_of(row) for row in rows}
    kept = json.loads(out.read_text())["rows"] if out.exists() else []
    kept = [row for row in kept if run_of(row) not in ours]
    result = {
        "gpu": gpu,
        "date": datetime.date.today().isoformat(),
        "script": "benchmarks/dsv4_engine_vllm.py",
        "script_sglang": "benchmarks/dsv4_engine_sglang.py",
        "rows": kept + rows,
    }
    write_record(out, result)


def run_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Engine, release, mode, model and heads of a row."""
    named = re.fullmatch(r"(.*?); (DeepSeek-V4\.1, )?(\d+) heads,.*", row["mode"])
    if named is None:
        raise ValueError(f"a row's mode must name its heads, got {row['mode']!r}")
    return row["engine"], row["release"], *named.groups("")
