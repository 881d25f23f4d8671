"""kda_verify_step: drafts in both forms against the definition and against single steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.testing.numerics import poisoned
from kda_backend.testing.steps import StepCase, StepPools, make_step
from kda_backend.testing.tolerances import STEP_TOLERANCES
from tests.kda.cases import ON_GPU, Backend, assert_close, assert_same_bits, run_step, run_verify

LENGTHS = (3, 0, 1, 4)


def starts(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def walk(
    case: StepCase, tokens: range, state: torch.Tensor, window: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(out, state, window) behind each token, in float64."""
    behind = []
    state, window = state.double().cpu(), window.double().cpu()
    for token in tokens:
        out, state, window = case.expected(token, state, window)
        behind.append((out, state, window))
    return behind


class Draft:
    """Sequences of a batch in sglang's form, with buffers of NaN for what is kept."""

    def __init__(self, backend: Backend, seed: int, lengths: tuple[int, ...], **model: Any) -> None:
        self.lengths, self.max_tokens = lengths, max(lengths)
        pool_dtype = model.pop("pool_dtype", torch.float32)
        self.case = make_step(seed, sum(lengths), device=backend.device, **model)
        self.slots = [2 * n + 1 for n in range(len(lengths))]
        self.pools = StepPools(self.case, 2 * len(lengths) + 1, dtype=pool_dtype)
        self.pools.fill(seed + 1, self.slots)
        self.before = self.pools.copy()
        rows, device = len(lengths) + 2, backend.device
        shape = (rows, self.max_tokens, *self.pools.states.shape[1:])
        self.states = poisoned(*shape, dtype=pool_dtype, device=device)
        shape = (rows, self.max_tokens, 3, self.case.channels)
        self.windows = poisoned(*shape, dtype=torch.bfloat16, device=device)
        self.rows = [len(lengths) - n for n in range(len(lengths))]

    def arguments(self, *, equal: bool = False) -> dict[str, Any]:
        device = self.pools.states.device
        arguments: dict[str, Any] = {
            "intermediate_states": self.states,
            "intermediate_indices": torch.tensor(self.rows, dtype=torch.int32, device=device),
        }
        if self.case.has_conv:
            arguments["intermediate_conv"] = self.windows.transpose(2, 3)
        if not equal:
            offsets = torch.tensor(starts(self.lengths), dtype=torch.int32, device=device)
            arguments["cu_seqlens"] = offsets
        return arguments

    def run(self, backend: Backend, **overrides: Any) -> torch.Tensor:
        equal = len(set(self.lengths)) == 1
        table = torch.tensor(self.slots, dtype=torch.int32, device=self.pools.states.device)
        arguments = self.arguments(equal=equal) | overrides
        return run_verify(backend, self.case, self.pools, table, **arguments)

    def assert_kept(self, out: torch.Tensor) -> None:
        tolerance_o, tolerance_s = STEP_TOLERANCES[self.states.dtype]
        steps_o = 2.0 * tolerance_o
        for n, slot in enumerate(self.slots):
            tokens = range(starts(self.lengths)[n], starts(self.lengths)[n + 1])
            state, window = self.before.states[slot], self.before.windows[slot]
            for t, (o, s, w) in enumerate(walk(self.case, tokens, state, window)):
                where = f"of sequence {n}, token {t}"
                assert_close(f"output {where}", out[tokens[t]], o, steps_o)
                kept = self.states[self.rows[n], t]
                assert_close(f"state {where}", kept, s, 2.0 * tolerance_s)
                if self.case.has_conv:
                    kept = self.windows[self.rows[n], t].T
                    assert_same_bits(f"window {where}", kept, w.to(kept))
            rest = self.states[self.rows[n], len(tokens) :]
            assert rest.isnan().all(), f"written behind the draft of sequence {n}"
        assert self.states[0].isnan().all() and self.windows[0].isnan().all(), "another row"
        assert_same_bits("committed states", self.pools.memory, self.before.memory)
        assert_same_bits("committed windows", self.pools.window_memory, self.before.window_memory)


