"""Any ragged batch of any small model: exact, and indifferent to how it is packed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import TOKEN_FIELDS, chunks_of, cu_tensor, make_case, offsets_of
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import ON_GPU, Backend, assert_result, assert_same_bits

# the same examples in every run, however long one takes
SETTINGS = settings(derandomize=True, deadline=None, database=None)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
KERNELS = Backend("kernels", DEVICE)
TORCH = Backend("torch", torch.device("cpu"))

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


@settings(SETTINGS, max_examples=40)
@given(lengths=lengths, model=models, group=st.integers(1, 2), seed=seeds)
def test_the_torch_path_is_exact_on_any_batch(
    lengths: tuple[int, ...], model: dict[str, Any], group: int, seed: int
) -> None:
    case = make_case(seed, lengths, value_heads=group * model["heads"], **model)
    assert_result(case, *TORCH.chunk(case))


@settings(SETTINGS, max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 80), min_size=2, max_size=3).map(tuple),
    order=st.randoms(use_true_random=False),
    seed=seeds,
)
def test_the_order_of_the_batch_changes_no_bit(
    lengths: tuple[int, ...], order: random.Random, seed: int
) -> None:
    case = make_case(seed, lengths, value_dim=16).to(DEVICE)
    permutation = list(range(len(lengths)))
    order.shuffle(permutation)
    parts = [case.only(n) for n in permutation]
    shuffled = dataclasses.replace(
        case,
        lengths=tuple(lengths[n] for n in permutation),
        state=case.state[permutation],
        **{name: torch.cat([getattr(part, name) for part in parts], 1) for name in TOKEN_FIELDS},
    )
    o, state = KERNELS.chunk(case)
    shuffled_o, shuffled_state = KERNELS.chunk(shuffled)
    offsets = offsets_of(shuffled.lengths)
    for position, n in enumerate(permutation):
        begin, end = offsets[position : position + 2]
        want = o[:, case.offsets[n] : case.offsets[n + 1]]
        assert_same_bits(f"output of sequence {n}", shuffled_o[:, begin:end], want)
        assert_same_bits(f"state of sequence {n}", shuffled_state[position], state[n])


@settings(SETTINGS, max_examples=50)
@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12).map(tuple))
def test_without_host_lengths_the_bound_on_chunks_is_never_passed(lengths: tuple[int, ...]) -> None:
    """A tensor whose values the host must not read: one on a device without storage."""
    on_meta = cu_tensor(lengths, torch.device("meta"))
    meta = build_step_plan(on_meta, sum(lengths), chunk_table=False)
    assert meta.cu_seqlens_cpu is None
    assert meta.num_chunks >= len(chunks_of(lengths)[0])
    assert meta.num_chunks <= sum(lengths) // 64 + len(lengths)
