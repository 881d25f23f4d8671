"""Sources with a mistake in them."""

from __future__ import annotations

import shutil
from pathlib import Path


def plant(sources: Path, to: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of a kernel's folder under ``to`` in which ``wrong`` stands in place of ``right``.

    ``right`` must be there once: a kernel that has changed needs its mistake planted anew.
    """
    folder = to / "sources"
    shutil.copytree(sources, folder)
    text = (sources / file).read_text()
    found = text.count(right)
    assert found == 1, f"expected once in {file}, found {found} times: {right!r}"
    (folder / file).write_text(text.replace(right, wrong))
    return folder
