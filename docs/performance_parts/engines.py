"""Whole models: engines in their default mode, and a small model's answers."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import load, section, table

# pairs of upstream and flag by the serve benchmarks
DEFAULT_MODES = ("vllm033_kimi48b.json", "sglang_kimi48b.json")

# later runs of the loads alone, by the pair whose memory they tell
_LOADS = {"vllm033_kimi48b.json": "vllm033_kimi48b_load.json"}

_RECALL = (
    "recall_vllm033.json",
    "recall_vllm033_segments.json",
    "recall_vllm033_two_gpus.json",
    "recall_vllm033_four_gpus.json",
    "recall_vllm033_ngram.json",
    "recall_vllm033_two_gpus_ngram.json",
    "recall_vllm033_bounded.json",
    "recall_vllm033_whole.json",
    "recall_vllm033_bf16.json",
    "recall_vllm033_bf16_drafts.json",
    "recall_vllm033_fp16.json",
    "recall_vllm033_fp16_drafts.json",
    "recall_sglang_upstream.json",
    "recall_sglang.json",
    "recall_sglang_fp16.json",
    "recall_sglang_drafts.json",
    "recall_sglang_fp16_drafts.json",
    "recall_sglang_two_gpus.json",
    "recall_sglang_two_gpus_drafts.json",
    "recall_sglang_modes.json",
    "recall_sglang_restarts.json",
)

# with the flag, from before the drafts of sglang's n-gram corpus were made chains
_TREES = {
    ("recall_sglang.json", "flag, ngram drafts"),
    ("recall_sglang_fp16.json", "flag, ngram drafts"),
    ("recall_sglang_modes.json", "flag, ngram drafts"),
    ("recall_sglang_modes.json", "flag, ngram drafts, no prefill graphs"),
}

_OURS = ("scan", "scan_split", "intra_chunk")


def both(report: dict[str, Any], kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a pair that both sides have."""
    return [
        row
        for row in report["rows"]
        if "upstream_ms" in row and "flag_ms" in row and kind in (None, row["kind"])
    ]


def engine_of(report: dict[str, Any]) -> str:
    """An engine and its release, as a text names them."""
    return str(report["engine"]).replace("vllm", "vLLM")


_CHUNKS_UNTIL = "2026-11-29"
"""Until then a decode step in sglang was timed at the client."""


def decode_note(report: dict[str, Any]) -> list[str]:
    """A sentence on the decode steps of a file whose client timed them."""
    is_of_chunks = engine_of(report).startswith("sglang") and report["date"] <= _CHUNKS_UNTIL
    if not (is_of_chunks and both(report, "decode")):
        return []
    return [
        "Decode steps are times between a request's chunks at the client, which gets several steps"
        " in one chunk where it is late; short ones are therefore not exactly the engine's."
    ]


def full_attention(report: dict[str, Any]) -> str:
    """Which backend of sglang's the full-attention layers of both sides ran on; its default on
    Hopper is FlashAttention 3."""
    engine = report["sides"]["flag"]["engine"]
    name = engine.get("decode_attention_backend") or engine.get("attention_backend")
    return {"fa3": " with FlashAttention 3", "triton": " with its triton backend"}.get(name, "")


def default_modes() -> list[str]:
    """Engines in their default mode: every row of every pair."""
    lines = []
    for name in DEFAULT_MODES:
        report = load(name)
        named = engine_of(report)
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
        decodes = decode_note(report) or [
            "The time of a decode step is the time by which the engine advances."
        ]
        lines += [
            *section(f"Kimi-Linear-48B in {named}, default mode", report, name),
            "",
            "The model's configuration with random weights; each side is a process with empty"
            " compile caches. Times in ms. A row prompts × tokens is a call that returns one token"
            f" for each prompt. {decodes[0]} All requests of the mixed load arrive at once.",
            "",
            *table(["", "upstream", "with the flag", "×"], cells),
            "",
            *_runs_of_the_mixed_load(report),
            *_memory(_LOADS.get(name, name)),
            *([f"The engine: {mode}."] if mode else []),
            *(["", "Both sides have CuTe DSL."] if engine.get("cute_dsl") else []),
            *_where_time_goes(report),
        ]
    return [*lines, *_experts_of_sglang()]


def _experts_of_sglang() -> list[str]:
    """The part of a call in sglang that its experts' matrix products take."""
    name = "sglang_kimi48b_profile.json"
    cells = []
    for profile in load(name)["profiles"]:
        experts = profile["kernels"]["fused_moe_kernel"][0]
        ours = sum(profile["kernels"].get(kernel, [0.0])[0] for kernel in _OURS)
        share = f"{experts / profile['gpu_ms']:.0%}"
        cells.append([profile["what"], f"{profile['gpu_ms']:.1f}", f"{experts:.1f}", share])
        cells[-1].append(f"{ours:.1f}")
    return [
        "",
        f"A profile of the side with the flag ([{name}](../../benchmarks/results/{name})) bounds"
        " what graphs can give there: the GPU's kernels alone take the following times in ms.",
        "",
        *table(["call", "all kernels", "experts", "share", "KDA's two stages"], cells),
    ]