DRAFTS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *((LENGTHS, {"has_conv": x, "has_norm": y}) for x in (True, False) for y in (True, False)),
    ((2, 2), {}),
    ((8, 8), {}),
    ((2, 1), {"gate": "bounded", "beta_kind": "given", "l2norm": False, "has_bias": False}),
    ((2, 1), {"heads": 2, "value_heads": 4, "has_conv": False, "key_dim": 24, "value_dim": 40}),
    *(((2, 1), {"pool_dtype": dtype}) for dtype in (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("lengths", "model"), DRAFTS, ids=str)
def test_a_draft_leaves_the_pools_untouched(
    backend: Backend, seed: int, lengths: tuple[int, ...], model: dict[str, Any]
) -> None:
    draft = Draft(backend, seed, lengths, **{"heads": 1, **model})
    draft.assert_kept(draft.run(backend))


def test_a_negative_row_keeps_nothing(backend: Backend, seed: int) -> None:
    draft = Draft(backend, seed, (2, 2), heads=1)
    want = draft.run(backend)
    draft.states.fill_(float("nan"))
    draft.windows.fill_(float("nan"))
    none = torch.full((2,), -1, dtype=torch.int32, device=backend.device)
    out = draft.run(backend, intermediate_indices=none)
    assert_same_bits("output", out, want)
    assert draft.states.isnan().all() and draft.windows.isnan().all()


def test_padded_sequences_get_zeros(backend: Backend, seed: int) -> None:
    draft = Draft(backend, seed, (2, 2, 2), heads=1)
    draft.slots = [draft.slots[0], -1, 0]
    out = draft.run(backend, null_slot=0)
    assert not out[2:].any() and out[:2].any()
    kept = draft.states[[row for row in range(5) if row != draft.rows[0]]]
    assert kept.isnan().all()


@pytest.mark.parametrize("accepted", [1, 3])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_slot_for_each_token(backend: Backend, seed: int, accepted: int, layout: str) -> None:
    """vLLM's form: the state accepted last is read, every token's goes to its slot, the window
    rolls; slot 0 of a shorter table keeps nothing."""
    tokens = 3
    case = make_step(seed, tokens, device=backend.device, heads=1)
    pools = StepPools(case, 6, layout=layout, width=tokens + 2)
    pools.fill(seed + 1, [1, 2, 3, 4])
    table = [4, 2, 1]
    before = pools.copy()
    out = run_verify(
        backend,
        case,
        pools,
        torch.tensor([table], dtype=torch.int32, device=backend.device),
        num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32, device=backend.device),
        null_slot=0,
    )
    window = before.windows[table[0], :, accepted - 1 : accepted + 2]
    behind = walk(case, range(tokens), before.states[table[accepted - 1]], window)
    for t, (o, s, _) in enumerate(behind):
        assert_close(f"output {t}", out[t], o, 1e-2)
        assert_close(f"state {t}", pools.states[table[t]], s, 2e-4)
    rolled = torch.cat([window[:, 1:], case.packed.T], 1)
    assert_same_bits("window", pools.windows[table[0]].contiguous(), rolled.contiguous())
    for pool in (pools, before):
        for slot in table:
            pool.states[slot] = 0.0
        pool.windows[table[0]] = 0.0
    assert_same_bits("states elsewhere", pools.memory, before.memory)
    assert_same_bits("windows elsewhere", pools.window_memory, before.window_memory)


@pytest.mark.parametrize("accepted", [1, 3])
def test_an_empty_draft_touches_nothing(backend: Backend, seed: int, accepted: int) -> None:
    """A window that rolled without a token would have lost the oldest of its inputs."""
    case = make_step(seed, 2, device=backend.device, heads=1)
    pools = StepPools(case, 7, width=5)
    pools.fill(seed + 1, [1, 2, 3, 4, 5, 6])
    before = pools.copy()
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32, device=backend.device)
    run_verify(
        backend,
        case,
        pools,
        table,
        num_accepted_tokens=torch.full((2,), accepted, dtype=torch.int32, device=backend.device),
        cu_seqlens=torch.tensor([0, 0, 2], dtype=torch.int32, device=backend.device),
    )
    assert_same_bits("states", pools.states[1:4], before.states[1:4])
    assert_same_bits("window", pools.windows[1].contiguous(), before.windows[1].contiguous())
    assert not torch.equal(pools.windows[4], before.windows[4])


