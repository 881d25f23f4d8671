"""The kinds of bytes in a page of DeepSeek-V4's records (docs/families/dsv4.md, cache formats)."""

from __future__ import annotations

DATA_BYTES = {584: 576, 132: 128}
"""Of a record by its width: main, and the indexer's. A page's scales lie behind its data."""


def part_of(byte: int, rows: int, width: int) -> str:
    """The kind of a byte in a page of ``rows`` records of ``width`` bytes."""
    data = DATA_BYTES[width]
    if byte >= rows * data:
        return "scale of a main record" if width == 584 else "scale of an indexer record"
    if width == 132:
        return "e4m3 of an indexer record"
    return "e4m3 of a main record" if byte % data < 448 else "bf16 byte of a main record"


def row_of(byte: int, rows: int, width: int) -> int:
    """The record of a page that a byte belongs to."""
    data = DATA_BYTES[width]
    over = byte - rows * data
    return byte // data if over < 0 else over // (width - data)
