"""Block-sparse attention."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import load, section, table

RESULT = "sparse_attention_h200.json"
PEERS = "sparse_attention_peers_h200.json"
FLEX = "FlexAttention"


def in_use(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of kernels that are there: of a result that has "gluon in step", "gluon" is a form
    whose warpgroups took turns, which is deleted."""
    if all(row["path"] != "gluon in step" for row in rows):
        return rows
    rows = [row for row in rows if row["path"] != "gluon"]
    return [row | {"path": row["path"].removesuffix(" in step")} for row in rows]


def block_sparse() -> list[str]:
    """Block-sparse attention in 16 and in 8 bits."""
    return attention(load(RESULT))


def attention(report: dict[str, Any]) -> list[str]:
    """Each measured case beside the peers of its run, and the peers that were not built."""
    rows = in_use(report["rows"])
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
    absent = [f"{name}: {why}." for name, why in report.get("not_built", {}).items()]
    return [
        *section("Block-sparse and 8-bit attention", report, RESULT),
        "",
        "D = 128, times in ms. A *whole call* includes quantisation and prediction. Random blocks"
        " differ from head to head. Peers computed the same blocks; peers without block plans ran"
        " only dense work.",
        "",
        *table(titles, cells),
        *(
            f"\nOn random inputs, which are the worst case for a prediction, it keeps"
            f" {row['mass_kept']:.2f} of the attention at density {row['density']:.2f}."
            for row in kept
        ),
        *(["", "Not built: " + " ".join(absent)] if absent else []),
    ]


def built_peers() -> list[str]:
    """A second run, beside peers that were built from their sources."""
    report = load(PEERS)
    cells = (
        [
            row["work"],
            f"{int(row['shape'].split()[0]):,}",
            f"{row['density']:.2f}",
            _ms(row["ours_ms"]),
            _ms(row["ours_whole_ms"]),
            ", ".join(f"{name} {_ms(ms)}" for name, ms in peers.items()),
        ]
        for row in report["rows"]
        if row["path"] in ("gluon", "int8 per_warp") and (peers := _right_peers(row))
    )
    return [
        *section("Block-sparse and 8-bit attention beside built peers", report, PEERS),
        "",
        "SageAttention, SpargeAttn and ThunderKittens were built from their sources; this run had"
        " no FlashAttention 3. Times in ms. A *whole call* includes quantisation, as a peer's does"
        " unless its name says otherwise. FlexAttention's times of random blocks at half of the"
        " blocks and more are left out: the benchmark kept masks by the address of a tensor that"
        " was gone, and so timed them with the mask of another density.",
        "",
        *table(["work", "tokens", "density", "ours", "whole call", "peers"], cells),
    ]


def _right_peers(row: dict[str, Any]) -> dict[str, float]:
    """A row's peers without FlexAttention where its times are known to be wrong."""
    is_wrong = row["work"] == "random blocks" and row["density"] >= 0.5
    return {name: ms for name, ms in row["peers"].items() if not (is_wrong and name == FLEX)}


def forms() -> list[str]:
    """Forms of prediction and of the 8-bit exponent beside those that the table had."""
    name = "sparse_forms_h200.json"
    report = load(name)
    titles = {"prediction": "prediction", "8-bit 0.25": "8 bit, a quarter of the blocks",
              "8-bit dense": "8 bit, all blocks"}  # fmt: skip
    cells = (
        [titles[row["part"]], row["form"], *(f"{row[key]:.3f}" for key in ("ms", "again_ms"))]
        for row in report["rows"]
        if row["part"] in titles
    )
    return [
        *section("Forms of prediction and of 8-bit attention", report, name),
        "",
        f"{report['shape']}, D = 128, times in ms. Every form was compared with float64 and then"
        " timed twice. *in use* is the form that the path table had until then."
        " [families/block-sparse.md]"
        "(families/block-sparse.md#forms-of-prediction-and-of-the-exponent) explains the names.",
        "",
        *table(["", "form", "ms", "again"], cells),
    ]


def _ms(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"
