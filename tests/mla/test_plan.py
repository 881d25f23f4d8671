"""Properties of plans: every block once, the split numbers exact; kernels as in torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_backend.launch_params import Sm90MlaParams
from mla_backend.plan.fill import MIN_BLOCKS, OVERHEAD, plan_split_kv
from mla_backend.plan.split_kv import split_kv
from mla_backend.step_plan import MlaPlan

lengths_of = st.lists(st.integers(0, 5000) | st.integers(0, 130), min_size=1, max_size=40)


def blocks_of(length: int) -> int:
    return -(-max(length, 0) // 64)


def walk(work: torch.Tensor, lengths: list[int]) -> dict[int, list[tuple[int, int, int]]]:
    """For each tile the pieces (begin, end, split) that the CTAs have, in their order."""
    found: dict[int, list[tuple[int, int, int]]] = {i: [] for i in range(len(lengths))}
    for first, block, last, end, split, *_ in work.tolist():
        for tile in range(first, last + 1):
            begin = block if tile == first else 0
            stop = end if tile == last else blocks_of(lengths[tile])
            found[tile].append((begin, stop, split if tile == first else 0))
    return found


def check_plan(work: torch.Tensor, num_splits: torch.Tensor, lengths: list[int]) -> None:
    """Pieces tile each tile's blocks in order, and are numbered as the slots count them."""
    assert num_splits[0] == 0
    for tile, pieces in walk(work, lengths).items():
        assert [split for *_, split in pieces] == list(range(len(pieces)))
        assert int(num_splits[tile + 1] - num_splits[tile]) == len(pieces)
        assert pieces[0][0] == 0 and pieces[-1][1] == blocks_of(lengths[tile])
        for (_, end, _), (begin, *_) in itertools.pairwise(pieces):
            assert end == begin
        assert all(begin < end for begin, end, _ in pieces) or lengths[tile] == 0


@settings(max_examples=150, deadline=None)
@given(lengths_of, st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_every_block_is_computed_once(
    lengths: list[int], ctas: int, overhead: int, min_blocks: int
) -> None:
    tokens = torch.tensor(lengths, dtype=torch.int32)
    work, num_splits = split_kv(tokens, ctas, overhead, min_blocks)
    check_plan(work, num_splits, lengths)
    assert int(num_splits[-1]) <= len(lengths) + ctas


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([1024], 1),
        ([8192], 1),
        ([65536], 8),
        ([1024] * 16, 2),
        ([8192] * 4, 4),
        ([1024] * 128, 16),
        ([8192] * 128, 128),
        ([65536] + [1024] * 63, 17),
        ([8192] * 64, 64),
    ],
)
def test_the_cases_of_the_benchmark_are_even(lengths: list[int], most: int) -> None:
    """On 132 CTAs: the most blocks that a CTA has."""
    work, _ = split_kv(torch.tensor(lengths, dtype=torch.int32), 132, 1, 1)
    load = []
    for first, block, last, end, *_ in work.tolist():
        pieces = range(first, last + 1)
        total = sum(blocks_of(lengths[tile]) for tile in pieces)
        load.append(total - block - (blocks_of(lengths[last]) - end) if len(pieces) else 0)
    assert sum(load) == sum(map(blocks_of, lengths))
    assert max(load) <= most


def test_the_triton_planner_is_the_one_in_torch(device: torch.device, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for most in (100, 3000, 40000):
        tiles = int(torch.randint(1, 50, (1,), generator=generator))
        lengths = torch.randint(0, most, (tiles,), generator=generator, dtype=torch.int32)
        lengths[tiles // 2 + 1 :: 5] = -1
        plan = empty_plan(lengths.to(device), 20)
        plan_split_kv(plan, plan.lengths)
        work, num_splits = split_kv(lengths, 20, OVERHEAD, MIN_BLOCKS)
        assert torch.equal(plan.work.cpu(), work)
        assert torch.equal(plan.num_splits.cpu(), num_splits)


def empty_plan(lengths: torch.Tensor, ctas: int) -> MlaPlan:
    tiles = lengths.shape[0]
    i32 = {"dtype": torch.int32, "device": lengths.device}
    return MlaPlan(
        lengths, torch.zeros(ctas, 8, **i32), torch.zeros(tiles + 1, **i32), 1, 0,
        starts=torch.zeros(2, tiles, **i32),
    )  # fmt: skip


def test_half_of_a_threshold_of_shared_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="must both be 0, or at least 2 requests and 1 token"):
        Sm90MlaParams(shared_requests=32)
