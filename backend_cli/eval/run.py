"""What the evaluations share: asking with a progress bar, keeping answers, writing the record."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backend_cli.errors import BadInputError
from backend_cli.eval.answers import AnswerLog
from backend_cli.eval.endpoint import Server, ServerGoneError, ask_all
from backend_cli.eval.record import FORMAT
from backend_cli.files import check_writable, write_json
from backend_cli.terminal import Bar, plain_console, visible
from backend_core import __version__


class Run:
    """One evaluation from its first question to its record.

    Answers go to ``<output>.answers.jsonl`` as they come; a run that was cut off goes on from
    there. The file is deleted once the record is written.
    """

    def __init__(
        self, output: Path | None, task: str, model: str, settings: dict[str, Any]
    ) -> None:
        """Raises BadInputError where the output exists or cannot be written, or where the kept
        answers are of another run."""
        slug = re.sub(r"[^A-Za-z0-9.-]+", "-", model.rstrip("/").split("/")[-1])
        self.output = output or Path(f"{task}-{slug}.json")
        if os.path.lexists(self.output):  # Path's raises where a folder above is closed
            raise BadInputError(f"{self.output} exists already: name another --output")
        check_writable(self.output)
        self.settings = {"task": task, "model": model, **settings}
        self._begin = time.perf_counter()
        path = self.output.with_name(self.output.name + ".answers.jsonl")
        self._log = AnswerLog(path, self.settings)

    def ask(
        self,
        prompts: Sequence[str],
        ask: Callable[[str], str],
        concurrency: int,
        is_right: Callable[[int, str], bool] | None = None,
    ) -> list[str]:
        """The answer to each prompt; those that are kept are not asked again.

        Args:
            is_right: shows the accuracy so far.

        Raises:
            BadInputError: the server is gone or refuses; the answers so far are kept.
        """
        answers = [self._log.get(prompt) for prompt in prompts]
        rights = [is_right(i, a) for i, a in enumerate(answers) if is_right and a is not None]
        open_ = [i for i, answer in enumerate(answers) if answer is None]

        def done(place: int, answer: str) -> None:
            index = open_[place]
            answers[index] = answer
            self._log.add(prompts[index], answer)
            shown = ""
            if is_right is not None:
                rights.append(is_right(index, answer))
                shown = f"accuracy {sum(rights) / len(rights):.3f}"
            bar.update(1, note=shown)

        with Bar("questions", len(prompts)) as bar:
            bar.update(len(prompts) - len(open_))
            try:
                ask_all(ask, [prompts[i] for i in open_], concurrency, done)
            except BadInputError as error:
                gone = "the server stopped answering" if isinstance(error, ServerGoneError) else ""
                finished = sum(answer is not None for answer in answers)
                raise BadInputError(
                    f"{gone or 'stopped'} after {finished} of {len(prompts)} questions ({error}); "
                    f"the answers are kept in {self._log.path}: run the same command again to go on"
                ) from error
        return [answer for answer in answers if answer is not None]

    def finish(
        self,
        server: Server | None,
        flags: str | None,
        accuracy: dict[str, dict[str, float]],
        verdict: dict[str, Any],
        questions: list[dict[str, Any]],
        **more: Any,
    ) -> dict[str, Any]:
        """Write the record, delete the kept answers, return the record.

        Within one ``format`` keys are added, never changed: ``script``, ``task``, ``model``,
        ``engine``, ``engine_version``, ``backend``, ``flags``, ``accuracy`` (by extraction rule:
        ``value``, ``low``, ``high``), ``verdict`` (``ok``, ``text``), ``questions`` (``id``,
        ``question``, ``expected``, ``answer``, ``right`` by rule), ``settings``, ``date``,
        ``seconds`` (of the last, unbroken part), ``version``.
        """
        record = {
            "format": FORMAT,
            "script": f"kda-dsv4 eval {self.settings['task']}",
            "task": self.settings["task"],
            "model": self.settings["model"],
            "engine": server and server.engine,
            "engine_version": server and server.version,
            "backend": server and server.backend,
            "flags": flags if flags is not None else server and server.flags,
            "accuracy": accuracy,
            "verdict": verdict,
            "settings": self.settings,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "seconds": round(time.perf_counter() - self._begin, 1),
            "version": __version__,
            **more,
            "questions": questions,
        }
        write_json(self.output, record)
        self._log.remove()
        return record


def print_record(record: dict[str, Any], output: Path) -> None:
    """The result in a few lines on stdout."""
    console = plain_console()
    where = " ".join(str(record[k]) for k in ("engine", "engine_version") if record[k])
    on = f" on {where}" if where else ""
    backend = f", attention backend {record['backend']}" if record["backend"] else ""
    title = f"{record['model']}{on}{backend}, {len(record['questions'])} questions"
    console.print(visible(title))
    for rule, found in record["accuracy"].items():
        console.print(
            f"{rule:10} {found['value']:.4f}, 95 % interval {found['low']:.4f} to "
            f"{found['high']:.4f}"
        )
    console.print(record["verdict"]["text"])
    console.print(f"record: {output}")
