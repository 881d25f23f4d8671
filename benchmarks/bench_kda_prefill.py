"""KDA prefill beside its peers: accuracy first, then GPU and call time.

    python benchmarks/bench_kda_prefill.py --output benchmarks/results/kda_prefill_h200.json

The inputs are those that an engine passes: packed sequences with cu_seqlens, raw gate and raw beta
in bf16, l2norm in the kernel, K = V = 128, and a non-zero fp32 state. This package works in place
on a state pool; its step plan and selection are made before. A peer gets the arguments of its own
call. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.target import detect_target
from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import (
    call_time_ms,
    copy_bandwidth_gbs,
    environment,
    graph_time_ms,
    host_time_ms,
    installed_version,
)
from benchmarks.kda_paths import only
from benchmarks.peers.autotuned import compile_side_by_side
from kda_backend import StateRef, kda_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import select
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import LOWER_BOUND, Case, make_case
from kda_backend.testing.regimes import MEASURED_REGIMES

DIM = 128
RAGGED = [1300, 547, 2048, 963, 271, 3063]
UNBOUNDED = [
    (heads, lens)
    for heads in (32, 16, 8, 4)
    for lens in ([512], [2048], [8192], [32768], [1024] * 8)
] + [(32, RAGGED)]
BOUNDED = [(32, [512]), *((h, [8192]) for h in (32, 16, 8, 4)), (4, [32768])] + [
    (h, [1024] * 8) for h in (32, 8)
]
# one sequence, equal ones, a long one before short ones and after them
GROWTH = [
    *([tokens] for tokens in (8192, 16384, 32768, 65536, 131072)),
    *([8192 // n] * n for n in (8, 64, 256)),
    [32768] + [256] * 31,
    [256] * 31 + [32768],
]


def draw(lens: list[int], heads: int, regime: str, lower_bound: float | None, seed: int) -> Case:
    """Fresh random inputs on the GPU; the gate regimes are those of kda_backend.testing.regimes."""
    gate = "softplus" if lower_bound is None else "bounded"
    return make_case(
        seed, lens, regime=regime, gate=gate, heads=heads, key_dim=DIM, value_dim=DIM, device="cuda"
    )


Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


class Ours:
    """The call of an engine's layer: all buffers exist, the plan is the step's."""

    def __init__(
        self, case: Case, path: str | None = None, *, batch_invariant: bool = False
    ) -> None:
        tokens, heads = case.q.shape[1:3]
        target = detect_target()
        self.num_sms = target.num_sms
        shape = dataclasses.replace(case.shape, batch_invariant=batch_invariant)
        selection = select(target, shape) if path is None else only(shape, path)
        cu_seqlens = case.cu_seqlens
        self.step_plan = build_step_plan(cu_seqlens, tokens, cu_seqlens_cpu=cu_seqlens.cpu())
        self.path = selection.prefill.row(
            self.step_plan.num_chunks * heads, self.step_plan.max_tokens
        ).name
        sequences = len(case.state)
        self.pool = torch.full((sequences + 2, heads, DIM, DIM), math.nan, device="cuda")
        self.pool[1:-1] = case.state
        self.out = torch.full_like(case.v, math.nan)
        slots = torch.arange(sequences, dtype=torch.int32, device="cuda") + 1
        self.inputs, self.state = case.inputs, StateRef.pool(self.pool, slots)
        self.scratch, self.selection = Scratch(case.q.device), selection

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        kda_prefill(
            *self.inputs,
            self.state,
            self.step_plan,
            out=self.out,
            scratch=self.scratch,
            selection=self.selection,
        )
        return self.out, self.pool[1:-1]


def fla(case: Case) -> Call:
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    cu_seqlens = case.cu_seqlens.long()  # one tensor: FLA keeps its chunk table by identity

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return fla_chunk_kda(
                *case.tokens,
                initial_state=case.state,
                output_final_state=True,
                safe_gate=case.gate == "bounded",
                state_v_first=True,
                cu_seqlens=cu_seqlens,
                **case.options(),
            )

    return call


def flashkda(case: Case) -> Call:
    """FlashKDA's library as vLLM ships it (``_flashkda_C``); bounded gates only."""
    tokens, heads = case.q.shape[1:3]
    out, final = torch.empty_like(case.v), torch.empty_like(case.state)
    ops = torch.ops._flashkda_C
    size = ops.get_workspace_size(tokens, heads, len(case.state))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    cu_seqlens, a_log = case.cu_seqlens.long(), case.a_log
    assert case.dt_bias is not None
    dt_bias = case.dt_bias.view(heads, DIM)
    gate = (a_log, dt_bias, LOWER_BOUND)
    states = (case.state, final, cu_seqlens)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        ops.fwd(*case.tokens, DIM**-0.5, out, workspace, *gate, *states)
        return out, final

    return call


