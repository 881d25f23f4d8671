"""Answers of a server, kept in a file as they come, from which an interrupted run continues."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.errors import BadInputError
from backend_cli.eval.endpoint import Endpoint, Server, ask_all
from backend_cli.files import read_by
from backend_cli.terminal import Bar, visible
from backend_core.bounded import RESULT_BYTES, parse_json, read_text

FORMAT = "kda-dsv4 answers 1"

Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="The served model; needed if there are several.")
]
Timeout = Annotated[float, typer.Option(min=1.0, max=86_400.0, help="Most seconds for one answer.")]
Flags = Annotated[
    str | None, typer.Option(metavar="TEXT", help="The server's flags, to be noted in the record.")
]
"""Options of the commands that ask a server."""


class KeptAnswers:
    """The completions of one server, by request.

    The file's first line names the server: address, model, weights, engine, release, backend and
    the flags that the user notes. Each further line is an answer with the digest of its whole
    request, so a prompt that was asked with other options is another request.

    Attributes:
        path: the file; it exists from the first answer on.
        without_text: how many answers had null for a text.
    """

    def __init__(self, path: Path, endpoint: Endpoint, server: Server, flags: str | None) -> None:
        """Continue the run whose answers lie in the file, where it was of this server and flags.

        Raises:
            BadInputError: the file cannot be read, or holds something else.
        """
        self.path, self.without_text = path, 0
        self._endpoint, self._lock = endpoint, threading.Lock()
        self._header = {
            "format": FORMAT,
            "base_url": endpoint.base_url,
            **dataclasses.asdict(server),
            "flags": flags,
        }
        self._kept: dict[str, str | None] = {}
        if os.path.lexists(path):
            self._kept = self._read()

    def ask(self, requests: list[dict[str, Any]], concurrency: int) -> list[str]:
        """The texts of the requests' completions, ``""`` for null; asks for those not kept.

        Raises:
            BadInputError: the server stopped answering; what it had answered is kept.
        """
        texts = [""] * len(requests)
        with Bar("questions", len(requests)) as bar:
            try:
                for index, text in ask_all(self._ask, requests, concurrency):
                    texts[index] = text or ""
                    self.without_text += text is None
                    bar.update(1)
            except BadInputError as error:
                if not self.path.exists():
                    raise
                raise BadInputError(
                    f"{error}; the answers are kept in {self.path}: run the same command again to "
                    "go on"
                ) from error
        return texts

    def remove(self) -> None:
        """Forget the answers, once the record has them."""
        self.path.unlink(missing_ok=True)

    def _ask(self, request: dict[str, Any]) -> str | None:
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if digest in self._kept:
            return self._kept[digest]
        text = self._endpoint.complete(request)
        with self._lock:  # here and not by the reader of `ask_all`, which leaves after an error
            self._kept[digest] = text
            self._append({"request": digest, "text": text})
        return text

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                before = file.tell()
                lines = [line] if before else [self._header, line]
                text = "".join(f"{json.dumps(x)}\n" for x in lines).encode()
                try:
                    if file.write(text) != len(text):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except OSError:  # of a full disk: what comes next must not follow half a line
                    file.truncate(before)
                    raise
        except OSError as error:
            raise BadInputError(f"cannot write {self.path}: {error.strerror}") from error

    def _read(self) -> dict[str, str | None]:
        """The answers in the file, which is removed where they are another server's."""
        text = read_by(lambda path: read_text(path, RESULT_BYTES), self.path, "kept answers")
        if json.dumps(self._header).startswith(text):  # an interrupt came before the first answer
            self.path.unlink()
            return {}
        whole = text.rpartition("\n")[0].split("\n")  # an interrupt may have cut the last line
        try:
            header, *lines = map(parse_json, whole)
            if header["format"] != FORMAT:
                raise ValueError
            kept = {str(line["request"]): line["text"] for line in lines}
            if not all(text is None or isinstance(text, str) for text in kept.values()):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise BadInputError(
                f"{self.path} must hold answers that eval kept ({FORMAT!r}): remove it, or name "
                "another --output"
            ) from None
        differing = [key for key, value in self._header.items() if header.get(key) != value]
        if differing:
            said = ", ".join(
                f"{k} {header.get(k)!r} instead of {self._header[k]!r}" for k in differing
            )
            print(
                visible(f"the answers in {self.path} are of another run and are not used: {said}"),
                file=sys.stderr,
            )
            self.path.unlink()
            return {}
        if len(whole) and not text.endswith("\n"):
            os.truncate(self.path, len(text.rpartition("\n")[0].encode()) + 1)
        return kept
