"""The recall checkpoint through the OpenAI endpoint of a real vLLM server, stock and flagged.

    python -m benchmarks.recall_vllm OUT.json [--flag CUSTOM] [--items N] [--serve-option ...]
    python -m benchmarks.recall_vllm OUT.json --only canary

Each server runs with chunked prefill (512 tokens a step, prompts have up to 2,000) and prefix
caching, so that its steps mix decodes with pieces of prefills; the items are asked with 1, 16 and
64 requests at a time, then twice more, the second time from the cache. Accuracy is exact match.
The canary is the flagged server with every state that a prefill leaves transposed, ``[K, V]`` for
``[V, K]``: it shows that these questions notice. It is asked once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from backend_cli.eval import recall_task as recall

HERE = Path(__file__).parent / "recall"
CONCURRENCY = (1, 16, 64)
CANARY = "kda_dsv4_canary"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--flag", default="CUSTOM", help="of --attention-backend (KDA from 0.32)")
    parser.add_argument("--items", type=int, default=320)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--only", choices=("stock", "flag", "canary"))
    parser.add_argument("--memory", default="0.5", help="share of the GPU's memory")
    parser.add_argument("--timeout", type=float, default=300.0, help="of a server's start, seconds")
    parser.add_argument(
        "--serve-option", action="append", default=[], help="one more argument of vllm serve"
    )
    args = parser.parse_args()
    questions = recall.read_questions(HERE / "questions.jsonl").head(args.items)
    result: dict[str, Any] = {
        "script": "benchmarks/recall_vllm.py",
        "environment": environment("vllm"),
        "items": args.items,
        "serve_options": args.serve_option,
        "date": time.strftime("%Y-%m-%d"),
        "servers": {},
    }
    flag = ["--attention-backend", args.flag]
    variants: dict[str, list[str]] = {"stock": [], "flag": flag, "canary": flag}
    for name, flags in variants.items():
        if args.only in (None, name):
            log = args.out.with_name(f"{args.out.stem}_{name}.log")
            with tempfile.TemporaryDirectory() as place:
                path = plant(Path(place)) if name == "canary" else None
                result["servers"][name] = measure(questions, flags, args, log, path)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def environment(engine: str) -> dict[str, str]:
    """GPU and versions, asked of another process: this one leaves the GPU to the server."""
    code = (
        f"import json, torch, triton, {engine}; print(json.dumps(dict("
        f"gpu=torch.cuda.get_device_name(), {engine}={engine}.__version__,"
        " torch=torch.__version__, triton=triton.__version__)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def shown(command: list[str]) -> list[str]:
    """An engine's arguments, paths from the repository's root."""
    return [
        str(Path(part).relative_to(HERE.parents[1])) if part.startswith(str(HERE)) else part
        for part in command
    ]


def plant(place: Path) -> str:
    """A search path with a plug-in that calls `transpose_states` in each process of a server."""
    info = place / f"{CANARY}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {CANARY}\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\n{CANARY} = benchmarks.recall_vllm:transpose_states\n"
    (info / "entry_points.txt").write_text(entry)
    old = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(place), str(HERE.parents[1]), *([old] if old else [])])


def transpose_states() -> None:
    """Have every prefill of this process leave its states as ``[K, V]``."""
    from kda_backend import layer

    prefill = layer.prefill

    def planted(*args: Any, **options: Any) -> None:
        prefill(*args, **options)
        states, slots = args[3].state, args[4]
        slots = slots[slots >= 0].long()  # a device sync, which a test may have
        states[slots] = states[slots].mT.contiguous()

    layer.prefill = planted


def measure(
    questions: recall.QuestionSet,
    flags: list[str],
    args: argparse.Namespace,
    log: Path,
    planted: str | None,
) -> dict[str, Any]:
    """Start a server, ask it everything at each concurrency, stop it."""
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(HERE / "checkpoint")),
        *("--served-model-name", "recall", "--port", str(args.port), "--dtype", "bfloat16"),
        *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "64"),
        *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        *("--gpu-memory-utilization", args.memory),
        *flags,
        *args.serve_option,
    ]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        **os.environ,
        **({} if planted is None else {"PYTHONPATH": planted}),
    }
    rounds = [*((f"salt {n}", n) for n in CONCURRENCY), ("salt 64", 64)]
    begin = time.perf_counter()
    with log.open("wb") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=variables)
        try:
            wait(server, args.port, args.timeout, log)
            rows = []
            start_s = time.perf_counter() - begin
            # rounds of one salt share the cache
            for salt, concurrency in rounds if planted is None else rounds[-1:]:
                rows.append(ask_all(questions, args.port, concurrency, salt))
                print(json.dumps({k: v for k, v in rows[-1].items() if k != "answers"}), flush=True)
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
    said = [line for line in log.read_text(errors="replace").splitlines() if "kda-dsv4" in line]
    return {"command": shown(command[3:]), "start_s": start_s, "rounds": rows, "log": said}


def wait(server: subprocess.Popen[bytes], port: int, timeout: float, log: Path) -> None:
    """Until the server is healthy; its last words where it ends or takes too long."""
    until = time.monotonic() + timeout
    while time.monotonic() < until and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    raise SystemExit(f"vllm did not become ready in {timeout:.0f} s: {log}")


def ask_all(
    questions: recall.QuestionSet, port: int, concurrency: int, salt: str
) -> dict[str, Any]:
    prompts = [recall.encode(questions.prompt(item)) for item in questions.items]
    begin = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda prompt: ask(prompt, port, salt), prompts))
    seconds = time.perf_counter() - begin
    score = recall.score(questions, [text for text, _ in answers])
    return {
        "concurrency": concurrency,
        "accuracy": score.accuracy,
        "right": sum(score.right),
        "seconds": seconds,
        "cached_prompt_tokens": sum(cached for _, cached in answers),
        "prompt_tokens": sum(map(len, prompts)),
        "answers": [recall.extract_answer(text) for text, _ in answers],
    }


def ask(prompt: list[int], port: int, salt: str) -> tuple[str, int]:
    """The greedy completion of a prompt, and how many of its tokens came from the cache."""
    body = {
        "model": "recall",
        "prompt": prompt,
        "max_tokens": recall.MAX_ANSWER_TOKENS,
        "temperature": 0.0,
        "stop": [recall.TERMINATOR],
        "cache_salt": salt,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


if __name__ == "__main__":
    main()
