"""``kda-dsv4 eval recall``: the small checkpoint's task, against a server or transformers here."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.errors import BadInputError, CliError
from backend_cli.eval import recall_task as task
from backend_cli.eval.answers import Flags, KeptAnswers, Model, Timeout
from backend_cli.eval.endpoint import Endpoint, Server
from backend_cli.eval.record import (
    QUESTION_CHARS,
    accuracy,
    output_path,
    print_record,
    write_record,
)
from backend_cli.families import family_of_checkpoint, transformers_adapter
from backend_cli.files import read_by
from backend_cli.terminal import Bar, shown_command
from backend_core.engines import ENGINES

RECALL = Path(__file__).resolve().parents[2] / "benchmarks" / "recall"
WANTED = 0.95
"""The checkpoint answers 0.999 rightly; 0.02 of them with its state read transposed."""


def recall(
    base_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server; by default transformers runs on this machine."),
    ] = None,
    model: Model = None,
    num_questions: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first N questions.")
    ] = None,
    data_path: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The questions; by default the repository's."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The model for transformers; by default the repository's."
        ),
    ] = None,
    upstream: Annotated[
        bool,
        typer.Option("--upstream", help="Run transformers on this machine without this package."),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The record; recall-MODEL.json by default.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Questions that are asked at the same time.")
    ] = 16,
    timeout: Timeout = 600.0,
    flags: Flags = None,
) -> None:
    """Ask the recall checkpoint for answers in its context, which right kernels find."""
    if base_url is not None and (upstream or checkpoint is not None):
        raise BadInputError(
            "--upstream and --checkpoint are for transformers here, not for a server"
        )
    if base_url is None and model is not None:
        raise BadInputError("--model is the name at a server and must come with --base-url")
    path = data_path or RECALL / "questions.jsonl"
    questions = _questions(path, num_questions, data_path is None)
    endpoint = None if base_url is None else Endpoint.parse(base_url, timeout)
    if endpoint is not None:
        server = endpoint.server(model)
    else:
        where = checkpoint or RECALL / "checkpoint"
        server = _here(where, upstream)
    path_out = output_path(output, "recall", server.model)
    flags = None if flags is None else shown_command(flags)
    prompts = [questions.prompt(item) for item in questions.items]
    expected = [questions.answer(item) for item in questions.items]
    kept = None
    if endpoint is not None:
        kept = KeptAnswers(Path(f"{path_out}.answers"), endpoint, server, flags)
        answers = kept.ask([_request(server.model, prompt) for prompt in prompts], concurrency)
    else:
        answers = _answer_here(where, upstream, prompts, expected)
    rights = [
        task.extract_answer(answer) == want for answer, want in zip(answers, expected, strict=True)
    ]
    found = {"exact": accuracy(rights)}
    ok = found["exact"]["value"] >= WANTED
    said = f"{'at least' if ok else 'under'} {WANTED}, which right kernels reach"
    asked = zip(questions.items, prompts, expected, answers, rights, strict=True)
    record = write_record(
        path_out,
        "recall",
        server,
        flags,
        found,
        {"ok": ok, "text": said},
        [
            {
                "id": hashlib.sha256(prompt.encode()).hexdigest()[:16],
                "question": questions.pool[item.asked].text[:QUESTION_CHARS],
                "expected": want,
                "answer": answer,
                "right": {"exact": right},
            }
            for item, prompt, want, answer, right in asked
        ],
        {
            "num_questions": len(questions.items),
            "data": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        },
        0 if kept is None else kept.without_text,
    )
    if kept is not None:
        kept.remove()
    print_record(record, path_out)
    if not ok:
        raise typer.Exit(1)


def _questions(path: Path, count: int | None, is_default: bool) -> task.QuestionSet:
    hint = ": they are in the repository, run from a clone or give --data-path"
    questions = read_by(task.read_questions, path, "questions", hint if is_default else "")
    if count is not None and count > len(questions.items):
        raise BadInputError(f"--num-questions must be at most {len(questions.items)}, got {count}")
    return questions if count is None else questions.head(count)


def _request(model: str, prompt: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": task.MAX_ANSWER_TOKENS,
        "temperature": 0.0,
        "stop": [task.TERMINATOR],
    }


def _here(checkpoint: Path, upstream: bool) -> Server:
    """transformers in this process, as a server would describe itself."""
    version = ENGINES["transformers"].installed()
    if version is None or importlib.util.find_spec("torch") is None:
        raise CliError(
            "eval recall without --base-url needs torch and transformers: "
            "pip install '.[cpu]' in the clone"
        )
    if not (checkpoint / "config.json").is_file():
        raise BadInputError(
            f"the checkpoint must be a folder with config.json, got {checkpoint}: the repository "
            "has one, run from a clone or give --checkpoint"
        )
    return Server(
        checkpoint.name,
        "transformers",
        version,
        "upstream" if upstream else family_of_checkpoint(checkpoint).name,
    )


def _answer_here(
    checkpoint: Path, upstream: bool, prompts: list[str], expected: list[str]
) -> list[str]:
    import torch

    from backend_cli.demo import bounded_threads, generate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adapter = transformers_adapter(family_of_checkpoint(checkpoint))
    try:
        model = adapter.load_model(checkpoint, device)
    except (OSError, ValueError, ImportError) as error:
        raise BadInputError(f"{checkpoint} cannot be loaded: {error}") from error
    if not upstream:
        adapter.enable()
    try:
        answers: list[str] = []
        right = 0
        with bounded_threads(), Bar("questions", len(prompts)) as bar:
            for prompt, want in zip(prompts, expected, strict=True):
                answers.append(task.decode(generate(model, prompt)))
                right += task.extract_answer(answers[-1]) == want
                bar.update(1, note=f"accuracy {right / len(answers):.3f}")
        return answers
    finally:
        adapter.disable()
