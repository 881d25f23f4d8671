"""A full server by the format of KDA's states: more requests at once than have room.

    python -m benchmarks.crowd vllm CONFIG_DIR benchmarks/results/crowd_vllm.json
    python -m benchmarks.crowd sglang CONFIG_DIR benchmarks/results/crowd_sglang.json
    python -m benchmarks.crowd sglang CONFIG_DIR crowd_sglang_drafts.json --drafts 7

A side is Kimi-Linear-48B in `benchmarks.serve_vllm` or `benchmarks.serve_sglang`, in the engine's
default mode with all of the memory of a GPU of its own. ``--gpus`` sides load at the same time, and
run at the same time once all of them have loaded. With ``--drafts`` so many tokens are looked up
for each step (n-gram drafts), and side ``states`` is the flag with a state after each drafted
token, as upstream keeps them.
``running`` are the most requests that ran at once, ``slots`` what the engine made room for: blocks
of vLLM's cache, KDA states of sglang's. ``tokens_per_s`` counts new tokens, over a time in which
the prompts are read too; it is ``null`` where sglang began and did not end in time.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from backend_core.testing.records import write_record
from benchmarks.engines import serve_sides, serve_work

SLOTS = {"vllm": "blocks", "sglang": "max_mamba_cache_size"}
FLAG = {"vllm": ["--attention-backend", "KDA"], "sglang": ["--flag"]}
STATES = ("float32", "float16", "bfloat16")
OF_DRAFTS = ("upstream:float32", "states:float32", "flag:float32")
VARIABLES = {"states": {"KDA_DSV4_DRAFT_RECORDS": "0"}}
_SIDES = [f"{side}:{state}" for state in STATES for side in serve_sides.SIDES]
# upstream's layers of Kimi-Linear refuse 16 bits in vLLM
SIDES = {"vllm": [s for s in _SIDES if s in (_SIDES[0], *_SIDES[1::2])], "sglang": _SIDES}


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("engine", choices=tuple(SLOTS))
    parser.add_argument("config", type=Path, help="a folder with the model's config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sides", nargs="+", choices=[*_SIDES, OF_DRAFTS[1]], help="in this order")
    parser.add_argument(
        "--parts", nargs="+", choices=tuple(serve_work.CROWDS), default=[*serve_work.CROWDS]
    )
    parser.add_argument("--limit", type=float, default=540.0, help="of all sides, seconds")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--drafts", type=int, help="tokens that are looked up for each step")
    args = parser.parse_args()
    if not (args.config / "config.json").is_file():
        parser.error(f"expected a folder with a config.json, got {args.config}")
    until = time.time() + args.limit - serve_sides.GRACE_S
    found: dict[str, dict[str, Any]] = {}
    sides = args.sides or (OF_DRAFTS if args.drafts else SIDES[args.engine])

    turns = args.out.with_name(f"{args.out.stem}.turns")

    def run(gpu: str, side: str) -> None:
        who, state = side.split(":")
        label = f"{who}_{state}"
        options = ["--config", str(args.config), "--parts", *args.parts, "--state", state]
        options += ["--turns", str(turns), "--own-gpu"]
        options += [] if who == "upstream" else FLAG[args.engine]
        options += ["--drafts", str(args.drafts)] if args.drafts else []
        if args.engine == "sglang":
            options += ["--full-attention", "triton"]
        module = f"benchmarks.serve_{args.engine}"
        variables = {"CUDA_VISIBLE_DEVICES": gpu, **VARIABLES.get(who, {})}
        data = serve_sides.run_side(module, label, options, args.out, until, variables)
        log = args.out.with_name(f"{args.out.stem}_{label}.log").read_text(errors="replace")
        of_side = {"failed": {"process": "no file"}} if data is None else {**data, "log": log}
        with serve_sides.WRITING:
            found[side] = of_side
            done = {s: found[s] for s in sides if s in found}
            write_record(args.out, document(args.engine, done, args.drafts))

    for first in range(0, len(sides), args.gpus):
        wave = sides[first : first + args.gpus]
        gpus = serve_work.gpus(len(wave))
        serve_sides.beside(
            functools.partial(run, gpu, side) for gpu, side in zip(gpus, wave, strict=True)
        )
    turns.unlink(missing_ok=True)
    result = document(args.engine, {s: found[s] for s in sides}, args.drafts)
    for row in result["rows"]:
        print(" ".join(f"{key} {value}" for key, value in row.items()))
    print("\n".join(f"{side} failed: {why}" for side, why in result["failed"].items()))
    return len(result["failed"])


def document(
    engine: str, found: dict[str, dict[str, Any]], drafts: int | None = None
) -> dict[str, Any]:
    """The file: a row of each side and part, and which sides failed.

    Args:
        found: by ``side:state`` what its file holds, with its ``log``.
    """
    heads = [data["head"] for data in found.values() if "head" in data]
    return {
        "script": "benchmarks/crowd.py",
        **(heads[0] if heads else {}),
        "gpus": 1,
        "at_once": True,
        **({"drafts": drafts} if drafts else {}),
        "rows": [row for side, data in found.items() for row in rows_of(engine, side, data)],
        "failed": {side: lost for side, data in found.items() if (lost := lost_parts(data))},
    }


def lost_parts(data: dict[str, Any]) -> dict[str, str]:
    """Why a side has no row of a part that was asked for."""
    return {**data["failed"], **dict.fromkeys(data.get("left_out", ()), "no time was left")}


def rows_of(engine: str, side: str, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those of one side."""
    who, state = side.split(":")
    ended = {row["what"]: row for row in data.get("rows", []) if row["kind"] == "crowd"}
    begun = re.findall(rf"{re.escape(serve_work.BEGINS)}(.*)", data["log"])
    for what in dict.fromkeys([*ended, *begun]):
        row = ended.get(what, {"running": None, "tokens_per_s": None})
        running, rate = row["running"], row["tokens_per_s"]
        if running is None:
            running = most_running(data["log"], what)
        yield {
            "what": what,
            "side": who,
            "state": state,
            "running": running,
            "slots": data["engine"].get(SLOTS[engine]),
            "tokens_per_s": None if rate is None else round(rate, 1),
        }


def most_running(log: str, what: str) -> int | None:
    """The most requests at a time that sglang's lines of decode steps name, of one part."""
    part = log.partition(f"{serve_work.BEGINS}{what}")[2].partition(serve_work.BEGINS)[0]
    counts: Sequence[str] = re.findall(r"#running-req: (\d+)", part)
    return max(map(int, counts), default=None)


if __name__ == "__main__":
    raise SystemExit(main())
