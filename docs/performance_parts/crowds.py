"""Servers that are full, and answers whose bits do not depend on other requests."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import by_size, load, section, table

FULL = {
    "crowd_vllm.json": "A full server: Kimi-Linear-48B in vLLM, float32 states",
    "crowd_vllm_float16.json": "A full server: Kimi-Linear-48B in vLLM, float16 states",
    "crowd_sglang_float32.json": "A full server: Kimi-Linear-48B in sglang, float32 states",
    "crowd_sglang.json": "A full server: Kimi-Linear-48B in sglang, by the format of states",
    "crowd_sglang_drafts.json": "A full server: Kimi-Linear-48B in sglang, with drafts",
}
_SLOTS = {"sglang": "slots of states", "vllm": "blocks"}
SAME_BITS = (
    "same_bits_vllm033.json",
    "same_bits_vllm033_two_gpus.json",
    "same_bits_sglang.json",
    "same_bits_sglang_two_gpus.json",
)


def full_servers() -> list[str]:
    """Requests that run at a time and tokens per second, by the format of states."""
    return [line for name, title in FULL.items() for line in _full(name, title)]


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


def _full(name: str, title: str) -> list[str]:
    report = load(name)
    slots = _SLOTS[report["engine"].split()[0]]
    cells = []
    for row in report["rows"]:
        first = next(x for x in report["rows"] if x["what"] == row["what"])
        numbers = [f"{row[key]:,}" for key in ("running", "slots")]
        rates = [one["tokens_per_s"] for one in (row, first)]
        rate = "" if rates[0] is None else f"{rates[0]:,.0f}"
        gain = "" if None in rates else f"{rates[0] / rates[1]:.2f}"
        cells.append([row["what"], row["side"], row["state"], *numbers, rate, gain])
    ended = " and ".join(side.replace(":", " with ") for side in report["failed"])
    more = f" {ended} did not end in the benchmark's time." if ended else ""
    if "drafts" in report:
        more += (
            f" {report['drafts']} tokens are looked up for each step, of which random prompts"
            " accept none: a step verifies so many for one that is written. sglang, which runs at"
            " most 48 requests at a time with drafts unless it is told to, may run 128 here."
        )
    turns = "one after the other"
    if "at_once" in report:
        turns = "at the same time once all have loaded"
    return [
        *section(title, report, name),
        "",
        "Random weights on one GPU, in the engine's default mode but for the format of KDA's"
        f" states. All sides load at the same time on GPUs of one host, and run {turns}."
        f" × is the rate over that of the first row of the same load.{more}",
        "",
        *table(["load", "side", "states", "running at a time", slots, "tokens/s", "×"], cells),
    ]


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
