"""The definition itself, against formulas written out a second time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend_core.testing.numerics import relative_error
from kda_backend import reference
from kda_backend.testing.cases import make_case, offsets_of
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import Backend


def test_recurrence_is_the_delta_rule_with_a_decay_per_channel(seed: int) -> None:
    """S_t = S_{t-1} diag(a_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = scale S_t q_t."""
    case = make_case(seed, (9, 0, 4), heads=2, value_heads=4, key_dim=5, value_dim=7)
    q, k, v, log_decay, beta = (x.numpy() for x in case.activated())
    want_o = np.empty_like(v)
    want_state = case.state.double().numpy().copy()
    for n, (begin, end) in enumerate(zip(case.offsets, case.offsets[1:], strict=False)):
        for head in range(4):
            for t in range(begin, end):
                k_t = k[t, head // 2]
                transition = np.diag(np.exp(log_decay[t, head])) @ (
                    np.eye(5) - beta[t, head] * np.outer(k_t, k_t)
                )
                s = want_state[n, head] @ transition + beta[t, head] * np.outer(v[t, head], k_t)
                want_state[n, head] = s
                want_o[t, head] = 5**-0.5 * s @ q[t, head // 2]
    o, state = case.expected()
    np.testing.assert_allclose(o.numpy(), want_o, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(state.numpy(), want_state, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("regime", REGIMES)
def test_chunked_form_equals_the_recurrence_in_float64(regime: str, seed: int) -> None:
    case = make_case(seed, (70, 0, 1, 128, 9), regime=regime, heads=1, value_heads=2)
    want_o, want_state = case.expected()
    o, state, chunk_states = reference.chunk_kda(
        *case.activated(), scale=32**-0.5, state=case.state.double(), cu_seqlens=case.offsets
    )
    assert relative_error(o, want_o) <= 1e-12
    assert relative_error(state, want_state) <= 1e-12
    # before the chunks of sequence 0, 2, 3 and 4: two, one, two and one
    assert chunk_states.shape[0] == 6
    _, middle = case.only(3).part(0, 64, case.state[3:4]).expected()
    assert relative_error(chunk_states[4], middle[0]) <= 1e-12


def test_log_decay_is_the_gate_formula() -> None:
    raw = np.linspace(-60.0, 60.0, 241)
    bias, a_log = 0.75, 1.5
    x = raw + bias
    softplus = np.where(x > 0, x, 0) + np.log1p(np.exp(-np.abs(x)))
    bounded = -3.0 / (1.0 + np.exp(-np.exp(a_log) * x))
    unit_rate = -3.0 / (1.0 + np.exp(-x))
    g = torch.tensor(raw)[:, None, None]
    bias_t = torch.tensor([bias], dtype=torch.float64)
    a_t = torch.tensor([a_log], dtype=torch.float64)
    for want, a, lower_bound in (
        (-np.exp(a_log) * softplus, a_t, None),
        (bounded, a_t, -3.0),
        (unit_rate, None, -3.0),
    ):
        got = reference.log_decay(g, a, bias_t, lower_bound)[:, 0, 0].numpy()
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_l2norm_divides_by_the_length() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    want = torch.tensor([[0.6, 0.8], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(reference.l2norm(x), want, rtol=0, atol=1e-7)


def test_extreme_regime_reaches_the_gates_of_the_released_checkpoint(seed: int) -> None:
    _, _, _, log_decay, _ = make_case(seed, (128,), regime="extreme", heads=2).activated()
    assert log_decay.min() <= -2661
    assert log_decay.unflatten(0, (2, 64)).sum(1).min() <= -6e4
    assert log_decay.sum(0).max() >= -1.0, "no channel keeps its state"


def test_collinear_regime_is_ill_conditioned(seed: int) -> None:
    _, k, _, log_decay, beta = make_case(seed, (64,), regime="collinear", key_dim=64).activated()
    assert (k[1:, 0] @ k[0, 0]).min() >= 0.99
    assert beta.mean() >= 0.99 and log_decay.mean() >= -1e-3
    low = torch.eye(64) + (beta * k[:, 0] @ k[:, 0].T).tril(-1)
    # a Neumann series needs the powers of L, which reach far beyond fp16
    assert torch.linalg.matrix_power(low - torch.eye(64), 16).abs().max() > 65504


def test_offsets_count_empty_sequences() -> None:
    assert offsets_of((3, 0, 2)) == [0, 3, 3, 5]


def test_cpu_needs_no_plan(seed: int) -> None:
    case = make_case(seed, (70, 3))
    backend = Backend("torch", torch.device("cpu"))
    for run in (backend.chunk, backend.recurrent):
        chosen, by_default = run(case), run(case, selection=None)
        assert torch.equal(chosen[0], by_default[0]) and torch.equal(chosen[1], by_default[1])
