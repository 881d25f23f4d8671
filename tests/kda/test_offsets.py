"""Elements further than 2^31 from a tensor's start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kda_backend.testing.cases import TOKEN_FIELDS, Case
from tests.kda.cases import ON_GPU, Backend, assert_result, assert_same_bits

FAR = 2**31
Allocate = Callable[[int, torch.dtype], torch.Tensor]


@pytest.fixture
def allocate(device: torch.device, tmp_path: Path) -> Allocate:
    """So many zeros, with 2^31 more on either side for offsets that wrapped around.

    On a CPU it is a sparse file, of which only what is written exists.
    """

    def reserve(elements: int, dtype: torch.dtype) -> torch.Tensor:
        return zeros(elements + 2 * FAR, dtype)[FAR:-FAR]

    def zeros(elements: int, dtype: torch.dtype) -> torch.Tensor:
        if device.type != "cpu":
            if torch.cuda.mem_get_info()[0] < 1.2 * elements * dtype.itemsize:
                pytest.skip("too little GPU memory")
            return torch.zeros(elements, dtype=dtype, device=device)
        file = tmp_path / "sparse"
        with file.open("wb") as stream:
            stream.truncate(elements * dtype.itemsize)
        return torch.from_file(str(file), shared=True, size=elements, dtype=dtype)

    return reserve


def spread(case: Case, allocate: Allocate, dim: int, stride: int) -> tuple[Case, torch.Tensor]:
    """The case's tokens, and a place for its output, as columns of one packed tensor in which
    ``stride`` elements lie between neighbours of dimension ``dim``."""
    far = allocate(stride * case.q.shape[dim], case.q.dtype)
    column = 0
    views = {}
    for name in (*TOKEN_FIELDS, "out"):
        x = getattr(case, "v" if name == "out" else name)
        strides = list(x.contiguous().stride())
        strides[dim] = stride
        views[name] = far.as_strided(x.shape, strides, far.storage_offset() + column)
        column += x.numel()
        if name != "out":
            views[name].copy_(x)
    assert column < stride
    out = views.pop("out")
    return dataclasses.replace(case, **views), out


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_tokens_far_apart(kernels: Backend, allocate: Allocate, seed: int, name: str) -> None:
    lengths, stride = ((130,), FAR // 128) if name == "chunk" else ((1, 2), FAR // 2)
    case = kernels.case(seed, lengths, dims="narrow")
    far, out = spread(case, allocate, 1, stride)
    assert out.stride(1) * (sum(lengths) - 1) >= FAR
    o, state = getattr(kernels, name)(far, out=out)
    want_o, want_state = getattr(kernels, name)(case)
    assert_same_bits("output", o, want_o)
    assert_same_bits("state", state, want_state)


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_heads_far_apart(kernels: Backend, allocate: Allocate, seed: int, name: str) -> None:
    """Heads outside tokens: head 2 of a long prompt is that far from head 0."""
    lengths = (20,) if name == "chunk" else (1, 1)
    case = kernels.case(seed, lengths, heads=3, dims="narrow")
    far, out = spread(case, allocate, 2, FAR // 2)
    o, state = getattr(kernels, name)(far, out=out)
    want_o, want_state = getattr(kernels, name)(case)
    assert_same_bits("output", o, want_o)
    assert_same_bits("state", state, want_state)


@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_slots_far_apart(kernels: Backend, allocate: Allocate, seed: int, name: str) -> None:
    lengths = (20, 3) if name == "chunk" else (1, 1)
    case = kernels.case(seed, lengths, heads=2, dims="narrow")
    memory = allocate(3 * (FAR // 2), torch.float32)
    shape, strides = case.state.shape[1:], case.state.stride()[1:]
    pool = memory.as_strided((3, *shape), (FAR // 2, *strides), memory.storage_offset())
    pool[2], pool[0] = case.state[0], case.state[1]
    slots = torch.tensor([2, 0], dtype=torch.int32, device=kernels.device)
    o, _ = getattr(kernels, name)(case, state_pool=pool, state_indices=slots)
    assert_result(case, o, torch.stack([pool[2], pool[0]]))
    assert (pool[1] == 0.0).all()


def test_slots_of_snapshots_far_apart(kernels: Backend, allocate: Allocate, seed: int) -> None:
    case = kernels.case(seed, (70, 3), heads=2, dims="narrow")
    memory = allocate(3 * (FAR // 2), torch.float32)
    shape, strides = case.state.shape[1:], case.state.stride()[1:]
    pool = memory.as_strided((3, *shape), (FAR // 2, *strides), memory.storage_offset())
    chunks = torch.tensor([[1], [1]], dtype=torch.int32, device=kernels.device)
    in_order = torch.zeros(2, 1, *shape, device=kernels.device)
    kernels.chunk(case, snapshot_chunks=chunks, snapshots=in_order)
    slots = torch.tensor([[2], [0]], dtype=torch.int32, device=kernels.device)
    kernels.chunk(case, snapshot_chunks=chunks, snapshots=pool, snapshot_indices=slots)
    for slot, want in ((2, in_order[0, 0]), (0, in_order[1, 0])):
        assert_same_bits(f"slot {slot}", pool[slot], want)
    assert (pool[1] == 0.0).all()


@pytest.mark.skipif(not ON_GPU, reason="takes 60 GB of GPU memory")
@pytest.mark.parametrize("name", ["chunk", "recurrent"])
def test_a_step_of_over_2_to_31_elements(device: torch.device, seed: int, name: str) -> None:
    """Inputs, output and scratch tiles all pass 2^31; the last sequence is as if alone."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("too little GPU memory")
    kernels = Backend("kernels_128", device)
    last = kernels.case(seed, (130 if name == "chunk" else 3,), heads=32)
    padded = FAR // (32 * 128 * 64)
    tokens = {}
    for field in TOKEN_FIELDS:
        x = getattr(last, field)
        tokens[field] = torch.cat([x.new_ones(1, 64 * padded, *x.shape[2:]), x], 1)
    case = dataclasses.replace(last, lengths=(64,) * padded + last.lengths, **tokens)
    pool = last.state.clone()
    slots = torch.full((padded + 1,), -1, dtype=torch.int32, device=device)
    slots[-1] = 0
    o, _ = getattr(kernels, name)(case, state_pool=pool, state_indices=slots)
    assert_result(last, o[:, 64 * padded :], pool)
