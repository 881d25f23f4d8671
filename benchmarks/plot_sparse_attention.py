"""Draw block-sparse attention's time against density and against tokens, beside the peers'.

    python -m benchmarks.plot_sparse_attention

Reads a result of bench_sparse_attention.py. With rows of ``--growth`` the second panel is of random
blocks at one density; without them it is of causal attention, which every result has. Needs
matplotlib (the extra ``bench``). Writes the same bytes for the same result and the same matplotlib,
and the result's digest into the picture, which a test compares.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "sparse_attention_h200.json"
IMAGE = ROOT / "docs" / "img" / "sparse_attention_h200.svg"
OURS = {"gluon": "this backend, bf16, Gluon", "triton": "this backend, bf16, Triton",
        "int8 per_warp": "this backend, 8 bit, with quantisation"}  # fmt: skip
PEERS = ("FA3", "cuDNN", "FlexAttention", "SageAttention2", "SpargeAttn", "ThunderKittens")
COLOURS = {
    **dict(zip(OURS, ("#1f5a94", "#8fb3d9", "#2a9d8f"), strict=True)),
    **dict(zip(PEERS, ("#404040", "#909090", "#c06030", "#a05080", "#d0a020", "#70a040"),
               strict=True)),
}  # fmt: skip
Lines = dict[str, dict[float, float]]
"""For each path and peer, ms by what is on the axis."""


def digest(result: dict[str, Any]) -> str:
    """A digest of the rows that the picture shows."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def in_use(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of kernels that are there: of a result that has "gluon in step", "gluon" is a form
    whose warpgroups took turns, which is deleted."""
    if all(row["path"] != "gluon in step" for row in rows):
        return rows
    rows = [row for row in rows if row["path"] != "gluon"]
    return [row | {"path": row["path"].removesuffix(" in step")} for row in rows]


def tokens_of(row: dict[str, Any]) -> int:
    return int(row["shape"].split()[0])


def heads_of(row: dict[str, Any]) -> int:
    return int(row["shape"].split()[2])


def lines(rows: list[dict[str, Any]], axis: str) -> Lines:
    """Whole calls of the rows against ``"density"`` or ``"tokens"``; of several the fastest."""
    found: Lines = {}

    def add(name: str, at: float, ms: float | None) -> None:
        if ms is not None:
            line = found.setdefault(name, {})
            line[at] = min(ms, line.get(at, ms))

    for row in rows:
        at = row["density"] if axis == "density" else tokens_of(row)
        if row["path"] in OURS:
            add(row["path"], at, row["ours_whole_ms"])
        for name, ms in row["peers"].items():
            if name in PEERS:
                add(name, at, ms)
    return found


def by_density(result: dict[str, Any]) -> tuple[str, Lines]:
    """The panel's title and lines: all works without a causal mask at the most tokens."""
    works = ("dense", "random blocks", "sliding tiles")
    rows = [row for row in in_use(result["rows"]) if row["work"].startswith(works)]
    most = max(map(tokens_of, rows))
    rows = [row for row in rows if tokens_of(row) == most]
    return f"{most:,} tokens, {heads_of(rows[0])} heads", lines(rows, "density")


def by_tokens(result: dict[str, Any]) -> tuple[str, Lines]:
    """The panel's title and lines: random blocks where they were timed at several lengths."""
    rows = in_use(result["rows"])
    blocks = [row for row in rows if row["work"].startswith("random blocks")]
    blocks = [row for row in blocks if abs(row["density"] - 0.25) < 0.01]
    if len({tokens_of(row) for row in blocks}) > 2:
        return f"a quarter of the blocks, {heads_of(blocks[0])} heads", lines(blocks, "tokens")
    causal = [row for row in rows if row["work"].startswith("causal")]
    return f"causal, {heads_of(causal[0])} heads", lines(causal, "tokens")


def draw(result: dict[str, Any]) -> Any:
    """The figure: two panels with logarithmic axes."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, panels = plt.subplots(1, 2, figsize=(10.0, 4.2))
    axes = (("density", by_density(result)), ("tokens", by_tokens(result)))
    named: dict[str, Any] = {}
    for panel, (axis, (title, found)) in zip(panels, axes, strict=True):
        for name in (*OURS, *PEERS):
            points = sorted(found.get(name, {}).items())
            if not points:
                continue
            style = "-" if name in OURS else "--"
            (drawn,) = panel.plot(
                *zip(*points, strict=True), style, marker="o", color=COLOURS[name], markersize=4
            )
            named.setdefault(OURS.get(name, name), drawn)
        panel.set_xscale("log")
        panel.set_yscale("log")
        ticks = sorted({at for line in found.values() for at in line})
        panel.set_xticks(ticks, [f"{at:.2f}" if axis == "density" else f"{at:,}" for at in ticks])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        panel.set_xlabel("density: share of the blocks" if axis == "density" else "tokens")
        panel.set_ylabel("ms")
        panel.set_title(title, fontsize=10)
        panel.grid(True, linewidth=0.3)
    figure.suptitle(f"Block-sparse attention, GPU time: {result['gpu']}, D 128", fontsize=11)
    figure.legend(
        list(named.values()), list(named), loc="lower center", ncols=4, frameon=False, fontsize=8
    )
    versions = f"torch {result['torch']}, Triton {result['triton']}, {result['date']}"
    figure.text(0.995, 0.005, versions, ha="right", fontsize=6, color="#707070")
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", type=Path, default=RESULT)
    parser.add_argument("--output", type=Path, default=IMAGE)
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "sparse", "font.family": "sans-serif"}
    )
    result = json.loads(options.input.read_text(encoding="utf-8"))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None, "Description": f"drawn from {digest(result)}"}
    draw(result).savefig(options.output, metadata=metadata)


if __name__ == "__main__":
    main()
