"""Write docs/performance.md, the pages beside it in docs/performance/, and README's table of speed,
from the files under benchmarks/results/.

    python docs/performance.py

A test fails where a file is not what this writes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from docs.performance_parts import (
    block_sparse,
    crowds,
    cut_models,
    drop_ins,
    dsv4,
    engines,
    kda,
    mla,
    ranks,
)
from docs.performance_parts.page import ROOT, best, load, mean, table

DOCS = ROOT / "docs"
README = ROOT / "README.md"
HEADLINE = ("<!-- headline: written by docs/performance.py -->", "<!-- end of headline -->")

HEAD = """# Performance

This page and those that it links are written by `docs/performance.py` from the files under
`benchmarks/results/`; CI fails where one is out of date.
"""

MEASURED = """
## How it was measured

A GPU time is the median over replays of a CUDA graph. The peers, which are the other
implementations of the same operator, were timed in the same run. Each side was timed only after its
results had passed a check of their accuracy. *host* is the time that one Python call takes on the
host. The [studies](studies/README.md) have what was tried and what did not help.
"""

BOUNDS = """
## What bounds each operator

| operator | bound by |
|---|---|
| KDA prefill, few heads | the chain of chunks: each step of the scan waits for the one before it |
| KDA prefill, many heads | memory traffic of the scan or of the intra-chunk stage, which overlap |
| KDA prefill, many short sequences | both stages, and start and end of the call, with idle SMs |
| KDA decode step | the launch for few sequences times heads, else the bytes of the states |
| compressor, decode | the launch for few requests, else the bytes of the windows that are pooled |
| a call of an engine | the host at short prompts, the experts' matrix products at long ones |

