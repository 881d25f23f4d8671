"""Records in place of states: kda_verify_step and kda_commit_ against float64 and the states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton._C.libtriton import interpreter

from backend_core.testing.numerics import poisoned
from kda_backend import (
    DraftInputs,
    GateSpec,
    Records,
    StateRef,
    kda_commit_,
    kda_verify_step,
    reference,
)
from kda_backend.contract.calls import CommitCall, LayersApart
from kda_backend.testing.cases import make_case
from kda_backend.testing.records import KEY_ERROR, RecordedDrafts
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.testing.steps import make_step
from kda_backend.testing.tolerances import ONE_HEAD, STEP_TOLERANCES
from tests.kda.cases import ON_GPU, Backend, assert_close, assert_same_bits

COUNTS = ((2, 0, 1), (3, 0, 0), (1, 0, 1))
"""Accepted tokens of three drafts, step by step; the second has no tokens."""


def drafts(
    backend: Backend, seed: int, lengths: tuple[int, ...] = (3, 0, 1), steps: int = 3, **model: Any
) -> RecordedDrafts:
    options = {k: model.pop(k) for k in ("state_dtype", "layout", "rolls") if k in model}
    if backend.name == "kernels_128":
        model = {"key_dim": 128, "value_dim": 128} | model
    case = make_step(seed, steps * sum(lengths), device=backend.device, **({"heads": 1} | model))
    return RecordedDrafts(case, lengths, seed=seed + 1, **options)


def verify(
    backend: Backend,
    x: RecordedDrafts,
    step: int,
    held: torch.Tensor | None,
    given: tuple[StateRef, DraftInputs] | None = None,
    **options: Any,
) -> torch.Tensor:
    """The verification of a step; ``options`` go to the pool."""
    state, draft = given or (x.state(**options), x.draft(held))
    part = x.case.part(slice(x.tokens(step).start, x.tokens(step).stop))
    return kda_verify_step(
        *part.inputs,
        state,
        draft,
        selection=backend.selection(x.case.shape),
        **part.stages(x.pools.windows),
    )


def commit(
    backend: Backend, x: RecordedDrafts, counts: Any, state: StateRef | None = None, **options: Any
) -> None:
    kda_commit_(
        x.case.inputs[1],
        state or x.state(),
        x.records,
        x.ints(x.rows),
        x.ints(counts),
        selection=backend.selection(x.case.shape),
        **options,
    )


def assert_step(x: RecordedDrafts, step: int, out: torch.Tensor, stored: list[Any]) -> None:
    """Outputs, windows and stored states are the definition's, and nothing else was written.

    ``stored``: what float64 says of each sequence's state in the pool."""
    tolerance_o, tolerance_s = STEP_TOLERANCES[x.pools.states.dtype]
    assert_close(f"output of step {step}", out, x.expected_out(), tolerance_o)
    for n, slot in enumerate(x.slots):
        assert x.drafts[n].key_error <= KEY_ERROR[x.case.packed.dtype]
        # 16 bits: a state was rounded in every step before
        bound = (1 + step) * tolerance_s
        for h in range(x.case.value_heads):
            got, want = x.pools.states[slot, h], stored[n][h]
            assert_close(f"state of {n}, head {h}", got, want, ONE_HEAD * bound)
    own = torch.zeros(len(x.pools.states), dtype=torch.bool)
    own[x.slots] = True
    assert x.pools.states[~own].isnan().all(), "another slot was written"
    assert x.records.correction[[0, -1]].isnan().all(), "another row was written"


def run(backend: Backend, x: RecordedDrafts) -> None:
    """Three steps of verify and accept."""
    for step, counts in enumerate(COUNTS):
        stored = list(x.states)
        out = verify(backend, x, step, x.ints(x.held))
        x.expect(step)
        assert_step(x, step, out, stored)
        # a window that rolls has lost its oldest input: at least the engine's own token is accepted
        rolls = x.rolls and x.case.has_conv
        x.accept([max(n, 1) for n in counts] if rolls else counts)


