"""Write docs/performance.md, and README's table of speed, from the files under benchmarks/results/.

    python docs/performance.py

A test fails where the file is not what this writes.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from docs import performance_sparse
from kda_backend.launch_params import TABLES
from kda_backend.spec import CHUNK

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
HEADLINE = ("<!-- headline: written by docs/performance.py -->", "<!-- end of headline -->")
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """# Performance

Written by `docs/performance.py` from the files under `benchmarks/results/`; CI fails where it is
stale. GPU times are medians of CUDA-graph replays with the peers in the same run, after a gate on
accuracy. *host* is what one Python call costs the host. What was tried and what failed is in
[studies](studies/README.md).
"""

BOUNDS = """
## What bounds each operator

| operator | bound by |
|---|---|
| prefill, few heads | the chain of chunks: each step of the scan waits for the one before |
| prefill, many heads | bytes; the scan runs beside the intra-chunk stage and the longer counts |
| prefill, many short sequences | both stages, and the ends, where most SMs wait |
| decode step | the launch for few sequences times heads, then the bytes of the state |
| compressor, decode | the launch for few requests, then the bytes of the pooled windows |
| an engine's call | at short prompts the host; at long ones the experts' matrix products |

The tables above have each time beside its bytes at the copy bandwidth, or beside an empty launch.
Profiles are in [studies](studies/README.md).
"""

# pairs of upstream and flag by the serve benchmarks, shown where they have been measured, and what
# a heading adds to engine and mode
DEFAULT_MODES = {
    "vllm033_kimi48b.json": "",
    "vllm033_kimi48b_without_checkpoints.json": ", prompts split at their last cache block",
    "sglang_kimi48b.json": "",
    "vllm026_kimi48b.json": "",
}
_NEWEST = "vllm033_kimi48b.json"
_RECALL = ("recall_vllm033.json", "recall_vllm033_tp2.json", "recall_vllm033_bounded.json",
           "recall_vllm.json", "recall_sglang.json")  # fmt: skip
_LOADS = ("load_vllm033.json", "load_sglang.json")

_WITHOUT_CUTE = [
    "",
    "CuTe DSL was not installed, on either side: vLLM's router product of few tokens and its skinny"
    " products then run in cuBLAS.",
]

_IMPLEMENTATIONS = {"ours": "this backend", "fla": "FLA 0.6.0", "flashkda": "FlashKDA"}


def render() -> str:
    """The page's text."""
    lines = [*_prefill(), *_accuracy(), *_growth(), *_short(), *_segments(), *_decode()]
    lines += [*_compressor(), *_mla(), *_mla_in_engine(), *_sparse()]
    lines += [*_default_modes(), *_engine(), *_recall(), *_load_test()]
    return HEAD + "\n".join(lines) + "\n" + BOUNDS


def headline() -> str:
    """README with its table of speed: how much longer the best peer takes, in words and figures."""
    text = README.read_text(encoding="utf-8")
    start, end = (text.index(mark) for mark in HEADLINE)
    return text[: start + len(HEADLINE[0])] + "\n" + _headline() + text[end:]


