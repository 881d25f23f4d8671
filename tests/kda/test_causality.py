"""What a result may depend on: its own sequence's past, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kda_backend.scratch import Scratch
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import TOKEN_FIELDS, Case, offsets_of
from kda_backend.testing.regimes import REGIMES
from kda_backend.testing.tolerances import TOLERANCES
from tests.kda.cases import (
    Backend,
    assert_causal,
    assert_result,
    assert_same_bits,
    assert_splits_agree,
    spoil,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
def test_prefill_never_looks_ahead(
    kernels: Backend, seed: int, gate: str, dtype: torch.dtype
) -> None:
    case = kernels.case(seed, (67,), gate=gate, dims="narrow", dtype=dtype)
    assert_causal(case, kernels.chunk, (1, 4, 16, 27, 31, 40, 46, 64))


@pytest.mark.parametrize("regime", ["long", "extreme", "collinear"])
def test_prefill_never_looks_ahead_whatever_the_gates(
    kernels: Backend, seed: int, regime: str
) -> None:
    case = kernels.case(seed, (64,), regime=regime, dims="narrow")
    assert_causal(case, kernels.chunk, (2, 33, 62))


@pytest.mark.parametrize("name", TOKEN_FIELDS)
def test_no_single_input_leaks_back(kernels: Backend, seed: int, name: str) -> None:
    case = kernels.case(seed, (64,), dims="narrow")
    before, _ = kernels.chunk(case)
    for t in (17, 48):
        changed = getattr(case, name).clone()
        changed[:, t] += 0.5
        after, _ = kernels.chunk(dataclasses.replace(case, **{name: changed}))
        assert_same_bits(f"output before token {t}", after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t:], before[:, t:])


def test_decode_never_looks_ahead(kernels: Backend, seed: int) -> None:
    case = kernels.case(seed, (9,))
    assert_causal(case, kernels.recurrent, (1, 4, 8))


def test_a_prefix_has_the_same_bits_alone(kernels: Backend, seed: int) -> None:
    """Cut off anywhere, also inside a chunk: what prefix caching and chunked prefill rely on."""
    case = kernels.case(seed, (130,))
    o, _ = kernels.chunk(case)
    for length in (1, 31, 64, 100, 129):
        prefix, _ = kernels.chunk(case.part(0, length, case.state))
        assert_same_bits(f"first {length} outputs", prefix, o[:, :length])


@pytest.mark.parametrize(
    ("regime", "splits"),
    list(zip(REGIMES, [(1, 99), (65,), (0, 37), (1, 50), (63, 100), (37,), (66,)], strict=True)),
)
def test_one_shot_equals_two_calls_at_any_split(
    backend: Backend, seed: int, regime: str, splits: tuple[int, ...]
) -> None:
    case = backend.case(seed, (100,), regime=regime, dims="narrow", dtype=torch.float32)
    tolerance = TOLERANCES[torch.float32][0]
    assert_splits_agree(case, backend.chunk, splits, tolerance)


@pytest.mark.parametrize("regime", ["random", "long", "extreme"])
def test_splits_between_chunks_change_nothing(backend: Backend, seed: int, regime: str) -> None:
    case = backend.case(seed, (150,), regime=regime, dims="narrow", dtype=torch.float32)
    assert_splits_agree(case, backend.chunk, (64, 128), 1e-6)


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_neighbours_in_the_batch_change_no_bit(kernels: Backend, seed: int, name: str) -> None:
    """Not even neighbours that are NaN throughout."""
    run = getattr(kernels, name)
    lengths = (9, 70, 0, 33) if name == "chunk" else (2, 4, 0, 1)
    case = kernels.case(seed, lengths, heads=2)
    o, state = run(case)
    for n in (0, 1, 3):
        begin, end = case.offsets[n : n + 2]
        alone_o, alone = run(case.only(n))
        assert_same_bits(f"output of sequence {n} alone", alone_o, o[:, begin:end])
        assert_same_bits(f"state of sequence {n} alone", alone[0], state[n])
    begin, end = case.offsets[1:3]
    spoilt = {}
    for field in TOKEN_FIELDS:
        spoilt[field] = torch.full_like(getattr(case, field), torch.nan)
        spoilt[field][:, begin:end] = getattr(case, field)[:, begin:end]
    states = torch.full_like(case.state, torch.nan)
    states[1] = case.state[1]
    spoilt_o, spoilt_state = run(dataclasses.replace(case, state=states, **spoilt))
    assert_same_bits("output", spoilt_o[:, begin:end], o[:, begin:end])
    assert_same_bits("state", spoilt_state[1], state[1])
    assert spoilt_o[:, :begin].isnan().all()


def test_heads_change_no_bit_of_one_another(kernels: Backend, seed: int) -> None:
    case = kernels.case(seed, (70,), heads=2, value_heads=4)
    assert case.a_log is not None and case.dt_bias is not None
    o, state = kernels.chunk(case)
    alone = dataclasses.replace(
        case,
        q=case.q[:, :, 1:],
        k=case.k[:, :, 1:],
        v=case.v[:, :, 3:],
        g=case.g[:, :, 3:],
        beta=case.beta[:, :, 3:],
        a_log=case.a_log[3:],
        dt_bias=case.dt_bias[3:],
        state=case.state[:, 3:],
    )
    alone_o, alone_state = kernels.chunk(alone)
    assert_same_bits("output", alone_o, o[:, :, 3:])
    assert_same_bits("state", alone_state, state[:, 3:])


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_runs_repeat_to_the_bit(kernels: Backend, seed: int, name: str) -> None:
    lengths = (70, 3) if name == "chunk" else (3, 1)
    case = kernels.case(seed, lengths, heads=2)
    first = getattr(kernels, name)(case)
    for _ in range(2):
        again = getattr(kernels, name)(case)
        assert_same_bits("output", again[0], first[0])
        assert_same_bits("state", again[1], first[1])


def test_what_a_workspace_holds_does_not_matter(backend: Backend, seed: int) -> None:
    """One scratch serves layer after layer, of other shapes and dtypes too."""
    scratch = Scratch(backend.device)
    for number, (dtype, dims) in enumerate(
        [
            (torch.float32, (48, 80)),
            (torch.bfloat16, (32, 16)),
            (torch.bfloat16, (128, 128)),
            (torch.float32, (48, 80)),
        ]
    ):
        case = backend.case(seed + number, (70, 3), key_dim=dims[0], value_dim=dims[1], dtype=dtype)
        want_o, want_state = backend.chunk(case, scratch=scratch)
        spoil(scratch)
        o, state = backend.chunk(case, scratch=scratch)
        backend.assert_same("output", o, want_o)
        backend.assert_same("state", state, want_state)
        assert_result(case, o, state)


def test_a_step_plan_serves_every_layer_of_a_step(backend: Backend, seed: int) -> None:
    layers = [backend.case(seed + n, (70, 0, 9)) for n in range(3)]
    cu_seqlens = layers[0].cu_seqlens
    step_plan = build_step_plan(
        cu_seqlens, 79, cu_seqlens_cpu=cu_seqlens.cpu(), chunk_table=backend.name != "torch"
    )
    scratch = Scratch(backend.device)
    for case in layers:
        assert_result(case, *backend.chunk(case, step_plan=step_plan, scratch=scratch))


def test_launch_sizes_from_a_bound_give_the_same_bits(kernels: Backend, seed: int) -> None:
    """Where the host does not know the lengths, spare programs of the launch do nothing."""
    case = kernels.case(seed, (70, 0, 9, 0, 3))
    exact = build_step_plan(case.cu_seqlens, 82, cu_seqlens_cpu=case.cu_seqlens.cpu())
    assert exact.num_chunks == 4
    padded = with_capacity(case, 9)
    want_o, want_state = kernels.chunk(case, step_plan=exact)
    o, state = kernels.chunk(case, step_plan=padded)
    assert_same_bits("output", o, want_o)
    assert_same_bits("state", state, want_state)


def with_capacity(case: Case, capacity: int) -> Any:
    from kda_backend.step_plan import build_chunk_table

    return dataclasses.replace(
        build_step_plan(case.cu_seqlens, offsets_of(case.lengths)[-1]),
        cu_seqlens_cpu=None,
        num_chunks=capacity,
        chunk_table=build_chunk_table(case.cu_seqlens, capacity),
    )
