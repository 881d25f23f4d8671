"""Plans by property: what a plan lets attend is what its definition says, element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from block_sparse_backend.plan import block_plan, intervals, predicted
from block_sparse_backend.plan.block_plan import FULL, PARTIAL, BlockPlan
from block_sparse_backend.testing.cases import causal_seen, elements_seen

CPU = torch.device("cpu")
lengths = st.integers(1, 150)
blocks = st.sampled_from([16, 32, 64])
few = settings(max_examples=25, deadline=None)


def assert_well_formed(plan: BlockPlan) -> None:
    """FULL before PARTIAL, no block twice in a row, every tile with queries once."""
    for begin, full_end, end, _ in plan.rows.tolist():
        assert 0 <= begin <= full_end <= end <= len(plan.cols)
        row = plan.cols[begin:end].tolist()
        assert len(set(row)) == len(row)
    tiles = [tuple(x[:3]) for x in plan.work.tolist() if x[0] >= 0]
    assert len(set(tiles)) == len(tiles)
    for i, (_, _, q_len, *_) in enumerate(plan.sequences.tolist()):
        expected = plan.num_heads * -(-q_len // plan.block_m)
        assert sum(x[0] == i for x in tiles) == expected


@few
@given(lengths, lengths, blocks, blocks)
def test_causal(q_len: int, kv_len: int, m: int, n: int) -> None:
    plan = intervals.causal(q_len, kv_len, 2, block_m=m, block_n=n, device=CPU)
    assert_well_formed(plan)
    assert torch.equal(elements_seen(plan)[1], causal_seen(q_len, kv_len))


@few
@given(lengths, lengths, blocks, blocks)
def test_full_blocks_are_whole(q_len: int, kv_len: int, m: int, n: int) -> None:
    """A FULL block hides nothing from the mask: every element of it is attended."""
    plan = intervals.causal(q_len, kv_len, 1, block_m=m, block_n=n, device=CPU)
    seen = causal_seen(q_len, kv_len)
    for _, _, tile, row in plan.work.tolist():
        begin, full_end, _, _ = plan.rows[row].tolist()
        for col in plan.cols[begin:full_end].tolist():
            assert (col + 1) * n <= kv_len
            assert bool(seen[tile * m : (tile + 1) * m, col * n : (col + 1) * n].all())


@few
@given(st.lists(st.tuples(st.integers(0, 70), lengths), min_size=1, max_size=4), st.booleans())
def test_ragged(sizes: list[tuple[int, int]], is_causal: bool) -> None:
    q_lens, kv_lens = (torch.tensor([0, *x]).cumsum(0).int() for x in zip(*sizes, strict=True))
    plan = intervals.ragged(
        q_lens, kv_lens, 80, 160, 2, is_causal=is_causal, block_m=32, block_n=32
    )
    assert_well_formed(plan)
    for i, (q_len, kv_len) in enumerate(sizes):
        seen = elements_seen(plan, i)[0]
        full = torch.ones(q_len, kv_len, dtype=torch.bool)
        assert torch.equal(seen, causal_seen(q_len, kv_len) if is_causal else full)


@pytest.mark.parametrize("is_causal", [False, True])
def test_many_packed_sequences(is_causal: bool, seed: int, device: torch.device) -> None:
    """The kernel's plan is torch's, and as large as all tokens are."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 40, (2, 150), generator=generator)
    sizes[:, 70], sizes[:, 100] = 700, 0
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)).int().to(device)
    tokens = (int(sizes[0].sum()), int(sizes[1].sum()))
    given: dict[str, Any] = {"num_heads": 3, "tokens": tokens, "is_causal": is_causal}
    given |= {"block_m": 32, "block_n": 64}
    plan, in_torch = (
        intervals.ragged(*offsets, 600, 650, **given, path=path) for path in ("triton", "torch")
    )
    for name in ("rows", "work", "sequences", "key_blocks", "first_blocks"):
        assert torch.equal(getattr(plan, name), getattr(in_torch, name)), name
    assert len(plan.rows) < 400 and plan.key_blocks is not None and len(plan.key_blocks) < 390
    assert_well_formed(plan)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64])
@pytest.mark.parametrize("keep_first", [False, True])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_a_map_of_blocks(
    path: str, dtype: torch.dtype, keep_first: bool, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kept = (torch.rand(2, 3, 70, 4, generator=generator) < 0.4).mT
    sizes = (128, 70 * 64 - 3), (32, 64)
    plan = predicted.from_map(kept.to(device, dtype), *sizes, keep_first, path)
    assert_well_formed(plan)
    for _, head, tile, row in plan.work.tolist()[: 3 * 4]:
        begin, full_end, end, _ = plan.rows[row].tolist()
        want = kept[0, head, tile].clone()
        want[0] |= keep_first
        assert plan.cols[begin:end].tolist() == want.nonzero().flatten().tolist()
        assert full_end == end - int(want[-1])


@few
@given(st.integers(0, 1 << 20))
def test_compact_lists_full_blocks_first(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 3, (7, 9), generator=generator, dtype=torch.int8)
    rows, cols = block_plan.compact(kinds)
    for kind, (begin, full_end, end, _) in zip(kinds, rows.tolist(), strict=True):
        assert cols[begin:full_end].tolist() == (kind == FULL).nonzero().flatten().tolist()
        assert cols[full_end:end].tolist() == (kind == PARTIAL).nonzero().flatten().tolist()


def test_density_of_a_causal_plan() -> None:
    plan = intervals.causal(128, 128, 3, block_m=32, block_n=32, device=CPU)
    assert plan.density() == 10 / 16


def test_longest_rows_of_a_head_come_first() -> None:
    plan = intervals.causal(128, 128, 2, block_m=32, block_n=32, device=CPU)
    assert [x[1:3] for x in plan.work.tolist()[:4]] == [[0, 3], [0, 2], [0, 1], [0, 0]]