def _runs_of_the_mixed_load(report: dict[str, Any]) -> list[str]:
    """The single runs of both sides; the first may hold compilation by the engine."""
    said, is_warm = [], True
    for side, name in (("upstream", "upstream"), ("flag", "with the flag")):
        rows = report["sides"][side]["rows"]
        row = next((row for row in rows if row["kind"] == "mixed"), {"runs_ms": []})
        is_warm &= "first_ms" in row
        said.append(f"{name} {', '.join(f'{ms:,.0f}' for ms in row['runs_ms'])}")
    note = "after one that is not timed" if is_warm else "of which the first may hold the engine's"
    note += "" if is_warm else " own compilation"
    return [f"Runs of the mixed load in ms, {note}: {'; '.join(said)}.", ""]


def _memory(name: str) -> list[str]:
    """The GPU's memory and the cache after the loads of a file, as far as asked."""
    report = load(name)
    sides = [report["sides"][side] for side in ("upstream", "flag")]
    found = [side.get("memory_after_load_mib") for side in sides]
    if None in found:
        return []
    said = f"{found[0]:,} MiB, with the flag {found[1]:,} MiB"
    blocks = [side.get("engine", {}).get("blocks") for side in sides]
    if None not in blocks:
        said += f". The engine then has {blocks[0]:,} cache blocks, and {blocks[1]:,} with the flag"
    record = f"[{report['date']}](../../benchmarks/results/{name})"
    return [f"Memory of the GPU after load ({record}): {said}.", ""]


def _where_time_goes(report: dict[str, Any]) -> list[str]:
    """The GPU's busy time in a call, and the steps of the call."""
    upstream, flag = (report["sides"][side] for side in ("upstream", "flag"))
    cells = []
    for a, b in zip(upstream.get("profiles", []), flag.get("profiles", []), strict=False):
        row = next(row for row in report["rows"] if row["what"] == a["what"])
        if row["kind"] != "call":
            continue
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


_SERVERS = {
    "stock": "upstream",
    "canary": "with the flag, states transposed on purpose",
    "canary of MLA decode": "with the flag, MLA decodes set to zero on purpose",
}


def recall() -> list[str]:
    """The small checkpoint's answers: engines with and without this backend."""
    cells = []
    for name in _RECALL:
        report = load(name)
        engine = next(key for key in ("vllm", "sglang") if key in report["environment"])
        link = f"[{engine} {report['environment'][engine]}](../../benchmarks/results/{name})"
        for server, run in report["servers"].items():
            if (name, server) in _TREES:
                continue
            right = min(round["right"] for round in run["rounds"])
            how = _SERVERS.get(server, server.replace("flag", "with the flag"))
            if report.get("checkpoint") == "checkpoint_bounded":
                how += ", bounded gate"
            for dtype, states in (("bfloat16", "bf16"), ("float16", "fp16")):
                if dtype in report.get("serve_options", ()):
                    how += f", states in {states}"
            cells.append([link, how, f"{right} of {report['items']}", report["date"]])
    for name in ("eval_recall_transformers_upstream.json", "eval_recall_transformers.json"):
        record = load(name)
        link = f"[transformers {record['engine_version']}](../../benchmarks/results/{name})"
        right = sum(question["right"]["exact"] for question in record["questions"])
        how = "upstream" if record["backend"] in ("stock", "upstream") else "with the backend"
        cells.append([link, how, f"{right} of {len(record['questions'])}", record["date"]])
    return [
        "",
        "## Answers of a small model",
        "",
        "The checkpoint repeats answers from its context ([evaluating.md](../evaluating.md)). The"
        " table has the number of right answers, in the worst of all rounds.",
        "",
        *table(["engine", "served", "right", "date"], cells),
    ]


def first_start() -> list[str]:
    """The kernels that a model's first start compiles."""
    name, file = "cold_start_h200.json", "seam_times.json"
    report = load(name)
    slowest = report["kernels"][0]
    return [
        *section("First start", report, name),
        "",
        f"The first start of a model compiles {len(report['kernels'])} CUDA kernels of KDA in"
        f" {report['cpu_threads']} threads in {report['nvrtc_s']:.1f} s; the slowest takes"
        f" {slowest['s']:.1f} s. A layer's calls with their Triton kernels take"
        f" {report['triton_s']:.1f} s more. With full caches all of it takes"
        f" {report['cached_s']:.2f} s.",
        "",
        f"Before weights load, {_seam_times()} ([{file}](../../benchmarks/results/{file}), on a CPU"
        f" with {load(file)['cpu_threads']} threads, {load(file)['date']}).",
    ]


def _seam_times() -> str:
    """How long what the adapters rely on is held, by engine."""
    rows = load("seam_times.json")["rows"]
    times = (f"{row['ms']:.0f} ms beside {row['engine']} {row['version']}" for row in rows)
    return f"what the adapters rely on is held against the engine's source in {' and '.join(times)}"