def cudnn(case: Case) -> Call:
    """cuDNN's front end, whose kernel for Hopper reads gates and step sizes in fp32; bounded gates
    only, since nothing in it keeps the exponents of others within range."""
    from cudnn.linear_attention.ops import kimi_delta_attention

    assert case.dt_bias is not None
    heads = case.q.shape[2]
    q, k, v, g, beta = (x[0].contiguous() for x in case.tokens)
    tokens = (q, k, v, g.float(), beta.float(), case.cu_seqlens)
    options: dict[str, Any] = {
        "initial_state": case.state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "gate_lower_bound": LOWER_BOUND,
        "a_log": case.a_log,
        "dt_bias": case.dt_bias.view(heads, DIM),
        "plan_name": "kda_hopper_cuda",
    }

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            out, final = kimi_delta_attention(*tokens, **options)
        return out[None], final

    return call


PEERS: dict[str, Callable[[Case], Call]] = {"fla": fla, "flashkda": flashkda, "cudnn": cudnn}
BOUNDED_ALONE = ("flashkda", "cudnn")


def check_accuracy(
    make: Callable[[Case], Call], lower_bound: float | None
) -> dict[str, list[float]]:
    """Relative L2 of output and final state in each gate regime."""
    errors = {}
    for seed, regime in enumerate(MEASURED_REGIMES):
        case = draw([257, 512, 63], 4, regime, lower_bound, seed)
        o, states = make(case)()
        pairs = zip((o[0], states), case.expected(), strict=True)
        errors[regime] = [relative_error(got.cpu(), want) for got, want in pairs]
    return errors


def floor_ms(case: Case, bandwidth_gbs: float) -> float:
    """Every input read once, every output written once, at the copy bandwidth of this run."""
    tokens = (case.q, case.k, case.v, case.g, case.beta, case.v)
    return (sum(x.nbytes for x in tokens) + 2 * case.state.nbytes) / bandwidth_gbs / 1e6


def measure(
    heads: int, lens: list[int], lower_bound: float | None, peers: set[str], bandwidth: float
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "H": heads,
        "seq_lens": lens,
        "gate": "unbounded" if lower_bound is None else "bounded",
    }
    case = draw(lens, heads, "init", lower_bound, seed=7)
    ours = Ours(case)
    row["ours_gpu_ms"] = graph_time_ms(ours)
    row["ours_host_ms"] = host_time_ms(ours)
    row["path"] = ours.path
    row["two_stage_gpu_ms"] = graph_time_ms(Ours(case, "two_stage"))
    row["floor_ms"] = floor_ms(case, bandwidth)
    row["flashkda_gpu_ms"] = None
    if "fla" in peers:
        call = fla(case)
        row["fla_gpu_ms"] = graph_time_ms(call)
        row["fla_call_ms"] = call_time_ms(call, repeats=20)
    if "flashkda" in peers and lower_bound is not None:
        row["flashkda_gpu_ms"] = graph_time_ms(flashkda(case))
    if "cudnn" in peers and lower_bound is not None:
        row["cudnn_gpu_ms"] = graph_time_ms(cudnn(case))
        # it cuts a sequence where all channels of a head decay by e^-16 within a few chunks of
        # 16 tokens; here every token decays by nearly e^LOWER_BOUND
        assert case.dt_bias is not None
        case = dataclasses.replace(case, dt_bias=torch.full_like(case.dt_bias, 4.0))
        row["ours_forgetting_gpu_ms"] = graph_time_ms(Ours(case))
        row["cudnn_forgetting_gpu_ms"] = graph_time_ms(cudnn(case))
    return row


