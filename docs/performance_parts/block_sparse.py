"""Block-sparse attention, and the order of tokens."""

from __future__ import annotations

from typing import Any

from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from docs.performance_parts.page import load, section, table
from softmax_backend.launch_params import TABLES

RESULT = "sparse_attention_h200.json"
ORDERS = "token_orders.json"
_IMAGE = "sparse_attention_h200.svg"


def block_sparse() -> list[str]:
    """Block-sparse attention of the softmax family, and what the order of tokens does."""
    report, tokens = load(RESULT), load(ORDERS)
    return [
        *attention(report),
        *orders(tokens),
        "",
        orders_in_words(tokens),
    ]


def _names() -> dict[str, str]:
    """Of the Gluon kernel's two orders in the result: the path table's goes without an addition."""
    rows = load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    (turns,) = (row.params.ping_pong for row in rows if row.name == "gluon")
    return (
        {"gluon in step": "gluon, in step"}
        if turns
        else {"gluon": "gluon, in turns", "gluon in step": "gluon"}
    )


def attention(report: dict[str, Any]) -> list[str]:
    """Every work beside the peers of its run, and what was not built."""
    rows, names = report["rows"], _names()
    cells = (
        [
            row["work"],
            f"{int(row['shape'].split()[0]):,}",
            f"{row['density']:.2f}",
            names.get(row["path"], row["path"]),
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
        " only dense work. *In turns* means that one warpgroup multiplies while the other computes"
        " its softmax, *in step* that both do the same; the path table says which is in use.",
        "",
        *table(titles, cells),
        *(
            f"\nOn random inputs, which are the worst case for a prediction, it keeps"
            f" {row['mass_kept']:.2f} of the attention at density {row['density']:.2f}."
            for row in kept
        ),
        *(["", "Not built: " + " ".join(absent)] if absent else []),
        "",
        f"![time against density and against tokens, beside the peers](img/{_IMAGE})",
    ]


def orders(report: dict[str, Any]) -> list[str]:
    """What the order of a video's tokens does to density and to the attention kept."""
    rows, key = report["rows"], f"density_for_{report['mass']}"
    densities = [x["density"] for x in rows[0]["kept"]]
    cells = (
        [
            f"{row['field']}, {row['waves']} waves",
            row["order"],
            *(f"{x['predicted']:.2f} / {x['best']:.2f}" for x in row["kept"]),
            f"{row[key]:.2f}",
        ]
        for row in rows
    )
    titles = ["field", "order", *(f"kept at {x:.2f}" for x in densities)]
    link = f"[{ORDERS}](../benchmarks/results/{ORDERS})"
    box = " x ".join(map(str, report["box"]))
    return [
        "",
        "## Orders of a video's tokens",
        "",
        f"Synthetic fields over {box} tokens, in blocks of {report['block']}, on a CPU,"
        f" {report['date']}: {link}. For each density the table has the share of the attention that"
        " a prediction keeps, and the share that the best choice of as many blocks would keep. The"
        f" last column is the density that the best choice needs to keep {report['mass']:.1f}."
        " `benchmarks/token_orders.py` describes the fields.",
        "",
        *table([*titles, f"density for {report['mass']:.1f}"], cells),
    ]


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
        " [families/softmax.md](families/softmax.md#forms-of-prediction-and-of-the-exponent)"
        " explains the names.",
        "",
        *table(["", "form", "ms", "again"], cells),
    ]


def orders_in_words(report: dict[str, Any]) -> str:
    """The comparison of the Hilbert curve with tiles, in a sentence."""
    key = f"density_for_{report['mass']}"
    needed: dict[str, list[float]] = {}
    for row in report["rows"]:
        needed.setdefault(row["order"], []).append(row[key])
    cubes, *others = [name for name in needed if name.startswith("tiles")]
    same = needed[cubes] == needed["hilbert"]
    verdict = "the same blocks as" if same else "other blocks than"
    over = [
        f"{name} {min(ratios):.2f} to {max(ratios):.2f} times as many"
        for name in ("raster", *others, "random")
        for ratios in [[a / b for a, b in zip(needed[name], needed[cubes], strict=True)]]
    ]
    return (
        f"To keep {report['mass']:.1f} of the attention, the Hilbert curve needs {verdict} {cubes};"
        f" other orders need more blocks than those: {', '.join(over)}."
    )


def _ms(ms: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.2f}" if ms < 100 else f"{ms:.1f}"
