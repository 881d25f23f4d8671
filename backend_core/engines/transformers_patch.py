"""Names of a transformers model's code that a family replaces, and puts back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from backend_core.engines import ENGINES


class Replacements:
    """The replacements of one adapter: true while there is something to put back."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._originals)

    def replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Put ``ours`` in the place of ``owner.name``; the owner is a module or a class."""
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Put back the very functions that were replaced."""
        for owner, name, function in self._originals:
            setattr(owner, name, function)
        self._originals.clear()


def modeling(module: str, names: Sequence[str]) -> ModuleType:
    """A modeling module of transformers, which must have these functions or classes.

    Raises:
        ImportError: transformers is not installed, or lacks one of them.
    """
    version = ENGINES["transformers"].installed()
    if version is None:
        raise ImportError("transformers is not installed")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"transformers {version} has no {module}") from error
    missing = [name for name in names if not callable(getattr(found, name, None))]
    if missing:
        raise ImportError(f"transformers {version} has no {' and no '.join(missing)} in {module}")
    return found
