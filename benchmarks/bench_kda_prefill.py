"""KDA prefill beside its peers: accuracy first, then GPU and call time.

    python benchmarks/bench_kda_prefill.py --output benchmarks/results/kda_prefill_h200.json

Inputs as an engine passes them: packed sequences with cu_seqlens, raw gate and raw beta in bf16,
l2norm in the kernel, K = V = 128, a non-zero fp32 state. Ours works in place on a state pool with
the step's metadata built and the path selected; a peer gets what its own call asks for. Peers that
are not installed are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.tables.select import PathSelection, load_table
from backend_core.target import detect_target
from backend_core.testing.timing import (
    call_time_ms,
    copy_bandwidth_gbs,
    environment,
    graph_time_ms,
    host_time_ms,
    installed_version,
)
from benchmarks.regimes import REGIMES, collinear, gate_parameters
from kda_backend import chunk_kda, reference
from kda_backend.scratch import Workspace
from kda_backend.selection import KdaPlan, KdaShape, select
from kda_backend.step_plan import build_metadata

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
# one sequence, equal ones, a long one in front of short ones and behind them
GROWTH = [
    *([tokens] for tokens in (8192, 16384, 32768, 65536, 131072)),
    *([8192 // n] * n for n in (8, 64, 256)),
    [32768] + [256] * 31,
    [256] * 31 + [32768],
]


@dataclass
class Case:
    """One batch: tokens on the GPU, ``state [N, H, V, K]`` fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    cu_seqlens: torch.Tensor
    state: torch.Tensor
    lower_bound: float | None


def make_case(
    lens: list[int],
    heads: int,
    regime: str,
    lower_bound: float | None,
    seed: int,
    device: str = "cuda",
) -> Case:
    """Fresh random inputs; the gate regimes are described in docs/kda.md."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    tokens = sum(lens)
    q, k, v, g = (normal(1, tokens, heads, DIM) for _ in range(4))
    beta = normal(1, tokens, heads)
    a_log, dt_bias, gate_scale = gate_parameters(regime, heads, DIM, normal, uniform)
    dt_bias, g = dt_bias.flatten(), g * gate_scale
    if regime == "collinear":
        k, beta = collinear(k, beta)
    offsets = [0]
    for length in lens:
        offsets.append(offsets[-1] + length)
    return Case(
        *(x.bfloat16() for x in (q, k, v, g, beta)),
        a_log,
        dt_bias,
        torch.tensor(offsets, dtype=torch.int32, device=device),
        normal(len(lens), heads, DIM, DIM) * 0.3,
        lower_bound,
    )


def expected(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and final state in float64."""
    q, k, v, g, beta = (x[0].double() for x in (case.q, case.k, case.v, case.g, case.beta))
    o, state, _ = reference.chunk_kda(
        reference.l2norm(q),
        reference.l2norm(k),
        v,
        reference.log_decay(g, case.a_log, case.dt_bias, case.lower_bound),
        beta.sigmoid(),
        scale=DIM**-0.5,
        state=case.state.double(),
        cu_seqlens=case.cu_seqlens.tolist(),
    )
    return o[None], state


Call = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def only(plan: KdaPlan, path: str) -> KdaPlan:
    """The plan with the largest row of one named path for every grid."""
    rows = load_table("kda", plan.target).rows
    row = [row for row in rows if row.phase == "prefill" and row.name == path][-1]
    return dataclasses.replace(plan, prefill=PathSelection("prefill", (row,), (), ()))


class Ours:
    """The call of an engine's layer: all buffers exist, the metadata is the step's."""

    def __init__(self, case: Case, path: str | None = None) -> None:
        tokens, heads = case.q.shape[1:3]
        shape = KdaShape(heads, heads, DIM, DIM, case.lower_bound is not None)
        target = detect_target()
        self.num_sms = target.num_sms
        self.plan = select(target, shape)
        if path is not None:
            self.plan = only(self.plan, path)
        self.meta = build_metadata(case.cu_seqlens, tokens, cu_seqlens_cpu=case.cu_seqlens.cpu())
        self.path = self.plan.prefill.lookup(self.meta.num_chunks * heads).name
        sequences = len(case.state)
        self.pool = torch.full((sequences + 2, heads, DIM, DIM), math.nan, device="cuda")
        self.indices = torch.arange(sequences, dtype=torch.int32, device="cuda") + 1
        self.pool[1:-1] = case.state
        self.out = torch.full_like(case.v, math.nan)
        self.workspace = Workspace(case.q.device)
        self.case = case

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        chunk_kda(
            case.q,
            case.k,
            case.v,
            case.g,
            case.beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=case.lower_bound is not None,
            lower_bound=case.lower_bound,
            A_log=case.a_log,
            dt_bias=case.dt_bias,
            state_pool=self.pool,
            state_indices=self.indices,
            out=self.out,
            metadata=self.meta,
            workspace=self.workspace,
            plan=self.plan,
        )
        return self.out, self.pool[1:-1]


