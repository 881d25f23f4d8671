"""Write docs/performance.md from the files under benchmarks/results/.

    python docs/performance.py

A test fails where the file is not what this writes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# Performance

Written by `docs/performance.py` from the files under `benchmarks/results/`; CI fails where it is
stale. GPU times are medians of CUDA-graph replays with the peers in the same run, after a gate on
accuracy. *host* is what one Python call costs the host. What was tried, what failed and what was
predicted stands in [performance-log.md](performance-log.md).
"""

BOUNDS = """
## What bounds each phase

- **Intra stage of prefill**: instructions and bytes alike. With the 16 warps that registers and
  shared memory allow a multiprocessor, the stage alone uses 58 % of the issue slots, 43 % of the
  memory bandwidth and 60 % of the L2 cache's
  ([ncu](../benchmarks/results/kda_prefill_solve_development_h200.json)).
- **Scan of prefill**: the latency of a chain. A step of 64 tokens is 0.88 µs in clusters of two
  blocks, 64 value rows each, and 1.75 µs for 128 rows in one block, of which tensor work is 1.02
  and the traffic of shared memory 1.4.
- **Both together**: with few heads the chain, with many the bytes: 192 KiB a tile of 64 tokens and
  one head, 786 MB for 8k tokens and 32 heads, which take 187 of the 280 µs at the copy bandwidth.
  The scan starts beside the intra stage, so the longer of the two counts.
- **Many short sequences**: the sum of both, and at each end a time in which most multiprocessors
  wait, for the first tiles and for the last task.
- **Decode**: the bytes of the state, read and written once, from about 1,000 sequences times heads
  on; below, the launch.
- **The compressor's decode**: the launch up to 64 tokens, then the bytes of the pooled windows.
- **An engine's call**: at 8k tokens the experts' products are half of the GPU's time and the KDA
  layers an eighth; at 512 tokens the host.
"""


def render() -> str:
    """The page's text."""
    lines = [*_prefill(), *_growth(), *_decode(), *_compressor(), *_engine()]
    return HEAD + "\n".join(lines) + "\n" + BOUNDS


def _prefill() -> list[str]:
    report = _load("kda_prefill_h200.json")
    lines = _section("KDA prefill", report, "kda_prefill_h200.json")
    for gate, peers in (("unbounded", ("fla",)), ("bounded", ("fla", "flashkda"))):
        rows = [row for row in report["rows"] if row["gate"] == gate]
        ratios = [_best(row, peers) / row["ours_gpu_ms"] for row in rows]
        titles = {"fla": "FLA 0.6.0", "flashkda": "FlashKDA"}
        lines += [
            "",
            f"{gate.capitalize()} gate, bf16, K = V = 128, µs. Over the fastest peer: geometric"
            f" mean {_mean(ratios):.2f}×, least {min(ratios):.2f}×.",
            "",
            *_table(
                [
                    "heads",
                    "tokens",
                    "ours",
                    *(titles[peer] for peer in peers),
                    "×",
                    "Triton",
                    "host",
                ],
                (
                    [
                        str(row["H"]),
                        _shape(row["seq_lens"]),
                        _us(row["ours_gpu_ms"]),
                        *(_us(row[f"{peer}_gpu_ms"]) for peer in peers),
                        f"{ratio:.2f}",
                        _us(row["two_stage_gpu_ms"]),
                        _us(row["ours_host_ms"]),
                    ]
                    for row, ratio in zip(rows, ratios, strict=True)
                ),
            ),
        ]
    return [
        *lines,
        "",
        "The host of that run changes its speed: FLA's whole call takes 0.9 to 4.7 ms. 64 tokens"
        " and 4 heads cost 62 µs while torch's `zero_` of eight numbers cost 8"
        " ([file](../benchmarks/results/kda_host_h200.json)).",
    ]


def _growth() -> list[str]:
    report = _load("kda_prefill_growth_h200.json")
    rows = (
        [
            str(row["H"]),
            str(row["sequences"]),
            f"{row['tokens']:,}",
            f"{row['longest']:,}",
            _us(row["ours_gpu_ms"]),
            f"{row['ours_gpu_ms'] * 1e6 / row['tokens']:.1f}",
        ]
        for row in report["rows"]
    )
    titles = ["heads", "sequences", "tokens", "longest", "µs", "ns a token"]
    return [
        *_section("Growth of prefill", report, "kda_prefill_growth_h200.json"),
        "",
        *_table(titles, rows),
    ]


def _decode() -> list[str]:
    report = _load("kda_decode_h200.json")
    ratios = [row["best_peer_gpu_ms"] / row["ours_gpu_ms"] for row in report["rows"]]
    rows = (
        [
            str(row["H"]),
            str(row["batch"]),
            _us(row["ours_gpu_ms"]),
            f"{_us(row['best_peer_gpu_ms'])} ({row['best_peer']})",
            f"{ratio:.2f}",
            _us(row["floor_ms"]),
            _us(row["ours_host_ms"]),
        ]
        for row, ratio in zip(report["rows"], ratios, strict=True)
    )
    return [
        *_section("KDA decode step", report, "kda_decode_h200.json"),
        "",
        "From the packed projections to the gated norm, µs; peers' launches counted together. Over"
        f" the best peer: geometric mean {_mean(ratios):.2f}×, least {min(ratios):.2f}×. *floor*:"
        " the fp32 state read and written once. What was tried and what memory forbids:"
        " [performance-log.md](performance-log.md#decode-step-in-one-launch).",
        "",
        *_table(["heads", "sequences", "ours", "best peer", "×", "floor", "host"], rows),
    ]


