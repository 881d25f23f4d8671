"""A small DeepSeek-V4 in a real sglang on one GPU, without and with the flag: tokens and records.

    python -m benchmarks.dsv4_engine_sglang [OUT.json] [--logs DIR] [--mtp] [--budget 590]

The twin of `benchmarks.dsv4_engine_vllm`, whose rows of the same file it leaves. Four processes
beside each other: upstream and flag, each in the default mode (graphs of decodes, prompts without)
and eager; `benchmarks.engines.dsv4_sglang_side` says what the model is. Checked:

- greedy tokens of 64 prompts of 1 to 5,000 tokens, with chunks, and of the same prompts continued
  from the prefix cache: flag beside upstream, in each mode. They may part where upstream's two best
  are no further apart than rounding moves them, which is seen in upstream's own two modes;
- with the flag, all bytes of states and records after each step, beside eager calls of the
  compressors on the same input (`benchmarks.engines.dsv4_sglang_watch`), by kind of batch and size;
- that the checks can fail: a planted error is seen, and the tokens depend on compressed rows;
- with ``--mtp`` the same with two drafts per token from an MTP layer, in two processes more, where
  graphs verify several tokens of a request.

Exit status 1 and the end of a process's log where one of them fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.dsv4_engine_vllm import RESULT, ROOT, conclude, partings, rounding
from benchmarks.engines import sglang_needs
from benchmarks.engines.dsv4_vllm_side import DRAFTS, MTP_SIDES, SIDES

COMPRESSORS = 5  # of four layers with ratios 0, 4, 128 and 4: three main ones, two of indexers
MODEL = "64 heads, bf16 weights, fp32 head of 16 tokens, mHC in torch"
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--logs", type=Path, default=Path("/tmp/dsv4_engine_sglang"))
    parser.add_argument("--mtp", action="store_true", help="two drafts per token besides")
    parser.add_argument("--budget", type=float, default=590.0, help="seconds, of the whole command")
    args = parser.parse_args()
    until = time.monotonic() + args.budget - 10.0
    sglang_needs.require((sglang_needs.FLASH_MLA,))
    args.logs.mkdir(parents=True, exist_ok=True)
    wanted = [*SIDES, *(MTP_SIDES if args.mtp else ())]
    sides = run(wanted, args.logs, until)
    conclude(wanted, sides, judge, args.out)


def run(names: list[str], logs: Path, until: float) -> dict[str, Any]:
    """The sides' results, of those that came to their end; of others the end of the log."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    if "CUDA_HOME" not in environment and Path("/usr/local/cuda/bin/nvcc").exists():
        environment["CUDA_HOME"] = "/usr/local/cuda"
    results = {}
    running = {}
    for name in names:
        (logs / f"{name}.json").unlink(missing_ok=True)
        running[name] = begin([name, str(logs / f"{name}.json")], name, logs, environment)
    for name, process in running.items():
        status = wait(process, until)
        own = shown(name, status, logs)
        if status == 0 and (logs / f"{name}.json").exists():
            results[name] = json.loads((logs / f"{name}.json").read_text())
        else:
            print(f"-- end of the log of {name}", *own[-45:], sep="\n")
    return results


