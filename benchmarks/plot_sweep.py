"""Draw where one schedule of KDA prefill overtakes another, from a result of sweep_kda_prefill.py.

    python benchmarks/plot_sweep.py

Single sequences: for each number of tokens the time of the best schedule of each kind over that of
the best of all. Upper row: strategies; lower row: intra CTAs per SM.
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

from benchmarks.sweep_kda_prefill import chosen, shipped_model, timed
from kda_backend.prefill.sm_schedule import Schedule

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {
    "concurrent, split": "#1f5a94",
    "concurrent": "#c46a1b",
    "sequence-major": "#8a5fa8",
    "tiles first": "#3f8f5b",
    "2 intra CTAs per SM": "#1f5a94",
    "3 intra CTAs per SM": "#c46a1b",
    "4 intra CTAs per SM": "#3f8f5b",
}
MOST = 1.5  # of the axis; what takes longer is beyond it


def strategy(schedule: Schedule, num_sms: int) -> str:
    """The schedule's strategy, in words."""
    if schedule.sequence_major:
        return "sequence-major"
    if schedule.first_scan_sm == num_sms:
        return "tiles first"
    return "concurrent, split" if schedule.split else "concurrent"


def ctas(schedule: Schedule, num_sms: int) -> str:
    return f"{schedule.intra_ctas_per_sm} intra CTAs per SM"


def curve(rows: list[dict[str, Any]], kind: Callable[[Schedule, int], str]) -> dict[str, list[Any]]:
    """Kind -> (tokens, time over the best) of each row that has a schedule of it."""
    found: dict[str, list[Any]] = {}
    for row in rows:
        _, times = timed(row)
        by_kind: dict[str, float] = {}
        for schedule, ms in times.items():
            name = kind(schedule, row["num_sms"])
            by_kind[name] = min(ms, by_kind.get(name, ms))
        for name, ms in by_kind.items():
            found.setdefault(name, []).append((sum(row["seq_lens"]), ms / min(times.values())))
    return found


def choices(rows: list[dict[str, Any]]) -> list[Any]:
    """(tokens, time over the best) of what the shipped cost model chooses."""
    found = []
    for row in rows:
        shape, times = timed(row)
        schedule = chosen(shipped_model(row["num_sms"]), shape, times)
        found.append((sum(row["seq_lens"]), times[schedule] / min(times.values())))
    return found


def draw(result: dict[str, Any]) -> plt.Figure:
    heads = sorted({row["H"] for row in result["rows"]})
    figure, panels = plt.subplots(2, len(heads), figsize=(2.6 * len(heads), 4.6), sharey=True)
    for column, h in enumerate(heads):
        rows = [row for row in result["rows"] if row["H"] == h and len(row["seq_lens"]) == 1]
        rows.sort(key=lambda row: sum(row["seq_lens"]))
        for panel, kind in zip(panels[:, column], (strategy, ctas), strict=True):
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
        f"KDA prefill, one sequence: schedules by their kind ({result['gpu']}, {result['date']})",
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
