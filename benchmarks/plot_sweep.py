"""Draw where one layout of KDA prefill overtakes another, from a result of sweep_kda_prefill.py.

    python benchmarks/plot_sweep.py

Single sequences: for each number of tokens the time of the best layout of each kind over that of
the best of all. Upper row: ways to share the multiprocessors; lower row: intra blocks on one.
Needs matplotlib (the extra ``bench``). Writes the same bytes for the same result and the same
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.sweep_kda_prefill import chosen, shipped_tables, timed
from kda_backend.prefill.sm_schedule import Layout, costs_of

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {
    "beside, in clusters": "#1f5a94",
    "beside, one block a head": "#c46a1b",
    "heads in turn": "#8a5fa8",
    "tiles first": "#3f8f5b",
    "2 intra blocks": "#1f5a94",
    "3 intra blocks": "#c46a1b",
    "4 intra blocks": "#3f8f5b",
}
MOST = 1.5  # of the axis; what takes longer is beyond it


def way(layout: Layout, num_sms: int) -> str:
    """The layout's kind, in words."""
    if layout.in_turn:
        return "heads in turn"
    if layout.first_scan_sm == num_sms:
        return "tiles first"
    return "beside, in clusters" if layout.split else "beside, one block a head"


def blocks(layout: Layout, num_sms: int) -> str:
    return f"{layout.per_sm} intra blocks"


def curve(rows: list[dict[str, Any]], kind: Callable[[Layout, int], str]) -> dict[str, list[Any]]:
    """Kind -> (tokens, time over the best) of each row that has a layout of it."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        _, times = timed(row)
        by_kind: dict[str, float] = {}
        for layout, ms in times.items():
            name = kind(layout, row["num_sms"])
            by_kind[name] = min(ms, by_kind.get(name, ms))
        for name, ms in by_kind.items():
            found.setdefault(name, []).append((sum(row["seq_lens"]), ms / min(times.values())))
    return found


def choices(rows: list[dict[str, Any]]) -> list[Any]:
    """(tokens, time over the best) of what the shipped table chooses."""
    found = []
    for row in rows:
        work, times = timed(row)
        path = next(t for t in shipped_tables() if t.max_grid is None or work.tiles <= t.max_grid)
        layout = chosen(costs_of(path.params, row["num_sms"]), work, times)
        found.append((sum(row["seq_lens"]), times[layout] / min(times.values())))
    return found


def draw(result: dict[str, Any]) -> plt.Figure:
    heads = sorted({row["H"] for row in result["rows"]})
    figure, panels = plt.subplots(2, len(heads), figsize=(2.6 * len(heads), 4.6), sharey=True)
    for column, h in enumerate(heads):
        rows = [row for row in result["rows"] if row["H"] == h and len(row["seq_lens"]) == 1]
        rows.sort(key=lambda row: sum(row["seq_lens"]))
        for panel, kind in zip(panels[:, column], (way, blocks), strict=True):
            curves = curve(rows, kind)
            for name in (name for name in COLOURS if name in curves):
                panel.plot(
                    *zip(*curves[name], strict=True), "o-", color=COLOURS[name], label=name,
                    markersize=3,
                )  # fmt: skip
            panel.plot(
                *zip(*choices(rows), strict=True), "k+", label="the table's choice", markersize=8
            )
            panel.set_xscale("log", base=2)
            panel.set_ylim(0.98, MOST)
            panel.spines[["top", "right"]].set_visible(False)
        panels[0, column].set_title(f"{h} heads", fontsize=10)
        panels[1, column].set_xlabel("tokens", fontsize=9)
    for row in panels:
        row[0].set_ylabel("time over the best", fontsize=9)
        row[-1].legend(frameon=False, fontsize=6)
    figure.suptitle(
        f"KDA prefill, one sequence: layouts by their kind ({result['gpu']}, {result['date']})",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    name = "benchmarks/results/kda_prefill_sweep_h200.json"
    parser.add_argument("--result", type=Path, default=ROOT / name)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/img/kda_prefill_sweep_h200.svg")
    args = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "kda-dsv4"
    figure = draw(json.loads(args.result.read_text()))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
