"""The answers of a run as they come: what an interrupted evaluation goes on from."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import IO, Any

from backend_cli.errors import BadInputError
from backend_core.bounded import RESULT_BYTES, parse_json, read_bytes

FORMAT = "kda-dsv4 answers 1"


class AnswerLog:
    """JSON lines: a header with the run's settings, then one answer a line.

    A line that was cut off is dropped; every line before it counts.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open ``path`` to go on, or begin it.

        Args:
            settings: what all answers depend on; those of the file must be the same.

        Raises:
            BadInputError: the file is of another run, or cannot be used; it is left as it is.
        """
        self.path = path
        self._answers: dict[str, str] = {}
        header = {"format": FORMAT, "settings": settings}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self._read(header)
            self._file: IO[str] = path.open("a", encoding="utf-8")
            if not path.stat().st_size:
                self._write(header)
        except OSError as error:
            raise BadInputError(f"cannot keep answers in {path}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, prompt: str) -> str | None:
        """The answer to a prompt, if it was given before."""
        return self._answers.get(_key(prompt))

    def add(self, prompt: str, answer: str) -> None:
        """Keep an answer, on disk at once.

        Raises:
            BadInputError: it cannot be written, on a full disk for instance.
        """
        self._answers[_key(prompt)] = answer
        try:
            self._write({"key": _key(prompt), "answer": answer})
        except OSError as error:
            with contextlib.suppress(OSError):  # closing tries to write what is left
                self._file.close()
            raise BadInputError(f"cannot keep answers in {self.path}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Delete the file: the run's record holds the answers now."""
        self._file.close()
        self.path.unlink()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _read(self, header: dict[str, Any]) -> None:
        try:
            text = read_bytes(self.path, RESULT_BYTES).decode(errors="replace")
        except ValueError as error:
            raise self._foreign(f"not such a file ({error})") from error
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            if text:
                raise self._foreign("its first line is cut off")
            return
        try:
            first, *lines = map(parse_json, whole.splitlines())
            found = {line["key"]: line["answer"] for line in lines}
        except (ValueError, KeyError, TypeError) as error:
            raise self._foreign(f"not such a file ({error})") from error
        if first != header:
            settings = first.get("settings") if isinstance(first, dict) else None
            if not isinstance(settings, dict) or first.get("format") != FORMAT:
                raise self._foreign(f"not of format {FORMAT!r}")
            new = header["settings"]
            differ = [k for k in {**settings, **new} if settings.get(k) != new.get(k)]
            raise self._foreign(
                ", ".join(f"{k} {settings.get(k)!r} instead of {new.get(k)!r}" for k in differ)
            )
        self._answers = found
        if whole != text:  # the line being written when the run was cut off
            self.path.write_text(whole, encoding="utf-8")

    def _foreign(self, why: str) -> BadInputError:
        return BadInputError(
            f"{self.path} holds the answers of another run ({why}): move it away, or name another "
            "--output"
        )


def _key(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:32]
