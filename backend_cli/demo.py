"""``kda-dsv4 demo``: a small model answers questions, with this backend and without.

The model is transformers' own; its checkpoint and the questions are in the repository, under
``benchmarks/recall``. Every question goes through transformers twice: on this backend, and on
transformers' own code. So does a prompt for a tiny model of each further family, with random
weights, whose tokens must be equal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from backend_cli.errors import BadInputError, CliError
from backend_cli.eval import recall_task as recall
from backend_cli.families import family_of_checkpoint, transformers_adapter
from backend_cli.terminal import Bar, plain_console
from backend_core.family import families

RECALL = Path(__file__).resolve().parent.parent / "benchmarks" / "recall"
SCHEMA = 3
DEFAULT_QUESTIONS = 32
WANTED_ACCURACY = 0.95
THREADS = 1
"""For operations this small more threads are no faster, and on a busy machine they wait for one
another."""
TINY_TOKENS = 16
_TINY_PROMPT = 120  # windows of 128 tokens end among those generated

MODEL = "moonshotai/Kimi-Linear-48B-A3B-Instruct"
SERVE = tuple(
    f"kda-dsv4 serve --engine {engine} {MODEL} --trust-remote-code" for engine in ("vllm", "sglang")
)


@dataclass
class Answers:
    """The result of one way of running the model.

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

    Returns 0, or 1 where accuracy on this backend is under 0.95 or a tiny model's tokens differ
    from upstream's. Raises BadInputError where ``num_questions`` is not among the questions at
    hand, CliError where the checkpoint is absent.
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
    with bounded_threads():
        adapter = transformers_adapter(family_of_checkpoint(RECALL / "checkpoint"))
        model = adapter.load_model(RECALL / "checkpoint", device)
        backend, upstream = answer(adapter, model, questions)
        accuracies = backend.accuracy(questions), upstream.accuracy(questions)
        equal = {
            family.title: equal_tokens(tiny, device)
            for family in families().values()
            if (tiny := transformers_adapter(family)) and hasattr(tiny, "tiny_model")
        }
    report = {
        "schema": SCHEMA,
        "questions": count,
        "accuracy": accuracies[0],
        "upstream_accuracy": accuracies[1],
        "token_agreement": agreement(backend.generated, upstream.generated),
        "tokens_per_second": median(backend.speeds),
        "upstream_tokens_per_second": median(upstream.speeds),
        "tiny_tokens": TINY_TOKENS,
        "tiny_equal_tokens": equal,
        "device": str(device),
        "serve": SERVE,
    }
    if json_output:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report, questions, backend)
        for title, count_equal in equal.items():
            print(
                f"{title} (tiny model, random weights): {count_equal} of {TINY_TOKENS} tokens "
                "equal with and without the backend"
            )
        print(
            f"demo: accuracy {accuracies[0]:.3f}, upstream {accuracies[1]:.3f}, {count} questions"
        )
    right = accuracies[0] >= WANTED_ACCURACY and all(n == TINY_TOKENS for n in equal.values())
    return 0 if right else 1


@contextmanager
def bounded_threads() -> Iterator[None]:
    """`THREADS` threads for each operation of torch, as long as the body runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def answer(adapter: Any, model: Any, questions: recall.QuestionSet) -> tuple[Answers, Answers]:
    """Answer every question on this backend and on transformers' own code, and show progress."""
    backend, upstream = Answers(), Answers()
    for name, answers in (("this backend", backend), ("transformers", upstream)):
        with Bar(f"{name:12}", len(questions.items)) as bar:
            if answers is backend:
                adapter.enable()
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
                    bar.update(1, note=f"accuracy {share:.3f}")
            finally:
                adapter.disable()
    return backend, upstream


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


def equal_tokens(adapter: Any, device: torch.device) -> int:
    """How many greedy tokens of a family's tiny model are the same on this backend and upstream."""
    model = adapter.tiny_model(device)
    size = (1, _TINY_PROMPT)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, size, generator=rng).to(device)
    arguments = {"max_new_tokens": TINY_TOKENS, "do_sample": False}
    upstream = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    adapter.enable()
    try:
        ours = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    finally:
        adapter.disable()
    return int((ours == upstream)[0, _TINY_PROMPT:].sum())


def agreement(left: list[list[int]], right: list[list[int]]) -> float:
    """Share of generated tokens that are equal, place by place; a missing token is not equal."""
    pairs = list(zip(left, right, strict=True))
    equal = sum(a == b for x, y in pairs for a, b in zip(x, y, strict=False))
    return equal / max(1, sum(max(len(x), len(y)) for x, y in pairs))


def _print_report(report: dict[str, Any], questions: recall.QuestionSet, backend: Answers) -> None:
    console = plain_console(soft_wrap=False)
    item = questions.items[0]
    console.print(f"\nThe first question, one of {len(item.context)} in its context:")
    console.print(questions.pool[item.asked].text, style="italic")
    text = recall.extract_answer(recall.decode(backend.generated[0]))
    console.print(f"answered {text!r}, the context says {questions.answer(item)!r}\n")

    results = Table("", "this backend", "transformers", box=None, pad_edge=False)
    results.add_row("accuracy", f"{report['accuracy']:.3f}", f"{report['upstream_accuracy']:.3f}")
    speeds = report["tokens_per_second"], report["upstream_tokens_per_second"]
    results.add_row("tokens per second (median)", *(f"{speed:,.0f}" for speed in speeds))
    results.add_row("equal tokens", f"{report['token_agreement']:.3f}", "")
    console.print(results)

    console.print("\nServe the real model:")
    for command in report["serve"]:
        console.print(f"  {command}", soft_wrap=True)
    console.print()
