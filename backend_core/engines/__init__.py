"""The supported versions of each engine, and the flag's name there: stated here once.

Read by adapters, ``info`` and ``serve``; nothing here imports an engine.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """An engine and the inclusive range of its releases that the adapters are written for.

    Attributes:
        name: the distribution's name.
        first: the oldest supported release.
        last: the newest, or ``None`` where every later release is accepted.
    """

    name: str
    first: str
    last: str | None

    @property
    def supported(self) -> str:
        """The range in words: ``"0.30.0 to 0.33.0"`` or ``">= 5.17"``."""
        return f">= {self.first}" if self.last is None else f"{self.first} to {self.last}"

    def supports(self, version: str) -> bool:
        """Whether a version's release number lies in the range.

        Only the release number counts: ``0.33.0rc1`` and ``0.33.0+cu130`` are 0.33.0.
        """
        release = _release(version)
        return _release(self.first) <= release and (
            self.last is None or release <= _release(self.last)
        )

    def installed(self) -> str | None:
        """The installed version, without importing the engine; ``None`` if there is none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("vllm", "0.30.0", "0.33.0"),
        Engine("sglang", "0.5.20", "0.5.23"),
        Engine("transformers", "5.17", None),
    )
}


# takes names of attention backends that are not its own
_NEW_NAMES = Engine("vllm", "0.32.0", None)


def flag_name(engine: str, family: str, version: str | None = None) -> str:
    """The value of ``--attention-backend`` that asks for a family.

    Args:
        engine: ``"vllm"`` or ``"sglang"``; family: ``"kda"``.
        version: the engine's; by default the installed one.

    Raises:
        ValueError: there is no such flag in that engine, or no version to tell.
    """
    if engine == "sglang":
        return family
    if engine != "vllm":
        raise ValueError(f"engine must be vllm or sglang, got {engine}")
    version = ENGINES["vllm"].installed() if version is None else version
    if version is None:
        raise ValueError("vllm must be installed, or its version given, to name its flag")
    return family.upper() if _NEW_NAMES.supports(version) else "CUSTOM"


def _release(version: str) -> tuple[int, int, int]:
    match = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    if match is None:
        raise ValueError(f"version must start with a release number, got {version!r}")
    major, minor, patch = (int(part or 0) for part in match.groups())
    return major, minor, patch
