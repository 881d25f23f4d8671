"""Draw latency and memory over time, from a result of load_vllm.py or load_sglang.py.

    python benchmarks/plot_load.py --input load_vllm033.json --output load_vllm033.svg

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
COLOURS = ("#b0b0b0", "#8fb3d9", "#1f5a94", "#0b2545")


def draw(result: dict[str, Any]) -> plt.Figure:
    """Two panels: latency per minute and concurrency, and both memories over time."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    concurrencies = sorted({row["concurrency"] for row in result["latency"]})
    for colour, clients in zip(COLOURS, concurrencies, strict=False):
        rows = [row for row in result["latency"] if row["concurrency"] == clients]
        minutes = [row["minute"] + 0.5 for row in rows]
        for name, style in (("p50", "-"), ("p99", ":")):
            values = [row["latency_ms"][name] for row in rows]
            label = f"{clients} at a time, {name}"
            above.plot(minutes, values, style, color=colour, label=label, marker=".")
    above.set_yscale("log")
    above.set_ylabel("answer, ms")
    above.legend(fontsize=7, ncols=4, frameon=False, loc="upper center")
    low, high = above.get_ylim()
    above.set_ylim(low, high * 4)  # room for the legend
    at = [row["at_s"] / 60 for row in result["memory"]]
    for name, colour, label in (("gpu_mib", COLOURS[2], "GPU"), ("host_mib", COLOURS[0], "host")):
        below.plot(at, [row[name] / 1024 for row in result["memory"]], color=colour, label=label)
    below.set_ylim(bottom=0)
    below.set_ylabel("memory, GiB")
    below.set_xlabel("minutes")
    below.legend(fontsize=8, frameon=False)
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
    asked = sum(row["requests"] for row in result["requests"].values())
    wrong = sum(row["wrong"] for row in result["requests"].values())
    where = result["environment"]
    engine = "sglang" if "sglang" in where else "vLLM"
    title = f"{engine} {where[engine.lower()]} under load, {where['gpu']}"
    title += f": {asked:,} requests, {wrong} wrong"
    figure.suptitle(title, fontsize=10)
    versions = f"torch {where['torch']}, Triton {where['triton']}, {result['date']}"
    figure.text(0.995, 0.01, versions, ha="right", fontsize=6, color="#707070")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--input", type=Path, default=results / "load_vllm033.json")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/img/load_vllm033.svg")
    args = parser.parse_args()

    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "kda", "font.family": "sans-serif"}
    )
    figure = draw(json.loads(args.input.read_text(encoding="utf-8")))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
