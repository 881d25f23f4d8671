"""Draw MLA decode beside its peers, from results of bench_mla_decode.py.

    python benchmarks/plot_mla_decode.py
    python benchmarks/plot_mla_decode.py --input benchmarks/results/mla_decode_growth_h200.json

A result of all cases becomes a panel of bars for each head count, one of ``--growth`` a table
of batch by context. Both show the time of the best peer over ours: above 1 ours is ahead. Needs
matplotlib (the extra ``bench``). Writes the same bytes for the same result and the same matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEERS = {
    "flashmla": "FlashMLA",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "vllm_triton": "vLLM's Triton kernel",
}
AHEAD, BEHIND = "#1f5a94", "#b0b0b0"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "mla", "font.family": "sans-serif"}


def peers_of(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each peer that a row has."""
    return {name: row[f"{name}_us"] for name in PEERS if f"{name}_us" in row}


def lead(row: dict[str, Any]) -> float:
    """The best peer's time over ours."""
    peers = peers_of(row)
    if not peers:
        raise SystemExit(f"the row of {row['case']} has no peer")
    return min(peers.values()) / float(row["ours_gpu_us"])


def is_growth(result: dict[str, Any]) -> bool:
    return result.get("mode") == "growth"


def draw(result: dict[str, Any]) -> plt.Figure:
    return draw_growth(result) if is_growth(result) else draw_cases(result)


def draw_cases(result: dict[str, Any]) -> plt.Figure:
    """A panel for each head count, a bar for each case."""
    heads = list(dict.fromkeys(row["heads"] for row in result["rows"]))
    figure, panels = plt.subplots(len(heads), 1, figsize=(9, 1.9 * len(heads)), squeeze=False)
    for panel, count in zip(panels[:, 0], heads, strict=True):
        rows = [row for row in result["rows"] if row["heads"] == count]
        leads = [lead(row) for row in rows]
        colours = [AHEAD if value >= 1 else BEHIND for value in leads]
        panel.bar(range(len(rows)), leads, width=0.75, color=colours)
        panel.axhline(1, color="#404040", linewidth=0.8)
        for place, value in enumerate(leads):
            panel.annotate(
                f"{value:.2f}", (place, value), (0, 2), textcoords="offset points", ha="center",
                fontsize=7,
            )  # fmt: skip
        panel.set_ylim(0, 1.25 * max(leads))
        panel.set_xticks(range(len(rows)), [row["case"] for row in rows], fontsize=7, rotation=30)
        panel.set_ylabel(f"{count} heads", fontsize=8)
        panel.tick_params(axis="y", labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    _titles(figure, result)
    return figure


def draw_growth(result: dict[str, Any]) -> plt.Figure:
    """A panel for each head count: batch by context."""
    rows = result["rows"]
    heads = list(dict.fromkeys(row["heads"] for row in rows))
    batches = _sizes(row["case"].partition("x")[0] for row in rows)
    contexts = _sizes(row["case"].partition("x")[2].removesuffix("k") for row in rows)
    figure, panels = plt.subplots(1, len(heads), figsize=(2.9 * len(heads), 3.2), squeeze=False)
    for panel, count in zip(panels[0], heads, strict=True):
        found = {row["case"]: lead(row) for row in rows if row["heads"] == count}
        for y, batch in enumerate(batches):
            for x, context in enumerate(contexts):
                value = found.get(f"{batch}x{context}k")
                if value is None:  # did not fit into memory
                    continue
                colour = AHEAD if value >= 1 else BEHIND
                strength = 0.25 + 0.75 * min(abs(value - 1), 1)
                box = plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=colour, alpha=strength)
                panel.add_patch(box)
                panel.annotate(f"{value:.2f}", (x, y), ha="center", va="center", fontsize=7)
        panel.set_xlim(-0.5, len(contexts) - 0.5)
        panel.set_ylim(-0.5, len(batches) - 0.5)
        panel.set_xticks(range(len(contexts)), [f"{context}k" for context in contexts], fontsize=7)
        panel.set_yticks(range(len(batches)), [str(batch) for batch in batches], fontsize=7)
        panel.set_xlabel("tokens of each request", fontsize=7)
        panel.set_title(f"{count} heads", fontsize=9)
    panels[0][0].set_ylabel("requests", fontsize=7)
    _titles(figure, result)
    return figure


def _sizes(names: Iterable[str]) -> list[int]:
    return sorted({int(name) for name in names})


def _titles(figure: plt.Figure, result: dict[str, Any]) -> None:
    names = ", ".join(PEERS[name] for name in peers_of(result["rows"][0]))
    figure.suptitle(
        f"MLA decode, bf16, {result['gpu']}: best peer's GPU time over ours (above 1: ahead)",
        fontsize=10,
    )
    versions = f"torch {result['torch']}, Triton {result['triton']}, {result['date']}"
    figure.text(0.005, 0.005, f"peers: {names}", ha="left", fontsize=6, color="#707070")
    figure.text(0.995, 0.005, versions, ha="right", fontsize=6, color="#707070")
    figure.tight_layout(rect=(0, 0.02, 1, 1))


def write(source: Path, output: Path) -> None:
    with plt.rc_context(STYLE):
        figure = draw(json.loads(source.read_text(encoding="utf-8")))
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", type=Path, default=RESULTS / "mla_decode_h200.json")
    parser.add_argument("--output", type=Path, help="by default docs/img/NAME.svg of the input")
    args = parser.parse_args()
    write(args.input, args.output or ROOT / "docs" / "img" / f"{args.input.stem}.svg")


if __name__ == "__main__":
    main()
