"""KDA: prefill, its accuracy, growth and forms, and the decode step."""

from __future__ import annotations

from statistics import median
from typing import Any

from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS
from docs.performance_parts.page import (
    RESULTS,
    best,
    by_size,
    load,
    mean,
    section,
    shape,
    table,
    us,
)
from kda_backend.launch_params import TABLES
from kda_backend.spec import CHUNK

_IMPLEMENTATIONS = {
    "ours": "this backend",
    "fla": "FLA 0.6.0",
    "flashkda": "FlashKDA",
    "cudnn": "cuDNN",
}


def _prefill_table(report: dict[str, Any], gate: str, peers: tuple[str, ...]) -> list[str]:
    """The shapes of one gate."""
    rows = [row for row in report["rows"] if row["gate"] == gate]
    ratios = [best(row, peers) / row["ours_gpu_ms"] for row in rows]
    names = [_IMPLEMENTATIONS[peer] for peer in peers]
    cells = (
        [
            str(row["H"]),
            shape(row["seq_lens"]),
            us(row["ours_gpu_ms"]),
            *(us(row[f"{peer}_gpu_ms"]) for peer in peers),
            f"{ratio:.2f}",
            us(row["two_stage_gpu_ms"]),
            us(row["ours_host_ms"]),
        ]
        for row, ratio in zip(rows, ratios, strict=True)
    )
    return [
        "",
        f"{gate.capitalize()} gate, bf16, K = V = 128, times in µs. × is the time of the"
        f" fastest peer over ours; its geometric mean is {mean(ratios):.2f}×, its least value"
        f" {min(ratios):.2f}×. *Triton* is the time of this package's Triton path.",
        "",
        *table(["heads", "tokens", "ours", *names, "×", "Triton", "host"], cells),
    ]


def forgetting_ratio(row: dict[str, Any]) -> float:
    """The time of cuDNN over ours where every channel's gates are near their lower bound."""
    ratio: float = row["cudnn_forgetting_gpu_ms"] / row["ours_forgetting_gpu_ms"]
    return ratio


def prefill() -> list[str]:
    report = load("kda_prefill_h200.json")
    lines = section("KDA prefill", report, "kda_prefill_h200.json")
    lines += _prefill_table(report, "unbounded", ("fla",))
    lines += _prefill_table(report, "bounded", ("fla", "flashkda", "cudnn"))
    cuts = (
        [
            str(row["H"]),
            shape(row["seq_lens"]),
            us(row["ours_forgetting_gpu_ms"]),
            us(row["cudnn_forgetting_gpu_ms"]),
            f"{forgetting_ratio(row):.2f}",
        ]
        for row in report["rows"]
        if row["gate"] == "bounded"
    )
    lines += [
        "",
        f"*cuDNN* is the front end's kernel for Hopper (nvidia-cudnn-frontend {report['cudnn']})."
        " It cuts a sequence into parts that run side by side where every channel of a head decays"
        " by e^-16 within a few chunks of 16 tokens. Under the gates of this table it cuts none.",
    ]
    lines += [
        "",
        "With gates near their lower bound, of e^-5 per token in every channel, it cuts, and is"
        " faster where a long sequence has few heads. This package's kernels do not look at the"
        " gates' values for this. Times in µs:",
        "",
        *table(["heads", "tokens", "ours", "cuDNN", "×"], cuts),
    ]
    host = sorted(row["ours_host_ms"] for row in report["rows"])
    calls = sorted(row["fla_call_ms"] for row in report["rows"] if row["fla_call_ms"] is not None)
    share = [row["floor_ms"] / row["ours_gpu_ms"] for row in report["rows"]]
    return [
        *lines,
        "",
        f"A call takes {us(host[0])} to {us(host[-1])} µs on the host, {us(median(host))} in the"
        f" median. FLA's whole call takes {calls[0]:.1f} to {calls[-1]:.1f} ms. To read all inputs"
        " and write all outputs once, at the copy bandwidth of the run"
        f" ({report['copy_gbs']:,.0f} GB/s), would take {min(share):.0%} to {max(share):.0%} of"
        " our time.",
    ]


