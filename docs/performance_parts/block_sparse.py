"""Block-sparse attention."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import load, section, table

RESULT = "sparse_attention_h200.json"


def block_sparse() -> list[str]:
    """Block-sparse attention in 16 and in 8 bits."""
    return attention(load(RESULT))


def ratios(report: dict[str, Any], peer: str) -> list[float]:
    """A peer's time over ours with its quantisation, for each sparse work that both computed."""
    ours: dict[tuple[str, str, float], float] = {}
    theirs: dict[tuple[str, str, float], float] = {}
    for row in report["rows"]:
        if row["density"] < 1 and peer in row["peers"]:
            work = row["work"], row["shape"], row["density"]
            ours[work] = min(row["ours_whole_ms"], ours.get(work, row["ours_whole_ms"]))
            theirs[work] = row["peers"][peer]
    return [theirs[work] / ms for work, ms in ours.items()]


def attention(report: dict[str, Any]) -> list[str]:
    """Each measured case beside the peers of its run."""
    rows = report["rows"]
    cells = (
        [
            row["work"],
            f"{int(row['shape'].split()[0]):,}",
            f"{row['density']:.2f}",
            row["path"],
            _ms(row["ours_ms"]),
            _ms(row["ours_whole_ms"]),
            "" if row["tflops"] is None else f"{row['tflops']:.0f}",
            ", ".join(f"{name} {_ms(ms)}" for name, ms in row["peers"].items()),
        ]
        for row in rows
    )
    kept = [row for row in rows if row["mass_kept"] is not None]
    titles = ["work", "tokens", "density", "path", "ours", "whole call", "TFLOP/s", "peers"]
    return [
        *section("Block-sparse and 8-bit attention", report, RESULT),
        "",
        "D = 128, times in ms. A *whole call* includes quantisation and prediction. Random blocks"
        " differ from head to head. Peers computed the same blocks; peers without block plans ran"
        " only dense work. SageAttention and SpargeAttn were built from their sources; their times"
        " include quantisation unless their names say otherwise.",
        "The rows of 8 bits are older than the scales for each query and the exact differences of"
        " massive logits, which cost time; the drop-ins were [timed since](drop-ins.md).",
        "",
        *table(titles, cells),
        *(
            f"\nOn random inputs, which are the worst case for a prediction, it keeps"
            f" {row['mass_kept']:.2f} of the attention at density {row['density']:.2f}."
            for row in kept
        ),
    ]


def _ms(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"
