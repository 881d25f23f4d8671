"""The forms of KDA prefill on Hopper beside the two stages: one launch, segments, direct rows, and
what the table can turn on in the two stages.

    python benchmarks/bench_kda_prefill_forms.py \
        --short benchmarks/results/kda_prefill_short_h200.json \
        --segments benchmarks/results/kda_prefill_segments_h200.json \
        --bounded benchmarks/results/kda_prefill_bounded_h200.json \
        --scan benchmarks/results/kda_prefill_scan_h200.json

Short sequences: ``parts_us`` has the two stages, ``fused_us`` the one launch, ``floor_us`` all
inputs read and all outputs written once at the copy bandwidth of the run. Long ones over few heads:
``two_stage_us`` and, by the tokens of a segment, ``segments_us``. Each form is compared with
float64 first (``error``, the relative L2 difference of outputs and states; ``two_stage_error``), on
sequences of at most 8,192 tokens. Bounded gates: ``centred_us`` and ``direct_us`` of the two
stages, by how the rows are made (`PrefillCostModel.bounded_rows`), in turns: each is timed twice,
and the second times are ``again``. ``--scan``: by form (`scan_forms`), ``us`` and a second time
``again``, whether outputs and states have the ``same_bits`` as the form in use, and up to 8,192
tokens their ``error``. Inputs as an engine passes them; states in a pool, in place.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backend_core.launch.cuda import CudaKernel
from backend_core.tables.select import load_table
from backend_core.target import detect_target
from backend_core.testing.numerics import relative_error
from backend_core.testing.timing import copy_bandwidth_gbs, environment, graph_time_ms
from kda_backend import chunk_kda, reference
from kda_backend.launch_params import TABLES
from kda_backend.prefill import one_launch_sm90, segmented_sm90, two_stage_sm90
from kda_backend.prefill.arguments_sm90 import Variant, intra_defines
from kda_backend.prefill.one_launch_sm90 import CTAS_PER_SM
from kda_backend.prefill.one_launch_sm90 import defines as one_launch_defines
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.spec import Beta, Gate
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import make_case

DIM = 128
SHORT = [[n] for n in (1, 16, 32, 64)] + [[8] * 512, [16] * 256, [32] * 256, [64] * 64, [64] * 16]
SHORT += [[1 + 37 * i % 64 for i in range(128)], [128] * 64]
LONG = [(4, n) for n in (2048, 4096, 8192, 16384, 32768, 131072)]
LONG += [(8, n) for n in (4096, 8192, 32768, 131072)] + [(16, 8192)]
# the bounded shapes of bench_kda_prefill.py, and one of many heads
BOUNDED = [(32, [512]), *((h, [8192]) for h in (32, 16, 8, 4)), (4, [32768])]
BOUNDED += [(h, [1024] * 8) for h in (64, 32, 8)]
SEGMENT_CHUNKS = (8, 16, 32, 64)
# heads, lengths, gate
SCAN = [(h, [n], "softplus") for n in (8192, 32768) for h in (32, 16, 8, 4)]
SCAN += [(h, [1024] * 8, gate) for gate in ("softplus", "bounded") for h in (32, 64)]
SCAN += [(32, [128] * 64, "softplus"), (32, [32] * 256, "softplus"), (32, [64], "softplus")]
APART = {"scan_buffers": "apart"}
EARLY = APART | {"scan_output_early": True}
AHEAD = EARLY | {"scan_state_ahead": True}
LARGEST_CHECKED = 8192  # tokens


def selections(heads: int, *, bounded_gate: bool = False) -> dict[str, KdaSelection]:
    """By form: the shipped row of the two stages, with and without the one launch and with each
    kind of rows of a bounded gate, and segments."""
    target = detect_target()
    chosen = select(target, KdaShape(heads, heads, DIM, DIM, bounded_gate=bounded_gate))
    rows = {row.name: row for row in load_table(TABLES, target).rows}
    whole, segmented = rows["two_stage_sm90"], rows["segmented_sm90"]

    def of(row: Any, **params: Any) -> KdaSelection:
        return chosen.with_path(
            dataclasses.replace(row, params=dataclasses.replace(row.params, **params))
        )

    off = dataclasses.replace(whole.params, one_launch_max_tokens=0)
    found = {
        "two stages": of(whole, one_launch_max_tokens=0),
        "one launch": of(whole, one_launch_max_tokens=128),
        "centred": of(whole, bounded_rows="centred"),
        "direct": of(whole, bounded_rows="direct"),
    }
    for chunks in SEGMENT_CHUNKS:
        found[f"{64 * chunks}"] = of(
            segmented,
            segment_chunks=chunks,
            min_chunks=chunks + 1,
            max_tasks=1 << 20,
            cost_model=off,
        )
    return found


def scan_forms(heads: int, lengths: list[int], gate: str) -> dict[str, KdaSelection]:
    """By form: what the shipped row does (``in use``); the two stages with scan buffers apart,
    then also outputs early, states ahead and a schedule for shorter steps; with intra-chunk CTAs in
    turn; and all of these. For few heads segments, in use and early."""
    target = detect_target()
    shape = KdaShape(heads, heads, DIM, DIM, bounded_gate=gate == "bounded")
    chosen = select(target, shape)
    rows = {row.name: row for row in load_table(TABLES, target).rows}
    row: Any = rows["two_stage_sm90"]

    def of(**params: Any) -> KdaSelection:
        params = {"one_launch_max_tokens": 0} | params
        new = dataclasses.replace(row.params, **params)
        return chosen.with_path(dataclasses.replace(row, params=new))

    found = {
        "in use": chosen.with_path(row),
        "apart": of(**APART),
        "early": of(**EARLY),
        "early, ahead": of(**AHEAD),
        "early, ahead, 1450": of(**AHEAD, scan_step_ns=1450),
        "in turn": of(intra_stagger_ns=2500),
        "all": of(**AHEAD, scan_step_ns=1450, intra_stagger_ns=2500),
    }
    if heads <= 8 and max(lengths) > LARGEST_CHECKED:
        segments: Any = rows["segmented_sm90"]
        early = dataclasses.replace(segments.params.cost_model, **EARLY)
        params = dataclasses.replace(segments.params, cost_model=early)
        found["segments"] = chosen.with_path(segments)
        found["segments, early"] = chosen.with_path(dataclasses.replace(segments, params=params))
    return found


class Call:
    """One batch, which can be called in each form."""

    def __init__(self, heads: int, lengths: list[int], gate: str = "softplus") -> None:
        model: dict[str, Any] = {"heads": heads, "key_dim": DIM, "value_dim": DIM, "gate": gate}
        self.case = make_case(1, lengths, regime="init", device="cuda", **model)
        offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        self.plan = build_step_plan(offsets.cuda(), sum(lengths), cu_seqlens_cpu=offsets)
        self.pool = torch.zeros(len(lengths) + 1, heads, DIM, DIM, device="cuda")
        self.slots = torch.arange(len(lengths), dtype=torch.int32, device="cuda") + 1
        self.out = torch.full_like(self.case.v, float("nan"))
        self.scratch = Scratch(self.pool.device)

    def make(self, selection: KdaSelection) -> Callable[[], object]:
        q, k, v, g, beta = self.case.tokens
        return functools.partial(
            chunk_kda,
            q,
            k,
            v,
            g,
            beta,
            **self.case.options(),
            state_pool=self.pool,
            state_indices=self.slots,
            step_plan=self.plan,
            scratch=self.scratch,
            out=self.out,
            selection=selection,
        )

    def error(self, selection: KdaSelection) -> float:
        """Of outputs and states, against float64; the larger."""
        self.pool[1:] = self.case.state
        self.out.fill_(float("nan"))
        self.make(selection)()
        want, states = self.expected
        return max(relative_error(self.out[0], want), relative_error(self.pool[1:], states))

    @functools.cached_property
    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        found, states, _ = reference.chunk_kda(
            *case.activated(torch.device("cuda")),
            scale=DIM**-0.5,
            state=case.state.double(),
            cu_seqlens=case.offsets,
        )
        return found, states

    def results(self, selection: KdaSelection) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states."""
        self.pool[1:] = self.case.state
        self.out.fill_(float("nan"))
        self.make(selection)()
        return self.out.clone(), self.pool.clone()

    def us(self, selection: KdaSelection) -> float:
        self.pool[1:] = self.case.state
        return round(1e3 * graph_time_ms(self.make(selection), replays=11), 1)

    def floor_us(self, bandwidth_gbs: float) -> float:
        values = self.case.q.numel() * 5 * 2 + 2 * self.pool[1:].nbytes
        return round(values / bandwidth_gbs / 1e3, 1)


