"""``kda-dsv4 demo``: a small Kimi-Linear model answers questions, with this backend and without.

The model is transformers' own; its checkpoint and the questions are in the repository, under
``benchmarks/recall``. Every question goes through transformers twice: on this backend, and stock.
So does a prompt for a tiny DeepSeek-V4 with random weights, whose tokens must be equal.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from backend_cli import recall
from backend_cli.errors import BadInputError, CliError
from backend_core.tables.select import PathSelection
from backend_core.target import KNOWN_TARGETS, Target, detect_target
from dsv4_backend.engines import transformers as dsv4
from kda_backend.engines import transformers as kda
from kda_backend.selection import KdaShape, select

RECALL = Path(__file__).resolve().parent.parent / "benchmarks" / "recall"
SCHEMA = 1
DEFAULT_QUESTIONS = 64
WANTED_ACCURACY = 0.95
DSV4_TOKENS = 16
_DSV4_PROMPT = 120  # a window of 128 tokens ends among those generated

_CHUNK = 64
_KIMI_LINEAR = KdaShape(num_heads=32, num_value_heads=32, key_dim=128, value_dim=128)
_KIMI_LINEAR_TOKENS = 8192
SERVE = (
    "vllm serve moonshotai/Kimi-Linear-48B-A3B-Instruct --attention-backend KDA",
    "sglang serve --model-path moonshotai/Kimi-Linear-48B-A3B-Instruct --attention-backend kda",
)


@dataclass
class Answers:
    """What one way of running the model gave.

    Attributes:
        generated: the token ids generated for each question, terminator included.
        speeds: tokens read and generated per second, for each question.
    """

    generated: list[list[int]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def accuracy(self, questions: recall.QuestionSet) -> float:
        """Share of the questions that were answered exactly."""
        return recall.score(questions, [recall.decode(ids) for ids in self.generated]).accuracy


def run(num_questions: int | None = None, json_output: bool = False) -> int:
    """Run the demo and print its report; JSON on stdout with ``json_output``.

    Returns 0, or 1 where accuracy on this backend is under 0.95 or DeepSeek-V4's tokens differ
    from stock. Raises BadInputError where ``num_questions`` is not among the questions at hand,
    CliError where the checkpoint is absent.
    """
    if not (RECALL / "checkpoint" / "model.safetensors").is_file():
        raise CliError(
            f"the demo's checkpoint is not at {RECALL / 'checkpoint'}: it is in the repository, "
            "not in the wheel; run the demo from a clone (make demo)"
        )
    questions = recall.read_questions(RECALL / "questions.jsonl")
    count = DEFAULT_QUESTIONS if num_questions is None else num_questions
    if not 1 <= count <= len(questions.items):
        raise BadInputError(f"questions must number 1 to {len(questions.items)}, got {count}")
    questions = questions.head(count)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # read by transformers when it is imported: its warnings and bars would break the one shown here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    model = kda.load_model(RECALL / "checkpoint", device)

    backend, stock = answer(model, questions)
    accuracies = backend.accuracy(questions), stock.accuracy(questions)
    dsv4_equal = dsv4_equal_tokens(device)
    report = {
        "schema": SCHEMA,
        "questions": count,
        "accuracy": accuracies[0],
        "stock_accuracy": accuracies[1],
        "token_agreement": agreement(backend.generated, stock.generated),
        "tokens_per_second": median(backend.speeds),
        "stock_tokens_per_second": median(stock.speeds),
        "dsv4_tokens": DSV4_TOKENS,
        "dsv4_equal_tokens": dsv4_equal,
        "device": str(device),
        "paths": [path_row(target) for target in _targets()],
        "serve": SERVE,
    }
    if json_output:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report, questions, backend)
        print(
            f"DeepSeek-V4 (tiny, random weights): {dsv4_equal} of {DSV4_TOKENS} tokens equal "
            "with and without the backend"
        )
        print(f"demo: accuracy {accuracies[0]:.3f}, stock {accuracies[1]:.3f}, {count} questions")
    return 0 if accuracies[0] >= WANTED_ACCURACY and dsv4_equal == DSV4_TOKENS else 1


def answer(model: Any, questions: recall.QuestionSet) -> tuple[Answers, Answers]:
    """Answer every question on this backend and on stock transformers, with a progress bar."""
    backend, stock = Answers(), Answers()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[right]}"),
        console=Console(stderr=True),
    )
    with progress:
        for name, answers in (("this backend", backend), ("stock transformers", stock)):
            task = progress.add_task(f"{name:18}", total=len(questions.items), right="")
            if answers is backend:
                kda.enable()
            try:
                generate(model, "Q: 1 + 1?\nA: ")  # first calls load and compile
                for done, item in enumerate(questions.items, start=1):
                    prompt = questions.prompt(item)
                    start = time.perf_counter()
                    ids = generate(model, prompt)
                    seconds = time.perf_counter() - start
                    answers.generated.append(ids)
                    answers.speeds.append((len(recall.encode(prompt)) + len(ids)) / seconds)
                    share = answers.accuracy(questions.head(done))
                    progress.update(task, advance=1, right=f"accuracy {share:.3f}")
            finally:
                kda.disable()
    return backend, stock


def generate(model: Any, prompt: str) -> list[int]:
    """Greedy continuation of one prompt, up to the terminator."""
    ids = torch.tensor([recall.encode(prompt)], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=recall.MAX_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=ord(recall.TERMINATOR),
    )
    generated: list[int] = output[0, ids.shape[1] :].tolist()
    return generated


def dsv4_equal_tokens(device: torch.device) -> int:
    """How many greedy tokens of a tiny DeepSeek-V4 are the same on this backend and on stock."""
    model = dsv4.tiny_model(device)
    ids = torch.randint(2, 97, (1, _DSV4_PROMPT), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device)
    arguments = {"max_new_tokens": DSV4_TOKENS, "do_sample": False}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for operations this small threads only wait for one another
    try:
        stock = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        dsv4.enable()
        ours = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    finally:
        dsv4.disable()
        torch.set_num_threads(threads)
    return int((ours == stock)[0, _DSV4_PROMPT:].sum())


def agreement(left: list[list[int]], right: list[list[int]]) -> float:
    """Share of generated tokens that are equal, place by place; a missing token is not equal."""
    pairs = list(zip(left, right, strict=True))
    equal = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=False))
    return equal / max(1, sum(max(len(x), len(y)) for x, y in pairs))


def path_row(target: Target) -> dict[str, Any]:
    """The paths that ``target`` would run for Kimi-Linear-48B on one GPU, or why there are none."""
    row: dict[str, Any] = {"target": asdict(target), "prefill": None, "decode": None, "error": None}
    try:
        plan = select(target, _KIMI_LINEAR)
    except LookupError as error:
        return row | {"error": str(error)}
    chunks = _KIMI_LINEAR_TOKENS // _CHUNK
    return row | {
        "prefill": _path(plan.prefill, chunks * _KIMI_LINEAR.num_value_heads),
        "decode": _path(plan.decode, _KIMI_LINEAR.num_value_heads),
    }


def _path(selection: PathSelection, grid: int) -> dict[str, Any]:
    path = selection.lookup(grid)
    return {"grid": grid, "path": path.name, "measured": path.measured, "why": path.provenance}


def _targets() -> list[Target]:
    """This machine, then the other known parts."""
    here = detect_target()
    return [here, *(t for t in KNOWN_TARGETS.values() if t.key != here.key)]


def _print_report(report: dict[str, Any], questions: recall.QuestionSet, backend: Answers) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    item = questions.items[0]
    console.print(f"\nThe first question, one of {len(item.context)} in its context:")
    console.print(questions.pool[item.asked].text, style="italic")
    said = recall.extract_answer(recall.decode(backend.generated[0]))
    console.print(f"answered {said!r}, the context says {questions.answer(item)!r}\n")

    results = Table("", "this backend", "stock transformers", box=None, pad_edge=False)
    results.add_row("accuracy", f"{report['accuracy']:.3f}", f"{report['stock_accuracy']:.3f}")
    speeds = report["tokens_per_second"], report["stock_tokens_per_second"]
    results.add_row("tokens per second (median)", *(f"{speed:,.0f}" for speed in speeds))
    results.add_row("equal tokens", f"{report['token_agreement']:.3f}", "")
    console.print(results)

    console.print(
        f"\nKernel paths for Kimi-Linear-48B, {_KIMI_LINEAR_TOKENS:,} tokens (the first line is "
        "this machine):"
    )
    table = Table("machine", "prefill", "decode", "figures", box=None, pad_edge=False)
    for row in report["paths"]:
        name = row["target"]["name"]
        if row["error"]:
            table.add_row(name, "stock", "stock", row["error"])
            continue
        prefill, decode = row["prefill"], row["decode"]
        table.add_row(name, prefill["path"], decode["path"], prefill["why"])
    console.print(table)
    console.print("\nServe the real model:")
    for command in report["serve"]:
        console.print(f"  {command}", soft_wrap=True)
    console.print("  (vLLM before 0.32 takes CUSTOM instead of KDA)\n")
