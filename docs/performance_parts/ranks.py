"""Whole models: engines over several GPUs."""

from __future__ import annotations

from typing import Any

from benchmarks.engines import serve_work as work
from docs.performance_parts.engines import (
    DEFAULT_MODES,
    both,
    decode_note,
    engine_of,
    full_attention,
)
from docs.performance_parts.page import load, section, table

# pairs over several GPUs, and upstream with as many prefill graphs
SEVERAL_RANKS = (
    "vllm033_kimi48b_tp4.json",
    "sglang_kimi48b_tp4_fa3.json",
    "sglang_kimi48b_tp4.json",
    "vllm033_kimi48b_tp2.json",
    "sglang_kimi48b_tp2.json",
)

# sglang on an attention backend that is not its default
_OTHER_MODES = ("sglang_kimi48b_tp4.json", "sglang_kimi48b_tp2.json")

# the pairs of README's table
HEADLINES = (*(name for name in SEVERAL_RANKS if name not in _OTHER_MODES), *DEFAULT_MODES)

# later runs of the decode steps alone, with a profile of one, by the pair that they belong to
_DECODES = {"vllm033_kimi48b_tp4.json": "vllm033_kimi48b_tp4_decode.json"}


def several_ranks() -> list[str]:
    """Engines over several GPUs: every row of every pair, and how busy the GPUs are."""
    lines = []
    for name in SEVERAL_RANKS:
        report = load(name)
        ranks = report["sides"]["flag"]["environment"]["ranks"]
        rows = [row for row in both(report) if row["kind"] != "load"]
        others = {"upstream_ms": "upstream"}
        same_graphs = ""
        if "upstream_graphs" in report["sides"]:
            others["upstream_graphs_ms"] = "upstream, same graphs"
            same_graphs = (
                " *Same graphs* is upstream with the sizes of prefill graphs that the flag chooses."
            )
        cells = (
            [
                row["what"],
                *(f"{row[key]:,.1f}" for key in (*others, "flag_ms")),
                *(f"{row[key] / row['flag_ms']:.2f}" for key in others),
            ]
            for row in rows
        )
        ratios = ["×", "× same graphs"][: len(others)]
        title = f"Kimi-Linear-48B in {engine_of(report)}{full_attention(report)} on {ranks} GPUs"
        lines += [
            *section(title, report, name),
            "",
            f"The model's configuration with random weights, tensor parallelism over {ranks} GPUs"
            f" of one host; {_where(report)}. Times in ms. A row prompts × tokens is a call that"
            f" returns one token for each prompt.{same_graphs}",
            "",
            *table(["", *others.values(), "with the flag", *ratios], cells),
            "",
            *(line for note in decode_note(report) for line in (note, "")),
            *_mixed(report),
            *_busy(report),
            *_decodes_again(name),
        ]
    return lines


def _mixed(report: dict[str, Any]) -> list[str]:
    """Say what the mixed load's steps take at the times of their rows, and how far decode rows of
    two sides with the same graphs are apart."""
    ms = {row["what"]: row for row in both(report)}
    steps = work.MIXED_REQUESTS * sum(work.MIXED_PROMPT) / 2 / work.BUDGET
    after = work.MIXED_NEW[1] - steps
    together = next(shape for shape in work.DECODE_SHORT if shape[0] == work.MIXED_REQUESTS)
    whole, decode = ms[work.call_name(1, work.BUDGET)], ms[work.decode_name(*together)]
    (load_row,) = both(report, "mixed")

    def of(key: str) -> str:
        parts = steps * whole[key], after * decode[key]
        return f"{parts[0]:,.0f} + {parts[1]:,.0f} ms ({load_row[key]:,.0f} measured)"

    lines = [
        f"The prompts of the mixed load fill {steps:.0f} steps of {work.BUDGET:,} tokens, and its"
        f" longest answer takes {after:.0f} decode steps more, of at most {work.MIXED_REQUESTS}"
        f" requests. By the rows of such steps the two would take {of('flag_ms')} with the flag"
        f" and {of('upstream_ms')} upstream.",
        "",
    ]
    decodes = [row for row in both(report, "decode") if "upstream_graphs_ms" in row]
    if decodes:
        apart = {abs(row["upstream_graphs_ms"] / row["upstream_ms"] - 1): row for row in decodes}
        lines += [
            "Both of upstream's sides decode with the same graphs, so their decode rows differ by"
            f" noise alone: by up to {max(apart):.0%} ({apart[max(apart)]['what']}).",
            "",
        ]
    return lines


