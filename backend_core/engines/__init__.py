"""The engines, the releases that the contract tests run with, and the flag's name in each: stated
here once.

Read by adapters, ``info`` and ``serve``; nothing here imports an engine.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """An engine and the releases of it that the contract tests run with.

    Others are served too where what the adapters rely on holds (`backend_core.engines.seams`).

    Attributes:
        name: the distribution's name.
        tested: releases, oldest first.
    """

    name: str
    tested: tuple[str, ...]

    def is_tested(self, version: str) -> bool:
        """Whether a version is one of the tested releases.

        Only the release number counts: ``0.33.0rc1`` and ``0.33.0+cu130`` are 0.33.0.
        """
        match = re.match(r"v?(\d+(?:\.\d+)*)", version)
        return match is not None and match[1] in self.tested

    def installed(self) -> str | None:
        """The installed version, without importing the engine; ``None`` if there is none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", ("0.32.0", "0.33.0")),
        Engine("sglang", ("0.5.22", "0.5.23")),
        Engine("transformers", ("5.17.0", "5.24.0")),
    )
}


def flag_name(engine: str, family: str) -> str:
    """The value of ``--attention-backend`` that asks for a family in ``"vllm"`` or ``"sglang"``."""
    return family.upper() if engine == "vllm" else family
