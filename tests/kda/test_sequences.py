"""What prefill and the recurrence have in common: shapes, states and outputs, against float64."""

from __future__ import annotations

import pytest

from backend_core.testing.numerics import poisoned
from tests.kda.cases import Backend, Run, assert_close, assert_result, assert_same_bits


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 128), (128, 64), (48, 80), (1, 3), (200, 256), (256, 64)]
)
def test_every_head_dimension(
    backend: Backend, run: Run, seed: int, key_dim: int, value_dim: int
) -> None:
    case = backend.case(seed, lengths_of(run)[:1], key_dim=key_dim, value_dim=value_dim)
    assert_result(case, *run(case))


@pytest.mark.parametrize(("heads", "value_heads"), [(1, 3), (2, 4)])
def test_grouped_value_heads(
    backend: Backend, run: Run, seed: int, heads: int, value_heads: int
) -> None:
    case = backend.case(seed, lengths_of(run), heads=heads, value_heads=value_heads)
    assert_result(case, *run(case))


def test_bounded_gate_without_a_log_has_rate_one(backend: Backend, run: Run, seed: int) -> None:
    case = backend.case(seed, lengths_of(run)[:1], gate="bounded", with_a_log=False)
    assert case.a_log is None
    assert_result(case, *run(case))


def test_state_layouts_are_transposes(backend: Backend, run: Run, seed: int) -> None:
    case = backend.case(seed, lengths_of(run), dims="uneven")
    o, state = run(case)
    transposed = {"initial_state": case.state.mT.contiguous(), "state_v_first": False}
    o_kv, state_kv = run(case, **transposed)
    assert state_kv.shape == case.state.mT.shape
    # a layout compiles to a kernel of its own, which may contract other products
    assert_close("output", o_kv, o, 1e-3)
    assert_close("state", state_kv.mT, state, 1e-6)


def test_initial_state_may_have_any_strides(backend: Backend, run: Run, seed: int) -> None:
    case = backend.case(seed, lengths_of(run), heads=2)
    o, state = run(case)
    strided = case.state.transpose(1, 3).contiguous().transpose(1, 3)
    o_strided, state_strided = run(case, initial_state=strided)
    backend.assert_same("output", o_strided, o)
    backend.assert_same("state", state_strided, state)


def test_no_initial_state_is_a_zero_state(backend: Backend, run: Run, seed: int) -> None:
    case = backend.case(seed, lengths_of(run))
    assert_result(case, *run(case, initial_state=None), from_zero=True)


def test_states_are_written_and_returned_only_when_asked_for(
    backend: Backend, run: Run, seed: int
) -> None:
    case = backend.case(seed, lengths_of(run))
    before = case.state.clone()
    _, state = run(case, output_final_state=False)
    assert state is None
    run(case)
    assert_same_bits("initial state", case.state, before)


@pytest.mark.parametrize("lengths", [(0, 0), ()])
def test_no_tokens_hand_the_states_on(
    backend: Backend, run: Run, seed: int, lengths: tuple[int, ...]
) -> None:
    case = backend.case(seed, lengths)
    o, state = run(case)
    assert o.shape == case.v.shape
    assert_same_bits("state", state, case.state)


def test_output_goes_to_the_given_buffer(backend: Backend, run: Run, seed: int) -> None:
    case = backend.case(seed, lengths_of(run), heads=2)
    tokens, value_dim = sum(case.lengths), case.v.shape[3]
    wide = poisoned(1, tokens, 2, 2 * value_dim, dtype=case.v.dtype, device=backend.device)
    out = wide[..., :value_dim]
    o, _ = run(case, out=out)
    assert o is out
    assert_same_bits("output", o, run(case)[0])
    assert wide[..., value_dim:].isnan().all(), "written beside the output"


def lengths_of(run: Run) -> tuple[int, ...]:
    """Prefill crosses a chunk boundary; one decode sequence takes several tokens."""
    return (70, 0, 9) if run.__name__ == "chunk" else (3, 0, 1)