def accuracy() -> list[str]:
    """Every implementation in every gate regime: the one accuracy table of the documentation."""
    report = load("kda_prefill_h200.json")
    found = report["accuracy"]
    regimes = list(next(iter(found.values())))
    cells = []
    for name, errors in found.items():
        who, gate = name.split()
        pairs = [errors[regime] for regime in regimes]
        shown = [f"{1e3 * output:.1f} / {1e3 * state:.1f}" for output, state in pairs]
        cells.append([f"{_IMPLEMENTATIONS[who]}, {gate} gate", *shown])
    return [
        *section("Accuracy of KDA prefill", report, "kda_prefill_h200.json"),
        "",
        "The table has the relative L2 errors of output / final state against float64, in"
        " thousandths, with bf16 inputs. [families/kda.md](../families/kda.md#accuracy) describes"
        " the gate regimes.",
        "",
        *table(["", *regimes], cells),
    ]


def state_formats() -> list[str]:
    """Errors by the format of states after the longest run of each regime."""
    name = "kda_state_formats_h200.json"
    if not (RESULTS / name).exists():
        return []
    report = load(name)
    steps = max(row["steps"] for row in report["rows"])
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in report["rows"]:
        if row["steps"] == steps:
            errors = f"{1e3 * row['output_error']:.2f} / {1e3 * row['state_error']:.2f}"
            cells.setdefault((row["calls"], row["regime"]), {})[row["format"]] = errors
    return [
        *section("KDA states by their format", report, name),
        "",
        f"Relative L2 errors against float64, in thousandths, after {steps:,} tokens: of the last"
        " outputs / of the states. Decode steps alone have fp32 outputs; beside prefills they are"
        " bf16, whose rounding every format has. [families/kda.md](../families/kda.md#accuracy)"
        " describes the gate regimes.",
        "",
        *by_size(["calls", "regime"], cells),
    ]


def growth() -> list[str]:
    report = load("kda_prefill_growth_h200.json")
    rows = (
        [
            str(row["H"]),
            str(row["sequences"]),
            f"{row['tokens']:,}",
            f"{row['longest']:,}",
            us(row["ours_gpu_ms"]),
            f"{row['ours_gpu_ms'] * 1e6 / row['tokens']:.1f}",
        ]
        for row in report["rows"]
    )
    titles = ["heads", "sequences", "tokens", "longest", "µs", "ns per token"]
    return [
        *section("Growth of prefill", report, "kda_prefill_growth_h200.json"),
        "",
        *table(titles, rows),
    ]


def short() -> list[str]:
    """Short sequences: one launch beside the two stages."""
    name = "kda_prefill_short_h200.json"
    report, limit = load(name), _prefill_row("one_launch_sm90").max_longest
    times: dict[tuple[str], dict[str, str]] = {}
    for row in report["rows"]:
        if row["H"] in (32, 4):
            two, one = row["parts_us"]["two_stage"], row["fused_us"]
            cell = f"{two:.1f}, {one:.1f}, {two / one:.2f}×"
            times.setdefault((shape(row["seq_lens"]),), {})[f"{row['H']} heads"] = cell
    return [
        *section("KDA prefill of short sequences", report, name),
        "",
        "Times in µs of the two stages, of one launch, and of the first over the second. The state"
        " of each sequence and head is read and written. The path table uses the single launch if"
        f" the host knows that no sequence is longer than {limit} tokens.",
        "",
        *by_size(["tokens"], times),
    ]


def _prefill_row(path: str) -> Any:
    """The row of a path of KDA prefill in the H200's table."""
    rows = load_table(TABLES, KNOWN_TARGETS["H200"]).rows
    return next(row for row in rows if row.name == path)


