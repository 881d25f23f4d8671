"""Draw the GPU time of KDA prefill beside FLA's, from a result of bench_kda_prefill.py.

    python benchmarks/plot_prefill.py

Needs matplotlib (the extra ``bench``). Writes the same bytes for the same result and the same
matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
COLOURS = ("#1f5a94", "#8fb3d9", "#b0b0b0")
TOP = 1.3  # of the tallest bar: room for the figures above the bars


def series(row: dict[str, Any]) -> list[tuple[str, float]]:
    """Label and milliseconds of each bar; the chosen path and the Triton path may be one."""
    bars = [(f"this backend, {row['path']}", row["ours_gpu_ms"])]
    if row["path"] != "two_stage":
        bars.append(("this backend, two_stage (Triton)", row["two_stage_gpu_ms"]))
    return [*bars, ("FLA", row["fla_gpu_ms"])]


def shape_name(seq_lens: list[int]) -> str:
    """The batch in words: ``1 × 8,192 tokens``."""
    if len(set(seq_lens)) > 1:
        return f"{len(seq_lens)} ragged, {sum(seq_lens):,} tokens"
    return f"{len(seq_lens)} × {seq_lens[0]:,} tokens"


def draw(result: dict[str, Any], heads: int, gate: str) -> plt.Figure:
    """One panel a shape, each with its own scale: times differ by a factor of a hundred."""
    rows = [row for row in result["rows"] if row["H"] == heads and row["gate"] == gate]
    if not rows:
        raise SystemExit(f"no rows with {heads} heads and a gate that is {gate}")
    figure, panels = plt.subplots(1, len(rows), figsize=(2.0 * len(rows), 3.0), squeeze=False)
    for panel, row in zip(panels[0], rows, strict=True):
        bars = series(row)
        drawn = panel.bar(range(len(bars)), [ms for _, ms in bars], width=0.8)
        for bar, colour, (label, ms) in zip(drawn, COLOURS, bars, strict=False):
            bar.set_color(colour if label != "FLA" else COLOURS[-1])
            bar.set_label(f"FLA {result['fla']}" if label == "FLA" else label)
            panel.annotate(
                f"{ms:.3f}", (bar.get_x() + 0.4, ms), (0, 2), textcoords="offset points",
                ha="center", fontsize=8,
            )  # fmt: skip
        panel.set_ylim(0, TOP * max(ms for _, ms in bars))
        panel.set_title(shape_name(row["seq_lens"]), fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[["top", "left", "right"]].set_visible(False)
    figure.suptitle(
        f"KDA prefill, GPU time in ms (lower is better): {result['gpu']}, {heads} heads, "
        f"K = V = 128, bf16, {gate} gate",
        fontsize=10,
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    versions = f"torch {result['torch']}, Triton {result['triton']}, {result['date']}"
    figure.text(0.995, 0.01, versions, ha="right", fontsize=6, color="#707070")
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--input", type=Path, default=results / "kda_prefill_h200.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/img/kda_prefill_h200.svg")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--gate", choices=("unbounded", "bounded"), default="unbounded")
    args = parser.parse_args()

    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "kda", "font.family": "sans-serif"}
    )
    figure = draw(json.loads(args.input.read_text(encoding="utf-8")), args.heads, args.gate)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