The pages' tables compare each time with the time of copying the same number of bytes, or with that
of an empty launch. Profiles are in the [studies](studies/README.md).
"""


def pages() -> dict[str, tuple[str, list[str]]]:
    """The title and the lines of each page in docs/performance/."""
    return {
        "servers": (
            "Servers: engines with the flag and without",
            [
                *ranks.several_ranks(),
                *engines.default_modes(),
                *crowds.full_servers(),
                *engines.bounded_gates(),
                *cut_models.cut_models(),
                *engines.recall(),
                *crowds.same_bits(),
                *engines.first_start(),
            ],
        ),
        "kda": (
            "Kimi Delta Attention",
            [
                *kda.prefill(),
                *kda.accuracy(),
                *kda.growth(),
                *kda.short(),
                *kda.segments(),
                *kda.layer(),
                *kda.decode(),
                *kda.state_formats(),
                *kda.verification(),
                *kda.same_bits(),
            ],
        ),
        "dsv4": ("DeepSeek-V4's compressors", dsv4.compressor()),
        "mla": (
            "Multi-head latent attention",
            [*mla.mla_decode(), *mla.shared_prompts(), *mla.named_rows()],
        ),
        "block-sparse": ("Block-sparse and 8-bit attention", block_sparse.block_sparse()),
        "drop-ins": ("Drop-ins", [*drop_ins.drop_ins(), "", *drop_ins.errors_by_length()]),
    }


def render() -> dict[Path, str]:
    """The text of each page."""
    found, links = {}, ["", "| page | |", "|---|---|"]
    for name, (title, lines) in pages().items():
        text = f"# {title}\n\nWritten by `docs/performance.py`; [performance.md](../performance.md)"
        text += " has how it was measured.\n"
        found[DOCS / "performance" / f"{name}.md"] = text + "\n".join(lines) + "\n"
        links.append(f"| [{name}.md](performance/{name}.md) | {title} |")
    found[DOCS / "performance.md"] = (
        f"{HEAD}\n{_headline()}" + "\n".join(links) + "\n" + BOUNDS + MEASURED
    )
    return found


def headline() -> str:
    """README with its table of speed-ups over the fastest peer."""
    text = README.read_text(encoding="utf-8")
    start, end = (text.index(mark) for mark in HEADLINE)
    return text[: start + len(HEADLINE[0])] + "\n" + _headline() + text[end:]


def _headline() -> str:
    prefill, decode = load("kda_prefill_h200.json"), load("kda_decode_h200.json")
    steps = kda.of_states(decode, "fp32")
    unbounded = [row for row in prefill["rows"] if row["gate"] == "unbounded"]
    bounded = [row for row in prefill["rows"] if row["gate"] == "bounded"]
    drafts = load("kda_verify_h200.json")["rows"]
    compressor = load("dsv4_compressor_h200.json")["rows"]
    compressor = [row for row in compressor if row.get("layout") == "paged"]
    mla_report, sparse = mla.decode_report(), load(block_sparse.RESULT)
    decodes = mla.decode_ratios(mla_report)
    flex = block_sparse.ratios(sparse, "FlexAttention")
    sage, sparge = drop_ins.eight_bit_ratios()
    full, drafted, smaller = crowds.full_server_ratios()
    rows = [
        *(_headline_of_engine(name) for name in ranks.HEADLINES),
        (
            f"Full server of vLLM or sglang, 1 GPU, {len(full)} loads",
            "the engine without the flag, with states in the same format",
            full,
        ),
        (
            f"Full server of sglang with drafts, 1 GPU, {len(drafted)} load",
            "the engine without the flag, with the same drafts",
            drafted,
        ),
        (
            f"Full server of vLLM or sglang with states in 16 bits, 1 GPU, {len(smaller)} loads",
            "the engine without the flag, whose states have 32",
            smaller,
        ),
        (
            f"KDA prefill, unbounded gate, {len(unbounded)} shapes",
            "FLA",
            [best(row, ("fla",)) / row["ours_gpu_ms"] for row in unbounded],
        ),
        (
            f"KDA prefill, bounded gate, {len(bounded)} shapes",
            "FLA, FlashKDA, cuDNN",
            [best(row, ("fla", "flashkda", "cudnn")) / row["ours_gpu_ms"] for row in bounded],
        ),
        (
            f"KDA prefill, gates near their lower bound, {len(bounded)} shapes",
            "cuDNN",
            list(map(kda.forgetting_ratio, bounded)),
        ),
        (
            f"KDA decode step, {len(steps)} sizes",
            f"FlashInfer ({kda.heads_of_flashinfer(steps)} heads), vLLM, sglang, FLA",
            [row["best_peer_gpu_ms"] / row["ours_gpu_ms"] for row in steps],
        ),
        (
            f"KDA verification of drafts, {len(drafts)} sizes",
            "sglang",
            [row["best_peer_us"] / kda.committed_us(row) for row in drafts],
        ),
        (
            f"DeepSeek-V4's compressor, {len(compressor)} sizes",
            "vLLM, Triton and CuTe DSL",
            [min(dsv4.compressor_peers(row)) / row["ours_gpu_ms"] for row in compressor],
        ),
        (
            f"MLA decode, {len(decodes)} sizes",
            ", ".join(mla.PEERS.values()),
            list(decodes.values()),
        ),
        (f"Block-sparse attention, {len(flex)} sizes", "FlexAttention", flex),
        (f"SpargeAttn's functions in 8 bits, {len(sparge)} calls", "SpargeAttn", sparge),
        (f"`sageattn`, {len(sage)} calls", "SageAttention", sage),
    ]
    cells = [
        [what, peer, f"{mean(x):.2f}×", f"{min(x):.2f}× to {max(x):.2f}×"] for what, peer, x in rows
    ]
    titles = [
        "engine or operator",
        "compared with the fastest of",
        "speed-up, geometric mean",
        "range",
    ]
    lines = table(titles, cells)
    servers = (*ranks.HEADLINES, *crowds.FULL)
    pairs = (load(name)["date"] for name in servers)
    dates = sorted({*pairs, *(x["date"] for x in (prefill, decode, mla_report, sparse))})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    intro = [
        f"Measured on one {prefill['gpu']} in bf16, or on several of one host where a row says so,",
        f"{days}. A speed-up is the other side's time divided by this package's; both were timed",
        "in the same run. Below 1 this package is slower. Rows of engines are of Kimi-Linear-48B's",
        "configuration in default mode: calls that return one token, or a full load of requests.",
    ]
    return "\n".join([*intro, "", *lines]) + "\n"


def _headline_of_engine(name: str) -> tuple[str, str, list[float]]:
    """The newest release of an engine in its default mode."""
    report = load(name)
    ratios = [row["upstream_ms"] / row["flag_ms"] for row in engines.both(report, "call")]
    ranks = report["sides"]["flag"]["environment"].get("ranks", 1)
    what = (
        f"{report['engine'].replace('vllm', 'vLLM')}{engines.full_attention(report)},"
        f" {ranks} GPU{'s' * (ranks > 1)}"
    )
    return what, "the engine without the flag", ratios


if __name__ == "__main__":
    for page, text in render().items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")
    README.write_text(headline(), encoding="utf-8")
