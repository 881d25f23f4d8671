"""Writing results: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from backend_cli.errors import BadInputError
from backend_core.bounded import RESULT_BYTES, parse_json, read_text
from backend_core.testing.records import record_text

Content = TypeVar("Content")


def write_text(path: Path, text: str) -> None:
    """Put ``text`` in place of what ``path`` holds, as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Put ``content`` in place of what ``path`` holds, at once.

    Raises:
        BadInputError: it cannot be written there; the old file is as it was.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe, which stays one
            path.write_bytes(content)
            return
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(content)
        os.chmod(file.name, 0o644)  # NamedTemporaryFile's are for the owner alone
        os.replace(file.name, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise BadInputError(f"cannot write {path}: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Before work whose result goes to ``path``: raise BadInputError where it could not."""
    folder = path.parent
    # not Path's own questions, which raise where a folder above is closed
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise BadInputError(f"cannot write {path}: it must be a file in a folder of yours")


def write_json(path: Path, record: dict[str, Any]) -> None:
    """``record`` as JSON with a line for each entry of its lists; raises as `write_text`."""
    write_text(path, record_text(record))


def read_json(path: Path, what: str, most: int = RESULT_BYTES) -> Any:
    """The JSON document in ``path``.

    Raises:
        BadInputError: there is none, or the file is not JSON or has more than ``most`` bytes; the
            message calls it ``what``.
    """

    def read(path: Path) -> Any:
        text = read_text(path, most)
        try:
            return parse_json(text)
        except ValueError as error:
            raise ValueError(f"{what} {path} must be JSON, got {error}") from error

    return read_by(read, path, what)


def read_by(read: Callable[[Path], Content], path: Path, what: str, hint: str = "") -> Content:
    """``read(path)``, which may raise OSError, and ValueError with a sentence.

    Raises:
        BadInputError: it raised; the message calls the file ``what``.
    """
    try:
        return read(path)
    except OSError as error:
        raise BadInputError(f"cannot read {what} {path}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"{what} {path} must be UTF-8 text, got {error.reason}") from error
    except ValueError as error:
        raise BadInputError(str(error)) from error
