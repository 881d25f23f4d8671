"""The forms of KDA prefill on Hopper beside the two stages: one launch and segments.

    python benchmarks/bench_kda_prefill_forms.py \
        --short benchmarks/results/kda_prefill_short_h200.json \
        --segments benchmarks/results/kda_prefill_segments_h200.json

Short sequences: ``parts_us`` has the two stages, ``fused_us`` the one launch, ``floor_us`` all
inputs read and all outputs written once at the copy bandwidth of the run. Long ones over few heads:
``two_stage_us`` and, by the tokens of a segment, ``segments_us``. Each form is compared with
float64 first (``error``, the relative L2 difference of outputs and states; ``two_stage_error``), on
sequences of at most 8,192 tokens. Inputs as an engine passes them; states in a pool, in place.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import copy_bandwidth_gbs, environment, graph_time_ms
from benchmarks.bench_kda_prefill import DIM, Ours, draw
from benchmarks.kda_paths import only
from kda_backend import reference
from kda_backend.selection import KdaSelection, KdaShape

SHORT = [[n] for n in (1, 16, 32, 64)] + [[8] * 512, [16] * 256, [32] * 256, [64] * 64, [64] * 16]
SHORT += [[1 + 37 * i % 64 for i in range(128)], [128] * 64]
LONG = [(4, n) for n in (2048, 4096, 8192, 16384, 32768, 131072)]
LONG += [(8, n) for n in (4096, 8192, 32768, 131072)] + [(16, 8192)]
SEGMENT_CHUNKS = (8, 16, 32, 64)
LARGEST_CHECKED = 8192  # tokens


def selections(heads: int) -> dict[str, KdaSelection]:
    """By form: the shipped row of the two stages, the one launch, and segments."""
    shape = KdaShape(heads, heads, DIM, DIM)
    found = {
        "two stages": only(shape, "two_stage_sm90"),
        "one launch": only(shape, "one_launch_sm90"),
    }
    for chunks in SEGMENT_CHUNKS:
        found[f"{64 * chunks}"] = only(shape, "segmented_sm90", segment_chunks=chunks)
    return found


class Call(Ours):
    """One batch, which can be called in each form."""

    def __init__(self, heads: int, lengths: list[int]) -> None:
        self.case = draw(lengths, heads, "init", None, seed=1)
        super().__init__(self.case)

    def use(self, selection: KdaSelection) -> None:
        """Take a form, with states as they were and no output."""
        self.selection = selection
        self.pool[1:-1] = self.case.state
        self.out.fill_(float("nan"))

    def error(self, selection: KdaSelection) -> float:
        """Of outputs and states, against float64; the larger."""
        self.use(selection)
        out, states = self()
        want, want_states = self.expected
        return max(relative_error(out[0], want), relative_error(states, want_states))

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

    def us(self, selection: KdaSelection) -> float:
        self.use(selection)
        return round(1e3 * graph_time_ms(self, replays=11), 1)

    def floor_us(self, bandwidth_gbs: float) -> float:
        values = self.case.q.numel() * 5 * 2 + 2 * self.case.state.nbytes
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", type=Path)
    parser.add_argument("--segments", type=Path)
    args = parser.parse_args()
    if not (args.short or args.segments):
        parser.error("expected a file for --short, --segments or both")
    head: dict[str, Any] = {**environment(), "script": "benchmarks/bench_kda_prefill_forms.py"}
    with torch.inference_mode():
        if args.segments:
            rows = long_rows()
            write_record(args.segments, {**head, "rows": rows})
        if args.short:
            bandwidth = copy_bandwidth_gbs()
            head["copy_gbs"] = round(bandwidth)
            rows = short_rows(bandwidth)
            args.short.write_text(json.dumps({**head, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
