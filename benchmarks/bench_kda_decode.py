"""A KDA layer's decode step beside its peers: accuracy first, then GPU and call time.

    python benchmarks/bench_kda_decode.py --output benchmarks/results/kda_decode_h200.json

From the packed projections to the gated norm: convolution update, gate, l2norm, beta, the state in
place, output, RMSNorm; bf16 tokens, fp32 state, K = V = 128, unbounded gate. A CUDA graph holds
several steps, each on states that no step touched within 150 MB (three times an H200's L2), as the
other layers and the weights see to in an engine; its time is divided by their number. Peers make
the launches that their engines make; all are counted. ``floor_ms`` is the state read and written
once at the copy bandwidth of the same run, ``empty_ms`` a kernel without work in the same graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.path_table import PathSelection, load_table
from backend_core.target import detect_target
from benchmarks.kda_decode_peers import (
    DIM,
    EPS,
    Layer,
    Peer,
    Step,
    load_fla,
    load_sglang,
    load_vllm,
)
from benchmarks.regimes import gate_parameters
from benchmarks.timing import (
    call_time_ms,
    copy_bandwidth_gbs,
    environment,
    graph_time_ms,
    host_time_ms,
    installed_version,
)
from kda_backend import kda_decode_step, kda_verify_step, reference
from kda_backend.paths import KdaPlan, KdaShape, select

BATCHES = (1, 8, 32, 64, 256, 512)
COLD_BYTES = 150e6
Space = dict[str, tuple[int | str, ...]]
# (path, whether convolution and norm take part, parameters to try)
SWEEPS: dict[str, tuple[str, bool, Space]] = {
    "sm90": ("recurrent_sm90", True, {"step_split": (1, 2, 4, 8), "step_overlaps": (True, False)}),
    "triton": (
        "recurrent",
        True,
        {
            "step_num_warps": (4, 8),
            "step_k_inner": (16, 32, 64),
            "step_eviction": ("", "evict_first"),
        },
    ),
    "bare": (
        "recurrent",
        False,
        {
            "step_split_num_warps": (1, 2, 4),
            "step_block_v": (8, 16, 32, 64, 128),
            "step_k_inner": (32, 64, 128),
        },
    ),
}


def make_layer(rows: int, heads: int, seed: int = 1, calls: int | None = None) -> Layer:
    """Inputs on the GPU in the gate regime of HF's initialisation."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, device="cuda")

    if calls is None:
        calls = max(4, min(600, round(COLD_BYTES / (rows * heads * DIM * DIM * 4))))
    a_log, dt_bias, gate_scale = gate_parameters("init", heads, DIM, normal, uniform)
    channels, slots = 3 * heads * DIM, calls * rows + 1
    order = torch.randperm(slots - 1, generator=generator, device="cuda") + 1
    states = torch.empty(slots, heads, DIM, DIM, device="cuda").normal_(generator=generator)
    return Layer(
        qkv=normal(rows, channels).bfloat16(),
        g=(normal(rows, heads, DIM) * gate_scale).bfloat16(),
        beta=normal(rows, heads).bfloat16(),
        z=normal(rows, heads, DIM).bfloat16(),
        a_log=a_log,
        dt_bias=dt_bias,
        conv_weight=normal(channels, 4) * 0.5,
        norm_weight=1 + 0.1 * normal(DIM),
        states=states,
        windows=normal(slots, 3, channels).bfloat16(),
        indices=order.int().view(calls, rows),
    )


def plan_of(heads: int, path: str | None = None, **params: int | str) -> KdaPlan:
    """The table's plan, or the largest row of one path with other parameters."""
    plan = select(detect_target(), KdaShape(heads, heads, DIM, DIM))
    if path is None:
        return plan
    rows = [row for row in load_table("kda", plan.target).rows if row.name == path]
    row = dataclasses.replace(rows[-1], params=dict(rows[-1].params) | params)
    return dataclasses.replace(plan, decode=PathSelection("decode", (row,), (), ()))


def ours(x: Layer, plan: KdaPlan | None = None, *, fused: bool = True) -> Step:
    """Our step; bare of convolution and norm without ``fused``."""
    plan = plan or plan_of(x.heads)
    keys = x.heads * DIM
    q, k, v = (y.unflatten(1, (x.heads, DIM)) for y in x.qkv.split([keys, keys, keys], 1))
    extra: dict[str, Any] = {}
    if fused:
        extra = {
            "conv_state": x.windows.transpose(1, 2),
            "conv_weight": x.conv_weight,
            "norm_weight": x.norm_weight,
            "norm_gate": x.z,
            "norm_eps": EPS,
        }
    out = torch.empty_like(x.z)

    def step(i: int) -> torch.Tensor:
        return kda_decode_step(
            q,
            k,
            v,
            x.g,
            x.beta,
            x.states,
            x.indices[i],
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=x.a_log,
            dt_bias=x.dt_bias,
            out=out,
            plan=plan,
            **extra,
        )

    return step


