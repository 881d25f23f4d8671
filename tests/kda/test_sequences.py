"""What prefill and the recurrence have in common: shapes, states and outputs, against float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from backend_core.testing.numerics import poisoned
from kda_backend.testing.cases import TOKEN_FIELDS, Case
from tests.kda.cases import Backend, Run, assert_close, assert_result, assert_same_bits


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 128), (128, 64), (48, 80), (1, 3), (200, 256), (256, 64)]
)
def test_every_head_dimension(
    backend: Backend, run: Run, seed: int, key_dim: int, value_dim: int
) -> None:
    case = backend.case(seed, lengths_of(run)[:1], key_dim=key_dim, value_dim=value_dim)
    assert_result(case, *run(case))


MODELS: dict[str, dict[str, Any]] = {
    "log decays, given beta": {"gate": "log", "beta": "given"},
    "log decays, twice": {"gate": "log", "beta": "twice_sigmoid"},
    "bounded gate, given beta": {"gate": "bounded", "beta": "given"},
    "bounded gate, twice": {"gate": "bounded", "beta": "twice_sigmoid"},
    "bounded gate of rate one": {"gate": "bounded", "with_a_log": False},
    "grouped values": {"heads": 2, "value_heads": 4},
    "three values of a key": {"heads": 1, "value_heads": 3},
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_kind_of_model(backend: Backend, run: Run, seed: int, model: dict[str, Any]) -> None:
    case = backend.case(seed, lengths_of(run), **model)
    assert_result(case, *run(case))


def test_a_gate_without_bias(backend: Backend, run: Run, seed: int) -> None:
    case = dataclasses.replace(backend.case(seed, lengths_of(run)), dt_bias=None)
    assert_result(case, *run(case))


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scale_and_norm(
    backend: Backend, run: Run, seed: int, l2norm: bool, dtype: torch.dtype
) -> None:
    case = backend.case(seed, lengths_of(run), l2norm=l2norm, scale=3.0, dtype=dtype)
    doubled = dataclasses.replace(case, q=2.0 * case.q)
    for each in (case, doubled):
        assert_result(each, *run(each))


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_offsets_of_either_width(
    backend: Backend, run: Run, seed: int, cu_dtype: torch.dtype
) -> None:
    case = backend.case(seed, (0, *lengths_of(run), 0), heads=2)
    cu_seqlens = case.cu_seqlens.to(cu_dtype)
    assert_result(case, *run(case, cu_seqlens=cu_seqlens))
    if run.__name__ == "chunk":
        exact = run(case, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu())
        assert_result(case, *exact)


@pytest.mark.parametrize("is_single", [True, False])
def test_equal_lengths_as_a_batch(backend: Backend, run: Run, seed: int, is_single: bool) -> None:
    length = 1 if is_single else lengths_of(run)[0]
    case = backend.case(seed, (length,) * 3, heads=2)
    batch = as_batch(case)
    o, state = run(batch, cu_seqlens=None)
    assert o.shape == batch.v.shape
    assert_result(case, o, state)


def as_batch(case: Case) -> Case:
    """Equal lengths as rows of a batch instead of one packed row."""
    rows = {
        name: getattr(case, name)[0].unflatten(0, (len(case.lengths), case.lengths[0]))
        for name in TOKEN_FIELDS
    }
    return dataclasses.replace(case, **rows)


def test_views_of_one_packed_tensor_and_an_output_in_place_of_v(
    backend: Backend, run: Run, seed: int
) -> None:
    """As engines split it: [T, q | k | v | g | beta], and columns of others."""
    case = backend.case(seed, lengths_of(run), heads=2, dims="uneven")
    columns = [getattr(case, name)[0].flatten(1) for name in TOKEN_FIELDS]
    packed = torch.cat([*columns, torch.full_like(columns[0], torch.nan)], dim=1)
    shaped = {
        name: view.unflatten(1, getattr(case, name).shape[2:])[None]
        for name, view in zip(
            TOKEN_FIELDS,
            packed.split([c.shape[1] for c in (*columns, columns[0])], 1),
            strict=False,
        )
    }
    views, before = dataclasses.replace(case, **shaped), packed.clone()
    assert not views.k.is_contiguous()
    want, want_state = run(case)
    for options in ({}, {"out": views.v}):
        o, state = run(views, **options)
        backend.assert_same("output", o, want)
        backend.assert_same("state", state, want_state)
    assert o.data_ptr() == views.v.data_ptr()
    views.v.copy_(case.v)
    assert_same_bits("q, k, g and beta", packed, before)


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
