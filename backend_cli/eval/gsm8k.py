"""``kda-dsv4 eval gsm8k``: grade-school mathematics through the endpoint of a running server.

Prompts, examples, extraction and scores are those of lm-evaluation-harness's task ``gsm8k``.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.errors import BadInputError, CliError
from backend_cli.eval import recall_task as recall
from backend_cli.eval.answers import Flags, KeptAnswers, Model, Timeout
from backend_cli.eval.endpoint import Endpoint
from backend_cli.eval.record import (
    QUESTION_CHARS,
    accuracy,
    output_path,
    print_record,
    verdict,
    write_record,
)
from backend_cli.files import read_by
from backend_cli.terminal import shown_command

NUM_FEWSHOT = 5
SEED = 1234
"""The harness's own default, for the choice of examples and for the server."""
_RULES = {"flexible": "flexible-extract", "strict": "strict-match"}


def gsm8k(
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The server, such as http://localhost:8000.")
    ],
    model: Model = None,
    num_questions: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first N questions of the test set.")
    ] = None,
    data_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="GSM8K's test.jsonl. Examples come from a train.jsonl next to it, or from the "
            "file's other questions. By default both come from Hugging Face's hub.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The record; gsm8k-MODEL.json by default.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Questions that are asked at the same time.")
    ] = 32,
    timeout: Timeout = 600.0,
    flags: Flags = None,
) -> None:
    """Measure GSM8K accuracy with five examples and compare it with published values."""
    if importlib.util.find_spec("lm_eval") is None:
        raise CliError("eval gsm8k needs lm-eval[api]: pip install '.[eval]' in the clone")
    files = None if data_path is None else _data_files(data_path, num_questions)
    endpoint = Endpoint.parse(base_url, timeout)
    server = endpoint.server(model)
    path = output_path(output, "gsm8k", server.model)
    flags = None if flags is None else shown_command(flags)
    answers = KeptAnswers(Path(f"{path}.answers"), endpoint, server, flags)

    def ask(prompts: list[str], options: dict[str, Any]) -> list[str]:
        shared = {
            "model": server.model,
            "max_tokens": max_tokens,
            "temperature": options["temperature"],
            "stop": options["until"],
            "seed": SEED,
        }
        return answers.ask([{"prompt": prompt, **shared} for prompt in prompts], concurrency)

    results = evaluate(ask, files, num_questions)
    questions = _questions(results["samples"]["gsm8k"])
    found = {rule: accuracy([q["right"][rule] for q in questions]) for rule in _RULES}
    settings = {
        "num_questions": num_questions,
        "data": "openai/gsm8k" if files is None else _digest(files),
        "num_fewshot": NUM_FEWSHOT,
        "max_tokens": max_tokens,
        "harness": importlib.metadata.version("lm_eval"),
    }
    judged = verdict(server.model, found)
    record = write_record(
        path, "gsm8k", server, flags, found, judged, questions, settings, answers.without_text
    )
    answers.remove()
    print_record(record, path)
    if record["verdict"]["ok"] is False:
        raise typer.Exit(1)


def evaluate(
    ask: Callable[[list[str], dict[str, Any]], list[str]],
    files: dict[str, str] | None,
    limit: int | None,
) -> dict[str, Any]:
    """Run the harness's task ``gsm8k``.

    Args:
        ask: the answers to prompts, and the task's options for generation (``until``,
            ``temperature``).
        files: ``test`` and perhaps ``train``; ``None`` loads the hub's data set.
        limit: how many questions; ``None`` is all.

    Returns:
        The value of ``lm_eval.simple_evaluate``.

    Raises:
        BadInputError: the server stopped answering, or the data set cannot be loaded.
    """
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    import lm_eval
    import lm_eval.evaluator
    import yaml
    from datasets.exceptions import DatasetGenerationError
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Asked(LM):  # type: ignore[misc]
        """The harness's view of what answers; the task generates and asks for no likelihoods."""

        loglikelihood = loglikelihood_rolling = None

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            prompts, options = zip(*(request.args for request in requests), strict=True)
            return ask(list(prompts), options[0])

    # it would ask git about the user's folder, and git complains where that is no repository
    lm_eval.evaluator.get_git_commit_hash = lambda: None
    task = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    config = yaml.safe_load(task.read_text(encoding="utf-8"))
    if files is not None:
        config |= {
            "dataset_path": "json",
            "dataset_name": None,
            # the loader takes names for patterns
            "dataset_kwargs": {"data_files": {k: glob.escape(v) for k, v in files.items()}},
        }
        if "train" not in files:
            config |= {"training_split": None, "fewshot_split": "test"}
    try:
        return dict(
            lm_eval.simple_evaluate(
                model=Asked(),
                tasks=[config],
                task_manager=TaskManager(include_defaults=False),  # of thousands, one is used
                num_fewshot=NUM_FEWSHOT,
                limit=limit,
                bootstrap_iters=0,
                fewshot_random_seed=SEED,
            )
        )
    except BrokenPipeError:
        raise  # of a bar
    except (OSError, ValueError, DatasetGenerationError) as error:
        if files is not None and isinstance(error, ValueError):
            raise
        if files is not None:
            raise BadInputError(
                f"the data cannot be prepared: {error.__cause__ or error} (HF_DATASETS_CACHE names"
                " the folder for it)"
            ) from error
        raise BadInputError(
            f"openai/gsm8k cannot be loaded from its hub ({error}): give its test file with "
            "--data-path"
        ) from error


def _data_files(path: Path, num_questions: int | None) -> dict[str, str]:
    """The files of the data set, every line of which is a GSM8K record."""
    files = {"test": path}
    train = path.with_name("train.jsonl")
    if train.is_file() and train != path:
        files["train"] = train
    for file in files.values():
        questions = read_by(recall.read_gsm8k, file, "data")
        needed = NUM_FEWSHOT + (len(files) == 1)
        if len(questions) < needed:
            raise BadInputError(
                f"data {file} must have at least {needed} questions, got {len(questions)}"
            )
        if file == path and num_questions is not None and num_questions > len(questions):
            raise BadInputError(
                f"--num-questions must be at most {len(questions)}, got {num_questions}"
            )
    return {split: str(file.resolve()) for split, file in files.items()}


def _digest(files: dict[str, str]) -> str:
    parts = [hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in files.values()]
    return " ".join(f"{split} {part}" for split, part in zip(files, parts, strict=True))


def _questions(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a question, in the data's order, out of the harness's one a rule and question."""
    found: dict[int, dict[str, Any]] = {}
    for sample in samples:
        text = sample["doc"]["question"]
        entry = found.setdefault(
            sample["doc_id"],
            {
                "id": hashlib.sha256(text.encode()).hexdigest()[:16],
                "question": text[:QUESTION_CHARS],
                "expected": sample["doc"]["answer"].split("####")[-1].strip(),
                "answer": sample["resps"][0][0],
                "extracted": {},
                "right": {},
            },
        )
        (rule,) = [rule for rule, name in _RULES.items() if name == sample["filter"]]
        entry["extracted"][rule] = sample["filtered_resps"][0]
        entry["right"][rule] = bool(sample["exact_match"])
    return [found[number] for number in sorted(found)]
