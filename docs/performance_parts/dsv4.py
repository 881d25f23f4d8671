"""DeepSeek-V4's compressor."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import by_size, load, mean, section, table, us

_COMPRESSOR_PEERS = {
    "vllm": "vLLM, Triton",
    "vllm_cutedsl": "vLLM, CuTe DSL",
    "sglang_jit": "sglang",
}


def compressor_peers(row: dict[str, Any]) -> list[float]:
    """The engines' times of a row."""
    times = (row.get(f"{peer}_gpu_ms") for peer in _COMPRESSOR_PEERS)
    return [time for time in times if time is not None]


def compressor() -> list[str]:
    name = "dsv4_compressor_h200.json"
    report = load(name)
    return [
        *section("DeepSeek-V4's compressor beside vLLM as it runs on CUDA", report, name),
        "",
        *_compressor_table(
            report,
            "paged",
            f"two forms of vLLM {report['vllm']}: its Triton kernels, and what it chooses on CUDA,"
            f" which is CuTe DSL ({report['cutedsl']}) for the main compressor and Triton for the"
            " indexer's.",
        ),
        *section("DeepSeek-V4's compressor beside sglang", report, name),
        "",
        *_compressor_table(
            report,
            "ring",
            f"sglang {report['sglang']}'s kernels, on its rings. The table leaves prefills and C128"
            " decodes of more than 64 requests to them.",
        ),
        *_split_channels(),
        *_v41(
            "vLLM",
            "dsv4_v41_h200.json",
            ("vllm", "vllm_two_streams"),
            "'s four launches over it, on one stream and on the two that vLLM uses on CUDA. A draft"
            " has four tokens. Records of 4 bits have no peer on Hopper.",
        ),
        *_v41(
            "sglang",
            "dsv4_v41_sglang_h200.json",
            ("sglang",),
            "'s own step behind its projections over it, both with sglang's roundings.",
        ),
    ]


def _v41(engine: str, name: str, peers: tuple[str, ...], what: str) -> list[str]:
    """DeepSeek-V4.1's compressors with the records that an engine keeps on Hopper."""
    report = load(name)
    times: dict[tuple[str, str], dict[str, str]] = {}
    for row in report["rows"]:
        if row["main"] == "fp8_ds_mla" and row.get(f"{peers[0]}_gpu_ms"):
            ours = row["ours_gpu_ms"]
            ratios = (row[f"{peer}_gpu_ms"] / ours for peer in peers)
            cell = ", ".join((us(ours), *(f"{ratio:.2f}×" for ratio in ratios)))
            times.setdefault((row["phase"], f"{row['n']:,}"), {})[f"ratio {row['ratio']}"] = cell
    return [
        "",
        *section(f"DeepSeek-V4.1's compressors beside {engine}", report, name),
        "",
        f"Times of a step in µs, and those of {engine} {report[engine.lower()]}{what}",
        "",
        *by_size(["phase", "requests or tokens"], times),
    ]


def _split_channels() -> list[str]:
    """C128 decode by the programs that share a request's channels: the fastest of each number."""
    name = "dsv4_sweep_h200.json"
    report = load(name)
    times: dict[int, list[dict[str, float]]] = {}
    for row in report["rows"]:
        if row["operator"] == "main_c128_decode" and row["failure"] is None:
            times.setdefault(row["params"].get("splits", 1), []).append(row["gpu_ms"])
    sizes = list(times[1][0])
    cells = (
        [str(splits), *(us(min(row[size] for row in times[splits])) for size in sizes)]
        for splits in sorted(times)
    )
    return [
        "",
        *section("C128 decode, a request's channels split over programs", report, name),
        "",
        "Times in µs if every request ends a window, with the best number of warps and size of"
        " blocks for each. Every form writes the same bytes as the one without a split.",
        "",
        *table(["programs per request", *(f"{int(size):,} requests" for size in sizes)], cells),
    ]


def _compressor_table(report: dict[str, Any], layout: str, peers: str) -> list[str]:
    """Every row of a state's layout with a time of an engine, over the fastest of the row."""
    rows = [row for row in report["rows"] if compressor_peers(row) and row.get("layout") == layout]
    ratios = [min(compressor_peers(row)) / row["ours_gpu_ms"] for row in rows]
    times: dict[tuple[str, str, str], dict[str, str]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        size = (row["phase"], f"{row['n']:,}", row["ends"])
        part = f"{row['part']}, C{row['ratio']}"
        times.setdefault(size, {})[part] = f"{us(row['ours_gpu_ms'])}, {ratio:.2f}×"
    return [
        f"Times in µs, compared with {peers} Each is followed by the time of the fastest peer over"
        f" it; the geometric mean is {mean(ratios):.2f}×, the least value {min(ratios):.2f}×. An"
        f" empty launch takes {report['empty_launch_ms'] * 1e3:.2f} µs. *both* is the two"
        " compressors of a C4 layer, one call after the other.",
        "",
        *by_size(["phase", "tokens", "window ends"], times),
    ]