def _compressor() -> list[str]:
    report = _load("dsv4_compressor_h200.json")
    rows = [row for row in report["rows"] if row["vllm_gpu_ms"] is not None]
    ratios = [row["vllm_gpu_ms"] / row["ours_gpu_ms"] for row in rows]
    cells = (
        [
            row["phase"],
            f"{row['part']}, C{row['ratio']}",
            f"{row['n']:,}",
            row["ends"],
            _us(row["ours_gpu_ms"]),
            _us(row["vllm_gpu_ms"]),
            f"{ratio:.2f}",
            _us(row["ours_host_ms"]),
        ]
        for row, ratio in zip(rows, ratios, strict=True)
    )
    titles = ["phase", "part", "tokens", "window ends", "ours", "vLLM", "×", "host"]
    return [
        *_section("DeepSeek-V4's compressor", report, "dsv4_compressor_h200.json"),
        "",
        f"µs; vLLM 0.26's Triton kernels. Geometric mean {_mean(ratios):.2f}×, least"
        f" {min(ratios):.2f}×. An empty launch: {report['empty_launch_ms'] * 1e3:.2f} µs.",
        "",
        *_table(titles, cells),
        *_in_place(report["rows"]),
        *_alone(report["rows"]),
    ]


def _in_place(rows: list[dict[str, Any]]) -> list[str]:
    cells = (
        [f"{row['n']:,}"]
        + [_us(row[f"{who}_gpu_ms"]) for who in ("ours", "seed_style", "two_launch")]
        + [_us(row["ours_host_ms"])]
        for row in rows
        if row["part"] == "indexer_rows"
    )
    titles = ["rows", "ours", "one launch through memory", "two launches", "host"]
    return ["", "Norm, RoPE and rotation of pooled rows in place, µs:", "", *_table(titles, cells)]


def _alone(rows: list[dict[str, Any]]) -> list[str]:
    """Prefill on sglang's ring and rotated queries, which vLLM does not have, and fp4 queries."""
    shown = [row for row in rows if row["vllm_gpu_ms"] is None and row["part"] != "indexer_rows"]
    cells = (
        [
            row["phase"],
            f"{row['part']}, C{row['ratio']}"
            + (", rotated" if row.get("rotate") else "")
            + (f", {row['layout']}" if "layout" in row else ""),
            f"{row['n']:,}",
            _us(row["ours_gpu_ms"]),
            _us(row["floor_ms"]),
            _us(row["ours_host_ms"]),
        ]
        for row in shown
    )
    titles = ["phase", "part", "tokens", "ours", "bytes at copy bandwidth", "host"]
    return [
        "",
        "Without a peer, µs (vLLM rotates no queries and has no ring; its fp4 queries do not build"
        " for sm_90):",
        "",
        *_table(titles, cells),
    ]


def _engine() -> list[str]:
    stock, ours = (_load(f"vllm_kimi48b_{who}.json") for who in ("stock", "kda"))
    where = ours["environment"]
    links = ", ".join(
        f"[{text}](../benchmarks/results/vllm_kimi48b_{name}.json)"
        for text, name in (("stock", "stock"), ("with the flag", "kda"), ("decode", "decode"))
    )
    calls = (
        [
            f"{a['n']} × {a['length']:,}",
            f"{a['ms']:.1f}",
            f"{b['ms']:.1f}",
            f"{a['ms'] / b['ms']:.2f}",
        ]
        for a, b in zip(stock["shapes"], ours["shapes"], strict=True)
    )
    steps = (
        [
            str(row["batch"]),
            f"{row['stock_ms']:.2f}",
            f"{row['ours_ms']:.2f}",
            f"{row['stock_ms'] / row['ours_ms']:.2f}",
            f"{row['stock_kda_us']:,.0f} in {row['stock_kda_launches']:.0f}",
            f"{row['ours_kda_us']:,.0f} in {row['ours_kda_launches']:.0f}",
        ]
        for row in _load("vllm_kimi48b_decode.json")["rows"]
    )
    return [
        "",
        "## Kimi-Linear-48B in vLLM",
        "",
        f"vLLM {where['vllm']}, {where['layers']} layers with drawn weights, one {where['gpu']},"
        f" {where['date']} ({links}). A prompt in, one token out, eager, ms:",
        "",
        *_table(["prompts", "stock", "with the flag", "×"], calls),
        "",
        "A decode step in CUDA graphs, ms, and its KDA layers between their projections, µs in"
        " launches:",
        "",
        *_table(["sequences", "stock", "with the flag", "×", "KDA, stock", "KDA, flag"], steps),
    ]


def _section(title: str, report: dict[str, Any], name: str) -> list[str]:
    source = f"[{name}](../benchmarks/results/{name})"
    versions = f"torch {report['torch']}, Triton {report['triton']}"
    return ["", f"## {title}", "", f"{report['gpu']}, {versions}, {report['date']}: {source}."]


def _table(titles: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [titles, ["---:" if title != titles[0] else "---" for title in titles], *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _shape(lengths: list[int]) -> str:
    if len(set(lengths)) > 1:
        return f"{len(lengths)} ragged, {sum(lengths):,}"
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{len(lengths)} × {lengths[0]:,}"


def _best(row: dict[str, Any], peers: tuple[str, ...]) -> float:
    return min(float(row[f"{peer}_gpu_ms"]) for peer in peers)


def _us(ms: float) -> str:
    return f"{ms * 1e3:.1f}" if ms < 0.1 else f"{ms * 1e3:,.0f}"


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _load(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return report


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
