"""A KDA layer's decode step beside its peers: accuracy first, then GPU and call time.

    python benchmarks/bench_kda_decode.py --output benchmarks/results/kda_decode_h200.json

A step goes from the packed projections to the gated norm: convolution update, gate, l2norm, beta,
the state in place, output, RMSNorm, with bf16 tokens, K = V = 128 and an unbounded gate. States are
fp32 (``state``), and of some sizes of 32 heads also bf16 and fp16, beside the peers that take
these. A CUDA graph holds several steps, and its time is divided by their number. Each step works on
states that no step touched within the last 150 MB (three times an H200's L2), since in an engine
the other layers and the weights pass through the cache in between. Peers make the launches that
their engines make, and all of these are counted. ``floor_ms`` is the time of reading and writing
the states once at the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.target import detect_target
from backend_core.testing.numerics import relative_error
from backend_core.testing.records import write_record
from backend_core.testing.timing import (
    copy_bandwidth_gbs,
    environment,
    graph_us,
    host_time_ms,
    installed_version,
)
from benchmarks.kda_paths import only
from benchmarks.peers.kda_decode import (
    DIM,
    EPS,
    FLASHINFER_HEADS,
    Layer,
    Peer,
    Step,
    load_fla,
    load_flashinfer,
    load_sglang,
    load_vllm,
)
from kda_backend import (
    ConvInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
    kda_decode_step,
    reference,
)
from kda_backend.selection import KdaSelection, KdaShape, select
from kda_backend.testing.regimes import gate_parameters

BATCHES = (1, 8, 32, 64, 256, 512)
BATCHES_OF_16_BITS = (1, 8, 64, 256)
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LIMITS = {"fp32": (4e-3, 1e-5), "bf16": (6e-3, 5e-3), "fp16": (4e-3, 7e-4)}
"""Of our errors, of outputs and states."""
COLD_BYTES = 150e6
Row = dict[str, Any]


def make_layer(
    rows: int, heads: int, seed: int = 1, calls: int | None = None, state: str = "fp32"
) -> Layer:
    """Inputs on the GPU in the gate regime ``init``."""
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    dtype = STATES[state]
    if calls is None:
        calls = max(4, min(600, round(COLD_BYTES / (rows * heads * DIM * DIM * dtype.itemsize))))
    a_log, dt_bias, g = gate_parameters("init", normal(rows, heads, DIM), generator)
    channels, slots = 3 * heads * DIM, calls * rows + 1
    order = torch.randperm(slots - 1, generator=generator, device="cuda") + 1
    states = torch.empty(slots, heads, DIM, DIM, dtype=dtype, device="cuda")
    states.normal_(generator=generator)
    return Layer(
        qkv=normal(rows, channels).bfloat16(),
        g=g.bfloat16(),
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


def selection_of(
    heads: int, path: str | None = None, *, batch_invariant: bool = False
) -> KdaSelection:
    """The table's selection, or the last row of one path."""
    shape = KdaShape(heads, heads, DIM, DIM, batch_invariant=batch_invariant)
    return select(detect_target(), shape) if path is None else only(shape, path, "decode_step")


def inputs_of(x: Layer) -> tuple[TokenInputs, GateSpec]:
    """The tokens and the gate of a layer's call."""
    keys = x.heads * DIM
    q, k, v = (y.unflatten(1, (x.heads, DIM)) for y in x.qkv.split([keys, keys, keys], 1))
    return TokenInputs.of(q, k, v, x.g, x.beta), GateSpec.of(x.a_log, x.dt_bias, None)


def around(x: Layer, windows: torch.Tensor) -> tuple[ConvInputs, NormInputs]:
    """Convolution and norm."""
    conv = ConvInputs(windows.transpose(1, 2), x.conv_weight)
    return conv, NormInputs(x.norm_weight, x.z, EPS)


def ours(x: Layer, selection: KdaSelection | None = None) -> Step:
    """Our step."""
    inputs, out = inputs_of(x), torch.empty_like(x.z)
    conv, norm = around(x, x.windows)
    selection = selection or selection_of(x.heads)
    # pdl_prefetch_safe: the call before has other slots
    return lambda i: kda_decode_step(
        *inputs,
        StateRef.pool(x.states, x.indices[i]),
        conv=conv,
        norm=norm,
        out=out,
        selection=selection,
        pdl_prefetch_safe=True,
    )


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


def check_accuracy(make: Peer, *, in_place: bool = True, state: str = "fp32") -> list[float | None]:
    """Relative L2 of output and state; FLA's step hands no state on."""
    x = make_layer(9, 8, seed=3, calls=1, state=state)
    want_o, want_states = expected(x)
    got = make(x)(0)
    error = relative_error(x.states[x.indices[0].long()], want_states) if in_place else None
    return [relative_error(got, want_o), error]