def _headline() -> str:
    prefill, decode = _load("kda_prefill_h200.json"), _load("kda_decode_h200.json")
    unbounded = [row for row in prefill["rows"] if row["gate"] == "unbounded"]
    bounded = [row for row in prefill["rows"] if row["gate"] == "bounded"]
    compressor = _load("dsv4_compressor_cutedsl_h200.json")["rows"]
    rows = [
        (
            f"KDA prefill, gate without bound, {len(unbounded)} shapes",
            "FLA",
            [_best(row, ("fla",)) / row["ours_gpu_ms"] for row in unbounded],
        ),
        (
            f"KDA prefill, bounded gate, {len(bounded)} shapes",
            "FLA, FlashKDA",
            [_best(row, ("fla", "flashkda")) / row["ours_gpu_ms"] for row in bounded],
        ),
        (
            f"KDA decode step, {len(decode['rows'])} sizes",
            "vLLM, sglang, FLA",
            [row["best_peer_gpu_ms"] / row["ours_gpu_ms"] for row in decode["rows"]],
        ),
        (
            f"DeepSeek-V4's compressor, {len(compressor)} sizes",
            "vLLM, Triton and CuTe DSL",
            [min(_compressor_peers(row)) / row["ours_gpu_ms"] for row in compressor],
        ),
        _headline_of_engine(),
    ]
    cells = [
        [what, peer, f"{_mean(x):.2f}×", f"{min(x):.2f}× to {max(x):.2f}×"]
        for what, peer, x in rows
    ]
    lines = _table(["operator", "time of the best of", "over ours, geometric mean", "range"], cells)
    engine = _load(_NEWEST)["date"] if (RESULTS / _NEWEST).exists() else prefill["date"]
    dates = sorted({prefill["date"], decode["date"], engine})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    gpu = f"One {prefill['gpu']}, bf16, each pair in one run, {days}."
    return "\n".join([gpu, "", *lines]) + "\n"


def _headline_of_engine() -> tuple[str, str, list[float]]:
    """The newest release in its default mode where that has been measured, else 0.26.0, eager."""
    what = "Kimi-Linear-48B's configuration in vLLM {}, a prompt in and a token out"
    if (RESULTS / _NEWEST).exists():
        report = _load(_NEWEST)
        ratios = [row["upstream_ms"] / row["flag_ms"] for row in _both(report, "call")]
        release = report["engine"].removeprefix("vllm ") + ", default mode"
    else:
        sides = (_load(f"vllm_kimi48b_{who}.json")["shapes"] for who in ("upstream", "kda"))
        ratios = [a["ms"] / b["ms"] for a, b in zip(*sides, strict=True)]
        release = "0.26.0, eager"
    return what.format(release), "vLLM without the flag", ratios


