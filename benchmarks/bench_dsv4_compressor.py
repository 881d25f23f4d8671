"""DeepSeek-V4's compressor step beside its peers: bytes first, then GPU and call time.

    python benchmarks/bench_dsv4_compressor.py --vllm-source DIR --sglang-source DIR \\
        --output benchmarks/results/dsv4_compressor_h200.json

Parts: ``main`` (C4 and C128), ``indexer``, ``both`` (a C4 layer's two compressors, one call after
the other), on tensors as vLLM lays them out (fp32 projections, a paged fp32 state, a block table)
and as sglang does (``layout`` ``ring``, where the indexer rotates). ``--only v41`` measures
DeepSeek-V4.1's compressors instead (`benchmarks.dsv4_v41`), into a file of their own, and
``--only v41_sglang`` those beside sglang.

``vllm`` is vLLM 0.33's step in Triton, ``vllm_cutedsl`` its step as it runs on CUDA, and
``sglang_jit`` sglang 0.5.23's. Every implementation writes into poison, and its records and state
rows are compared with float64's before any time is taken; the row of a peer that fails has the
reason (``not_run``). A peer has no column in the rows of the other engine's layout.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.operator import Selection
from backend_core.testing.records import write_record
from backend_core.testing.timing import (
    copy_bandwidth_gbs,
    environment,
    graph_time_ms,
    host_time_ms,
    installed_version,
)
from benchmarks import dsv4_records as records
from benchmarks import dsv4_v41
from benchmarks.empty_launch import empty_launch_ms
from benchmarks.peers import dsv4_sglang, dsv4_vllm
from dsv4_backend import SeqLens, compress_norm_rope_hadamard_
from dsv4_backend.step_plan import PrefillStepPlan
from dsv4_backend.testing.engine import default_device
from dsv4_backend.testing.steps import TimedStep, make_step, rope_table

DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
CUDA = torch.device("cuda", 0)
PARTS = (("main", 4), ("indexer", 4), ("both", 4), ("main", 128))
PEERS = {"paged": ("vllm", "vllm_cutedsl"), "ring": ("sglang_jit",)}

Step = Callable[[], object]
Case = tuple[str, str, int, int, str]
"""(phase, part, ratio, tokens, ends)"""


@dataclass
class Peers:
    """How each peer makes its step, and why one cannot: by name, or (name, kind)."""

    make: dict[str, Callable[[TimedStep], Step]] = field(default_factory=dict)
    refused: dict[str | tuple[str, str], str] = field(default_factory=dict)
    v41: Any = None
    sglang_v41: Any = None

    @property
    def has_sglang(self) -> bool:
        return "sglang_jit" in self.make or self.sglang_v41 is not None

    def reason(self, name: str, kind: str) -> str | None:
        return self.refused.get(name) or self.refused.get((name, kind))


def kind_of(part: str, ratio: int) -> str:
    return "indexer" if part == "indexer" else f"main_c{ratio}"


def tokens_of(phase: str, n: int, ratio: int, ends: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and requests: n requests of 4k to 8k tokens, or one request of n tokens."""
    device = default_device()
    if phase == "prefill":
        return torch.arange(n, device=device), torch.zeros(n, dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(5)
    positions = torch.randint(4096, 8192, (n,), generator=generator, device=device)
    if ends == "all":
        positions = positions // ratio * ratio + ratio - 1
    return positions, torch.arange(n, device=device)


def load_peers(vllm: Path | None, sglang: Path | None, only: str | None = None) -> Peers:
    """The peers, from their sources; whatever is missing becomes the reason."""
    found = Peers()
    if only == "v41_sglang":
        try:
            if sglang is None:
                raise ImportError("--sglang-source was not given")
            found.sglang_v41 = dsv4_sglang.load_v41(sglang.resolve())
        except Exception as error:
            found.refused["sglang_v41"] = described(error)
        return found
    try:
        if vllm is None:
            raise ImportError("--vllm-source was not given")
        loaded = dsv4_vllm.load(vllm.resolve())
        found.make["vllm"] = lambda part: dsv4_vllm.triton_step(loaded, part)
        found.v41 = dsv4_vllm.load_v41()
        dsv4_vllm.load_cutedsl(loaded)
        found.make["vllm_cutedsl"] = lambda part: dsv4_vllm.upstream_step(loaded, part)
    except Exception as error:
        for name in {"vllm", "vllm_cutedsl"} - set(found.make):
            found.refused[name] = described(error)
        found.refused["vllm_v41"] = described(error)
    try:
        if sglang is None:
            raise ImportError("--sglang-source was not given")
        compress = dsv4_sglang.load(sglang.resolve())
        found.make["sglang_jit"] = lambda part: dsv4_sglang.upstream_step(compress, part)
    except Exception as error:
        found.refused["sglang_jit"] = described(error)
    # vLLM's own dispatch takes Triton for the indexer
    found.refused["vllm_cutedsl", "indexer"] = "vLLM's indexer is Triton on CUDA too: vllm_gpu_ms"
    return found


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[-2000:]


def make_parts(layout: str, case: Case) -> list[TimedStep]:
    phase, part, ratio, n, ends = case
    kinds = [kind_of(name, ratio) for name in (("main", "indexer") if part == "both" else (part,))]
    if layout == "paged":
        return [make_step(kind, *tokens_of(phase, n, ratio, ends)) for kind in kinds]
    return [dsv4_sglang.ring_step(k, phase, n, ends, default_device()) for k in kinds]


def take_times(row: dict[str, Any], name: str, call: Step) -> None:
    row[f"{name}_host_ms"] = host_time_ms(call)
    row[f"{name}_gpu_ms"] = graph_time_ms(call)


def together(steps: list[Step]) -> Step:
    return steps[0] if len(steps) == 1 else lambda: [step() for step in steps]


def measure(layout: str, case: Case, peers: Peers, bandwidth: float) -> dict[str, Any]:
    """The row of a case: ours, and every peer of the layout on the same tensors."""
    parts = make_parts(layout, case)
    phase, part, ratio, n, ends = case
    row: dict[str, Any] = {"phase": phase, "part": part, "layout": layout}
    row |= {"ratio": ratio, "n": n, "ends": ends, "ours_gpu_ms": None}
    row |= {f"{name}_gpu_ms": None for name in PEERS[layout]}
    wanted = [records.float64_rows(part) for part in parts]
    ours = [records.run(part, part.call()) for part in parts]
    checked = zip(parts, wanted, ours, strict=True)
    row["ours_float64_bytes"] = min(records.beside_float64(*each) for each in checked)
    take_times(row, "ours", together([part.call() for part in parts]))
    row["floor_ms"] = sum(floor_bytes(part) for part in parts) / (bandwidth * 1e6)
    row["not_run"] = {}
    for name in PEERS[layout]:
        reason = peers.reason(name, kind_of(case[1], case[2]))
        if reason is not None:
            row["not_run"][name] = reason
            continue
        try:
            beside(row, name, [peers.make[name](part) for part in parts], parts, wanted)
        except Exception as error:
            row["not_run"][name] = described(error)
    return row


def beside(
    row: dict[str, Any],
    name: str,
    steps: list[Step],
    parts: list[TimedStep],
    wanted: list[torch.Tensor],
) -> None:
    """A peer's records beside float64's, and its times."""
    theirs = [records.run(part, step) for part, step in zip(parts, steps, strict=True)]
    checked = zip(parts, wanted, theirs, strict=True)
    row[f"{name}_float64_bytes"] = min(records.beside_float64(*each) for each in checked)
    take_times(row, name, together(steps))


def floor_bytes(part: TimedStep) -> int:
    """Each input row read and each state row written once; windows and records of the ends.

    Window rows that the call itself brought in are counted once, as input. A ring's prefill writes
    few state rows, so input and records.
    """
    plan, spec = part.step_plan, part.layer.spec
    records = part.ends * spec.record.record_bytes
    if plan.state_layout == "ring" and plan.num_tokens >= PREFILL[0]:
        return part.kv_score.nbytes + records
    rows = 2 * plan.num_tokens * spec.row_width * 4
    if isinstance(plan, PrefillStepPlan):
        return rows + records
    return rows + records + part.ends * (spec.window - 1) * 2 * spec.head_dim * 4


def in_place_call(n: int, selection: Selection[Any, Any]) -> Step:
    """The in-place operator on n pooled rows of the indexer."""
    x, weight = torch.randn(n, 128, device=CUDA), torch.ones(128, device=CUDA)
    table = torch.stack(rope_table(CUDA).chunk(2, 1), -1).flatten(1).contiguous()
    plan = SeqLens((torch.randint(1, 4096, (n,), device=CUDA) * 4).int())
    return lambda: compress_norm_rope_hadamard_(
        x, weight, 1e-6, table, plan, head_dim=128, compress_ratio=4, rotate=True,
        selection=selection,
    )  # fmt: skip


def cases() -> list[Case]:
    found: list[Case] = [("decode", p, r, n, "all") for p, r in PARTS for n in DECODE]
    found += [("decode", p, r, n, "mixed") for p, r in PARTS for n in (1, 64, 512)]
    return found + [("prefill", p, r, n, "all") for p, r in PARTS for n in PREFILL]


def tasks(only: str | None = None) -> list[Callable[[Peers, float], dict[str, Any]]]:
    """The measurements, each from (peers, bandwidth)."""
    if only is not None:
        return dsv4_v41.tasks("sglang" if only == "v41_sglang" else "vllm")
    return [
        functools.partial(measure, layout, case)
        for layout, case in itertools.product(PEERS, cases())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vllm-source", type=Path, help="vLLM 0.33.0's site-packages, or a copy")
    parser.add_argument("--sglang-source", type=Path, help="sglang 0.5.23's, with its headers")
    only = ("v41", "v41_sglang")
    parser.add_argument("--only", choices=only, help="DeepSeek-V4.1's, beside vLLM's or sglang's")
    args = parser.parse_args()
    peers = load_peers(args.vllm_source, args.sglang_source, args.only)
    bandwidth = copy_bandwidth_gbs()
    head: dict[str, object] = environment() | {
        "vllm": dsv4_vllm.RELEASE if "vllm" in peers.make else None,
        "cutedsl": installed_version("nvidia-cutlass-dsl"),
        "sglang": dsv4_sglang.RELEASE if peers.has_sglang else None,
        "copy_gbs": bandwidth,
        "empty_launch_ms": empty_launch_ms(),
    }
    rows = []
    for measured in tasks(args.only):
        rows.append(measured(peers, bandwidth))
        print(rows[-1], flush=True)
        write_record(args.output, head | {"rows": rows})


if __name__ == "__main__":
    main()
