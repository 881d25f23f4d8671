"""Verification of drafts from records beside states and beside sglang: accuracy first, then times.

    python benchmarks/bench_kda_verify.py --output benchmarks/results/kda_verify_h200.json

A step goes from the packed projections of the drafted tokens to the gated norm, with bf16 tokens,
fp32 states, K = V = 128 and an unbounded gate. ``records_us`` is ``kda_verify_step`` with records:
one launch, which folds what was accepted of the draft before, 1 to ``drafts`` tokens uniformly.
``commit_us`` is ``kda_commit_`` alone, for an engine that wants its states between steps, and
``alone_us`` the verification then, with nothing to fold. ``states_us`` has a slot of the pool for
each token (vLLM's form), which leaves nothing to commit. ``triton_us`` is the Triton kernel, and
``split_1_us`` and its like the Hopper kernel with so many CTAs of a head, whatever the table says.
Peers include their commits.
``floor_us`` is the time of one state read and one written, of the records that are read and written
and of the tokens, at the copy bandwidth of the same run. Graphs and cold states are as in
``bench_kda_decode``. ``drift`` has errors of 2,000 steps of drafting and accepting.
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
from backend_core.testing.timing import copy_bandwidth_gbs, environment, graph_us
from benchmarks.bench_kda_decode import around, inputs_of, make_layer, selection_of
from benchmarks.kda_paths import only
from benchmarks.peers.kda_decode import DIM
from benchmarks.peers.kda_verify import (
    Drafts,
    VerifyPeer,
    VerifyStep,
    load_sglang_verification,
)
from kda_backend import (
    DraftInputs,
    GateSpec,
    Records,
    StateRef,
    TokenInputs,
    kda_commit_,
    kda_verify_step,
    reference,
)
from kda_backend.selection import KdaSelection, KdaShape
from kda_backend.testing.record_checks import run_records
from kda_backend.testing.regimes import gate_parameters

BATCHES, DRAFTS, HEADS = (1, 16, 64, 256), (2, 4, 8), (32, 8)
STEPS = 2000
DRIFT = {"weak": 2e-5, "random": 2e-5, "init": 2e-5, "long": 1e-4}
"""The largest error of a state after so many steps, by gate regime; ``long`` multiplies that of
fp32's softplus by up to 201."""
Row = dict[str, Any]


def make_drafts(sequences: int, heads: int, tokens: int) -> Drafts:
    """Inputs on the GPU, with a slot for each token of which records use the first."""
    layer = make_layer(sequences * tokens, heads)
    layer.windows = torch.zeros(
        len(layer.states), tokens + 2, layer.qkv.shape[1], dtype=torch.bfloat16, device="cuda"
    )
    slots = layer.indices.view(-1, sequences, tokens)[:, :, 0].contiguous()
    rng = torch.Generator("cuda").manual_seed(7)
    accepted = torch.randint(1, tokens + 1, (sequences,), generator=rng, device="cuda")
    return Drafts(layer, tokens, slots, accepted.int())


def records_of(x: Drafts) -> Records:
    """Memory of records, by slot, with numbers that keep states finite."""
    sizes: dict[str, Any] = {"heads": x.layer.heads, "key_dim": DIM, "value_dim": DIM}
    rows, device = (len(x.layer.states),), x.slots.device
    records = Records.empty(rows, x.tokens, **sizes, dtype=torch.bfloat16, device=device)
    records.correction.normal_(std=0.1)
    records.key_gate.normal_()
    return records


def from_records(
    x: Drafts, selection: KdaSelection, records: Records, *, folds: bool = True
) -> VerifyStep:
    """Verification with what is held; without ``folds`` nothing is."""
    inputs, out = inputs_of(x.layer), torch.empty_like(x.layer.z)
    conv, norm = around(x.layer, x.layer.windows)
    held = x.accepted if folds else None
    return lambda i: kda_verify_step(
        *inputs,
        StateRef.pool(x.layer.states, x.slots[i]),
        DraftInputs.in_records(records, x.slots[i], held),
        conv=conv,
        norm=norm,
        out=out,
        selection=selection,
    )


