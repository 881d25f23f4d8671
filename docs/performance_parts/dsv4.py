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
    name, upstream = "dsv4_compressor_h200.json", "dsv4_compressor_cutedsl_h200.json"
    report, beside = load(name), load(upstream)
    return [
        *section("DeepSeek-V4's compressor beside vLLM as it runs on CUDA", beside, upstream),
        "",
        *_compressor_table(
            beside,
            f"two forms of vLLM {beside['vllm']}: its Triton kernels, and what it chooses on CUDA,"
            f" which is CuTe DSL ({beside['cutedsl']}) for the main compressor and Triton for the"
            " indexer's.",
        ),
        "",
        "Not in the file: " + "; ".join(beside["left_out"]) + ".",
        *section("DeepSeek-V4's compressor where no peer runs", report, name),
        *_alone(report["rows"]),
        *_split_channels(),
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


def _compressor_table(report: dict[str, Any], peers: str) -> list[str]:
    """Every row with a time of an engine, over the fastest of the row."""
    rows = [row for row in report["rows"] if compressor_peers(row)]
    ratios = [min(compressor_peers(row)) / row["ours_gpu_ms"] for row in rows]
    times: dict[tuple[str, str, str], dict[str, str]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        size = (row["phase"], f"{row['n']:,}", row["ends"])
        times.setdefault(size, {})[_part(row)] = f"{us(row['ours_gpu_ms'])}, {ratio:.2f}×"
    return [
        f"Times in µs, compared with {peers} Each is followed by the time of the fastest peer over"
        f" it; the geometric mean is {mean(ratios):.2f}×, the least value {min(ratios):.2f}×. An"
        f" empty launch takes {report['empty_launch_ms'] * 1e3:.2f} µs. *both* is the two"
        " compressors of a C4 layer, one call after the other.",
        "",
        *by_size(["phase", "tokens", "window ends"], times),
    ]


def _part(row: dict[str, Any]) -> str:
    rotated = ", rotated" if row.get("rotate") else ""
    return f"{row['part']}, C{row['ratio']}{rotated}"


def _alone(rows: list[dict[str, Any]]) -> list[str]:
    """Prefill on sglang's ring, rotated queries and rows in place, which vLLM does not have, and
    fp4 queries."""
    times: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        if not compressor_peers(row):
            size = (row["phase"], f"{row['n']:,}")
            times.setdefault(size, {})[_part(row)] = us(row["ours_gpu_ms"])
    return [
        "",
        "These have no peer: vLLM has no ring and rotates neither queries nor pooled rows in place"
        " (indexer_rows: norm, RoPE and rotation), and its kernel for fp4 queries does not build"
        " for sm_90. Prefills are of the ring. Times in µs:",
        "",
        *by_size(["phase", "tokens"], times),
    ]
