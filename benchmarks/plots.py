"""Draw the pictures of the documentation from the committed results.

    python benchmarks/plots.py kda_prefill mla_decode sparse_attention

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
MLA_PEERS = {
    "flashmla": "FlashMLA",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "vllm_triton": "vLLM's Triton kernel",
}
OURS = {"gluon": "this backend, bf16, Gluon", "triton": "this backend, bf16, Triton",
        "int8 per_warp": "this backend, 8 bit, with quantisation"}  # fmt: skip
PEERS = ("FA3", "cuDNN", "FlexAttention", "SageAttention2", "SpargeAttn", "ThunderKittens")
COLOURS = {
    **dict(zip(OURS, (BLUE, LIGHT, "#2a9d8f"), strict=True)),
    **dict(zip(PEERS, ("#404040", "#909090", "#c06030", "#a05080", "#d0a020", "#70a040"),
               strict=True)),
}  # fmt: skip
Lines = dict[str, dict[float, float]]
"""For each path and peer, ms by what is on the axis."""


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


def lead(row: dict[str, Any]) -> float:
    """The best MLA peer's time over ours."""
    return min(row[f"{peer}_us"] for peer in MLA_PEERS) / float(row["ours_gpu_us"])


def mla_decode(plt: Any, result: dict[str, Any]) -> Any:
    """MLA decode, the best peer's time over ours: a panel for each head count, a bar a case."""
    heads = list(dict.fromkeys(row["heads"] for row in result["rows"]))
    figure, panels = plt.subplots(len(heads), 1, figsize=(9, 1.9 * len(heads)), squeeze=False)
    for panel, count in zip(panels[:, 0], heads, strict=True):
        rows = [row for row in result["rows"] if row["heads"] == count]
        leads = [lead(row) for row in rows]
        colours = [BLUE if value >= 1 else GREY for value in leads]
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
    figure.suptitle(
        f"MLA decode, bf16, {result['gpu']}: best peer's GPU time over ours (above 1: ahead)",
        fontsize=10,
    )
    peers = f"peers: {', '.join(MLA_PEERS.values())}"
    figure.text(0.005, 0.005, peers, ha="left", fontsize=6, color="#707070")
    sign(figure, result)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    return figure


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
    """The panel's title and lines: random blocks where they were timed at several lengths
    (``--growth``), else causal attention."""
    rows = in_use(result["rows"])
    blocks = [row for row in rows if row["work"].startswith("random blocks")]
    blocks = [row for row in blocks if abs(row["density"] - 0.25) < 0.01]
    if len({tokens_of(row) for row in blocks}) > 2:
        return f"a quarter of the blocks, {heads_of(blocks[0])} heads", lines(blocks, "tokens")
    causal = [row for row in rows if row["work"].startswith("causal")]
    return f"causal, {heads_of(causal[0])} heads", lines(causal, "tokens")


def sparse_attention(plt: Any, result: dict[str, Any]) -> Any:
    """Block-sparse attention against density and against tokens, on logarithmic axes."""
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
    sign(figure, result)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    return figure


def sign(figure: Any, result: dict[str, Any], height: float = 0.005) -> None:
    """Name the versions and the date of a result in a corner of its picture."""
    versions = f"torch {result['torch']}, Triton {result['triton']}, {result['date']}"
    figure.text(0.995, height, versions, ha="right", fontsize=6, color="#707070")


PICTURES = {"kda_prefill": kda_prefill, "mla_decode": mla_decode,
            "sparse_attention": sparse_attention}  # fmt: skip


def write(name: str, output: Path) -> None:
    """Draw one of `PICTURES`."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    result = result_of(name)
    style = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}
    with plt.rc_context(style):
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