def measure_growth(heads: list[int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for h, lens in itertools.product(heads, GROWTH):
        row = {"H": h, "sequences": len(lens), "tokens": sum(lens), "longest": max(lens)}
        ours = Ours(draw(lens, h, "init", None, seed=7))
        rows.append(row | {"seq_lens": lens, "ours_gpu_ms": graph_time_ms(ours)})
        print(row, f"{1e3 * rows[-1]['ours_gpu_ms']:.1f} us", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--flashkda-library", type=Path, help="vLLM's _flashkda_C.abi3.so")
    parser.add_argument("--heads", default="32,16,8,4")
    parser.add_argument(
        "--growth", action="store_true", help="time by length and sequences instead"
    )
    args = parser.parse_args()
    if args.growth:
        rows = measure_growth([32, 4])
        write_record(args.output, environment() | {"rows": rows})
        return

    peers = {name for name in ("fla", "cudnn") if importlib.util.find_spec(name)}
    compile_side_by_side()
    if args.flashkda_library:
        torch.ops.load_library(str(args.flashkda_library))
        peers.add("flashkda")
    accuracy: dict[str, dict[str, list[float]]] = {}
    left_out: dict[str, str] = {}
    for gate, bound in (("unbounded", None), ("bounded", -5.0)):
        accuracy[f"ours {gate}"] = check_accuracy(Ours, bound)
        for name in [name for name in PEERS if name in peers]:
            if bound is None and name in BOUNDED_ALONE:
                continue
            try:
                accuracy[f"{name} {gate}"] = check_accuracy(PEERS[name], bound)
            except Exception as reason:  # a peer that does not run here ends no other's times
                left_out[name] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
                peers.remove(name)
                print(f"{name} is left out: {left_out[name]}", flush=True)
    for name, errors in accuracy.items():
        print(name, {r: [f"{e:.1e}" for e in pair] for r, pair in errors.items()}, flush=True)
    ours = [e for gate in ("unbounded", "bounded") for e in accuracy[f"ours {gate}"].values()]
    if not all(o <= 5e-3 and s <= 4e-3 for o, s in ours):
        sys.exit("accuracy gate failed: no times were taken")

    bandwidth = copy_bandwidth_gbs()
    heads = {int(h) for h in args.heads.split(",")}
    cases: list[tuple[int, list[int], float | None]]
    cases = [(h, lens, None) for h, lens in UNBOUNDED if h in heads]
    cases += [(h, lens, -5.0) for h, lens in BOUNDED if h in heads]
    rows = []
    for h, lens, bound in cases:
        row = measure(h, lens, bound, peers, bandwidth)
        rows.append(row)
        times = {k: f"{v:.3f}" for k, v in row.items() if isinstance(v, float)}
        print(row["gate"], f"H{h}", lens if len(set(lens)) > 1 else f"{len(lens)}x{lens[0]}", times)
        sys.stdout.flush()
        result = environment() | {
            "fla": installed_version("fla-core"),
            "cudnn": installed_version("nvidia-cudnn-frontend"),
            "copy_gbs": bandwidth,
            "accuracy": accuracy,
            "left_out": left_out,
            "rows": rows,
        }
        write_record(args.output, result)


if __name__ == "__main__":
    main()