def begin(
    arguments: list[str], name: str, logs: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    log = (logs / f"{name}.log").open("w")
    command = [sys.executable, "-m", "benchmarks.engines.dsv4_sglang_side", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
    )


def wait(process: subprocess.Popen[bytes], until: float) -> int | str:
    """Its exit status, or that it was ended; the engine's own processes end with it."""
    try:
        return process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return "time was up"


def shown(name: str, status: int | str, logs: Path) -> list[str]:
    """Prints what a process said of itself; the lines of its log."""
    lines = (logs / f"{name}.log").read_text(errors="replace").splitlines()
    own = [line for line in lines if line.startswith("[") and " s] " in line]
    print(f"== {name}: status {status}", *own, sep="\n", flush=True)
    return lines


def judge(sides: dict[str, Any]) -> tuple[Rows, list[str]]:
    """Rows for the result file, and what is wrong in sentences."""
    upstream = sides["upstream"]
    logits = "DeepGEMM" if upstream["engine"]["deep_gemm"] else "torch"
    model = f"{MODEL}, logits of the indexer in {logits}"
    modes = {"": f"default (graphs of decodes); {model}", "-eager": f"eager; {model}"}
    if all(side in sides for side in MTP_SIDES):
        modes["-mtp"] = f"default with MTP, {DRAFTS} drafts (graphs of verifications); {model}"
    rows: Rows = []
    problems: list[str] = []

    def row(mode: str, check: str, equal: int, of: int, must: bool = True) -> None:
        rows.append(
            {
                "engine": "sglang",
                "release": upstream["release"],
                "mode": mode,
                "check": check,
                "equal": equal,
                "of": of,
            }
        )
        if must and (equal != of or not of):
            problems.append(f"{mode.split(';')[0]}: {check}: {equal} of {of}")

    moved = rounding(upstream["tokens"], sides["upstream-eager"]["tokens"])
    for suffix, mode in modes.items():
        token_rows(sides["upstream" + suffix], sides["flag" + suffix], mode, moved, row)
    for name in ("upstream", "flag"):
        pair = [sides[name + suffix]["tokens"]["tokens"] for suffix in ("", "-eager")]
        equal = sum(x == y for x, y in zip(*pair, strict=True))
        check = f"greedy tokens of 64 prompts, {name} default and {name} eager (not required)"
        row(modes[""], check, equal, len(pair[0]), False)
    for name, side in sides.items():
        problems += side_problems(name, side)
    record_rows(sides["flag"], "decode", modes[""], row, problems)
    if "-mtp" in modes:
        record_rows(sides["flag-mtp"], "verify", modes["-mtp"], row, problems)
    return rows, problems


def token_rows(
    one: dict[str, Any], other: dict[str, Any], mode: str, moved: float, row: Any
) -> None:
    """Tokens of upstream beside the flag's, plainly and where rounding may decide."""
    for part, what in (
        ("tokens", "greedy tokens of 64 prompts, upstream and flag"),
        ("tokens_from_cache", "the same continued from the prefix cache, upstream and flag"),
    ):
        pairs = zip(one[part]["tokens"], other[part]["tokens"], strict=True)
        same, of = sum(x == y for x, y in pairs), len(one[part]["tokens"])
        row(mode, what, same, of, False)
        parted = partings(one[part], other[part])
        close = sum(gap <= moved for *_, gap in parted)
        limit = f"{moved:.3f} (what padded batches move in upstream)"
        row(mode, f"{what}, or parted at a gap up to {limit}", same + close, of)
        for i, at, gap in parted:
            length = one[part]["lengths"][i]
            print(f"{what}: prompt {i} of {length} parts at {at}, upstream's gap {gap:.5f}")


def side_problems(name: str, side: dict[str, Any]) -> list[str]:
    """The faults of one side alone."""
    found = []
    if not any(side["tokens_from_cache"]["cached"]):
        found.append(f"{name}: no prompt was continued from the prefix cache")
    pairs = zip(side["other_weights"], side["tokens"]["tokens"], strict=True)
    changed = sum(x != y for x, y in pairs)
    print(f"{name}: with compressed rows of half the size {changed} prompts get other tokens")
    if changed < 16:
        found.append(f"{name}: tokens hardly depend on compressed rows")
    engine = side["engine"]
    wanted = COMPRESSORS if name.startswith("flag") else 0
    if (engine["served"], engine["unserved"]) != (wanted, 0):
        found.append(
            f"{name}: {wanted} compressors must be served here, got {engine['served']}, and"
            f" {engine['unserved']} that are not"
        )
    if name.endswith("-mtp"):
        accepted = [x for x in side["tokens"]["accepted"] if x]
        print(f"{name}: tokens per step {sum(accepted) / max(len(accepted), 1):.2f}")
    return found


def record_rows(
    flag: dict[str, Any], graphed: str, mode: str, row: Any, problems: list[str]
) -> None:
    """One row for each kind of batch and graph, and two that count beside upstream's.

    ``graphed`` is the kind of batch that graphs hold.
    """
    name, records = flag["side"], flag["records"]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for step in records["steps"]:
        start = "behind a chunk or a cached prefix" if step["later"] else "from the beginning"
        place = f", {start}" if step["kind"] == "prefill" else ""
        groups.setdefault((step["graph"], step["kind"], place), []).append(step)
    for (graph, kind, place), of in sorted(groups.items()):
        how = f"graph beside eager, {len(of)} sizes" if graph == "FULL" else "without a graph"
        row(
            mode,
            f"all bytes of states and records, {kind} batches{place}, {how}",
            sum(step["equal"] for step in of),
            sum(step["of"] for step in of),
        )
    width = flag["engine"]["tokens_per_request"]
    seen = {s["size"] for s in records["steps"] if (s["graph"], s["kind"]) == ("FULL", graphed)}
    absent = {size * width for size in flag["engine"]["capture_sizes"] if size <= 64} - seen
    if absent or not seen:
        problems.append(
            f"{name}: no {graphed} step was seen with graphs of {sorted(absent)} tokens"
        )
    wanted = {f"FULL {graphed}", "NONE prefill"}
    planted = records["planted_errors_seen"]
    if not wanted <= set(planted) or not all(planted.values()):
        problems.append(f"{name}: another input must be seen as an error, got {planted}")
    problems += [f"{name}: {failure}" for failure in records["failures"]]
    for what, unlike, of in (
        ("bytes of states and records", "bytes_unlike_upstream", "bytes_written"),
        ("whole records", "records_unlike_upstream", "records_written"),
    ):
        check = f"{what} beside upstream's kernels on the same input"
        row(mode, check, records[of] - records[unlike], records[of], False)
    for kind, count in sorted(records["kinds_of_bytes"].items(), key=lambda item: -item[1]):
        print(f"bytes unlike upstream's: {count:>6} {kind}")


if __name__ == "__main__":
    main()