def _where(report: dict[str, Any]) -> str:
    if report.get("beside"):
        return (
            "all sides are loaded beside each other with small caches and timed one after the other"
        )
    return "each side has GPUs of its own"


def _busy(report: dict[str, Any]) -> list[str]:
    """How busy each rank's GPU is in a call, and what the other time goes to."""
    cells = _of_ranks(report["sides"]["flag"].get("profiles", []))
    if not cells:
        return []
    return [
        "A profile of the side with the flag, in ms, from the least to the most of all ranks."
        " Waiting for the slowest rank in an all-reduce counts as busy. *KDA* is this package's"
        " kernels among the step's twelve longest.",
        "",
        *table(["call", *_OF_RANKS], cells),
        "",
    ]


def _decodes_again(name: str) -> list[str]:
    """The decode steps of a later run of both sides, and a profile of the largest."""
    if name not in _DECODES:
        return []
    own = _DECODES[name]
    report = load(own)
    times = (
        [
            row["what"],
            *(f"{row[f'{side}_ms']:,.1f}" for side in ("upstream", "flag")),
            f"{row['upstream_ms'] / row['flag_ms']:.2f}",
        ]
        for row in both(report, "decode")
    )
    profiles = {
        title: [p for p in report["sides"][side]["profiles"] if p["what"].startswith("decode")]
        for title, side in (("upstream", "upstream"), ("with the flag", "flag"))
    }
    (what,) = {profile["what"] for found in profiles.values() for profile in found}
    return [
        f"The decode steps again, of these two sides alone ({report['date']},"
        f" [{own}](../../benchmarks/results/{own})):",
        "",
        *table(["", "upstream", "with the flag", "×"], times),
        "",
        f"A profile of one of them ({what}; the profiler makes a step longer). GPUs wait for each"
        " other in all-reduces, and for the engine between two steps.",
        "",
        *table(
            ["side", *_OF_RANKS],
            [[title, *row[1:]] for title, found in profiles.items() for row in _of_ranks(found)],
        ),
        "",
    ]


_OF_RANKS = ("from first to last kernel", "ranks busy", "experts", "all-reduces", "KDA")


def _of_ranks(profiles: list[dict[str, Any]]) -> list[list[str]]:
    """A row of each call: its name and, in ms, what `_OF_RANKS` names."""
    cells = []
    for what in dict.fromkeys(profile["what"] for profile in profiles):
        ranks = [profile for profile in profiles if profile["what"] == what]
        experts = ranks[0]["kernels"].get("fused_moe_kernel", [0.0])[0]
        kda = sum(ms for kernel, (ms, _) in ranks[0]["kernels"].items() if kernel in _OF_KDA)
        reduced = [
            sum(ms for kernel, (ms, _) in rank["kernels"].items() if _is_all_reduce(kernel))
            for rank in ranks
        ]
        cells.append(
            [
                what,
                f"{min(rank['span_ms'] for rank in ranks):.1f}",
                f"{min(r['busy'] for r in ranks):.0%} to {max(r['busy'] for r in ranks):.0%}",
                f"{experts:.1f}",
                f"{min(reduced):.1f} to {max(reduced):.1f}",
                f"{kda:.1f}",
            ]
        )
    return cells


_SCANS = ("scan", "scan_split", "segment_ends", "merge_segments")
_DECODE_STEPS = ("decode_step", "fused_recurrent_kda_packed_decode_kernel")  # ours, upstream's
_OF_KDA = ("short_conv_kernel", "intra_chunk", *_SCANS, *_DECODE_STEPS)


def _is_all_reduce(kernel: str) -> bool:
    return any(part in kernel for part in ("AllReduce", "all_reduce", "cross_device_reduce"))