def expected(x: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and states of call 0 in float64."""
    slots = x.indices[0].long()
    columns = torch.cat([x.windows[slots].mT.double(), x.qkv.double().unsqueeze(2)], 2)
    mixed = (columns * x.conv_weight.double()).sum(2)
    mixed = (mixed * mixed.sigmoid()).unflatten(1, (3, x.heads, DIM))
    o, states = reference.recurrent_kda(
        reference.l2norm(mixed[:, 0]),
        reference.l2norm(mixed[:, 1]),
        mixed[:, 2],
        reference.log_decay(x.g.double(), x.a_log, x.dt_bias, None),
        x.beta.double().sigmoid(),
        scale=DIM**-0.5,
        state=x.states[slots].double(),
        cu_seqlens=list(range(len(slots) + 1)),
    )
    o = o * torch.rsqrt(o.square().mean(2, keepdim=True) + EPS) * x.norm_weight.double()
    return o * x.z.double().sigmoid(), states


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check_accuracy(make: Peer, *, in_place: bool = True) -> list[float | None]:
    """Relative L2 of output and state; FLA's step hands no state on."""
    x = make_layer(9, 4, seed=3, calls=1)
    want_o, want_states = expected(x)
    got = make(x)(0)
    error = relative_error(x.states[x.indices[0].long()], want_states) if in_place else None
    return [relative_error(got, want_o), error]


def all_calls(step: Step, x: Layer) -> Callable[[], None]:
    def run() -> None:
        for i in range(len(x.indices)):
            step(i)

    return run


def gpu_ms(step: Step, x: Layer) -> float:
    """Time of one call in a graph of all calls."""
    return graph_time_ms(all_calls(step, x), replays=15, calls=1) / len(x.indices)


@triton.jit
def empty_kernel(x_ptr):
    pass


def empty_ms(x: Layer) -> float:
    def step(i: int) -> torch.Tensor:
        empty_kernel[(1,)](x.beta)
        return x.beta

    return gpu_ms(step, x)


def verify_ms(rows: int, heads: int, tokens: int) -> float:
    """A draft of ``tokens`` for each of ``rows`` sequences, a slot a token (vLLM's form)."""
    x = make_layer(rows * tokens, heads)
    calls = len(x.indices)
    windows = torch.zeros(len(x.states), tokens + 2, x.qkv.shape[1], device="cuda").bfloat16()
    accepted = torch.ones(rows, dtype=torch.int32, device="cuda")
    plan, keys = plan_of(heads), heads * DIM
    q, k, v = (y.unflatten(1, (heads, DIM)) for y in x.qkv.split([keys, keys, keys], 1))
    tables = x.indices.view(calls, rows, tokens)

    def step(i: int) -> torch.Tensor:
        return kda_verify_step(
            q,
            k,
            v,
            x.g,
            x.beta,
            x.states,
            tables[i],
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=x.a_log,
            dt_bias=x.dt_bias,
            conv_state=windows.transpose(1, 2),
            conv_weight=x.conv_weight,
            norm_weight=x.norm_weight,
            norm_gate=x.z,
            out=x.z.new_empty(x.z.shape),
            plan=plan,
        )

    return gpu_ms(step, x)


def sweep(name: str, all_heads: list[int]) -> None:
    """The best parameters of each point, best first."""
    path, fused, space = SWEEPS[name]
    variants = [
        dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())
    ]
    for heads, rows in itertools.product(all_heads, BATCHES):
        x = make_layer(rows, heads)
        times = []
        for params in variants:
            step = ours(x, plan_of(heads, path, **params), fused=fused)
            times.append((gpu_ms(step, x) * 1e3, tuple(params.values())))
        times.sort()
        print(f"H{heads} N{rows}:", *(f"{t:.2f} {p}" for t, p in times[:6]), sep="  ", flush=True)
        del x, step
        torch.cuda.empty_cache()


