"""Reading what others have written: files and answers of bounded size, as data and nothing else."""

from __future__ import annotations

import json
import os
import stat
import time
import tomllib
from pathlib import Path
from typing import Any, Protocol

TABLE_BYTES = 1 << 20
CONFIG_BYTES = 16 << 20
RESULT_BYTES = 256 << 20
ANSWER_BYTES = 16 << 20


class Source(Protocol):
    """A source for `read_answer`: a response, or a file that is open."""

    def read1(self, size: int, /) -> bytes: ...


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file (reading a pipe may never end), or has more than ``most``
            bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"expected a regular file, got {path}")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"expected at most {most} bytes in {path}, got more")
    return content


def read_text(path: Path, most: int) -> str:
    """UTF-8; raises as `read_bytes`, UnicodeDecodeError (a ValueError) included."""
    return read_bytes(path, most).decode("utf-8")


def read_answer(source: Source, most: int, seconds: float) -> bytes:
    """All that a server sends.

    Raises:
        ValueError: it sends more than ``most`` bytes.
        TimeoutError: it has not come to an end after ``seconds``.
    """
    deadline, parts, size = time.monotonic() + seconds, [], 0
    while part := source.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > most:
            raise ValueError(f"expected an answer of at most {most} bytes, got more")
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected the whole answer within {seconds:g} s, got {size} bytes")
    return b"".join(parts)


def parse_json(text: str | bytes) -> Any:
    """Raises ValueError where the text is not JSON, or nests deeper than Python can."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("expected JSON that is not nested so deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError where the text is not TOML, or nests deeper than Python can."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("expected TOML that is not nested so deeply") from None