def gpu_ms(step: Step, x: Layer) -> float:
    """Time of one call, by a graph of all calls."""
    return graph_us([functools.partial(step, i) for i in range(len(x.indices))], 9) / 1e3


def measure(
    heads: int, batch: int, peers: dict[str, Peer], bandwidth: float, state: str = "fp32"
) -> Row:
    """One point; ours is the table's choice, beside each of our kernels."""
    x = make_layer(batch, heads, state=state)
    step = ours(x)
    row: Row = {"H": heads, "batch": batch, "state": state, "ours_gpu_ms": gpu_ms(step, x)}
    row["ours_host_ms"] = host_time_ms(lambda: step(0))
    row["triton_gpu_ms"] = gpu_ms(ours(x, selection_of(heads, "fused")), x)
    if has_hopper_kernel():
        row["sm90_gpu_ms"] = gpu_ms(ours(x, selection_of(heads, "fused_sm90")), x)
    times = {}
    for name, make in peers.items():
        if is_left_out(name, heads, batch):
            continue
        peer = make(x)
        times[name] = row[f"{name}_gpu_ms"] = gpu_ms(peer, x)
    if times:
        row["best_peer"] = min(times, key=times.__getitem__)
        row["best_peer_gpu_ms"] = times[row["best_peer"]]
    size = heads * DIM * DIM * x.states.element_size()
    row["floor_ms"] = 2 * batch * size / bandwidth / 1e6
    return row


def is_left_out(peer: str, heads: int, batch: int) -> bool:
    """FLA's kernel reads beyond its tensors there, which ends the process; FlashInfer's is compiled
    for some numbers of heads."""
    if peer == "flashinfer":
        return heads not in FLASHINFER_HEADS
    return peer == "fla" and heads * batch >= 32 * 512


def has_hopper_kernel() -> bool:
    return any(path.name == "fused_sm90" for path in selection_of(4).decode_step.rows)


def accurate(
    name: str, make: Peer, *, in_place: bool = True, strict: bool = False, state: str = "fp32"
) -> bool:
    """Whether an implementation may be timed; what cannot run or is wrong is said."""
    limit_o, limit_s = LIMITS[state] if strict else (2e-2, 2e-2)
    try:
        error_o, error_s = check_accuracy(make, in_place=in_place, state=state)
    except Exception as error:
        print(f"{name} is left out of {state}: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"{name}, {state}: relative L2 to float64 {error_o:.1e}, state {error_s}", flush=True)
    assert error_o is not None
    return error_o <= limit_o and (error_s is None or error_s <= limit_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--vllm-source", type=Path, help="an unpacked vllm 0.33 wheel")
    parser.add_argument("--sglang-source", type=Path, help="an unpacked sglang 0.5.23 wheel")
    parser.add_argument("--heads", default="32,4,16,8")
    args = parser.parse_args()
    all_heads = [int(h) for h in args.heads.split(",")]
    loaded = {
        "fla": load_fla(),  # as it is installed
        "vllm": load_vllm(args.vllm_source) if args.vllm_source else None,
        "sglang": load_sglang(args.sglang_source) if args.sglang_source else None,
        "flashinfer": load_flashinfer(),
    }
    peers = {name: make for name, make in loaded.items() if make is not None}
    triton_step: Peer = lambda x: ours(x, selection_of(x.heads, "fused"))  # noqa: E731
    mine = {"ours": ours, "triton": triton_step}
    for state, (name, make) in itertools.product(STATES, mine.items()):
        if not accurate(name, make, strict=True, state=state):
            sys.exit("no times were taken")
    # FLA's copies of states are none of a pool's
    of_16_bits = {
        state: {
            name: make
            for name, make in peers.items()
            if name != "fla" and accurate(name, make, state=state)
        }
        for state in ("bf16", "fp16")
    }
    peers = {
        name: make for name, make in peers.items() if accurate(name, make, in_place=name != "fla")
    }
    result: dict[str, Any] = environment() | {
        "fla": installed_version("fla-core"),
        "flashinfer": installed_version("flashinfer-python"),
        "copy_gbs": copy_bandwidth_gbs(),
        "rows": [],
    }
    sizes = [(heads, batch, "fp32") for heads, batch in itertools.product(all_heads, BATCHES)]
    sizes += [(32, batch, state) for state in of_16_bits for batch in BATCHES_OF_16_BITS]
    for heads, batch, state in sizes:
        chosen = peers if state == "fp32" else of_16_bits[state]
        row = measure(heads, batch, chosen, result["copy_gbs"], state)
        result["rows"].append(row)
        write(args.output, result)
        print(row, flush=True)
        torch.cuda.empty_cache()


def write(output: Path | None, result: dict[str, Any]) -> None:
    if output:
        write_record(output, result)


if __name__ == "__main__":
    main()
