"""Layers of models in the engines: those with few layers, few heads, or drafts of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docs.performance_parts.engines import both, decode_note, engine_of
from docs.performance_parts.page import RESULTS, load, table

# files of the serve benchmarks
CUT = {
    "sglang_kimi_k3.json": "Kimi-K3's layers in sglang",
    "sglang_glm_5_3_flash.json": "GLM-5.3-Flash's layers in sglang",
    "sglang_ling_3_tiny.json": "Ling-3.0-tiny's layers in sglang",
    "vllm033_4_heads.json": "Kimi-Linear-48B with four heads in vLLM",
    "sglang_4_heads.json": "Kimi-Linear-48B with four heads in sglang",
    "vllm033_ling_3_tiny_drafts.json": "Ling-3.0-tiny with its own drafts in vLLM",
    "sglang_ling_3_tiny_drafts.json": "Ling-3.0-tiny with its own drafts in sglang",
    "vllm033_glm_5_3_flash_drafts.json": "GLM-5.3-Flash with its own drafts in vLLM",
    "sglang_glm_5_3_flash_drafts.json": "GLM-5.3-Flash with its own drafts in sglang",
    "vllm033_kimi_k3_drafts.json": "Kimi-K3 with its own drafts in vLLM",
}

# calls of the flag's side, which ran alone, where a pair has none
ALONE = {"sglang_ling_3_tiny.json": "sglang_ling_3_tiny_alone.json"}


def cut_models() -> list[str]:
    """Models with few layers or heads, of the files that are there."""
    cells, tokens, notes = [], [], []
    for name, title in CUT.items():
        if not (RESULTS / name).exists():
            continue
        report = load(name)
        own = report["sides"]["flag"]["environment"]
        cut = [
            f"{own[key] or 'no'} {key}"
            for key in ("layers", "heads", "experts", "drafts")
            if own.get(key) is not None
        ]
        link = f"[{title}](../../benchmarks/results/{name})"
        others = [side for side in report["sides"] if side not in ("upstream", "flag")]
        for row in both(report):
            if row["kind"] == "load":
                continue
            times = [f"{row[f'{side}_ms']:,.1f}" for side in ("upstream", "flag")]
            more = [f"{row[f'{x}_ms']:,.1f} ({x.replace('_', ' ')})" for x in others]
            ratio = f"{row['upstream_ms'] / row['flag_ms']:.2f}"
            cells.append([link, row["what"], *times, ratio, ", ".join(more)])
        also = []
        if name in ALONE:
            cells += _alone(ALONE[name], title)
            also = ["Its calls are of the flag's side, which ran alone."]
        gpus = "all sides on one" if report.get("beside") else "each side on one of its own"
        machine = (
            f"{report['gpu']}, {gpus}, {own['cores']} CPU cores, torch {report['torch']},"
            f" {report['date']}"
        )
        note = f"- {title}: {engine_of(report)}, {', '.join(cut)}; {machine}."
        tokens += [[title, *row] for row in _tokens(report, others)]
        notes.append(" ".join([note, *also, *decode_note(report), *_drafts_and_paths(report)]))
    titles = ["model", "call", "upstream", "with the flag", "×", "the flag, otherwise"]
    return [
        "",
        "## Layers of other models, and few heads",
        "",
        "Random weights, in the engine's default mode; times in ms.",
        "",
        *table(titles, cells),
        "",
        "How many prompts have the same greedy tokens in two runs, and in how many of the others"
        " rounding explains the first token that differs. *Together* is all prompts in one batch,"
        " *apart* one at a time, *resumed* from the prefix cache, and *otherwise* the last column"
        " above.",
        "",
        *table(["model", "prompts", *_PAIRS], tokens),
        "",
        *notes,
    ]


def _alone(name: str, title: str) -> Iterator[list[str]]:
    """The calls of a side's file, of which there is no time of upstream's in the same run."""
    link = f"[{title}](../../benchmarks/results/{name})"
    for row in load(name)["rows"]:
        if row["kind"] == "call":
            yield [link, row["what"], "", f"{row['ms']:,.1f}", "", ""]


_PAIRS = {
    "upstream, together and apart": "upstream together and apart",
    "upstream and flag, together": "upstream and flag, together",
    "upstream and flag, apart": "upstream and flag, apart",
    "upstream and flag, resumed": "upstream and flag, resumed",
    "flag and otherwise, together": "flag and {}, together",
    "flag and otherwise, apart": "flag and {}, apart",
}
"""Titles of comparisons, and their names in a result; {} is a variant of the flag's side."""


def _tokens(report: dict[str, Any], variants: list[str]) -> Iterator[list[str]]:
    """How greedy tokens agree: a row for short and for long prompts, as far as they were asked."""
    for key, prompts in (("agreement", "short"), ("agreement_long", "long")):
        if key not in report:
            continue
        pairs = (report[key].get(name.format(*variants or "-")) for name in _PAIRS.values())
        yield [prompts, *("" if pair is None else _agreed(pair) for pair in pairs)]


def _agreed(pair: dict[str, Any]) -> str:
    said, parted = f"{pair['same']} of {pair['prompts']}", len(pair["partings"])
    return f"{said}; {pair['explained']} of {parted}" if parted else said


def _drafts_and_paths(report: dict[str, Any]) -> Iterator[str]:
    """Accepted drafts, which paths prefills took, and which steps ran in graphs."""
    yield from _drafts(report)
    flag = report["sides"]["flag"]
    paths = []
    for path, sizes in flag.get("paths", {}).items():
        how = [f"{len(of)} {kind} sizes of up to {max(of):,}" for kind, of in sizes.items() if of]
        paths.append(f"by `{path}` {', '.join(how)} tokens")
    yield f"Prefills: {'; '.join(paths)}."
    if steps := flag.get("prefill_steps"):
        alone = f", {steps['replayed']:,} of them of sizes that ran only there"
        yield (
            f"With the flag {steps['in_graphs']:,} of {steps['steps']:,} prefill steps ran in"
            f" CUDA graphs{alone if steps['replayed'] else ''}."
        )


def _drafts(report: dict[str, Any]) -> Iterator[str]:
    """Accepted drafts of each side, and what a request takes for them where the engine says so."""
    for side, data in report["sides"].items():
        if found := data.get("drafts"):
            line = f"Drafts, {side}: {found['accepted']:,} of {found['draft']:,} accepted"
            sizes = {"blocks_kib": "the cache for states", "records_kib": "records"}
            parts = [f"{found[k]:,.0f} KiB of {what}" for k, what in sizes.items() if found.get(k)]
            line += f"; a request takes {' and '.join(parts)}" if parts else ""
            yield line + "."