def segments() -> list[str]:
    """Long sequences over few heads: segments beside the two stages."""
    name = "kda_prefill_segments_h200.json"
    report, row = load(name), _prefill_row("segmented_sm90")
    length, shortest = CHUNK * row.params.segment_chunks, row.min_longest
    kinds = sorted({int(n) for one in report["rows"] for n in one["segments_us"]})
    cells = (
        [
            str(one["H"]),
            shape(one["seq_lens"]),
            f"{one['two_stage_us']:,.1f}",
            *(
                f"{one['segments_us'][str(n)]:,.1f}" if str(n) in one["segments_us"] else ""
                for n in kinds
            ),
        ]
        for one in report["rows"]
    )
    return [
        *section("KDA prefill by segments", report, name),
        "",
        "Times in µs, by the number of tokens in a segment. The path table uses segments of"
        f" {length:,} tokens for sequences of at least {shortest:,} tokens, if the"
        f" whole step is at most {row.max_width} times one head of the longest, and"
        " `deterministic_prefix` is off"
        " ([families/kda.md](../families/kda.md#segments-of-a-long-sequence)).",
        "",
        *table(["heads", "tokens", "two stages", *(f"{n:,}" for n in kinds)], cells),
    ]


def layer() -> list[str]:
    """A layer between its projections: its launches, and the convolution inside the prefill."""
    name = "kda_layer_h200.json"
    report = load(name)
    tiles = _prefill_row("two_stage_sm90").params.fused_conv_tiles
    parts = ("conv", "prefill", "norm")
    cells = (
        [
            str(row["H"]),
            shape(row["seq_lens"]),
            *(f"{row['parts_us'][part]:,.1f}" for part in parts),
            f"{row['apart_us']:,.1f}",
            f"{row['fused_us']:,.1f}",
            f"{row['apart_us'] / row['fused_us']:.2f}",
            f"{row['floor_us']:,.1f}",
        ]
        for row in report["rows"]
    )
    titles = ["heads", "tokens", "convolution", "prefill", "norm", "separate", "inside", "×"]
    titles.append("bytes")
    return [
        *section("KDA layer between its projections", report, name),
        "",
        "Times in µs. The first three columns are launches by themselves, and *separate* is the"
        " three one after another. With *inside*, the intra-chunk kernel also convolves q and k;"
        f" steps of at least {tiles:,} tiles (chunks times heads) do so. *bytes* is the time of"
        " reading and writing everything once at the copy bandwidth.",
        "",
        *table(titles, cells),
    ]


def same_bits() -> list[str]:
    """The price of bits that do not depend on the batch, once it has been measured."""
    name = "kda_same_bits_h200.json"
    if not (RESULTS / name).is_file():
        return []
    report = load(name)
    kinds = {"decode": "decode step", "prefill": "prefill", "layer": "prefill of a whole layer"}
    cells = []
    for what, title in kinds.items():
        rows = [row for row in report["rows"] if row["what"] == what]
        ratios = [row["invariant_us"] / row["free_us"] for row in rows]
        worst = rows[ratios.index(max(ratios))]
        where = f"{worst['H']} heads, {worst['size']}"
        cells.append([title, str(len(rows)), f"{mean(ratios):.3f}", f"{max(ratios):.3f}", where])
    titles = ["", "sizes", "time, geometric mean", "largest", "of"]
    return [
        *section("KDA with bits that do not depend on the batch", report, name),
        "",
        "Time with [`batch_invariant`](../reliability.md#the-same-bits-whatever-else-is-served)"
        " over that of what the table chooses by the size of the call. Before they were taken,"
        f" {report['equal']:,} of {report['requests']:,} random requests had the same bits alone"
        f" and {report['ways']} times among others.",
        "",
        *table(titles, cells),
    ]


def verification() -> list[str]:
    """Drafts verified from records, beside states and beside sglang."""
    name = "kda_verify_h200.json"
    report = load(name)
    times: dict[tuple[str, ...], dict[str, str]] = {}
    for row in report["rows"]:
        step = committed_us(row)
        found = (row["records_us"], step, row["states_us"], row["floor_us"])
        cell = [us(1e-3 * time) for time in found]
        if "best_peer" in row:
            cell.append(f"{row['best_peer_us'] / step:.2f}×")
        size = str(row["batch"]), str(row["drafts"])
        times.setdefault(size, {})[f"{row['H']} heads"] = ", ".join(cell)
    return [
        *section("KDA verification of drafts", report, name),
        "",
        "A step from the packed projections to the gated norm on fp32 states, times in µs: from"
        " [records](../families/kda.md#records-in-place-of-states), which it folds itself; from"
        " records that a launch behind it folds, as both engines do; with a state for each drafted"
        " token; and what it takes at the copy bandwidth to read and write one state and everything"
        " else once. Last is the time of sglang's faster verification, with its commit, over the"
        " second.",
        "",
        *by_size(["sequences", "drafted tokens"], times),
    ]


