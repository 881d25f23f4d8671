"""Whole models: engines in their default mode, under load, and a small model's answers."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import is_measured, load, section, table

# pairs of upstream and flag by the serve benchmarks, shown where they have been measured, and what
# a heading adds to engine and mode
DEFAULT_MODES = {
    "vllm033_kimi48b.json": "",
    "vllm033_kimi48b_without_checkpoints.json": ", prompts cut at their last cache block",
    "sglang_kimi48b.json": "",
    "vllm026_kimi48b.json": "",
}


NEWEST = "vllm033_kimi48b.json"


_RECALL = ("recall_vllm033.json", "recall_vllm033_tp2.json", "recall_vllm033_bounded.json",
           "recall_vllm.json", "recall_sglang.json", "recall_sglang_modes.json",
           "recall_sglang_tp2.json", "recall_sglang_mla.json")  # fmt: skip


_LOADS = {
    "load_vllm033.json": "",
    "load_vllm033_small_cache.json": ", with a cache too small for its requests",
    "load_sglang.json": "",
}


_WITHOUT_CUTE = [
    "",
    "CuTe DSL was not installed on either side. vLLM's router and other narrow matrix products of"
    " few tokens then run in cuBLAS.",
]


def both(report: dict[str, Any], kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a pair that both sides have."""
    return [
        row
        for row in report["rows"]
        if "upstream_ms" in row and "flag_ms" in row and kind in (None, row["kind"])
    ]


def default_modes() -> list[str]:
    """Engines in their default mode: every row of every pair."""
    lines = []
    for name, form in DEFAULT_MODES.items():
        if not is_measured(name):
            continue
        report = load(name)
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
            for row in both(report)
        )
        lines += [
            *section(f"Kimi-Linear-48B in {named}, default mode{form}", report, name),
            "",
            "The model's configuration with random weights; each side is a process with empty"
            " compile caches. Times in ms. A row prompts × tokens is a call that returns one token"
            " for each prompt. The time of a decode step is the time by which the engine advances."
            " All requests of the mixed load arrive at once.",
            "",
            *table(["", "upstream", "with the flag", "×"], cells),
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
            "The table compares the time of the GPU's kernels, from a profile, with the time of a"
            " call without a profile, in ms. In the rest of the time the GPU waits for the host."
            " The engine cuts a prompt where it keeps a state for its prefix cache, and each step"
            " reads the experts that it needs again.",
            "",
            *table(titles, cells),
        ]
    distinct = flag.get("router", {}).get("distinct", {})
    means = [f"{sum(n) / len(n):.0f} by {what}" for what, n in distinct.items()]
    if means:
        lines += ["", f"Distinct experts chosen per layer, on average: {', '.join(means)}."]
    return lines


def bounded_gates() -> list[str]:
    """Kimi-K3's configuration cut to four layers: calls, and the GPU's time in KDA."""
    name = "vllm033_bounded_gate.json"
    report = load(name)
    cells = (
        [
            row["what"],
            f"{row['upstream_ms']:,.1f}",
            f"{row['flag_ms']:,.1f}",
            f"{row['upstream_ms'] / row['flag_ms']:.2f}",
        ]
        for row in report["rows"]
        if row["model"] == "k3"
    )
    agreed = [row for row in report["verdicts"] if row["explained"]]
    engine = report["engine"].replace("vllm", "vLLM")
    return [
        *section(f"Kimi-K3's layers in {engine}, default mode", report, name),
        "",
        "Four layers with the widths of Kimi-K3, three of them KDA with a bounded gate, with random"
        " weights. Times in ms. *KDA layers* and *KDA cores* are times of the GPU's kernels in a"
        " profile, with the projections of a layer and without them. Upstream's core is FlashKDA.",
        "",
        *table(["", "upstream", "with the flag", "×"], cells),
        "",
        "Small models of Kimi-K3's and GLM-5.3-Flash's classes, with random weights, gave other"
        f" greedy tokens than upstream for {sum(row['partings'] for row in report['verdicts'])} of"
        f" {sum(row['prompts'] for row in report['verdicts'])} prompts. Rounding explains the"
        f" differences in {len(agreed)} of {len(report['verdicts'])} comparisons.",
    ]


def load_test() -> list[str]:
    """A server under load for minutes."""
    lines = []
    for name, form in _LOADS.items():
        if not is_measured(name):
            continue
        report = load(name)
        where = report["environment"]
        engine = next(key for key in ("vllm", "sglang") if key in where)
        kinds = ([kind, f"{row['requests']:,}", f"{row['wrong']:,}"]
                 for kind, row in report["requests"].items())  # fmt: skip
        found = report["verdict"]
        grown = (f"{found[f'memory, {x}_mib']['growth']:.2%}" for x in ("gpu", "host"))
        preempted = found["preemption and prefix hits"]["preemptions"]
        lines += [
            *section(
                f"{engine.replace('vllm', 'vLLM')} {where[engine]} under load{form}",
                {**report, **where},
                name,
            ),
            "",
            f"A server of the small checkpoint with the flag had {report['minutes']:g} minutes of"
            f" mixed traffic, with {preempted:,.0f} preemptions. From the first minute to the last"
            f" the memory of GPU and host grew by {', '.join(grown)}.",
            "",
            *table(["requests", "asked", "wrong"], kinds),
        ]
    return lines


def eager_engine() -> list[str]:
    upstream, ours = (load(f"vllm_kimi48b_{who}.json") for who in ("upstream", "kda"))
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
        for row in load("vllm_kimi48b_decode.json")["rows"]
    )
    return [
        "",
        "## Kimi-Linear-48B in vLLM",
        "",
        f"vLLM {where['vllm']}, {where['layers']} layers with random weights, one {where['gpu']},"
        f" {where['date']} ({links}). Calls in eager mode that return one token, in ms:",
        "",
        *table(["prompts", "upstream", "with the flag", "×"], calls),
        "",
        "A decode step in CUDA graphs in ms, and the time of its KDA layers without projections,"
        " in µs and the number of launches:",
        "",
        *table(titles, steps),
    ]


_SERVERS = {
    "stock": "upstream",
    "canary": "with the flag, states transposed on purpose",
    "canary of MLA decode": "with the flag, MLA decodes set to zero on purpose",
}


def recall() -> list[str]:
    """The small checkpoint's answers: engines with and without this backend."""
    cells = []
    for name in (name for name in _RECALL if is_measured(name)):
        report = load(name)
        engine = next(key for key in ("vllm", "sglang") if key in report["environment"])
        link = f"[{engine} {report['environment'][engine]}](../benchmarks/results/{name})"
        for server, run in report["servers"].items():
            right = min(round["right"] for round in run["rounds"])
            how = _SERVERS.get(server, server.replace("flag", "with the flag"))
            if report.get("checkpoint") == "checkpoint_bounded":
                how += ", bounded gate"
            cells.append([link, how, f"{right} of {report['items']}", report["date"]])
    for name in ("eval_recall_transformers_upstream.json", "eval_recall_transformers.json"):
        record = load(name)
        link = f"[transformers {record['engine_version']}](../benchmarks/results/{name})"
        right = sum(question["right"]["exact"] for question in record["questions"])
        how = "upstream" if record["backend"] in ("stock", "upstream") else "with the backend"
        cells.append([link, how, f"{right} of {len(record['questions'])}", record["date"]])
    return [
        "",
        "## Answers of a small model",
        "",
        "The checkpoint repeats answers from its context ([evaluating.md](evaluating.md)). The"
        " table has the number of right answers, in the worst of all rounds.",
        "",
        *table(["engine", "served", "right", "date"], cells),
    ]
