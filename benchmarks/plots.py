"""Draw the pictures of the documentation from the committed results.

    python benchmarks/plots.py kda_prefill

Needs matplotlib (the extra ``bench``). Writes the same bytes for the same result and the same
matplotlib. Each picture is of ``results/NAME_h200.json`` and becomes ``docs/img/NAME_h200.svg``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BLUE, LIGHT, GREY = "#1f5a94", "#8fb3d9", "#b0b0b0"


def result_of(name: str) -> dict[str, Any]:
    file = ROOT / "benchmarks" / "results" / f"{name}_h200.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def image_of(name: str) -> Path:
    return ROOT / "docs" / "img" / f"{name}_h200.svg"


def digest(result: dict[str, Any]) -> str:
    """A digest of the result that a picture shows, which is in the picture."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def kda_prefill(plt: Any, result: dict[str, Any]) -> Any:
    """KDA prefill beside FLA, 32 heads: one panel a shape, each with its own scale, since times
    differ by a factor of a hundred."""
    rows = [row for row in result["rows"] if (row["H"], row["gate"]) == (32, "unbounded")]
    figure, panels = plt.subplots(1, len(rows), figsize=(2.0 * len(rows), 3.0), squeeze=False)
    for panel, row in zip(panels[0], rows, strict=True):
        bars = [
            (f"this backend, {row['path']}", row["ours_gpu_ms"], BLUE),
            ("this backend, two_stage (Triton)", row["two_stage_gpu_ms"], LIGHT),
            (f"FLA {result['fla']}", row["fla_gpu_ms"], GREY),
        ]
        drawn = panel.bar(range(len(bars)), [ms for _, ms, _ in bars], width=0.8)
        for bar, (label, ms, colour) in zip(drawn, bars, strict=True):
            bar.set_color(colour)
            bar.set_label(label)
            panel.annotate(
                f"{ms:.3f}", (bar.get_x() + 0.4, ms), (0, 2), textcoords="offset points",
                ha="center", fontsize=8,
            )  # fmt: skip
        panel.set_ylim(0, 1.3 * max(ms for _, ms, _ in bars))  # room for the figures above
        lens = row["seq_lens"]
        ragged = f"{len(lens)} ragged, {sum(lens):,} tokens"
        even = f"{len(lens)} × {lens[0]:,} tokens"
        panel.set_title(ragged if len(set(lens)) > 1 else even, fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[["top", "left", "right"]].set_visible(False)
    figure.suptitle(
        f"KDA prefill, GPU time in ms (lower is better): {result['gpu']}, 32 heads, "
        "K = V = 128, bf16, unbounded gate",
        fontsize=10,
    )
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    sign(figure, result, 0.01)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    return figure


def sign(figure: Any, result: dict[str, Any], height: float = 0.005) -> None:
    """Name the versions and the date of a result in a corner of its picture."""
    versions = f"torch {result['torch']}, Triton {result['triton']}, {result['date']}"
    figure.text(0.995, height, versions, ha="right", fontsize=6, color="#707070")


PICTURES = {"kda_prefill": kda_prefill}


def write(name: str, output: Path) -> None:
    """Draw one of `PICTURES`."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    result = result_of(name)
    with plt.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    ):
        figure = PICTURES[name](plt, result)
        metadata = {"Date": None, "Description": f"drawn from {digest(result)}"}
        figure.savefig(output, metadata=metadata)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=PICTURES)
    for name in parser.parse_args().names:
        write(name, image_of(name))


if __name__ == "__main__":
    main()