def committed_us(row: dict[str, Any]) -> float:
    """A verification of drafts and the fold of what was accepted, as both engines run them."""
    return float(row["alone_us"] + row["commit_us"])


_PEERS = {"fla": "FLA", "flashinfer": "FlashInfer", "sglang": "sglang", "vllm": "vLLM"}


def of_states(report: dict[str, Any], state: str) -> list[dict[str, Any]]:
    """The decode steps on states of one format."""
    return [row for row in report["rows"] if row.get("state", "fp32") == state]


def heads_of_flashinfer(rows: list[dict[str, Any]]) -> str:
    """The numbers of heads that FlashInfer's kernel was timed with, as words."""
    *most, last = sorted({row["H"] for row in rows if "flashinfer_gpu_ms" in row})
    return f"{', '.join(map(str, most))} and {last}"


def decode() -> list[str]:
    report = load("kda_decode_h200.json")
    rows = of_states(report, "fp32")
    ratios = [row["best_peer_gpu_ms"] / row["ours_gpu_ms"] for row in rows]
    share = [row["floor_ms"] / row["ours_gpu_ms"] for row in rows]
    times: dict[tuple[str], dict[str, str]] = {}
    for row, ratio in zip(rows, ratios, strict=True):
        cell = f"{us(row['ours_gpu_ms'])}, {ratio:.2f}×"
        times.setdefault((str(row["batch"]),), {})[f"{row['H']} heads"] = cell
    peers = ", ".join(sorted({_PEERS[row["best_peer"]] for row in rows}))
    return [
        *section("KDA decode step", report, "kda_decode_h200.json"),
        "",
        "A step from the packed projections to the gated norm, times in µs; the launches of a peer"
        f" are added. Each is followed by the time of the best peer ({peers}) over it; the"
        f" geometric mean is {mean(ratios):.2f}×, the least value {min(ratios):.2f}×. FlashInfer's"
        f" kernel takes {heads_of_flashinfer(rows)} of these numbers of heads. To read and"
        f" write the fp32 state once at the copy bandwidth ({report['copy_gbs']:,.0f} GB/s) takes"
        f" {min(share):.0%} to {max(share):.0%} of our time."
        " [studies/kda.md](../studies/kda.md#decode-step) says what memory permits.",
        "",
        *by_size(["sequences"], times),
        *_decode_of_16_bits(report),
    ]


def _decode_of_16_bits(report: dict[str, Any]) -> list[str]:
    """The steps on 16-bit states beside those on fp32 states and beside peers."""
    whole = {(row["H"], row["batch"]): row["ours_gpu_ms"] for row in of_states(report, "fp32")}
    cells = []
    for state in ("bf16", "fp16"):
        for row in of_states(report, state):
            time = row["ours_gpu_ms"]
            gain = f"{whole[row['H'], row['batch']] / time:.2f}×"
            peer = f"{_PEERS[row['best_peer']]}, {row['best_peer_gpu_ms'] / time:.2f}×"
            share = f"{row['floor_ms'] / time:.0%}"
            cells.append([state, str(row["batch"]), us(time), gain, peer, share])
    titles = ["states", "sequences", "µs", "faster than with fp32", "best peer", "copy"]
    heads = {row["H"] for row in report["rows"] if row["state"] == "fp16"}
    return [
        "",
        f"With states in 16 bits ({' and '.join(map(str, sorted(heads)))} heads), beside the peers"
        " that take these; *copy* is what the copy of the states takes of our time. FlashInfer's"
        " kernel takes bf16 alone.",
        "",
        *table(titles, cells),
    ]