def _both(report: dict[str, Any], kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a pair that both sides have."""
    return [
        row
        for row in report["rows"]
        if "upstream_ms" in row and "flag_ms" in row and kind in (None, row["kind"])
    ]


def _accuracy() -> list[str]:
    """Every implementation in every gate regime: the one accuracy table of the documentation."""
    report = _load("kda_prefill_h200.json")
    found = report["accuracy"]
    regimes = list(next(iter(found.values())))
    cells = []
    for name, errors in found.items():
        who, gate = name.split()
        pairs = [errors[regime] for regime in regimes]
        shown = [f"{1e3 * output:.1f} / {1e3 * state:.1f}" for output, state in pairs]
        cells.append([f"{_IMPLEMENTATIONS[who]}, {gate} gate", *shown])
    return [
        *_section("Accuracy of KDA prefill", report, "kda_prefill_h200.json"),
        "",
        "Relative L2 error of output / final state against float64, in thousandths, by gate regime"
        " ([families/kda.md](families/kda.md) describes them); bf16 inputs.",
        "",
        *_table(["", *regimes], cells),
    ]


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
    host = sorted(row["ours_host_ms"] for row in report["rows"])
    calls = sorted(row["fla_call_ms"] for row in report["rows"] if row["fla_call_ms"] is not None)
    share = [row["floor_ms"] / row["ours_gpu_ms"] for row in report["rows"]]
    return [
        *lines,
        "",
        f"Host time of a call: {_us(host[0])} to {_us(host[-1])} µs, median"
        f" {_us(median(host))}; FLA's whole call takes {calls[0]:.1f} to {calls[-1]:.1f} ms. All"
        " inputs read and all outputs written once, at the copy bandwidth of the run"
        f" ({report['copy_gbs']:,.0f} GB/s), would take {min(share):.0%} to {max(share):.0%} of"
        " our time.",
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
    titles = ["heads", "sequences", "tokens", "longest", "µs", "ns per token"]
    return [
        *_section("Growth of prefill", report, "kda_prefill_growth_h200.json"),
        "",
        *_table(titles, rows),
    ]


def _short() -> list[str]:
    """Short sequences: one launch beside the two stages."""
    name = "kda_prefill_short_h200.json"
    report, limit = _load(name), _prefill_row("two_stage_sm90").one_launch_max_tokens
    cells = (
        [
            str(row["H"]),
            _shape(row["seq_lens"]),
            f"{row['parts_us']['two_stage']:.1f}",
            f"{row['fused_us']:.1f}",
            f"{row['parts_us']['two_stage'] / row['fused_us']:.2f}",
            f"{row['floor_us']:.1f}",
        ]
        for row in report["rows"]
        if row["H"] in (32, 4)
    )
    return [
        *_section("KDA prefill of short sequences", report, name),
        "",
        "µs; the state of each sequence and head is read and written. *bytes*: all inputs and"
        f" outputs at the copy bandwidth ({report['copy_gbs']:,} GB/s). The path table takes the"
        f" one launch where the host knows that no sequence is longer than {limit} tokens.",
        "",
        *_table(["heads", "tokens", "two stages", "one launch", "×", "bytes"], cells),
    ]


def _prefill_row(path: str) -> Any:
    """The parameters of a path of KDA prefill in the H200's table."""
    rows = load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    return next(row.params for row in rows if row.name == path)


def _segments() -> list[str]:
    """Long sequences over few heads: segments beside the two stages."""
    name = "kda_prefill_segments_h200.json"
    report, row = _load(name), _prefill_row("segmented_sm90")
    length, shortest = CHUNK * row.segment_chunks, CHUNK * row.min_chunks
    kinds = sorted({int(n) for one in report["rows"] for n in one["segments_us"]})
    cells = (
        [
            str(one["H"]),
            _shape(one["seq_lens"]),
            f"{one['two_stage_us']:,.1f}",
            *(
                f"{one['segments_us'][str(n)]:,.1f}" if str(n) in one["segments_us"] else ""
                for n in kinds
            ),
        ]
        for one in report["rows"]
    )
    return [
        *_section("KDA prefill by segments", report, name),
        "",
        f"µs, by the tokens of a segment. The path table takes segments of {length:,} tokens from"
        f" {shortest:,} tokens on, for at most {row.max_tasks} value heads times long sequences,"
        " where `deterministic_prefix` is off ([families/kda.md](families/kda.md)).",
        "",
        *_table(["heads", "tokens", "two stages", *(f"{n:,}" for n in kinds)], cells),
    ]


def _decode() -> list[str]:
    report = _load("kda_decode_h200.json")
    ratios = [row["best_peer_gpu_ms"] / row["ours_gpu_ms"] for row in report["rows"]]
    share = [row["floor_ms"] / row["ours_gpu_ms"] for row in report["rows"]]
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
        " the fp32 state read and written once at the copy bandwidth"
        f" ({report['copy_gbs']:,.0f} GB/s), {min(share):.0%} to {max(share):.0%} of our time."
        " What memory forbids: [studies/kda-decode.md](studies/kda-decode.md).",
        "",
        *_table(["heads", "sequences", "ours", "best peer", "×", "floor", "host"], rows),
    ]


_COMPRESSOR_PEERS = {
    "vllm": "vLLM, Triton",
    "vllm_cutedsl": "vLLM, CuTe DSL",
    "sglang_jit": "sglang",
}


def _compressor_peers(row: dict[str, Any]) -> list[float]:
    """The engines' times of a row."""
    times = (row.get(f"{peer}_gpu_ms") for peer in _COMPRESSOR_PEERS)
    return [time for time in times if time is not None]


