"""Servers that are full, and answers whose bits do not depend on other requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.performance_parts.page import by_size, load, table

FULL = (
    "crowd_vllm.json",
    "crowd_vllm_float16.json",
    "crowd_vllm_bfloat16.json",
    "crowd_sglang.json",
    "crowd_sglang_drafts.json",
)
FORMATS = ("float32", "float16", "bfloat16")
SAME_BITS = (
    "same_bits_vllm033.json",
    "same_bits_vllm033_two_gpus.json",
    "same_bits_sglang.json",
    "same_bits_sglang_two_gpus.json",
)


def full_servers() -> list[str]:
    """Requests that run at a time and tokens per second, by the format of states."""
    reports = {name: load(name) for name in FULL}
    machines = {f"{r['gpu']}, torch {r['torch']}, Triton {r['triton']}" for r in reports.values()}
    drafts = next(report["drafts"] for report in reports.values() if "drafts" in report)
    return [
        "",
        "## Full servers: Kimi-Linear-48B on one GPU",
        "",
        f"{' and '.join(sorted(machines))}."
        " Random weights, in the engine's default mode but for the format of KDA's states."
        " The sides of a file load at the same time on GPUs of one host, and then run at the same"
        " time, or one after the other. *Room* counts blocks of vLLM's cache, or slots of sglang's"
        " states. × is the rate over that of the same load's first row in a file. With drafts"
        f" {drafts} tokens are looked up for each step. Random prompts accept none of them, so a"
        " step verifies all and writes one. There sglang may run 128 requests at a time; its"
        " default is at most 48.",
        "",
        *table(
            ["engine", "load", "side", "states", "running at a time", "room", "tokens/s", "×"],
            [row for name, report in reports.items() for row in _full(name, report)],
        ),
    ]


def full_server_ratios() -> tuple[list[float], list[float], list[float]]:
    """The rate with the flag over the engine's own, of each load: with states in the same format,
    the same with drafts, and with states in 16 bits over the engine with its default, of 32."""
    alike, drafts, smaller = [], [], []
    for name in FULL:
        report = load(name)
        rows = [row for row in report["rows"] if row["tokens_per_s"] is not None]
        engine = [row for row in rows if row["side"] == "upstream"]
        for row in (row for row in rows if row["side"] == "flag"):
            for other in (other for other in engine if other["what"] == row["what"]):
                ratio = row["tokens_per_s"] / other["tokens_per_s"]
                if row["state"] == other["state"]:
                    (drafts if "drafts" in report else alike).append(ratio)
                elif other["state"] == "float32":
                    smaller.append(ratio)
    return alike, drafts, smaller


def _full(name: str, report: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of a file."""
    link = f"[{report['engine']}, {report['date']}](../../benchmarks/results/{name})"
    how = ", with drafts" if "drafts" in report else ""
    how += "" if "at_once" in report else ", one after the other"
    rows = [row for row in report["rows"] if row["tokens_per_s"] is not None]
    rows.sort(key=lambda row: FORMATS.index(row["state"]))
    for row in rows:
        first = next(other for other in rows if other["what"] == row["what"])
        numbers = [f"{row[key]:,}" for key in ("running", "slots")]
        rate, gain = row["tokens_per_s"], row["tokens_per_s"] / first["tokens_per_s"]
        what = [link, row["what"] + how, row["side"], row["state"]]
        yield [*what, *numbers, f"{rate:,.0f}", f"{gain:.2f}"]


def same_bits() -> list[str]:
    """Requests of servers whose bits were compared with those that they have alone."""
    cells: dict[tuple[str], dict[str, str]] = {}
    files = []
    for name in SAME_BITS:
        report = load(name)
        ranks = f"{report['ranks']} GPU" + "s" * (report["ranks"] > 1)
        column = f"{_engine_of(report)}, {ranks}"
        files.append(f"[{column}](../../benchmarks/results/{name})")
        for row in report["rows"]:
            cells.setdefault((row["what"],), {})[column] = f"{row['equal']} of {row['requests']}"
    dates = {load(name)["date"] for name in SAME_BITS}
    return [
        "",
        "## The same bits in servers",
        "",
        "The small checkpoint's questions under `VLLM_BATCH_INVARIANT=1` and"
        " `--enable-deterministic-inference`, with the flag. A request counts as equal if its text"
        " and the log-probabilities of the five likeliest tokens of each step are, to the last bit,"
        " what they are when it is asked alone. [reliability.md](../reliability.md) says what is"
        f" promised. {', '.join(files)}; {' and '.join(sorted(dates))}.",
        "",
        *by_size(["asked"], cells),
    ]


def _engine_of(report: dict[str, Any]) -> str:
    versions = report["environment"]
    engine = "vllm" if "vllm" in versions else "sglang"
    return f"{engine} {versions[engine]}"