def test_a_token_without_a_slot_keeps_nothing(backend: Backend, seed: int) -> None:
    case = make_step(seed, 3, device=backend.device, heads=1, has_conv=False)
    pools = StepPools(case, 3)
    pools.fill(seed + 1, [1, 2])
    before = pools.copy()
    table = torch.tensor([[1, 0, -1]], dtype=torch.int32, device=backend.device)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    run_verify(backend, case, pools, table, num_accepted_tokens=one, null_slot=0)
    assert_close(
        "state 0", pools.states[1], walk(case, range(1), before.states[1], before.windows[1])[0][1],
        2e-4,
    )  # fmt: skip
    before.states[1] = pools.states[1]
    assert_same_bits("other states", pools.memory, before.memory)


@pytest.mark.parametrize("wild", [0, -5, 4, 1 << 30])
def test_a_wild_number_of_accepted_tokens_stays_in_the_table(
    backend: Backend, seed: int, wild: int
) -> None:
    case = make_step(seed, 3, device=backend.device, heads=1)
    pools = StepPools(case, 4, width=5)
    pools.fill(seed + 1, [1, 2, 3])
    twin = pools.copy()
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=backend.device)
    outs = []
    for pool, number in ((pools, wild), (twin, min(max(wild, 1), 3))):
        accepted = torch.tensor([number], dtype=torch.int32, device=backend.device)
        outs.append(run_verify(backend, case, pool, table, num_accepted_tokens=accepted))
    assert_same_bits("output", outs[0], outs[1])
    assert_same_bits("states", pools.memory, twin.memory)
    assert_same_bits("windows", pools.window_memory, twin.window_memory)


def test_accepting_is_having_stepped(backend: Backend, seed: int) -> None:
    """Committing the state and window after token t equals t + 1 single steps."""
    draft = Draft(backend, seed, (3,), heads=1)
    out = draft.run(backend)
    for t in range(3):
        one = draft.case.part(slice(t, t + 1))
        stepped = run_step(backend, one, draft.pools, [draft.slots[0]])
        assert_close(f"output {t}", out[t : t + 1], stepped, 4e-3)
        slot, row = draft.slots[0], draft.rows[0]
        assert_close(f"state {t}", draft.states[row, t], draft.pools.states[slot], 1e-6)
        window = draft.pools.windows[slot].T
        assert_same_bits(f"window {t}", draft.windows[row, t], window.contiguous())


def test_a_draft_reads_its_own_tokens_as_the_pool_holds_them(backend: Backend, seed: int) -> None:
    """fp32 tokens beside windows in bf16: a step reads the rounded inputs of those before it."""
    case = make_step(seed, 4, device=backend.device, heads=1, dtype=torch.float32)
    pools = StepPools(case, 6, width=6)
    pools.fill(seed + 1, [1, 2, 3, 4])
    pools.windows = pools.windows.to(torch.bfloat16)
    states, windows = pools.states.clone(), pools.windows.clone()
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32, device=backend.device)
    one = torch.ones(1, dtype=torch.int32, device=backend.device)
    out = run_verify(backend, case, pools, table, num_accepted_tokens=one)
    pools.states, pools.windows = states, windows
    for t in range(4):
        stepped = run_step(backend, case.part(slice(t, t + 1)), pools, [1])
        assert_close(f"output {t}", out[t : t + 1], stepped, 1e-5)


