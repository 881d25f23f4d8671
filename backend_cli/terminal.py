"""The program's output: plain text on stdout, progress on stderr."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0
"""Where stderr is no terminal, a line is due after so many seconds."""


def plain_console(*, soft_wrap: bool = True) -> Console:
    """stdout without colours, markup or emoji; lines are not broken unless they are in a table."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=soft_wrap)


def wrapped(text: str, indent: int = 0) -> str:
    """A paragraph as wide as the terminal, whose words stay whole."""
    more = " " * indent
    wrapper = textwrap.TextWrapper(
        max(40, plain_console(soft_wrap=False).width),
        initial_indent=more,
        subsequent_indent=more + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.fill(text)


def visible(text: str) -> str:
    """One line of what others wrote, `hidden`: what would steer a terminal becomes U+FFFD."""
    text = hidden(text)
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


_LOGIN = re.compile(r"(?<=://)\S*@")
_HEADER = re.compile(
    r"(authorization\W+(?:bearer|basic)\s+|x-api-key\W+)[^\s\"'>,}]+", re.IGNORECASE
)
_KEYS = ("OPENAI_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Environment variables that hold one."""


def hidden(text: str, *secrets: str) -> str:
    """``text`` with ``***`` for secrets: those given, keys of the environment (``OPENAI_API_KEY``
    and others), the user and password of a URL, and what stands in a header of authorization."""
    for secret in (*secrets, *(os.environ.get(name, "").strip() for name in _KEYS)):
        if secret:
            text = text.replace(secret, "***")
    return _HEADER.sub(r"\1***", _LOGIN.sub("***@", text))


_SECRET = r"(?:api[-_]?k|access[-_]?key|password|secret|(?<![a-z])token(?=[=\s\"']))[\w.-]*"
_OPTIONS = re.compile(rf"(--[\w.-]*{_SECRET}[=\s]+)\S+\s*(?:(?!--)\S+(?:\s+|$))*", re.IGNORECASE)
_VARIABLES = re.compile(rf"(\b\w*{_SECRET}=)(?:\"[^\"]*\"|'[^']*'|\S+)", re.IGNORECASE)
_ENTRIES = re.compile(rf"(\"[\w.-]*{_SECRET}\"\s*:\s*)\"(?:\\.|[^\"\\])*\"", re.IGNORECASE)


def shown_command(command: str) -> str:
    """A server's command line or flags as `hidden` shows them, and ``***`` for keys in options, in
    environment variables that it sets, and in JSON."""
    shown = _VARIABLES.sub(r"\1***", _ENTRIES.sub(r'\1"***"', hidden(command)))
    return _OPTIONS.sub(r"\1*** ", shown).strip()


class Bar:
    """Progress on stderr, in a ``with`` statement.

    On a terminal, one bar that is redrawn. Elsewhere (a log, CI) a line at the start, one whenever
    `LINE_SECONDS` have passed since the last, and one at the end.

    Attributes:
        total: how many steps there are.
        done: how many are over.
    """

    def __init__(self, description: str, total: int, note: str = "") -> None:
        self.total, self.done = total, 0
        self._shown = -1  # of the last line
        self._description, self._note = description, note
        self._lock = threading.Lock()  # ``check`` counts from several threads
        self._console = Console(stderr=True)
        self._start = self._last = time.monotonic()
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._live.add_task(description, total=total, note=note)

    def __enter__(self) -> Bar:
        if self._live is not None:
            self._live.start()
        else:
            self._line()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.done != self._shown:
            self._line()

    def update(
        self, advance: int = 0, *, description: str | None = None, note: str | None = None
    ) -> None:
        """Count ``advance`` steps as over, and show another description or note from now on."""
        with self._lock:
            self.done += advance
            if description is not None:
                self._description = description
            if note is not None:
                self._note = note
            if self._live is not None:
                self._live.update(
                    self._task, advance=advance, description=self._description, note=self._note
                )
            elif time.monotonic() - self._last >= LINE_SECONDS:
                self._line()

    def print(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _line(self) -> None:
        self._last, self._shown = time.monotonic(), self.done
        seconds = self._last - self._start
        parts = [self._description.strip(), f"{self.done}/{self.total}", f"{seconds:.0f} s"]
        print("  ".join([*parts, self._note]).rstrip(), file=sys.stderr, flush=True)