def fla(case: Case) -> Call:
    from fla.ops.kda import chunk_kda as fla_chunk_kda

    cu_seqlens = case.cu_seqlens.long()  # one tensor: FLA keeps its chunk table by identity

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return fla_chunk_kda(
                case.q,
                case.k,
                case.v,
                case.g,
                case.beta,
                initial_state=case.state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                safe_gate=case.lower_bound is not None,
                lower_bound=case.lower_bound,
                A_log=case.a_log,
                dt_bias=case.dt_bias,
                state_v_first=True,
                cu_seqlens=cu_seqlens,
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
    dt_bias = case.dt_bias.view(heads, DIM)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        ops.fwd(
            case.q, case.k, case.v, case.g, case.beta, DIM**-0.5, out, workspace, a_log, dt_bias,
            case.lower_bound, case.state, final, cu_seqlens,
        )  # fmt: skip
        return out, final

    return call


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_accuracy(
    make: Callable[[Case], Call], lower_bound: float | None
) -> dict[str, list[float]]:
    """Relative L2 of output and final state in each gate regime."""
    errors = {}
    for seed, regime in enumerate(REGIMES):
        case = make_case([257, 512, 63], 4, regime, lower_bound, seed)
        want = expected(case)
        got = make(case)()
        errors[regime] = [relative_error(g, w) for g, w in zip(got, want, strict=True)]
    return errors


def floor_ms(case: Case, bandwidth_gbs: float) -> float:
    """Every input read once, every output written once, at the copy bandwidth of this run."""
    tokens = (case.q, case.k, case.v, case.g, case.beta, case.v)
    return (sum(x.nbytes for x in tokens) + 2 * case.state.nbytes) / bandwidth_gbs / 1e6


def measure(
    heads: int, lens: list[int], lower_bound: float | None, peers: set[str], bandwidth: float
) -> dict[str, object]:
    row: dict[str, object] = {
        "H": heads,
        "seq_lens": lens,
        "gate": "unbounded" if lower_bound is None else "bounded",
    }
    for regime in ("init", "random"):
        case = make_case(lens, heads, regime, lower_bound, seed=7)
        ours = Ours(case)
        suffix = "" if regime == "init" else f"_{regime}"
        row[f"ours_gpu_ms{suffix}"] = graph_time_ms(ours)
        if regime == "init":
            row["ours_call_ms"] = call_time_ms(ours)
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
    return row


def measure_growth(heads: list[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for h, lens in itertools.product(heads, GROWTH):
        row = {"H": h, "sequences": len(lens), "tokens": sum(lens), "longest": max(lens)}
        ours = Ours(make_case(lens, h, "init", None, seed=7))
        rows.append(row | {"seq_lens": lens, "ours_gpu_ms": graph_time_ms(ours)})
        print(row, f"{1e3 * rows[-1]['ours_gpu_ms']:.1f} us", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--flashkda-library", type=Path, help="vLLM's _flashkda_C.abi3.so")
    parser.add_argument("--gates", default="unbounded,bounded")
    parser.add_argument("--heads", default="32,16,8,4")
    parser.add_argument(
        "--growth", action="store_true", help="time by length and sequences instead"
    )
    args = parser.parse_args()
    if args.growth:
        rows = measure_growth([32, 4])
        args.output.write_text(json.dumps(environment() | {"rows": rows}, indent=1) + "\n")
        return

    peers = {"fla"} if importlib.util.find_spec("fla") else set()
    if args.flashkda_library:
        torch.ops.load_library(str(args.flashkda_library))
        peers.add("flashkda")
    accuracy: dict[str, object] = {}
    for gate, bound in (("unbounded", None), ("bounded", -5.0)):
        accuracy[f"ours {gate}"] = check_accuracy(Ours, bound)
        if "fla" in peers:
            accuracy[f"fla {gate}"] = check_accuracy(fla, bound)
        if "flashkda" in peers and bound is not None:
            accuracy[f"flashkda {gate}"] = check_accuracy(flashkda, bound)
    for name, errors in accuracy.items():
        print(name, {r: [f"{e:.1e}" for e in pair] for r, pair in errors.items()}, flush=True)
    ours = [e for gate in ("unbounded", "bounded") for e in accuracy[f"ours {gate}"].values()]
    if not all(o <= 5e-3 and s <= 4e-3 for o, s in ours):
        sys.exit("accuracy gate failed: no times were taken")

    bandwidth = copy_bandwidth_gbs()
    heads = {int(h) for h in args.heads.split(",")}
    cases = [(h, lens, None) for h, lens in UNBOUNDED if "unbounded" in args.gates and h in heads]
    cases += [
        (h, lens, -5.0) for h, lens in BOUNDED if "bounded" in args.gates.split(",") and h in heads
    ]
    rows = []
    for h, lens, bound in cases:
        row = measure(h, lens, bound, peers, bandwidth)
        rows.append(row)
        times = {k: f"{v:.3f}" for k, v in row.items() if isinstance(v, float)}
        print(row["gate"], f"H{h}", lens if len(set(lens)) > 1 else f"{len(lens)}x{lens[0]}", times)
        sys.stdout.flush()
        result = environment() | {
            "fla": installed_version("fla-core"),
            "copy_gbs": bandwidth,
            "accuracy": accuracy,
            "rows": rows,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    for gate in ("unbounded", "bounded"):
        ratios = [
            row["fla_gpu_ms"] / row["ours_gpu_ms"]
            for row in rows
            if row["gate"] == gate and "fla_gpu_ms" in row
        ]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{gate}: {mean:.2f}x FLA (geometric mean), least {min(ratios):.2f}x")


if __name__ == "__main__":
    main()