def test_overlapping_windows_of_steps(backend: Backend, seed: int) -> None:
    """sglang keeps the inputs of a draft once: windows of its tokens are views that overlap."""
    draft = Draft(backend, seed, (4, 4), heads=1)
    want = draft.run(backend)
    dense = draft.windows.clone()
    inputs = poisoned(4, 6, draft.case.channels, dtype=torch.bfloat16, device=backend.device)
    stride = inputs.stride()
    draft.windows = inputs.as_strided(
        (4, 4, 3, draft.case.channels), (stride[0], stride[1], stride[1], 1)
    )
    out = draft.run(backend)
    assert_same_bits("output", out, want)
    assert_same_bits("windows", draft.windows[1:3], dense[1:3])


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_graph_replay_equals_the_call(kernels: Backend, seed: int) -> None:
    draft = Draft(kernels, seed, (4, 2, 3), heads=4, key_dim=128, value_dim=128)
    want = draft.run(kernels)
    kept = draft.states.clone()
    draft.states.fill_(float("nan"))
    out = torch.full_like(want, float("nan"))
    table = torch.tensor(draft.slots, dtype=torch.int32, device=kernels.device)
    arguments = draft.arguments() | {"out": out}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run_verify(kernels, draft.case, draft.pools, table, **arguments)
    assert out.isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits("output", out, want)
    assert_same_bits("states", draft.states, kept)


def wrong_arguments(draft: Draft) -> list[tuple[str, dict[str, Any]]]:
    buffers = draft.arguments().keys() - {"cu_seqlens"}
    windows = draft.windows
    table = torch.tensor([draft.slots], dtype=torch.int32).T.repeat(1, 3)
    one = torch.ones(2, dtype=torch.int32)
    slots: dict[str, Any] = dict.fromkeys(buffers)
    slots |= {"state_indices": table, "num_accepted_tokens": one}
    return [
        ("intermediate_conv must be given if and only if", {"intermediate_conv": None}),
        ("intermediate_conv must have shape [rows, 2, 48, 3]", {"intermediate_conv": windows}),
        ("intermediate_conv must have elements that share no memory",
            {"intermediate_conv": windows[:1].mT.expand(4, -1, -1, -1)}),
        ("intermediate_states must have shape [rows, T, 1, 16, 16]",
            {"intermediate_states": draft.states[0]}),
        ("intermediate_indices must be negative or a row below 4",
            {"intermediate_indices": torch.tensor([0, 4], dtype=torch.int32)}),
        ("state_indices must have shape [2], got [2, 3]", {"state_indices": table}),
        ("q must have as many tokens for each of 2 sequences, got 3 tokens", {"cu_seqlens": None}),
        ("cu_seqlens must have shape [3]", {"cu_seqlens": torch.zeros(4, dtype=torch.int32)}),
        ("conv_state must have at least 5 columns for drafts of 3 tokens", slots),
        ("state_indices must have shape [N, T]", slots | {"state_indices": table[:, 0]}),
        ("num_accepted_tokens must have dtype int32", slots | {"num_accepted_tokens": one.long()}),
    ]  # fmt: skip


def test_wrong_input_is_refused_before_anything_is_written(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    draft = Draft(cpu, seed, (2, 1), heads=1)
    for message, wrong in wrong_arguments(draft):
        arguments = draft.arguments()
        arguments["state_indices"] = torch.tensor(draft.slots, dtype=torch.int32)
        arguments |= wrong
        table = arguments.pop("state_indices")
        with pytest.raises(ValueError) as raised:
            run_verify(cpu, draft.case, draft.pools, table, **arguments)
        assert message in str(raised.value)
        assert draft.states.isnan().all()
        assert_same_bits(message, draft.pools.memory, draft.before.memory)


def test_a_draft_longer_than_its_buffer_is_refused(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    draft = Draft(cpu, seed, (3, 3), heads=1)
    with pytest.raises(ValueError, match="at most 2 tokens, got 3 per sequence"):
        draft.run(cpu, intermediate_states=draft.states[:, :2],
                  intermediate_conv=draft.windows[:, :2].transpose(2, 3))  # fmt: skip