def _compressor() -> list[str]:
    name, upstream = "dsv4_compressor_h200.json", "dsv4_compressor_cutedsl_h200.json"
    report, beside = _load(name), _load(upstream)
    return [
        *_section("DeepSeek-V4's compressor", report, name),
        "",
        *_compressor_table(report, "vLLM 0.26's Triton kernels."),
        *_in_place(report["rows"]),
        *_alone(report["rows"]),
        *_section("DeepSeek-V4's compressor beside vLLM as it runs on CUDA", beside, upstream),
        "",
        *_compressor_table(
            beside,
            f"vLLM {beside['vllm']}: its step in Triton, and its own dispatch on CUDA, which takes"
            f" CuTe DSL ({beside['cutedsl']}) for the main compressor and Triton for the indexer.",
        ),
        "",
        "Not in the file: " + "; ".join(beside["left_out"]) + ".",
    ]


def _compressor_table(report: dict[str, Any], peers: str) -> list[str]:
    """Every row with a time of an engine, over the fastest of the row."""
    rows = [row for row in report["rows"] if _compressor_peers(row)]
    ratios = [min(_compressor_peers(row)) / row["ours_gpu_ms"] for row in rows]
    shown = [p for p in _COMPRESSOR_PEERS if any(row.get(f"{p}_gpu_ms") for row in rows)]
    cells = (
        [
            row["phase"],
            f"{row['part']}, C{row['ratio']}",
            f"{row['n']:,}",
            row["ends"],
            _us(row["ours_gpu_ms"]),
            *(_us(row[f"{p}_gpu_ms"]) if row.get(f"{p}_gpu_ms") else "" for p in shown),
            f"{ratio:.2f}",
            _us(row["ours_host_ms"]),
        ]
        for row, ratio in zip(rows, ratios, strict=True)
    )
    titles = ["phase", "part", "tokens", "window ends", "ours"]
    titles += [_COMPRESSOR_PEERS[peer] for peer in shown]
    return [
        f"µs. {peers} Over the fastest: geometric mean {_mean(ratios):.2f}×, least"
        f" {min(ratios):.2f}×. An empty launch: {report['empty_launch_ms'] * 1e3:.2f} µs.",
        "",
        *_table([*titles, "×", "host"], cells),
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
    shown = [r for r in rows if not _compressor_peers(r) and r["part"] != "indexer_rows"]
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


def _mla() -> list[str]:
    """MLA decode of the softmax family beside every peer of the run."""
    name = "mla_decode_h200.json"
    report = _load(name)
    peers = {"flashmla": "FlashMLA", "fa3": "FA3", "flashinfer": "FlashInfer"}
    peers |= {"vllm_triton": "vLLM's Triton"}
    lines = _section("MLA decode", report, name)
    for heads in sorted({row["heads"] for row in report["rows"]}):
        rows = [row for row in report["rows"] if row["heads"] == heads]
        ratios = [min(row[f"{p}_us"] for p in peers) / row["ours_gpu_us"] for row in rows]
        cells = (
            [
                row["case"],
                _us(row["ours_gpu_us"] / 1e3),
                *(_us(row[f"{peer}_us"] / 1e3) for peer in peers),
                f"{ratio:.2f}",
                _us(row["floor_us"] / 1e3),
            ]
            for row, ratio in zip(rows, ratios, strict=True)
        )
        lines += [
            "",
            f"{heads} heads, bf16, µs, without the plan, which is made once per step. Over the"
            f" fastest peer: geometric mean {_mean(ratios):.2f}×, least {min(ratios):.2f}×.",
            "",
            *_table(["case", "ours", *peers.values(), "×", "bytes"], cells),
        ]
    plans = (
        [requests, *(f"{times[who]:.1f}" for who in ("ours", "flashmla"))]
        for requests, times in report["plan_us"].items()
    )
    return [
        *lines,
        "",
        "The plan of a step, µs:",
        "",
        *_table(["requests", "ours", "FlashMLA"], plans),
    ]


def _mla_in_engine() -> list[str]:
    """A decode step of a whole model at long contexts."""
    name = "vllm_kimi48b_mla.json"
    report = _load(name)
    rows = sorted(report["rows"], key=lambda row: (row["context"], row["batch"]))
    cells = (
        [
            f"{row['batch']} × {row['context']:,}",
            f"{row['upstream_ms']:.2f}",
            f"{row['flag_ms']:.2f}",
            f"{row['upstream_ms'] / row['flag_ms']:.2f}",
        ]
        for row in rows
    )
    engine = report["engine"].replace("vllm", "vLLM")
    return [
        *_section(f"A decode step at long contexts in {engine}, default mode", report, name),
        "",
        "Kimi-Linear-48B's configuration with random weights, ms: the time by which the engine"
        " advances in a step. With the flag its KDA layers and, where the table says that it is"
        " ahead, its MLA layers are this package's. A step of one request waits for the host.",
        "",
        *_table(["requests × context", "upstream", "with the flag", "×"], cells),
    ]


def _sparse() -> list[str]:
    """Block-sparse attention of the softmax family, and what the order of tokens does."""
    report, orders = _load(performance_sparse.RESULT), _load(performance_sparse.ORDERS)
    return [
        *performance_sparse.attention(report, _section, _table),
        *performance_sparse.orders(orders, _table),
        "",
        performance_sparse.orders_in_words(orders),
    ]


def _default_modes() -> list[str]:
    """Engines in their default mode: every row of every pair."""
    lines = []
    for name, form in DEFAULT_MODES.items():
        if not (RESULTS / name).exists():
            continue
        report = _load(name)
        named = report["engine"].replace("vllm", "vLLM")
        engine = report["sides"]["flag"].get("engine", {})
        mode = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in engine.items())
        cells = (
            [
                row["what"],
                f"{row['upstream_ms']:,.1f}",
                f"{row['flag_ms']:,.1f}",
                f"{row['upstream_ms'] / row['flag_ms']:.2f}",
            ]
            for row in _both(report)
        )
        lines += [
            *_section(f"Kimi-Linear-48B in {named}, default mode{form}", report, name),
            "",
            "The configuration with random weights, each side a process with empty compile caches,"
            " ms. Prompts × tokens in, one token out; the time by which the engine advances in a"
            " decode step; requests of the mixed load arrive at once.",
            "",
            *_table(["", "upstream", "with the flag", "×"], cells),
            "",
            *([f"The engine: {mode}."] if mode else []),
            *(_WITHOUT_CUTE if engine.get("cute_dsl") is False else []),
            *_where_time_goes(report),
        ]
    return lines