HARD = {"heads": len(HARD_REGIMES), "regime": HARD_REGIMES, "has_conv": False}
OTHER = {"value_heads": 2, "key_dim": 24, "value_dim": 40, "l2norm": False, "has_bias": False}
MODELS: list[dict[str, Any]] = [
    *({"rolls": rolls, "layout": "DS"} for rolls in (True, False)),
    *({"rolls": rolls, "layout": "SD", "has_norm": False} for rolls in (True, False)),
    *(HARD | {"gate": gate} for gate in ("softplus", "bounded", "log")),
    OTHER | {"has_conv": False, "beta_kind": "twice_sigmoid"},
    *({"state_dtype": dtype} for dtype in (torch.bfloat16, torch.float16)),
    {"dtype": torch.float32},
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_steps_of_drafts(backend: Backend, seed: int, model: dict[str, Any]) -> None:
    """Ragged drafts, with the convolution's window in its pool (vLLM) or in buffers (sglang)."""
    run(backend, drafts(backend, seed, **model))


FUSES_FOLDS_ALONE = not ON_GPU and hasattr(interpreter, "fma_fp32")
"""Whether the interpreter, from Triton 3.9 on, rounds the FMA of a fold once. It rounds apart what
compilers fuse, a product and the sum behind it in a verification."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_those_of_states(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    """In Triton and without a convolution, whose k is rounded here alone: outputs, and what is
    committed."""
    kernels = Backend("kernels", device)
    x = drafts(kernels, seed, (4,), steps=1, has_conv=False, heads=2, state_dtype=dtype)
    part, pools = x.case.part(slice(0, 4)), x.pools.copy()
    states = poisoned(1, 4, *x.pools.states.shape[1:], dtype=dtype, device=kernels.device)
    want = kda_verify_step(
        *part.inputs,
        StateRef.pool(pools.states, x.ints(x.slots)),
        DraftInputs.in_buffers(states, x.ints([0])),
        selection=kernels.selection(x.case.shape),
        **part.stages(pools.windows),
    )
    assert_same_bits("output", verify(kernels, x, 0, None), want)
    assert_same_bits("pool", x.pools.memory, pools.memory)
    for accepted in range(1, 5):
        x.pools.memory.copy_(pools.memory)
        commit(kernels, x, [accepted])
        kept = states[0, accepted - 1]
        state = x.pools.states[x.slots[0]]
        if FUSES_FOLDS_ALONE and dtype == torch.float32:
            ulp = torch.finfo(dtype).eps * kept.abs().max().item()
            torch.testing.assert_close(state, kept, rtol=0.0, atol=4 * ulp)
            continue
        assert_same_bits(f"state after {accepted}", state, kept)


def test_committing_is_verifying_with_what_is_held(backend: Backend, seed: int) -> None:
    """Also with counts that a captured call did not have: tensors stay, their contents change."""
    found = {}
    counts = torch.empty(2, dtype=torch.int32, device=backend.device)
    for commits in (False, True):
        x = drafts(backend, seed, (2, 3), rolls=False, state_dtype=torch.bfloat16)
        draft = x.draft(None if commits else counts)
        outs = []
        for step, accepted in enumerate(((0, 0), (2, 1), (1, 3))):
            counts.copy_(x.ints(accepted))
            if step:
                x.accept(accepted)
            if commits:
                commit(backend, x, accepted)
            outs.append(verify(backend, x, step, None, (x.state(), draft)))
            x.expect(step)
        found[commits] = (torch.cat(outs), x.pools.memory)
    for name, got, want in zip(("output", "states"), found[True], found[False], strict=True):
        backend.assert_same(name, got.float().nan_to_num(), want.float().nan_to_num())


def test_a_boundary_inside_of_a_draft_is_kept(backend: Backend, seed: int) -> None:
    x = drafts(backend, seed, (3, 3, 3), steps=1, has_conv=False)
    verify(backend, x, 0, None)
    x.expect(0)
    places, kept_counts = [6, 4, 0], [1, 3, 2]  # the second was not accepted so far
    commit(backend, x, [3, 2, 0], kept=(x.ints(places), x.ints(kept_counts)))
    for n, (place, count) in enumerate([(1, 3), (3, 2), (5, 0), (6, 1)]):
        want = x.drafts[n % 3].states[count]
        assert_close(f"slot {place}", x.pools.states[place], want, 2e-4)
    assert x.pools.states[[0, 2, 4, 7]].isnan().all()


def test_corrections_for_keys_behind_their_norm(backend: Backend, seed: int) -> None:
    """As vLLM's commit takes them; nothing here folds them."""
    found = []
    for by_norm in (True, False):
        x = drafts(backend, seed, (3,), steps=1)
        x.records = x.records._replace(by_norm=by_norm)
        verify(backend, x, 0, None)
        found.append(x.records)
    keys = found[0].key_gate[1, 0, :, : x.case.g.shape[2]]
    norm = keys.double().square().sum(1, keepdim=True).add(1e-6).sqrt()
    assert_same_bits("keys", found[1].key_gate[1], found[0].key_gate[1])
    assert_close("u", found[1].correction[1, 0], found[0].correction[1, 0] * norm, 1e-6)
    with pytest.raises(ValueError, match="num_accepted_tokens must be None"):
        verify(backend, x, 0, x.ints([1]))
    with pytest.raises(ValueError, match="records must have their correction divided"):
        commit(backend, x, [1])


def test_layers_are_committed_at_once(backend: Backend, seed: int) -> None:
    one = [drafts(backend, seed + i, (2, 3), steps=1, has_conv=False) for i in range(2)]
    for x in one:
        verify(backend, x, 0, None)
    pool = torch.stack([x.pools.states for x in one])
    pairs = zip(*(x.records[:2] for x in one), strict=True)
    records = Records(*(torch.stack(pair) for pair in pairs))
    gates = [x.case.inputs[1] for x in one]
    a_log, dt_bias = (torch.stack([gate[i] for gate in gates]) for i in (1, 2))
    kda_commit_(
        GateSpec.of(a_log, dt_bias, None),
        StateRef.pool(pool, one[0].ints(one[0].slots)),
        records,
        one[0].ints(one[0].rows),
        one[0].ints([1, 3]),
        selection=backend.selection(one[0].case.shape),
    )
    for i, x in enumerate(one):
        commit(backend, x, [1, 3])
        assert_same_bits(f"layer {i}", pool[i], x.pools.states.contiguous())


def test_layers_that_lie_apart_are_committed_at_once(backend: Backend, seed: int) -> None:
    """With the bits of layers in one tensor, also where a state goes to another slot than it comes
    from and one is kept of a boundary before."""
    one = [drafts(backend, seed + i, (2, 3, 1), steps=1, has_conv=False) for i in range(3)]
    for x in one:
        verify(backend, x, 0, None)
    first = one[0]
    pool = torch.stack([x.pools.states for x in one])
    pairs = zip(*(x.records[:2] for x in one), strict=True)
    stacked = Records(*(torch.stack(pair) for pair in pairs))
    gates = [x.case.inputs[1] for x in one]
    a_log, dt_bias = (torch.stack([gate[i].flatten() for gate in gates]) for i in (1, 2))
    pools, records = tuple(x.pools.states for x in one), tuple(x.records for x in one)
    counts, kept_counts = first.ints([1, 3, 1]), first.ints([0, 2, 0])
    written, kept = first.ints([first.slots[0], 0, -1]), first.ints([0, 6, 0])
    call = CommitCall(
        GateSpec.of(a_log, dt_bias, None),
        pools[0][None],
        Records(*(x[None] for x in records[0][:2])),
        first.ints(first.rows),
        first.ints(first.slots),
        counts,
        kept,
        kept_counts,
        -1,
        written,
        LayersApart.of(pools, records),
    )
    selection = backend.selection(first.case.shape)
    selection.verify_records.run(1).commit(call)
    before = pool.clone()
    counts[2] = 0  # a state that has nowhere to go stays as it is
    kda_commit_(
        call.gate,
        StateRef.pool(pool, call.slots),
        stacked,
        call.indices,
        counts,
        kept=(kept, kept_counts),
        selection=selection,
    )
    for layer, states in enumerate(pool):
        source = first.slots[1]
        states[0] = states[source]  # where the other call writes it
        states[source] = before[layer, source]
        assert_same_bits(f"layer {layer}", pools[layer].contiguous(), states)


def test_layers_that_are_not_laid_out_alike_are_refused() -> None:
    pool = torch.zeros(3, 1, 16, 16)
    records = Records(torch.zeros(2, 1, 3, 16), torch.zeros(2, 1, 3, 32))
    with pytest.raises(ValueError, match="states of all layers must be laid out alike"):
        LayersApart.of((pool, pool[::2]), (records, records))
    odd = torch.zeros(3 * 256 + 1)[1:].view(3, 1, 16, 16)
    with pytest.raises(ValueError, match="states must begin at multiples of 16 bytes"):
        LayersApart.of((odd,), (records,))


def test_padding_and_rows_that_keep_nothing(backend: Backend, seed: int) -> None:
    x = drafts(backend, seed, (2, 2, 2, 2), steps=2)
    verify(backend, x, 0, x.ints([0] * 4))
    slots, rows = list(x.slots), list(x.rows)
    x.slots[:2], x.rows[2] = [-1, 0], -1
    before, records = x.pools.copy(), [y.clone() for y in x.records[:2]]
    out = verify(backend, x, 1, x.ints([2] * 4), null_slot=0)
    assert not out[:4].any() and out[4:].any()
    for slot in slots[:3]:  # padded, padded, and without records to fold
        assert_same_bits("state", x.pools.states[slot], before.states[slot])
    for row in rows[:3]:
        for got, want in zip(x.records[:2], records, strict=True):
            assert_same_bits("records", got[row], want[row])
    assert not torch.equal(x.pools.states[slots[3]], before.states[slots[3]])
    before = x.pools.copy()
    commit(backend, x, [2, 2, 2, 0], x.state(null_slot=0))
    assert_same_bits("states", x.pools.memory, before.memory)


@pytest.mark.parametrize("wild", [-7, 4, 1 << 30])
def test_wild_counts_stay_in_the_records(backend: Backend, seed: int, wild: int) -> None:
    x = drafts(backend, seed, (3,), steps=2)
    verify(backend, x, 0, x.ints([0]))
    twin = drafts(backend, seed, (3,), steps=2)
    verify(backend, twin, 0, twin.ints([0]))
    right = min(max(wild, 0), 3)
    assert_same_bits(
        "output", verify(backend, x, 1, x.ints([wild])), verify(backend, twin, 1, x.ints([right]))
    )
    commit(backend, x, [wild])
    commit(backend, twin, [right])
    assert_same_bits("states", x.pools.memory, twin.pools.memory)


def test_fp16_states_saturate(backend: Backend, seed: int) -> None:
    x = drafts(backend, seed, (1,), steps=2, has_conv=False, state_dtype=torch.float16)
    verify(backend, x, 0, None)
    x.records.correction[x.rows[0], 0, 0, 0] = 1e9
    commit(backend, x, [1])
    state = x.pools.states[x.slots[0], 0]
    assert bool((state[0].abs() == 65504.0).any()) and bool(state.isfinite().all())


def test_the_definition_is_the_recurrence(seed: int) -> None:
    case = make_case(seed, (5,), heads=2, value_heads=4, dtype=torch.float32)
    q, _, v, g, beta = case.activated()
    raw = case.k[0].double()
    o, state = case.expected()
    got, u = reference.record_kda(q, raw, v, g, beta, scale=32**-0.5, state=case.state[0].double())
    assert_close("output", got, o, 1e-12)
    folded = reference.fold_records(case.state[0].double(), u, raw.repeat_interleave(2, 1), g)
    assert_close("state", folded, state[0], 1e-12)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_graph_replay_with_other_counts(kernels: Backend, seed: int) -> None:
    model = {"heads": 4, "key_dim": 128, "value_dim": 128, "rolls": False}
    x, twin = (drafts(kernels, seed, (4, 2), steps=2, **model) for _ in range(2))
    counts = x.ints([0, 0])
    given = x.state(), x.draft(counts)
    for y in (x, twin):
        verify(kernels, y, 0, counts)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = verify(kernels, x, 1, None, given)
    counts.copy_(x.ints([3, 1]))
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits("output", out, verify(kernels, twin, 1, twin.ints([3, 1])))
    assert_same_bits("states", x.pools.memory, twin.pools.memory)


def wrong_drafts(x: RecordedDrafts) -> list[tuple[str, dict[str, Any]]]:
    one, rows = x.ints([1, 1]), torch.tensor([0, 4], dtype=torch.int32)
    shared = x.kept_windows.mT[:1].expand(4, -1, -1, -1)  # by all rows
    return [
        ("correction must have dtype float32", {"correction": x.records.correction.bfloat16()}),
        ("correction must have shape [rows, 1, T, 16]", {"correction": x.records.correction[0]}),
        ("key_gate must have shape [4, 1, 2, 32]", {"key_gate": x.records.key_gate[:, :, :1]}),
        ("key_gate must have dtype bfloat16", {"key_gate": x.records.key_gate.half()}),
        ("correction must have stride", {"correction": x.records.correction.mT.contiguous().mT}),
        ("record_indices must be negative or a row below 4", {"indices": rows}),
        ("record_indices must have shape [2]", {"indices": one[:1]}),
        ("num_accepted_tokens must have dtype int32", {"num_accepted": one.long()}),
        ("windows must have shape [rows, 2, 48, 3]", {"windows": x.kept_windows}),
        ("windows must have correction's 4 rows", {"windows": x.kept_windows.mT[:3]}),
        ("windows must have elements that share no memory", {"windows": shared}),
        ("conv_state must have at least 4 columns", {"windows": None}),
    ]


def test_a_wrong_draft_is_refused_before_anything_is_written(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    x = drafts(cpu, seed, (2, 1), steps=1, rolls=False)
    memory = x.pools.memory.clone()
    for message, wrong in wrong_drafts(x):
        with pytest.raises(ValueError) as raised:
            draft = x.draft(x.ints([0, 0]))._replace(**wrong)
            verify(cpu, x, 0, None, (x.state(), draft))
        assert message in str(raised.value)
    other = x.case.part(slice(0, 3))
    inputs = other.inputs[0]._replace(g=other.g.float()), other.inputs[1]
    with pytest.raises(ValueError, match=r"g must have dtype bfloat16, that of q, .* got float32"):
        kda_verify_step(*inputs, x.state(), x.draft(None), **other.stages(x.pools.windows))
    assert_same_bits("states", x.pools.memory, memory)
    assert x.records.correction.isnan().all() and x.records.key_gate.isnan().all()


def test_a_wrong_fold_is_refused_before_anything_is_written(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    x = drafts(cpu, seed, (2, 2), steps=1, has_conv=False)
    verify(cpu, x, 0, None)
    memory, good = x.pools.memory.clone(), {"counts": [1, 1], "kept": None}
    pair = (x.ints([0, 2]), x.ints([1, 1]))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("kept_slots must be negative or a slot below 6", {"kept": (x.ints([0, 6]), pair[1])}),
        ("kept_counts must have dtype int32", {"kept": (pair[0], pair[1].long())}),
        ("num_accepted_tokens must have shape [2]", {"counts": [1]}),
    ]
    for message, changed in wrong:
        with pytest.raises(ValueError) as raised:
            commit(cpu, x, **(good | changed))
        assert message in str(raised.value)
    gate = x.case.inputs[1]
    calls: list[tuple[str, Any, StateRef, Records]] = [
        ("A_log must have 1 elements", gate._replace(a_log=pair[0].float()), x.state(), x.records),
        ("state must be a pool", gate, StateRef.functional(None, v_first=True), x.records),
        ("state_pool must have shape", gate, x.state()._replace(read=x.pools.states[0]), x.records),
        ("key_gate must have shape", gate, x.state(), x.records._replace(key_gate=x.records[0])),
    ]
    for message, gate, state, records in calls:
        with pytest.raises(ValueError) as raised:
            kda_commit_(gate, state, records, x.ints(x.rows), x.ints([1, 1]))
        assert message in str(raised.value)
    assert_same_bits("states", x.pools.memory, memory)
