"""MLA decode, by itself and in an engine, and DeepSeek-V4's attention."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import by_size, load, mean, section, table, us

DECODE = "mla_decode_h200.json"
PEERS = {
    "flashmla": "FlashMLA",
    "fa3": "FA3",
    "flashinfer": "FlashInfer",
    "vllm_triton": "vLLM's Triton",
}


def decode_report() -> dict[str, Any]:
    """The result of MLA decode, without its requests behind one prompt, whose plan is deleted."""
    report = load(DECODE)
    report["rows"] = [row for row in report["rows"] if row["case"] != "prefix"]
    return report


def decode_ratios(report: dict[str, Any]) -> dict[tuple[str, int], float]:
    """The time of the fastest peer over ours, by case and heads."""
    return {
        (row["case"], row["heads"]): min(row[f"{p}_us"] for p in PEERS) / row["ours_gpu_us"]
        for row in report["rows"]
    }


def mla_decode() -> list[str]:
    """MLA decode beside every peer of the run."""
    report = decode_report()
    heads = sorted({row["heads"] for row in report["rows"]})
    ratio = decode_ratios(report)
    cells = []
    for case in dict.fromkeys(row["case"] for row in report["rows"]):
        of_case = {row["heads"]: row for row in report["rows"] if row["case"] == case}
        cells.append([case])
        for count in heads:
            cells[-1] += [us(of_case[count]["ours_gpu_us"] / 1e3), f"{ratio[case, count]:.2f}"]
        cells[-1].append(us(of_case[heads[0]]["floor_us"] / 1e3))
    means = [
        f"{mean([x for (_, n), x in ratio.items() if n == count]):.2f}× at {count} heads"
        for count in heads
    ]
    titles = [title for count in heads for title in (f"{count} heads", "×")]
    lines = [
        *section("MLA decode", report, DECODE),
        "",
        "bf16, times in µs without the plan, which is made once per step. × is the time of the"
        f" fastest of {', '.join(PEERS.values())} over ours; its geometric mean is"
        f" {', '.join(means)}. *bytes* is the time of reading the keys.",
        "",
        *table(["case", *titles, "bytes"], cells),
    ]
    lines += mla_ceiling(report["rows"], tuple(PEERS))
    plans = (
        [requests, *(f"{times[who]:.1f}" for who in ("ours", "flashmla"))]
        for requests, times in report["plan_us"].items()
    )
    return [
        *lines,
        "",
        "The time of making the plan of a step, in µs:",
        "",
        *table(["requests", "ours", "FlashMLA"], plans),
    ]


def mla_ceiling(rows: list[dict[str, Any]], peers: tuple[str, ...]) -> list[str]:
    """How far over the fastest peer all points are, and a kernel could be by the bytes alone."""
    best = [min(row[f"{peer}_us"] for peer in peers) for row in rows]
    now = [peer / row["ours_gpu_us"] for peer, row in zip(best, rows, strict=True)]
    bound = [peer / row["floor_us"] for peer, row in zip(best, rows, strict=True)]
    return [
        "",
        f"The geometric mean of all {len(rows)} points is {mean(now):.2f}×. The bytes of the keys"
        f" alone permit {mean(bound):.2f}×, which no kernel reaches: this counts neither a launch"
        " nor the time until the first bytes arrive.",
    ]


def shared_prompts() -> list[str]:
    """MLA decode of requests behind one prompt, planned alone and with a search for equal pages."""
    name = "mla_shared_h200.json"
    report = load(name)
    peers = {"flashmla": "FlashMLA", "fa3": "FA3"}
    peers = {key: words for key, words in peers.items() if f"{key}_us" in report["rows"][0]}
    cells = (
        [
            str(row["heads"]),
            str(row["requests"]),
            f"{row['shared']:,}",
            us(row["alone_us"] / 1e3),
            us(row["search_us"] / 1e3),
            *(us(row[f"{peer}_us"] / 1e3) for peer in peers),
            f"{min(row[f'{peer}_us'] for peer in peers) / row['search_us']:.2f}",
        ]
        for row in report["rows"]
        if row["requests"] in (32, 64, 128) and row["shared"] in (0, 8192)
    )
    plans = (
        [str(row["requests"]), f"{row['alone_us']:.1f}", f"{row['search_us']:.1f}"]
        for row in report["plans"]
    )
    return [
        *section("MLA decode behind one prompt", report, name),
        "",
        "Requests of 512 tokens of their own behind tokens that all of them share, or, with none"
        " shared, of 8,192 tokens. Times in µs. *alone*: each request is planned by itself."
        " *search*: the plan looks for requests whose block tables begin with the same pages, and"
        " a second launch reads those once. × is the time of the fastest peer over the latter.",
        "",
        *table(
            ["heads", "requests", "shared tokens", "alone", "search", *peers.values(), "×"], cells
        ),
        "",
        "The time of making the plan of a step, in µs:",
        "",
        *table(["requests", "alone", "search"], plans),
    ]


def named_rows() -> list[str]:
    """DeepSeek-V4's attention: decodes over records, prefills over rows of bf16."""
    name = "dsv4_attention_h200.json"
    report = load(name)
    lines = section("DeepSeek-V4's attention", report, name)
    decodes = [row for row in report["rows"] if row["phase"] == "decode"]
    ratios: dict[int, list[float]] = {}
    times: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in sorted(decodes, key=lambda row: (row["layer"], row["batch"], row["topk"])):
        ours = row["ours_gpu_us"]
        ratio = row["flashmla_gpu_us"] / ours
        ratios.setdefault(row["heads"], []).append(ratio)
        size = (row["layer"], f"{row['batch']:,}", f"{row['topk']:,}")
        times.setdefault(size, {})[f"{row['heads']} heads"] = f"{us(ours / 1e3)}, {ratio:.2f}×"
    means = ", ".join(f"{mean(x):.2f}× at {heads} heads" for heads, x in ratios.items())
    prefills = (
        [
            str(row["heads"]),
            f"{row['batch']:,}",
            str(128 + row["topk"]),
            us(row["ours_gpu_us"] / 1e3),
            us(row["variants_us"]["records, ours"] / 1e3),
            us(row["flashmla_gpu_us"] / 1e3),
            f"{row['flashmla_gpu_us'] / row['ours_gpu_us']:.2f}",
        ]
        for row in report["rows"]
        if row["phase"] == "prefill"
    )
    return [
        *lines,
        "",
        "Decode over records: each request attends to the 128 rows of a window and to top-k others"
        " in pages of 64 rows (ratio 4) or 2 (ratio 128), or to its window alone. *Mixed*: 1 to"
        " top-k others, in equal measure on a logarithmic scale. Times are in µs, as the path table"
        " runs these calls. FlashMLA's queries are padded to 64 heads, as vLLM pads them. Each is"
        f" followed by FlashMLA's time over it, whose geometric mean is {means}.",
        "",
        *by_size(["layer", "requests", "top-k"], times),
        "",
        "Prefill, in µs: each token attends to its window alone (128 rows) or to 512 rows more,"
        " gathered in bf16, or read from the records, which FlashMLA's prefill does not.",
        "",
        *table(["heads", "tokens", "rows", "ours", "ours, records", "FlashMLA", "×"], prefills),
    ]