def short_rows(bandwidth_gbs: float) -> list[dict[str, Any]]:
    rows = []
    for heads, lengths in itertools.product((32, 16, 8, 4), SHORT):
        forms, call = selections(heads), Call(heads, lengths)
        one, two = forms["one launch"], forms["two stages"]
        row = {
            "H": heads,
            "seq_lens": lengths,
            "error": call.error(one),
            "two_stage_error": call.error(two),
            "parts_us": {"two_stage": call.us(two)},
            "fused_us": call.us(one),
            "floor_us": call.floor_us(bandwidth_gbs),
        }
        print({**row, "seq_lens": f"{len(lengths)} x {max(lengths)}"}, flush=True)
        rows.append(row)
    return rows


def long_rows() -> list[dict[str, Any]]:
    rows = []
    for heads, tokens in LONG:
        forms, call = selections(heads), Call(heads, [tokens])
        row: dict[str, Any] = {"H": heads, "seq_lens": [tokens]}
        if tokens <= LARGEST_CHECKED:
            row["error"] = call.error(forms["1024"])
            row["two_stage_error"] = call.error(forms["two stages"])
        row["two_stage_us"] = call.us(forms["two stages"])
        row["segments_us"] = {
            str(64 * chunks): call.us(forms[str(64 * chunks)])
            for chunks in SEGMENT_CHUNKS
            if 64 * chunks < tokens
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def bounded_rows(bandwidth_gbs: float) -> list[dict[str, Any]]:
    rows = []
    for heads, lengths in BOUNDED:
        forms, call = selections(heads, bounded_gate=True), Call(heads, lengths, "bounded")
        centred, direct = forms["centred"], forms["direct"]
        row: dict[str, Any] = {"H": heads, "seq_lens": lengths}
        if max(lengths) <= LARGEST_CHECKED:
            row["error"] = call.error(direct)
            row["centred_error"] = call.error(centred)
        row["centred_us"], row["direct_us"] = call.us(centred), call.us(direct)
        row["again"] = {"centred_us": call.us(centred), "direct_us": call.us(direct)}
        row["floor_us"] = call.floor_us(bandwidth_gbs)
        print(row, flush=True)
        rows.append(row)
    return rows


Source = tuple[str, dict[str, int]]


def scan_sources() -> list[Source]:
    """(file, definitions) of what the forms of `scan_forms` launch."""
    rows: Any = {row.name: row for row in load_table(TABLES, detect_target()).rows}
    base = rows["two_stage_sm90"].params
    in_turn = dataclasses.replace(base, intra_stagger_ns=2500)
    forms: tuple[dict[str, Any], ...] = ({}, APART, EARLY, AHEAD)
    scans = [dataclasses.replace(base, **form) for form in forms]
    found: list[Source] = []
    for gate in (Gate.SOFTPLUS, Gate.BOUNDED):
        variant = Variant(gate, Beta.SIGMOID, True, torch.bfloat16, False, False, False)
        for ctas, params in itertools.product((2, 4), (base, in_turn)):
            found.append(("intra_chunk", intra_defines(variant, ctas, params)))
        for rows_of_chunk, many in CTAS_PER_SM.items():
            for ctas in (1, many):
                found.append(("one_launch", one_launch_defines(rows_of_chunk, ctas, variant, base)))
    for params, name in itertools.product(scans, ("scan", "scan_split")):
        found.append((name, two_stage_sm90.scan_defines(variant, params)))
    for params in (base, scans[2]):
        of_segments = segmented_sm90.segment_defines(False, False, params)
        for name in ("segment_ends", "merge_segments", "scan", "scan_split"):
            found.append((name, of_segments))
    return found


def compile_source(source: Source) -> None:
    """Compiled code is kept on disk."""
    name, defines = source
    if name == "intra_chunk":
        params = two_stage_sm90.INTRA_PARAMS
    elif name == "one_launch":
        params = one_launch_sm90.PARAMS
    elif "SEGMENTS" in defines:
        params = segmented_sm90.SEGMENT_PARAMS
    else:
        params = two_stage_sm90.SCAN_PARAMS
    CudaKernel(two_stage_sm90.KERNELS / f"{name}.cu", name, params, defines)


def compile_scan_forms() -> None:
    """Several kernels at once: NVRTC compiles one after the other in a process."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(12, os.cpu_count() or 1), spawn) as workers:
        list(workers.map(compile_source, scan_sources()))


def scan_rows() -> list[dict[str, Any]]:
    compile_scan_forms()
    rows = []
    for heads, lengths, gate in SCAN:
        forms, call = scan_forms(heads, lengths, gate), Call(heads, lengths, gate)
        row: dict[str, Any] = {"H": heads, "seq_lens": lengths, "gate": gate, "same_bits": {}}
        if max(lengths) <= LARGEST_CHECKED:
            row["error"] = {name: call.error(form) for name, form in forms.items()}
        for name, form in forms.items():
            in_use = forms["segments" if "segments" in name else "in use"]
            pairs = zip(call.results(form), call.results(in_use), strict=True)
            row["same_bits"][name] = all(torch.equal(got, same) for got, same in pairs)
        for times in ("us", "again"):
            row[times] = {name: call.us(form) for name, form in forms.items()}
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    print(f"{'us':32}" + "".join(f"{name:>20}" for name in names))
    for row in rows:
        what = f"{row['H']} heads, {len(row['seq_lens'])} x {row['seq_lens'][0]}, {row['gate']}"
        best = {name: min(row["us"][name], row["again"][name]) for name in row["us"]}
        marks = {name: "" if same else "*" for name, same in row["same_bits"].items()}
        cells = (f"{best[name]}{marks[name]}" if name in best else "" for name in names)
        print(f"{what:32}" + "".join(f"{cell:>20}" for cell in cells))
    print("* other bits than the form in use")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--segments", type=Path)
    parser.add_argument("--bounded", type=Path)
    parser.add_argument("--scan", type=Path)
    args = parser.parse_args()
    if not (args.short or args.segments or args.bounded or args.scan):
        parser.error("expected a file for one of --short, --segments, --bounded and --scan or more")
    head: dict[str, Any] = {**environment(), "script": "benchmarks/bench_kda_prefill_forms.py"}
    with torch.inference_mode():
        if args.scan:
            rows = scan_rows()
            args.scan.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        if args.segments:
            rows = long_rows()
            args.segments.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        bandwidth = copy_bandwidth_gbs()
        head["copy_gbs"] = round(bandwidth)
        for file, rows_of in ((args.bounded, bounded_rows), (args.short, short_rows)):
            if file:
                rows = rows_of(bandwidth)
                file.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
