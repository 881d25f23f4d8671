"""Which reports of compute-sanitizer are explained: those of ``sanitizer_explained.toml``.

A report names instructions by their offset, which any change moves, and in Triton's kernels by a
line of the source. Here an access is known by what stands there: the text of that line, or of CUDA
C++ the instruction in the disassembly. A report is explained if every pair that it names is.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
Listing = dict[int, str]
"""Instructions of a kernel by their offset."""
_ACCESS = r"(?:(Read|Write) access )?at (?:\S.*?)?\b{}\b[^+\n]*\+(0x[0-9a-f]+)(?: in (\S+?):(\d+))?"
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?)\s*;", re.MULTILINE
)


class Access(NamedTuple):
    """``kind``: Read, Write, or nothing, of a barrier. Without a source line ``file`` is empty."""

    kind: str
    offset: int
    file: str
    line: int


@cache
def table() -> list[dict[str, Any]]:
    """The rows of the file."""
    text = Path(__file__).with_suffix(".toml").read_text()
    rows: list[dict[str, Any]] = tomllib.loads(text)["explained"]
    return rows


def accesses(kernel: str, report: str) -> list[Access]:
    """All that a report names, in its order."""
    found = re.findall(_ACCESS.format(re.escape(kernel)), report)
    return [Access(kind, int(at, 16), file, int(line or 0)) for kind, at, file, line in found]


def listing_of(cubin: Path) -> Listing:
    """By the disassembler that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    done = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True)
    return {int(at, 16): text for at, text in _INSTRUCTION.findall(done.stdout)}


@cache
def _lines(file: str, number: int) -> tuple[str, ...]:
    """That line of all files beside one: Triton names the kernel's for what it inlines."""
    beside = {x.parent for x in ROOT.glob(f"*_backend/kernels/**/{Path(file).name}")}
    texts = (x.read_text().splitlines() for folder in beside for x in folder.glob("*.py"))
    return tuple(lines[number - 1] for lines in texts if len(lines) >= number)


def _stands(wanted: str, access: Access, listing: Listing) -> bool:
    """Is the access what a row's ``at`` says?"""
    if access.kind:
        kind, _, wanted = wanted.partition(" ")
        if kind != access.kind:
            return False
    if access.file:
        return any(wanted in text for text in _lines(access.file, access.line))
    return wanted in listing.get(access.offset, "")


def is_explained(
    tool: str, kernel: str, report: str, listings: Callable[[], Iterable[Listing]]
) -> bool:
    """Are all pairs of a report rows of the file?

    Args:
        listings: of the variants of a CUDA C++ kernel that ran; asked for where no line is named.
    """
    rows = [row for row in table() if (row["tool"], row["kernel"]) == (tool, kernel)]
    rows = [row["at"] for row in rows if row.get("error", "") in report]
    found = accesses(kernel, report)
    if not found or not rows:
        return False
    variants = [{}] if all(access.file for access in found) else list(listings())
    if not found[0].kind:
        return any(_stands(at[0], found[0], x) for at in rows for x in variants)
    pairs = [(found[0], other) for other in found[1:]]
    return bool(pairs) and any(
        all(
            any(
                (_stands(a, one, x) and _stands(b, other, x))
                or (_stands(b, one, x) and _stands(a, other, x))
                for a, b in rows
            )
            for one, other in pairs
        )
        for x in variants
    )
