"""The explained reports of compute-sanitizer: those of ``sanitizer_explained.toml``.

A report names instructions by their offset, which changes with any edit, and in Triton's kernels by
a line of the source. Here an access is identified by the text of that line, or for CUDA C++ by the
instruction in the disassembly, as a pattern. A report is explained if every pair that it names is.

A row for CUDA C++ may say what has to follow its first access (``then``). These are patterns; each
is searched from the instruction that matched the previous one. The last is an arrival at a barrier,
and the one before it is the ``__syncwarp`` at which the lanes meet for which the arriving lane
arrives; no other arrival may come before that. So the pair is explained only as long as the kernel
that ran has this ``__syncwarp``. If lanes cannot have diverged, ptxas leaves a ``NOP`` for it, and
the cubin says which (``MEETING``).
"""

from __future__ import annotations

import re
import struct
import subprocess
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

ROOT = Path(__file__).resolve().parent.parent
Listing = dict[int, str]
"""Instructions of a kernel by their offset, with ``MEETING`` behind those where all lanes meet."""
MEETING = "// all lanes meet"
_ACCESS = r"(Read|Write) access at (?:\S.*?)?\b{}\b[^+\n]*\+(0x[0-9a-f]+)(?: in (\S+?):(\d+))?"
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?)\s*;", re.MULTILINE
)
_MEETINGS, _MASKS = 0x28, 0x29
"""EIATTR_COOP_GROUP_INSTR_OFFSETS, EIATTR_COOP_GROUP_MASK_REGIDS: instructions of a warp's lanes
together, and which lanes each is of."""
_ALL_LANES = 0xFFFFFFFF


class Access(NamedTuple):
    """``kind``: Read or Write. Without a source line ``file`` is empty."""

    kind: str
    offset: int
    file: str
    line: int


@cache
def table() -> list[dict[str, Any]]:
    """The rows of the file, one for each kernel."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["explained"]
    return [{**row, "kernel": kernel} for row in rows for kernel in row["kernels"]]


def accesses(kernel: str, report: str) -> list[Access]:
    """All that a report names, in its order."""
    found = re.findall(_ACCESS.format(re.escape(kernel)), report)
    return [Access(kind, int(at, 16), file, int(line or 0)) for kind, at, file, line in found]


def listing_of(cubin: Path) -> Listing:
    """By the disassembler that Triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    done = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True)
    code = {int(at, 16): text for at, text in _INSTRUCTION.findall(done.stdout)}
    for at in _meetings(cubin.read_bytes()):
        if code.get(at, "").startswith(("NOP", "WARPSYNC")):  # no shuffle, no vote
            code[at] += f" {MEETING}"
    return code


def _meetings(image: bytes) -> list[int]:
    """Offsets of what all lanes of a warp do together, of the cubin's kernel."""
    found: dict[int, tuple[int, ...]] = {}
    for name, content in _sections(image):
        if not name.startswith(".nv.info.") or "shared_bytes" in name:
            continue
        at = 0
        while at < len(content):
            form, kind, size = struct.unpack_from("<BBH", content, at)
            at += 4
            if form == 4:  # with a value of ``size`` bytes; others hold theirs in ``size``
                if kind in (_MEETINGS, _MASKS):
                    found[kind] = struct.unpack_from(f"<{size // 4}I", content, at)
                at += size
    pairs = zip(found.get(_MEETINGS, ()), found.get(_MASKS, ()), strict=True)
    return [at for at, mask in pairs if mask == _ALL_LANES]


def _sections(image: bytes) -> list[tuple[str, bytes]]:
    """(name, content) of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    texts = heads[names][4]

    def name(begin: int) -> str:
        return image[texts + begin : image.index(b"\0", texts + begin)].decode()

    return [(name(head[0]), image[head[4] : head[4] + head[5]]) for head in heads]


@cache
def _lines(file: str, number: int) -> tuple[str, ...]:
    """That line of all files beside one: Triton names the kernel's for what it inlines."""
    beside = {x.parent for x in ROOT.glob(f"*_backend/kernels/**/{Path(file).name}")}
    beside |= {x.parent for x in Path(triton.language.__file__).parent.glob(Path(file).name)}
    texts = (x.read_text().splitlines() for folder in beside for x in folder.glob("*.py"))
    return tuple(lines[number - 1] for lines in texts if len(lines) >= number)


def _stands(wanted: str, access: Access, listing: Listing) -> bool:
    """Is the access what a row's ``at`` says?"""
    kind, _, wanted = wanted.partition(" ")
    if kind != access.kind:
        return False
    if access.file:
        return any(wanted in text for text in _lines(access.file, access.line))
    return bool(re.search(wanted, listing.get(access.offset, "")))


def is_followed(offset: int, then: list[str], listing: Listing) -> bool:
    """Does what a row's ``then`` says stand behind an instruction, with the meeting in front of
    the arrival?"""
    *ways, meeting, arrival = then

    def first(pattern: str, begin: int) -> int | None:
        return next(
            (at for at in sorted(listing) if at > begin and re.search(pattern, listing[at])), None
        )

    for way in ways:
        found = first(way, offset)
        if found is None:
            return False
        offset = found
    met, arrived = first(meeting, offset), first(arrival, offset)
    return met is not None and arrived is not None and met < arrived


def _is_pair(row: dict[str, Any], one: Access, other: Access, listing: Listing) -> bool:
    """Are two accesses, in either order, those of a row, the first followed by what it says?"""
    a, b = row["at"]
    for first, second in ((one, other), (other, one)):
        if _stands(a, first, listing) and _stands(b, second, listing):
            return "then" not in row or is_followed(first.offset, row["then"], listing)
    return False


def is_explained(
    tool: str, kernel: str, report: str, listings: Callable[[], Iterable[Listing]]
) -> bool:
    """Are all pairs of a report rows of the file?

    Args:
        listings: of the variants of a CUDA C++ kernel that ran; asked for where no line is named.
    """
    rows = [row for row in table() if (row["tool"], row["kernel"]) == (tool, kernel)]
    found = accesses(kernel, report)
    if not found or not rows:
        return False
    variants = [{}] if all(access.file for access in found) else list(listings())
    pairs = [(found[0], other) for other in found[1:]]
    return bool(pairs) and any(
        all(any(_is_pair(row, one, other, x) for row in rows) for one, other in pairs)
        for x in variants
    )