def measure(
    heads: int, rows: int, peers: dict[str, Peer], bandwidth: float
) -> dict[str, float | int | str | None]:
    x = make_layer(rows, heads)
    step = ours(x)
    row: dict[str, float | int | str | None] = {"H": heads, "batch": rows}
    row["ours_gpu_ms"] = gpu_ms(step, x)
    row["ours_call_ms"] = call_time_ms(lambda: step(0))
    row["ours_host_ms"] = host_time_ms(lambda: step(0))
    row["triton_gpu_ms"] = gpu_ms(ours(x, plan_of(heads, "recurrent")), x)
    row["bare_gpu_ms"] = gpu_ms(ours(x, fused=False), x)
    times = {}
    for name, make in peers.items():
        if name == "fla" and heads * rows >= 32 * 512:
            continue  # its kernel faults there
        peer = make(x)
        times[name] = row[f"{name}_gpu_ms"] = gpu_ms(peer, x)
        row[f"{name}_call_ms"] = call_time_ms(lambda peer=peer: peer(0), repeats=20)
        del peer
    best = min(times, key=times.__getitem__, default=None)
    row["best_peer"] = best
    row["best_peer_gpu_ms"] = None if best is None else times[best]
    row["floor_ms"] = 2 * rows * heads * DIM * DIM * 4 / bandwidth / 1e6
    row["empty_ms"] = empty_ms(x)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--vllm-source", type=Path, help="an unpacked vllm 0.33 wheel")
    parser.add_argument("--sglang-source", type=Path, help="an unpacked sglang 0.5.23 wheel")
    parser.add_argument("--peers", default="fla,vllm,sglang")
    parser.add_argument("--heads", default="4,8,16,32")
    parser.add_argument("--sweep", choices=tuple(SWEEPS), help="try parameters and stop")
    args = parser.parse_args()

    wanted, all_heads = args.peers.split(","), [int(h) for h in args.heads.split(",")]
    peers: dict[str, Peer | None] = {"fla": load_fla() if "fla" in wanted else None}
    if args.vllm_source and "vllm" in wanted:
        peers["vllm"] = load_vllm(args.vllm_source)
    if args.sglang_source and "sglang" in wanted:
        peers["sglang"] = load_sglang(args.sglang_source)
    loaded = {name: make for name, make in peers.items() if make is not None}
    accuracy = {
        "ours": check_accuracy(ours),
        "ours, triton": check_accuracy(lambda x: ours(x, plan_of(x.heads, "recurrent"))),
    }
    accuracy |= {
        name: check_accuracy(make, in_place=name != "fla") for name, make in loaded.items()
    }
    print("relative L2 to float64, output and state:", accuracy, flush=True)
    for name, (error_o, error_s) in accuracy.items():
        limit_o, limit_s = (4e-3, 1e-5) if name.startswith("ours") else (2e-2, 2e-2)
        if not (error_o <= limit_o and (error_s is None or error_s <= limit_s)):
            sys.exit(f"accuracy gate failed for {name}: no times were taken")
    if args.sweep:
        sweep(args.sweep, all_heads)
        return
    result: dict[str, Any] = environment() | {
        "fla": installed_version("fla-core"),
        "copy_gbs": copy_bandwidth_gbs(),
        "accuracy": accuracy,
        "rows": [],
        "verify": [],
    }
    print(f"copy {result['copy_gbs']:.0f} GB/s; times in us; ratio to the best of the peers")
    print("   H    N    ours triton   bare   call  host  floor empty  ratio", *loaded)
    for heads, batch in itertools.product(all_heads, BATCHES):
        row = measure(heads, batch, loaded, result["copy_gbs"])
        torch.cuda.empty_cache()
        result["rows"].append(row)
        print(table_line(row, list(loaded)), flush=True)
        write(args.output, result)
    for batch, tokens in itertools.product((1, 16, 64), (2, 4, 8)):
        time = verify_ms(batch, 32, tokens)
        result["verify"].append({"H": 32, "batch": batch, "tokens": tokens, "ours_gpu_ms": time})
    write(args.output, result)
    verify = result["verify"]
    print("verify", [(v["batch"], v["tokens"], round(v["ours_gpu_ms"] * 1e3, 1)) for v in verify])


def table_line(row: dict[str, float | int | str | None], peers: list[str]) -> str:
    us = {key: value * 1e3 for key, value in row.items() if isinstance(value, float)}
    ratio = us.get("best_peer_gpu_ms", 0.0) / us["ours_gpu_ms"]
    others = " ".join(f"{us.get(f'{name}_gpu_ms', float('nan')):.1f}" for name in peers)
    return (
        f"{row['H']:4} {row['batch']:4} {us['ours_gpu_ms']:7.2f} {us['triton_gpu_ms']:6.2f}"
        f" {us['bare_gpu_ms']:6.2f} {us['ours_call_ms']:6.1f} {us['ours_host_ms']:5.1f}"
        f" {us['floor_ms']:6.1f} {us['empty_ms']:5.2f} {ratio:5.2f}x {others}"
    )


def write(output: Path | None, result: dict[str, Any]) -> None:
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
