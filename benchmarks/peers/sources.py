"""Parts of an engine's sources, imported without the rest of the engine."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any


def packages(source: Path, *names: str) -> None:
    """Make the packages of each dotted name importable without running their ``__init__``."""
    for name in names:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                module = types.ModuleType(package)
                module.__path__ = [str(source.joinpath(*parts[:depth]))]
                sys.modules[package] = module


def stub(name: str, **members: Any) -> types.ModuleType:
    """A module that stands in for one of an engine's."""
    module = types.ModuleType(name)
    vars(module).update(members)
    module.__path__ = []
    sys.modules[name] = module
    return module
