"""The recall checkpoint through the OpenAI endpoint of a real sglang server, upstream and flagged.

    python -m benchmarks.recall_sglang OUT.json [--items N] [--only upstream] [--serve-option ...]

Each server prefills at most 512 tokens a step (prompts have up to 2,000), so that requests meet in
the middle of their prompts, and keeps prefixes with the states of their KDA layers. The items are
asked with 1, 16 and 64 requests at a time, then once more from the cache. The full-attention layers
run on sglang's triton backend in the servers ``upstream`` and ``flag``. In ``upstream_mla`` and
``mla``, which run where ``--only`` names them, they run on what sglang chooses with pages of 64
tokens, and decodes of ``mla`` on this package where that is ahead. Accuracy is exact match.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from backend_cli.eval import recall_task as recall
from benchmarks.recall_vllm import CONCURRENCY, ask_all
from benchmarks.sglang_server import FLAGS, SglangServer
from benchmarks.vllm_server import HERE, versions

VARIANTS = {
    **FLAGS,
    "upstream_mla": ["--page-size", "64"],
    "mla": ["--attention-backend", "kda", "--page-size", "64"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--port", type=int, default=8124)
    parser.add_argument("--only", nargs="+", choices=tuple(VARIANTS), default=list(FLAGS))
    parser.add_argument("--timeout", type=float, default=300.0, help="of a server's start, seconds")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="one more argument of the server"
    )
    args = parser.parse_args()
    questions = recall.read_questions(HERE / "questions.jsonl").head(args.items)
    result: dict[str, Any] = {
        "script": "benchmarks/recall_sglang.py",
        "environment": versions("sglang"),
        "items": args.items,
        "serve_options": args.serve_option,
        "date": time.strftime("%Y-%m-%d"),
        "servers": {},
        "failed": {},
    }
    for name in args.only:
        log = args.out.with_name(f"{args.out.stem}_{name}.log")
        print(f"== {name}: starting a server, its log is {log.name}", flush=True)
        try:
            result["servers"][name] = measure(questions, VARIANTS[name], args, log)
        except (RuntimeError, OSError) as error:  # the other server may be well
            last = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
            print(f"{name}: failed with {error}; its last lines:\n{last}", flush=True)
            result["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return bool(result["failed"])


def measure(
    questions: recall.QuestionSet, flags: list[str], args: argparse.Namespace, log: Path
) -> dict[str, Any]:
    """Start a server, ask it everything at each concurrency, stop it."""
    options = [
        *("--chunked-prefill-size", "512", "--max-running-requests", "64"),
        *flags,
        *args.serve_option,
    ]
    with SglangServer(options, args.port, log, args.timeout) as server:
        print(f"ready after {server.start_s:.0f} s", flush=True)
        rows = []
        # rounds of one salt share the cache
        for salt, concurrency in [*((f"salt {n}", n) for n in CONCURRENCY), ("salt 64", 64)]:
            rows.append(ask_all(questions, args.port, concurrency, salt))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "answers"}), flush=True)
        start_s, command = server.start_s, server.shown()
    said = [line for line in log.read_text(errors="replace").splitlines() if "kda-dsv4" in line]
    return {"command": command, "start_s": start_s, "rounds": rows, "log": said}


if __name__ == "__main__":
    raise SystemExit(main())
