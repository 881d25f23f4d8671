"""Drop-ins beside their originals."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import load, section, table

_GONE = frozenset(
    (
        "BatchMLAPagedAttentionWrapper",
        "merge_states",
        "BlockSparseAttentionWrapper",
        "VariableBlockSparseAttentionWrapper",
    )
)
"""Functions that were slower at both callers' shapes, and are not in this package any more."""


def drop_ins() -> list[str]:
    """Each function at two callers' shapes, those that were deleted after it too."""
    name = "dropins_h200.json"
    report = load(name)
    kept = [row for row in report["rows"] if row["function"] not in _GONE]
    gone = [row for row in report["rows"] if row["function"] in _GONE]
    titles = ["function", "caller", "ours", "original", "×", "host", "original's", "error"]
    titles.append("original's error")
    refused = sorted({row["function"] for row in kept if "theirs_us" not in row})
    return [
        *section("Drop-ins beside their originals", report, name),
        "",
        "Times of a call in µs, on the GPU and on the host, and relative L2 errors to float64 in"
        " thousandths. × is the time of the original over ours. The originals are FlashInfer 0.7.2,"
        " SageAttention 2.2.0 and SpargeAttn 0.1.0. The package `sgl-flash-mla` 1.0.0 refused the"
        f" calls of {_named(refused)} as they were made on this GPU. The tables of MLA decode and"
        " of DeepSeek-V4's attention have FlashMLA's own times.",
        "",
        *table(titles, map(_cells, kept)),
        "",
        f"These were slower than FlashInfer's at both callers' shapes and have been deleted:"
        f" {_named(sorted(_GONE))}.",
        "",
        *table(titles, map(_cells, gone)),
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    def at(key: str, scale: float = 1.0, digits: int = 0) -> str:
        return f"{scale * row[key]:,.{digits}f}" if key in row else ""

    ratio = f"{row['theirs_us'] / row['ours_us']:.2f}" if "theirs_us" in row else ""
    return [
        f"`{row['function']}`",
        row["caller"],
        *(at("ours_us"), at("theirs_us"), ratio, at("ours_host_us"), at("theirs_host_us")),
        *(at("ours_error", 1e3, 1), at("theirs_error", 1e3, 1)),
    ]


def _named(functions: list[str]) -> str:
    shown = [f"`{function}`" for function in functions]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
