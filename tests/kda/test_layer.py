"""A whole KDA layer between its projections, on pools in an engine's layout."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from backend_core.testing.numerics import poisoned
from kda_backend import layer
from kda_backend.contract.values import StateRef
from kda_backend.layer import LayerWeights, Projections
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.step_plan import StepPlan, build_chunk_table, build_step_plan
from kda_backend.testing.cases import cu_tensor, offsets_of
from kda_backend.testing.steps import EPS, StepPools, make_step
from tests.kda.cases import Backend, assert_close, assert_same_bits

SLOTS = 7
LENGTHS = (70, 1, 2, 0, 130, 3)
INDICES = (4, 1, 6, 0, 3, -1)
INITIAL = (True, True, False, True, True, True)


class Model:
    """One layer's weights and inputs in bf16, its pools, and the definition in float64."""

    def __init__(
        self,
        backend: Backend,
        seed: int,
        lengths: Sequence[int],
        heads: int = 2,
        dim: int = 16,
        gate: str = "softplus",
    ) -> None:
        device, tokens = backend.device, sum(lengths)
        dims = {"heads": heads, "key_dim": dim, "value_dim": dim}
        case = make_step(seed, tokens, device=device, gate=gate, has_bias=False, **dims)
        self.case, self.lengths = case, tuple(lengths)
        self.weights = LayerWeights(case.conv_weight, case.inputs[1], case.norm_weight, EPS)
        # a row of the packed projection is wider than what the layer takes of it
        wide = torch.cat([case.packed, case.beta, case.packed[:, :8]], 1)
        self.qkv, self.beta = wide[:, : case.channels], wide[:, case.channels : -8]
        self.g, self.gate = case.g, case.z
        pools = StepPools(case, SLOTS)
        pools.fill(seed + 1, list(range(SLOTS)))
        self.conv_pool, self.state_pool = pools.windows, pools.states
        self.selection: KdaSelection = backend.selection(case.shape)
        self.step_plan: StepPlan = build_step_plan(
            cu_tensor(lengths, device),
            tokens,
            cu_seqlens_cpu=cu_tensor(lengths, torch.device("cpu")),
            chunk_table=backend.name != "torch",
        )

    def run(
        self,
        function: Callable[..., None],
        indices: Sequence[int],
        initial: Sequence[bool] | None,
    ) -> torch.Tensor:
        """The layer's output [T, H, D]; the pools change in place."""
        device = self.qkv.device
        out = poisoned(*self.g.shape, dtype=torch.bfloat16, device=device)
        slots = torch.tensor(indices, dtype=torch.int32, device=device)
        if function is layer.decode:
            state = StateRef.pool(self.state_pool, slots, null_slot=0)
        else:
            flags = None if initial is None else torch.tensor(initial, device=device)
            state = StateRef.pool(self.state_pool, slots, flags)
        x = Projections(self.qkv, self.g, self.beta, self.gate, out)
        common = (self.weights, self.selection, x, self.conv_pool, state)
        if function is layer.decode:
            function(*common)
        else:
            function(*common, self.step_plan, Scratch(device))
        return out

    def expected(
        self, indices: Sequence[int], initial: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output [T, H, D] and both pools after it, sequence by sequence in float64."""
        windows, states = self.conv_pool.double().cpu(), self.state_pool.double().cpu()
        outputs = []
        for n, (begin, end) in enumerate(pairwise(offsets_of(self.lengths))):
            slot = indices[n]
            reads = float(slot >= 0 and initial[n])
            state, window = states[slot] * reads, windows[slot] * reads
            for t in range(begin, end):
                o, state, window = self.case.expected(t, state, window)
                outputs.append(o)
            if slot >= 0 and begin < end:
                windows[slot], states[slot] = window, state
        return torch.stack(outputs), windows, states


def check(
    model: Model, function: Callable[..., None], indices: Sequence[int], initial: Sequence[bool]
) -> None:
    want, conv_pool, states = model.expected(indices, initial)
    before = model.state_pool.clone()
    out = model.run(function, indices, initial)
    # The roundings of a bf16 layer: the convolution's output, the delta rule's, the norm's.
    assert_close("output", out, want, 1.5e-2)
    assert_close("states", model.state_pool, states, 1.5e-2)
    # Tokens are copied: a bf16 value is the same in float64.
    assert torch.equal(model.conv_pool.double().cpu(), conv_pool)
    untouched = [slot for slot in range(SLOTS) if slot not in indices]
    assert_same_bits("untouched states", model.state_pool[untouched], before[untouched])


def test_prefill_is_the_definition_and_keeps_its_slots(backend: Backend, seed: int) -> None:
    check(Model(backend, seed, LENGTHS), layer.prefill, INDICES, INITIAL)


def test_decode_in_one_launch_is_the_definition(backend: Backend, seed: int) -> None:
    check(Model(backend, seed, (1, 1, 1)), layer.decode, (5, 2, 3), (True, True, True))


def test_any_batch_is_decodes_and_prefills(kernels: Backend, seed: int) -> None:
    """Two tokens decode, of rows for five; two sequences follow, of rows for four, and padding."""
    model = Model(kernels, seed, (1, 1, 66, 5, 3))
    indices = (5, 2, 3, 1, -1)
    want, conv_pool, states = model.expected(indices, (True, True, True, False, False))
    on = model.qkv.device

    def table(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=on)

    bounds = table(2, 68, 73, 73, 73)
    plan = build_step_plan(bounds.to("meta"), 76, chunk_table=False, any_batch=True)
    chunks = build_chunk_table(bounds, plan.num_chunks)
    plan = dataclasses.replace(plan, cu_seqlens=bounds, chunk_table=chunks)
    out = poisoned(*model.g.shape, dtype=torch.bfloat16, device=on)
    pool = functools.partial(StateRef.pool, model.state_pool)
    layer.decode_and_prefill(
        model.weights,
        model.selection,
        Projections(model.qkv, model.g, model.beta, model.gate, out),
        model.conv_pool,
        pool(table(5, 2, -1, -1, -1), null_slot=0),
        table(1, 1, 0, 0, 0, dtype=torch.bool).view(-1, 1, 1),
        pool(table(3, 1, -1, -1), table(1, 0, 1, 1, dtype=torch.bool)),
        plan,
        Scratch(on),
    )
    assert_close("output", out[:73], want[:73], 1.5e-2)
    assert not out[73:].any()
    assert_close("states", model.state_pool, states, 1.5e-2)
    assert torch.equal(model.conv_pool.double().cpu(), conv_pool)


def test_decode_skips_rows_at_the_null_slot(backend: Backend, seed: int) -> None:
    model = Model(backend, seed, (1, 1, 1))
    pools = model.conv_pool.clone(), model.state_pool.clone()
    out = model.run(layer.decode, (0, 2, 0), None)
    assert not out[[0, 2]].any()
    for pool, before in zip((model.conv_pool, model.state_pool), pools, strict=True):
        others = [slot for slot in range(SLOTS) if slot != 2]
        assert_same_bits("other slots", pool[others], before[others])


@pytest.mark.parametrize("split", [1, 2, 3, 64, 66])
def test_a_sequence_in_two_steps_is_the_sequence_in_one(
    backend: Backend, seed: int, split: int
) -> None:
    whole = Model(backend, seed, (70,))
    halves = Model(backend, seed, (70,))
    out = whole.run(layer.prefill, (2,), (False,))
    parts = []
    for begin, end in ((0, split), (split, 70)):
        part = Model(backend, seed, (end - begin,))
        part.weights = halves.weights
        part.qkv, part.beta = halves.qkv[begin:end], halves.beta[begin:end]
        part.g, part.gate = halves.g[begin:end], halves.gate[begin:end]
        part.conv_pool, part.state_pool = halves.conv_pool, halves.state_pool
        parts.append(part.run(layer.prefill, (2,), (begin > 0,)))
    assert_close("output", torch.cat(parts), out, 6e-3)
    assert_close("state", halves.state_pool[2], whole.state_pool[2], 6e-3)
    assert_same_bits("conv state", halves.conv_pool[2], whole.conv_pool[2])


def test_bounded_gate(backend: Backend, seed: int) -> None:
    check(Model(backend, seed, (66, 5), gate="bounded"), layer.prefill, (4, 1), (True, False))


def test_a_step_plan_of_other_tokens_is_refused(backend: Backend, seed: int) -> None:
    model = Model(backend, seed, (66, 5))
    model.qkv = model.qkv[:-1]
    with pytest.raises(ValueError, match="step_plan is of 71 tokens, q has 70"):
        model.run(layer.prefill, (4, 1), None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("g", "g must have shape"),
        ("beta", "beta must have shape"),
        ("gate", "gate must have shape"),
        ("state_pool", "state_pool must have shape"),
    ],
)
def test_a_refused_prefill_writes_nothing(
    backend: Backend, seed: int, name: str, message: str
) -> None:
    model = Model(backend, seed, (66, 5))
    setattr(model, name, getattr(model, name)[:, :1])
    pools = model.conv_pool.clone(), model.state_pool.clone()
    with pytest.raises(ValueError, match=message):
        model.run(layer.prefill, (4, 1), None)
    assert_same_bits("conv states", model.conv_pool, pools[0])
    assert_same_bits("states", model.state_pool, pools[1])


def test_another_layout_behind_a_right_layer_is_checked(backend: Backend, seed: int) -> None:
    model = Model(backend, seed, (66, 5))
    model.run(layer.prefill, (4, 1), None)
    model.qkv = model.qkv[:, ::2]
    with pytest.raises(ValueError, match="qkv must"):
        model.run(layer.prefill, (4, 1), None)
