"""Drop-ins beside their originals."""

from __future__ import annotations

from typing import Any

from docs.performance_parts.page import load, mean, section, table

_GONE = frozenset(
    (
        "BatchMLAPagedAttentionWrapper",
        "flash_mla_sparse_fwd",
        "merge_states",
        "BlockSparseAttentionWrapper",
        "VariableBlockSparseAttentionWrapper",
        "sageattn_qk_int8_pv_fp8_cuda_sm90",
    )
)
"""Functions that were slower at both callers' shapes, and are not in this package any more."""


_FILES = ("dropins_h200.json", "dropins_flash_mla_h200.json", "dropins_sage_h200.json")
"""Results of three runs, a later one's rows in the place of an earlier one's; each one's originals
were other packages."""


def _is_gone(row: dict[str, Any]) -> bool:
    dense = row["function"] == "flash_mla_with_kvcache" and "tokens" in row["shape"]
    return dense or row["function"] in _GONE


def drop_ins() -> list[str]:
    """Each function at two callers' shapes, those that were deleted after it too."""
    name, flash_mla, sage = _FILES
    report = load(name)
    newest = {_case(row): row for file in _FILES for row in load(file)["rows"] if _compared(row)}
    kept = [row for row in newest.values() if not _is_gone(row)]
    gone = [row for row in newest.values() if _is_gone(row)]
    titles = ["function", "caller", "ours", "original", "×", "host", "original's", "error"]
    titles.append("original's error")
    return [
        *section("Drop-ins beside their originals", report, name),
        "",
        "Times of a call in µs, on the GPU and on the host, and relative L2 errors to float64 in"
        " thousandths. × is the time of the original over ours. The originals are FlashInfer 0.7.2,"
        " SageAttention 2.2.0, SpargeAttn 0.1.0 and FlashMLA as vLLM 0.33.0 builds it. FlashMLA's"
        f" and FlashInfer's rows are of [another run](../../benchmarks/results/{flash_mla}), and"
        f" those of SageAttention and SpargeAttn of [a third](../../benchmarks/results/{sage}) of"
        f" {load(sage)['date']}.",
        "The error of a function that predicts blocks includes what it leaves out. Of its inputs"
        " each 128 queries look for one block of 128 keys. × is empty where an original's error is"
        " more than ten times ours.",
        "",
        *table(titles, map(_cells, kept)),
        "",
        f"These were slower at both callers' shapes and have been deleted: {_named(sorted(_GONE))},"
        " and the dense decoding of `flash_mla_with_kvcache`.",
        "",
        *table(titles, map(_cells, gone)),
    ]


_ACCURACY = "dropins_accuracy_h200.json"


def errors_by_length() -> list[str]:
    """Each function's errors beside its original's, over all lengths."""
    report = load(_ACCURACY)
    rows = [row for row in report["rows"] if row["theirs_error"] < 10 * row["ours_error"]]
    tokens = {row["shape"]["tokens"] for row in rows}
    cells = []
    for kind in dict.fromkeys((row["function"], row["caller"]) for row in rows):
        of = [row for row in rows if (row["function"], row["caller"]) == kind]
        ratios = [row["ours_error"] / row["theirs_error"] for row in of]
        floors = [row["e4m3_error"] / row["theirs_error"] for row in of if "e4m3_error" in row]
        cells.append(
            [
                *(f"`{kind[0]}`", kind[1], f"{len(of)}", f"{mean(ratios):.2f}"),
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                f"{sum(ratio > 0.95 for ratio in ratios)}",
                f"{mean(floors):.2f}" if floors else "",
            ]
        )
    titles = ["function", "attention", "calls", "error", "range", "above 0.95", "e4m3 alone"]
    return [
        *section("Errors of 8-bit drop-ins beside their originals'", report, _ACCURACY),
        "",
        f"Relative L2 errors to float64 over the original's, of {len(rows):,} calls of"
        f" {min(tokens):,} to {max(tokens):,} tokens; no block of keys divides a length. Logits"
        " deviate by 1 in near-uniform attention and by 4 in sharp. *e4m3 alone* is the error that"
        " rounding weights and values to e4m3 has by itself; the mean that rounding leaves of the"
        " values is added back here, so near-uniform attention stays below it. The rest of sharp"
        " attention's error is that of int8 queries and keys. Calls in which the original's error"
        " is more than ten times ours are left out: `spas_sage_attn_meansim_cuda` misses the block"
        " that its queries look for.",
        "",
        *table(titles, cells),
        "",
    ]


def eight_bit_ratios() -> tuple[list[float], list[float]]:
    """An original's time over ours with values in e4m3: of ``sageattn``, and of SpargeAttn's."""
    rows = load(_FILES[2])["rows"]
    ratios = [(row["function"], row["theirs_us"] / row["ours_us"]) for row in rows]
    return (
        [ratio for function, ratio in ratios if function == "sageattn"],
        [ratio for function, ratio in ratios if "sage2_attn" in function],
    )


def _case(row: dict[str, Any]) -> tuple[str, str, bool]:
    return row["function"], row["caller"], _is_gone(row)


def _compared(row: dict[str, Any]) -> bool:
    return "theirs_us" in row


def _cells(row: dict[str, Any]) -> list[str]:
    def at(key: str, scale: float = 1.0, digits: int = 0) -> str:
        return f"{scale * row[key]:,.{digits}f}" if key in row else ""

    ratio = ""
    if "theirs_us" in row and row["theirs_error"] < 10 * row["ours_error"]:
        ratio = f"{row['theirs_us'] / row['ours_us']:.2f}"
    return [
        f"`{row['function']}`",
        row["caller"],
        *(at("ours_us"), at("theirs_us"), ratio, at("ours_host_us"), at("theirs_host_us")),
        *(at("ours_error", 1e3, 1), at("theirs_error", 1e3, 1)),
    ]


def _named(functions: list[str]) -> str:
    shown = [f"`{function}`" for function in functions]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
