"""Any ragged batch of any small model: exact, and indifferent to how it is packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import chunks_of, cu_tensor, make_case
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import ON_GPU, Backend, assert_result

# the same examples in every run, however long one takes
SETTINGS = settings(derandomize=True, deadline=None, database=None)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
KERNELS = Backend("kernels", DEVICE)

lengths = st.lists(
    st.one_of(st.integers(0, 4), st.integers(60, 68), st.integers(0, 130)), max_size=4
).map(tuple)
models = st.fixed_dictionaries(
    {
        "regime": st.sampled_from(REGIMES),
        "gate": st.sampled_from(["log", "softplus", "bounded"]),
        "beta": st.sampled_from(["given", "sigmoid"]),
        "heads": st.integers(1, 2),
        "key_dim": st.sampled_from([8, 16, 24, 40]),
        "value_dim": st.sampled_from([4, 8, 16, 24]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
        "l2norm": st.booleans(),
    }
)
seeds = st.integers(0, 2**31 - 1)


@settings(SETTINGS, max_examples=15)
@given(lengths=lengths, model=models, group=st.integers(1, 2), seed=seeds)
def test_prefill_of_any_batch_is_exact(
    lengths: tuple[int, ...], model: dict[str, Any], group: int, seed: int
) -> None:
    case = make_case(seed, lengths, value_heads=group * model["heads"], **model)
    assert_result(case, *KERNELS.chunk(case.to(DEVICE)))


@settings(SETTINGS, max_examples=15)
@given(
    lengths=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    model=models,
    group=st.integers(1, 2),
    seed=seeds,
)
def test_decode_of_any_batch_is_exact(
    lengths: tuple[int, ...], model: dict[str, Any], group: int, seed: int
) -> None:
    case = make_case(seed, lengths, value_heads=group * model["heads"], **model)
    assert_result(case, *KERNELS.recurrent(case.to(DEVICE)))


@settings(SETTINGS, max_examples=50)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple))
def test_without_host_lengths_the_bound_on_chunks_is_never_passed(lengths: tuple[int, ...]) -> None:
    """A tensor whose values the host must not read: one on a device without storage."""
    on_meta = cu_tensor(lengths, torch.device("meta"))
    meta = build_step_plan(on_meta, sum(lengths), chunk_table=False)
    assert meta.cu_seqlens_cpu is None
    assert meta.num_chunks >= len(chunks_of(lengths)[0])
    assert meta.num_chunks <= sum(lengths) // 64 + len(lengths)