def _where_time_goes(report: dict[str, Any]) -> list[str]:
    """How busy the GPU is in a call, into which steps a call is cut, and what the router chose."""
    upstream, flag = (report["sides"][side] for side in ("upstream", "flag"))
    cells = []
    for a, b in zip(upstream.get("profiles", []), flag.get("profiles", []), strict=False):
        row = next(row for row in report["rows"] if row["what"] == a["what"])
        steps = next(r for r in flag["rows"] if r["what"] == a["what"]).get("steps", [])
        shown = [
            f"{profile['gpu_ms']:.1f} of {row[f'{side}_ms']:.1f}"
            for side, profile in (("upstream", a), ("flag", b))
        ]
        cells.append([a["what"], " + ".join(f"{n:,}" for n in steps) or "not seen", *shown])
    lines = []
    if cells:
        titles = ["call", "tokens per step", "upstream", "with the flag"]
        lines = [
            "",
            "Time of the GPU's kernels, from a profile, of the time of a call without one, ms. The"
            " rest the GPU waits for the host. A prompt is cut where the engine keeps a state for"
            " its prefix cache, and each step reads the experts that it needs again.",
            "",
            *_table(titles, cells),
        ]
    distinct = flag.get("router", {}).get("distinct", {})
    means = [f"{sum(n) / len(n):.0f} by {what}" for what, n in distinct.items()]
    if means:
        lines += ["", f"Distinct experts per layer, mean: {', '.join(means)}."]
    return lines