def commit_of(x: Drafts, selection: KdaSelection, records: Records) -> VerifyStep:
    """The fold alone."""
    gate = inputs_of(x.layer)[1]

    def step(i: int) -> torch.Tensor:
        state = StateRef.pool(x.layer.states, x.slots[i])
        kda_commit_(gate, state, records, x.slots[i], x.accepted, selection=selection)
        return x.layer.states

    return step


def from_states(x: Drafts, selection: KdaSelection) -> VerifyStep:
    """Verification with a slot of the pool for each token."""
    inputs, out = inputs_of(x.layer), torch.empty_like(x.layer.z)
    conv, norm = around(x.layer, x.layer.windows)
    tables, draft = x.layer.indices.view(len(x.slots), -1, x.tokens), None
    draft = DraftInputs.in_pool(x.accepted)
    return lambda i: kda_verify_step(
        *inputs,
        StateRef.pool(x.layer.states, tables[i]),
        draft,
        conv=conv,
        norm=norm,
        out=out,
        selection=selection,
    )


def time_us(step: VerifyStep, x: Drafts) -> float:
    return graph_us([functools.partial(step, i) for i in range(len(x.slots))], 9)


def floor_us(x: Drafts, bandwidth: float) -> float:
    """One state read and written, records read and written, tokens and outputs."""
    heads, count = x.layer.heads, x.sequences
    states = 2 * count * DIM * DIM * 4
    records = (int(x.accepted.sum()) + count * x.tokens) * DIM * 8
    tokens = count * x.tokens * DIM * 2 * 6  # q, k, v, g, the output's gate and the output
    return heads * (states + records + tokens) / bandwidth / 1e3


@functools.cache
def forced_selections(heads: int) -> dict[str, KdaSelection]:
    """The Triton row of this GPU's table, and each form of the Hopper kernel where it has that."""
    shape, operator = KdaShape(heads, heads, DIM, DIM), "verify_records"
    found = {"triton": only(shape, "fused", operator)}
    if any(row.name == "fused_sm90" for row in selection_of(heads).verify_records.rows):
        for split in (1, 2, 4):
            found[f"split_{split}"] = only(shape, "fused_sm90", operator, split=split)
    return found


def measure(
    heads: int, sequences: int, tokens: int, peers: dict[str, VerifyPeer], gbs: float
) -> Row:
    x, selection = make_drafts(sequences, heads, tokens), selection_of(heads)
    records = records_of(x)
    row: Row = {"H": heads, "batch": sequences, "drafts": tokens}
    row["records_us"] = time_us(from_records(x, selection, records), x)
    for name, forced in forced_selections(heads).items():
        row[f"{name}_us"] = time_us(from_records(x, forced, records), x)
    row["commit_us"] = time_us(commit_of(x, selection, records), x)
    row["alone_us"] = time_us(from_records(x, selection, records, folds=False), x)
    row["states_us"] = time_us(from_states(x, selection), x)
    row["floor_us"] = floor_us(x, gbs)
    times = {name: time_us(make(x), x) for name, make in peers.items()}
    row |= {f"{name}_us": time for name, time in times.items()}
    row["best_peer"] = min(times, key=times.__getitem__) if times else None
    row["best_peer_us"] = min(times.values()) if times else None
    return row


def is_accurate(name: str, make: VerifyPeer) -> bool:
    """Whether a peer's outputs and committed states are those of ours, within bf16's rounding."""
    x = make_drafts(5, 8, 4)
    x.layer.states.mul_(0.1)
    selection, records = selection_of(8), records_of(x)
    states = x.layer.states.clone()
    want = from_records(x, selection, records, folds=False)(0).clone()
    commit_of(x, selection, records)(0)
    committed = x.layer.states[x.slots[0].long()].clone()
    x.layer.states.copy_(states)
    x.layer.windows.zero_()
    try:
        got = make(x)(0)
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{name} is left out: {type(error).__name__}: {error}", flush=True)
        return False
    errors = (
        relative_error(got, want),
        relative_error(x.layer.states[x.slots[0].long()], committed),
    )
    print(f"{name}: relative L2 to ours {errors[0]:.1e}, states {errors[1]:.1e}", flush=True)
    return max(errors) <= 2e-2


