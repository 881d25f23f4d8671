"""chunk_kda against the float64 recurrence: gates, lengths, shapes, dtypes, layouts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backend_core.tables.schema import Row
from backend_core.testing.numerics import relative_error
from kda_backend.testing.cases import TOKEN_FIELDS, Case
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import (
    LENGTHS,
    Backend,
    assert_close,
    assert_result,
    assert_same_bits,
    shipped_rows,
)
from tests.kda.test_sequences import as_batch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


BATCHES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    *(((length,), {}) for length in LENGTHS),
    ((1000,), {"regime": "weak"}),  # without a drift
    *(
        ((130,), {"regime": x, "dims": "long keys", "dtype": dtype})
        for x in REGIMES
        for dtype in (torch.bfloat16, torch.float32)
    ),
    *(((100,), {"regime": x, "gate": gate}) for x in REGIMES for gate in ("log", "bounded")),
    *(((0, 70, 0, 0, 64, 1, 17, 0), {"heads": 2, "dtype": dtype}) for dtype in DTYPES),
]


@pytest.mark.parametrize(("lengths", "model"), BATCHES, ids=str)
def test_every_kind_of_batch_is_exact(
    backend: Backend, seed: int, lengths: tuple[int, ...], model: dict[str, Any]
) -> None:
    case = backend.case(seed, lengths, **model)
    assert_result(case, *backend.chunk(case))


def test_gate_parameters_in_the_shapes_and_dtypes_of_engines(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (70,), heads=2)
    assert case.a_log is not None and case.dt_bias is not None
    as_engines = dataclasses.replace(
        case, a_log=case.a_log.bfloat16().view(1, 1, 2, 1), dt_bias=case.dt_bias.bfloat16().view(-1)
    )
    assert_result(as_engines, *backend.chunk(as_engines))


def test_step_sizes_near_two_of_one_key_beside_flas_roundings(kernels: Backend, seed: int) -> None:
    """Each token reflects the state, and no rounding is damped."""
    case = kernels.case(seed, (520,), gate="bounded", beta="twice_sigmoid", dtype=torch.bfloat16)
    case.k[:] = case.k[:, :1]
    case.g[:], case.beta[:] = -12.0, 8.0
    for zeros in (case.a_log, case.dt_bias, case.state):
        assert zeros is not None
        zeros.zero_()
    case.v[:] = case.v[:, :8].repeat(1, 65, 1, 1)
    _, want = case.expected()
    _, state = kernels.chunk(case)
    ours, flas = (relative_error(x.cpu(), want) for x in (state, of_flas_roundings(case)))
    assert ours < min(0.1 * flas, 0.1), (ours, flas)


def of_flas_roundings(case: Case) -> torch.Tensor:
    """The final state of one sequence from zeros by FLA's chunked algorithm: float64, but for what
    FLA 0.6 keeps or multiplies in bf16 (the inverse, w, u, decayed keys, v_new and the state)."""

    def bf16(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).double()

    _, k, v, log_decay, beta = (x.transpose(0, 1) for x in case.activated())
    k, v, beta = bf16(k.expand(v.shape[0], -1, -1)), v, beta[..., None]
    state = torch.zeros(v.shape[0], v.shape[2], k.shape[2], dtype=torch.float64)
    for tokens in torch.arange(k.shape[1]).split(64):
        kc, vc, b = k[:, tokens], v[:, tokens], beta[:, tokens]
        g = log_decay[:, tokens].cumsum(1)
        decays = (g[:, :, None] - g[:, None]).clamp(max=0.0).exp()
        scores = (kc[:, :, None] * kc[:, None] * decays).sum(-1).tril(-1) * b
        inverse = bf16(torch.linalg.inv(torch.eye(len(tokens)).double() + scores))
        w, u = bf16(inverse @ bf16(kc * b * g.exp())), bf16(inverse @ bf16(vc * b))
        v_new = bf16(u - w @ bf16(state).mT)
        state = state * g[:, -1:].exp() + v_new.mT @ bf16(kc * (g[:, -1:] - g).exp())
    return state[None]


@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_gate_and_beta_may_have_their_own_dtype(
    backend: Backend, seed: int, gate_dtype: torch.dtype
) -> None:
    case = backend.case(seed, (70,))
    case = dataclasses.replace(case, g=case.g.to(gate_dtype), beta=case.beta.to(torch.float32))
    assert_result(case, *backend.chunk(case))


def test_rows_of_a_batch_need_not_be_packed(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (20, 20))
    batch, rows = as_batch(case), {}
    for name in TOKEN_FIELDS:
        own = getattr(batch, name)
        rows[name] = torch.cat([own, torch.full_like(own, torch.nan)], 1)[:, :20]
    assert_result(case, *backend.chunk(dataclasses.replace(case, **rows), cu_seqlens=None))


def test_batch_of_zero_length_rows_hands_the_state_on(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (0, 0))
    o, state = backend.chunk(as_batch(case), cu_seqlens=None)
    assert o.shape[:2] == (2, 0)
    assert_same_bits("state", state, case.state)


@pytest.mark.parametrize("length", [0, 5])
def test_a_batch_without_rows_does_nothing(backend: Backend, seed: int, length: int) -> None:
    case = backend.case(seed, ())
    rows = {
        name: getattr(case, name).new_empty(0, length, *getattr(case, name).shape[2:])
        for name in TOKEN_FIELDS
    }
    batch = dataclasses.replace(case, **rows)
    o, state, chunk_states = backend.chunk(batch, cu_seqlens=None, return_intermediate_states=True)
    assert o.shape == batch.v.shape
    assert state.shape == case.state.shape
    assert chunk_states.shape[0] == 0


def test_interleaved_heads_and_strided_channels(backend: Backend, seed: int) -> None:
    """Heads outside tokens, channels two apart: what cannot be read in place is copied."""
    case = backend.case(seed, (70, 9), heads=2)
    odd = dataclasses.replace(
        case,
        q=case.q.transpose(1, 2).contiguous().transpose(1, 2),
        v=case.v.transpose(1, 2).contiguous().transpose(1, 2),
        k=torch.stack([case.k, torch.full_like(case.k, torch.nan)], -1)[..., 0],
        g=torch.stack([case.g, torch.full_like(case.g, torch.nan)], -1)[..., 0],
        beta=case.beta.transpose(1, 2).contiguous().transpose(1, 2),
    )
    backend.assert_same("output", backend.chunk(odd)[0], backend.chunk(case)[0])


@pytest.mark.parametrize("state_v_first", [True, False])
def test_intermediate_states_are_those_before_each_chunk(
    backend: Backend, seed: int, state_v_first: bool
) -> None:
    case = backend.case(seed, (130, 0, 64, 1), dims="uneven")
    initial = case.state if state_v_first else case.state.mT.contiguous()
    o, _, chunk_states = backend.chunk(
        case,
        initial_state=initial,
        state_v_first=state_v_first,
        return_intermediate_states=True,
    )
    assert_result(case, o, None)
    assert chunk_states.dtype == case.k.dtype
    if not state_v_first:
        assert chunk_states.shape[-2:] == case.state.mT.shape[-2:]
        chunk_states = chunk_states.mT
    # three chunks, none, one, one; on a GPU the host knows only a bound of their number
    assert chunk_states.shape[0] == 1 and chunk_states.shape[1] >= 5
    for chunk, n, tokens in ((0, 0, 0), (1, 0, 64), (2, 0, 128), (3, 2, 0), (4, 3, 0)):
        sequence = case.only(n)
        _, want = sequence.part(0, tokens, sequence.state).expected()
        assert_close(f"state before chunk {chunk}", chunk_states[0, chunk], want[0], 5e-3)


def test_intermediate_states_of_a_batch_have_its_rows(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (70, 70))
    _, _, chunk_states = backend.chunk(
        as_batch(case), cu_seqlens=None, return_intermediate_states=True
    )
    assert chunk_states.shape == (2, 2, *case.state.shape[1:])
    for n in range(2):
        assert_close("first state", chunk_states[n, 0], case.state[n], 5e-3)


@pytest.mark.parametrize("row", shipped_rows("prefill"))
@pytest.mark.parametrize("dims", [(128, 128), (48, 80)])
def test_every_row_of_the_tables_is_exact(
    kernels: Backend, seed: int, row: Row, dims: tuple[int, int]
) -> None:
    case = kernels.case(seed, (70, 9), key_dim=dims[0], value_dim=dims[1])
    shape = dataclasses.replace(case.shape, deterministic_prefix=False)
    if missing := shape.requires(row.operator) - row.features:
        pytest.skip(f"{row.name} lacks {', '.join(missing)}")
    selection = kernels.selection(case.shape).with_path(row)
    assert_result(case, *kernels.chunk(case, selection=selection))