def _load_test() -> list[str]:
    """A server under load for minutes."""
    lines = []
    for name in (name for name in _LOADS if (RESULTS / name).exists()):
        report = _load(name)
        where = report["environment"]
        engine = next(key for key in ("vllm", "sglang") if key in where)
        kinds = ([kind, f"{row['requests']:,}", f"{row['wrong']:,}"]
                 for kind, row in report["requests"].items())  # fmt: skip
        found = report["verdict"]
        grown = (f"{found[f'memory, {x}_mib']['growth']:.2%}" for x in ("gpu", "host"))
        preempted = found["preemption and prefix hits"]["preemptions"]
        lines += [
            *_section(f"{engine} {where[engine]} under load", {**report, **where}, name),
            "",
            f"The small checkpoint with the flag, {report['minutes']:g} minutes of mixed traffic,"
            f" {preempted:,.0f} preemptions; memory of GPU and host in the last minute against the"
            f" first: {', '.join(grown)}.",
            "",
            *_table(["requests", "asked", "wrong"], kinds),
        ]
    return lines


def _engine() -> list[str]:
    upstream, ours = (_load(f"vllm_kimi48b_{who}.json") for who in ("upstream", "kda"))
    where = ours["environment"]
    links = ", ".join(
        f"[{text}](../benchmarks/results/vllm_kimi48b_{name}.json)"
        for text, name in (("upstream", "upstream"), ("with the flag", "kda"), ("decode", "decode"))
    )
    calls = (
        [
            f"{a['n']} × {a['length']:,}",
            f"{a['ms']:.1f}",
            f"{b['ms']:.1f}",
            f"{a['ms'] / b['ms']:.2f}",
        ]
        for a, b in zip(upstream["shapes"], ours["shapes"], strict=True)
    )
    titles = ["sequences", "upstream", "with the flag", "×", "KDA, upstream", "KDA, flag"]
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
        f"vLLM {where['vllm']}, {where['layers']} layers with random weights, one {where['gpu']},"
        f" {where['date']} ({links}). A prompt in, one token out, eager, ms:",
        "",
        *_table(["prompts", "upstream", "with the flag", "×"], calls),
        "",
        "A decode step in CUDA graphs, ms, and its KDA layers between their projections, µs in"
        " launches:",
        "",
        *_table(titles, steps),
    ]


_SERVERS = {
    "stock": "upstream",
    "canary": "with the flag, states transposed on purpose",
    "canary of MLA decode": "with the flag, MLA decodes set to zero on purpose",
}


def _recall() -> list[str]:
    """The small checkpoint's answers: engines with and without this backend."""
    cells = []
    for name in (name for name in _RECALL if (RESULTS / name).exists()):
        report = _load(name)
        engine = next(key for key in ("vllm", "sglang") if key in report["environment"])
        link = f"[{engine} {report['environment'][engine]}](../benchmarks/results/{name})"
        for server, run in report["servers"].items():
            right = min(round["right"] for round in run["rounds"])
            how = _SERVERS.get(server, server.replace("flag", "with the flag"))
            if report.get("checkpoint") == "checkpoint_bounded":
                how += ", bounded gate"
            cells.append([link, how, f"{right} of {report['items']}", report["date"]])
    for name in ("eval_recall_transformers_upstream.json", "eval_recall_transformers.json"):
        record = _load(name)
        link = f"[transformers {record['engine_version']}](../benchmarks/results/{name})"
        right = sum(question["right"]["exact"] for question in record["questions"])
        how = "upstream" if record["backend"] in ("stock", "upstream") else "with the backend"
        cells.append([link, how, f"{right} of {len(record['questions'])}", record["date"]])
    return [
        "",
        "## Answers of a small model",
        "",
        "The checkpoint that repeats answers from its context ([evaluating.md](evaluating.md)):"
        " right answers, the fewest of all rounds.",
        "",
        *_table(["engine", "served", "right", "date"], cells),
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
    README.write_text(headline(), encoding="utf-8")