def drift(regime: str) -> Row:
    """Errors after many steps of drafting and accepting 0 to 4 tokens, without convolution and
    norm, against the recurrence in float64."""
    tokens, heads = 4, 4
    rng = torch.Generator("cuda").manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda")

    a_log, dt_bias, _ = gate_parameters(regime, normal(1, heads, DIM), rng)
    pool = normal(2, heads, DIM, DIM)
    want, slot = pool[1].double(), torch.ones(1, dtype=torch.int32, device="cuda")
    sizes: dict[str, Any] = {"heads": heads, "key_dim": DIM, "value_dim": DIM}
    records = Records.empty((2,), tokens, **sizes, dtype=torch.bfloat16, device=pool.device)
    counts = torch.randint(0, tokens + 1, (STEPS,), generator=rng, device="cuda").int()
    selection, held = selection_of(heads), torch.zeros(1, dtype=torch.int32, device="cuda")
    draft, worst = DraftInputs.in_records(records, slot, held), 0.0
    for step in range(STEPS):
        q, k, v = (normal(tokens, heads, DIM).bfloat16() for _ in range(3))
        _, _, raw = gate_parameters(regime, normal(tokens, heads, DIM), rng)
        g, beta = raw.bfloat16(), normal(tokens, heads).bfloat16()
        inputs, gate = TokenInputs.of(q, k, v, g, beta), GateSpec.of(a_log, dt_bias, None)
        state = StateRef.pool(pool, slot)
        out = kda_verify_step(inputs, gate, state, draft, selection=selection)
        q, k, v, g, beta = (y.double() for y in (q, k, v, g, beta))
        decay = reference.log_decay(g, a_log.double(), dt_bias.double(), None)
        o, u = reference.record_kda(
            reference.l2norm(q), k, v, decay, beta.sigmoid(), scale=DIM**-0.5, state=want
        )
        if step % 100 == 0 or step == STEPS - 1:
            worst = max(worst, relative_error(out, o))
            error = relative_error(pool[1], want)
        held.copy_(counts[step : step + 1])
        n = int(counts[step])
        want = reference.fold_records(want, u[:n], k[:n], decay[:n])
    return {"regime": regime, "steps": STEPS, "output_error": worst, "state_error": error}


def check() -> list[Row]:
    """Errors of every state dtype and gate, then of many steps; exits if one is too large."""
    device = torch.device("cuda")
    variants: list[dict[str, Any]] = [{}, {"gate": "bounded"}]
    variants += [{"state_dtype": dtype} for dtype in (torch.bfloat16, torch.float16)]
    for path in dict.fromkeys(selection_of(8).verify_records.rows):
        for flags in variants:
            error, allowed = run_records(path, detect_target(), device, **flags)
            print(f"{path.name} {flags}: error {error:.1e} of {allowed:.1e}", flush=True)
            if not error <= allowed:
                sys.exit("no times were taken")
    found = [drift(regime) for regime in DRIFT]
    for row in found:
        print(row, flush=True)
        if not (row["state_error"] <= DRIFT[row["regime"]] and row["output_error"] <= 5e-3):
            sys.exit("no times were taken")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sglang-source", type=Path, help="an unpacked sglang 0.5.23 wheel")
    parser.add_argument("--heads", default=",".join(map(str, HEADS)))
    args = parser.parse_args()
    errors = check()
    peers = load_sglang_verification(args.sglang_source) if args.sglang_source else {}
    peers = {name: make for name, make in peers.items() if is_accurate(name, make)}
    result: dict[str, Any] = environment() | {
        "copy_gbs": copy_bandwidth_gbs(),
        "drift": errors,
        "rows": [],
    }
    sizes = itertools.product([int(h) for h in args.heads.split(",")], BATCHES, DRAFTS)
    for heads, sequences, tokens in sizes:
        row = measure(heads, sequences, tokens, peers, result["copy_gbs"])
        result["rows"].append(row)
        if args.output:
            write_record(args.output, result)
        print(row, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
