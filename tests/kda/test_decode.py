"""fused_recurrent_kda against the float64 recurrence, and against chunk_kda."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backend_core.tables.schema import Row
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import (
    Backend,
    assert_result,
    assert_same_bits,
    shipped_rows,
)
from tests.kda.test_sequences import as_batch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("regime", REGIMES)
def test_one_token_for_each_sequence(
    backend: Backend, seed: int, regime: str, dtype: torch.dtype
) -> None:
    case = backend.case(
        seed, (1,) * 4, regime=regime, heads=2, key_dim=128, value_dim=128, dtype=dtype
    )
    o, state = backend.recurrent(as_batch(case), cu_seqlens=None)
    assert o.shape == (4, 1, 2, 128)
    assert_result(case, o, state)


@pytest.mark.parametrize("operator", ["recurrent", "chunk"])
def test_one_token_of_each_sequence_is_read_where_it_lies(
    backend: Backend, seed: int, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views [B, 1, ...] of one packed row per sequence, the output in place of v: no copies."""
    case = backend.case(seed, (1, 1, 1), heads=2)
    run = getattr(backend, operator)
    want, want_state = run(case)
    packed = torch.cat([case.q, case.k, case.v, case.g], 2)
    beta = torch.cat([case.beta, case.beta], 2)[0, :, None, :2]
    q, k, v, g = (x[0, :, None] for x in packed.split(2, dim=2))
    views = dataclasses.replace(case, q=q, k=k, v=v, g=g, beta=beta)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", None)  # a copy is a TypeError
        o, state = run(views, out=v, cu_seqlens=None)
    assert o is v
    backend.assert_same("output", packed[:, :, 4:6], want)
    backend.assert_same("state", state, want_state)
    assert_same_bits("q and k", packed[:, :, :4], torch.cat([case.q, case.k], 2))
    assert_same_bits("g", packed[:, :, 6:], case.g)


def test_outputs_of_one_token_must_not_lie_over_one_another(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (1, 1, 1), heads=2)
    views = {name: getattr(case, name)[0, :, None] for name in ("q", "k", "v", "g", "beta")}
    value = views["v"]
    dim = value.shape[3]
    memory = value.new_empty(3 * 2 * dim)
    for out in (
        value[:1].clone().expand(3, -1, -1, -1),
        memory.as_strided(value.shape, (dim, dim, dim, 1)),  # a head over the next row's
        memory.as_strided(value.shape, (2 * dim, dim, 0, 1)),
    ):
        with pytest.raises(ValueError, match="out must have rows apart, got strides"):
            backend.recurrent(dataclasses.replace(case, **views), out=out, cu_seqlens=None)
    heads_first = memory.as_strided(value.shape, (dim, dim, 3 * dim, 1))
    backend.recurrent(dataclasses.replace(case, **views), out=heads_first, cu_seqlens=None)


@pytest.mark.parametrize("row", shipped_rows("recurrent"))
@pytest.mark.parametrize("dims", [(128, 128), (48, 80)])
def test_every_row_of_the_tables_is_exact(
    kernels: Backend, seed: int, row: Row, dims: tuple[int, int]
) -> None:
    case = kernels.case(seed, (1, 2), key_dim=dims[0], value_dim=dims[1])
    if missing := case.shape.requires(row.operator) - row.features:
        pytest.skip(f"{row.name} lacks {', '.join(missing)}")
    selection = kernels.selection(case.shape).with_path(row)
    assert_result(case, *kernels.recurrent(case, selection=selection))
