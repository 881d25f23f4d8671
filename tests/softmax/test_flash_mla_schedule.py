"""FlashMLA's schedule in each release: examples by hand, the algorithm restated, the kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softmax_backend.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from softmax_backend.plan import MlaPlanner
from softmax_backend.plan.flash_mla import (
    RELEASES,
    Release,
    flash_mla_schedule,
    from_columns_of,
    in_columns_of,
    num_parts,
)
from softmax_backend.plan.planner import plan_flash_mla
from softmax_backend.spec import MlaSpec
from softmax_backend.testing.cases import SCALE, assert_close, expected, forced, make_case
from tests.softmax.test_plan import check_plan, lengths_of


def tensors_of(lengths: list[int], parts: int, release: Release) -> tuple[list[Any], list[int]]:
    tokens = torch.tensor(lengths, dtype=torch.int32)
    work, num_splits = flash_mla_schedule(tokens, parts, release)
    metadata = in_columns_of(release, work, tokens)
    assert metadata.shape == (parts, 8) and metadata.dtype == num_splits.dtype == torch.int32
    assert metadata.is_contiguous() and num_splits.shape == (len(lengths) + 1,)
    return metadata.tolist(), num_splits.tolist()


# 70 and 3 blocks on 4 parts: a payload of ceil((73 + 10) / 4) + 5 = 26, 21 blocks and 5 for the
# request. The last part has the last 7 blocks, whose 5 leave 14, and the second request's 3.
TWO_REQUESTS = {
    "2025-04": [
        [0, 0, 0, 1344, 0],
        [0, 1344, 0, 2688, 1],
        [0, 2688, 0, 4032, 2],
        [0, 4032, 1, 130, 3],
    ],
    "2025-09": [[0, 0, 0, 21, 0], [0, 21, 0, 42, 1], [0, 42, 0, 63, 2], [0, 63, 1, 3, 3]],
    "2026-01": [
        [0, 0, 0, 21, 0, 1, 1],
        [0, 0, 21, 42, 1, 1, 1],
        [0, 0, 42, 63, 2, 1, 1],
        [0, 1, 63, 3, 3, 1, 0],
    ],
}
# 130 tokens and none, on 4 parts. 2025-04: 3 and 0 blocks, ceil(13 / 4) + 5 = 9 is raised to 10: 3
# blocks take 8, and the empty request's 5 do not fit. Later: ceil((3 + 1 + 10) / 4) + 5 = 9, with
# the same end. A part without work begins after the last request, since 2025-09 at the block
# that is the first request's last.
AN_EMPTY_ONE = {
    "2025-04": [[0, 0, 0, 130, 0], [1, 0, 1, 0, 0], [2, 0, 1, 0, 0], [2, 0, 1, 0, 0]],
    "2025-09": [[0, 0, 0, 3, 0], [1, 0, 1, 0, 0], [2, 2, 1, 0, 0], [2, 2, 1, 0, 0]],
    "2026-01": [
        [0, 0, 0, 3, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [2, 1, 2, 0, 0, 0, 0],
        [2, 1, 2, 0, 0, 0, 0],
    ],
}


@pytest.mark.parametrize("release", RELEASES)
def test_examples_by_hand(release: Release) -> None:
    for lengths, by_release, splits in (
        ([70 * 64, 130], TWO_REQUESTS, [0, 4, 5]),
        ([130, 0], AN_EMPTY_ONE, [0, 1, 2]),
    ):
        metadata, num_splits = tensors_of(lengths, 4, release)
        want = [row + [0] * (8 - len(row)) for row in by_release[release]]
        assert metadata == want and num_splits == splits


@pytest.mark.parametrize(("release", "blocks"), [("2025-04", 5), ("2025-09", 1), ("2026-01", 1)])
def test_the_least_payload_of_one_short_request(release: Release, blocks: int) -> None:
    """16 blocks on 132 parts: ceil(21 / 132) + 5 = 6, which 2025-04 raises to 10."""
    metadata, num_splits = tensors_of([1024], 132, release)
    assert num_splits == [0, -(-16 // blocks)]
    begin, end = (2, 3) if release == "2026-01" else (1, 3)
    unit = 64 if release == "2025-04" else 1
    assert [row[begin] // unit for row in metadata[:3]] == [0, blocks, 2 * blocks]
    assert [row[end] // unit for row in metadata[:3]] == [blocks, 2 * blocks, 3 * blocks]


def restated(lengths: list[int], parts: int, release: Release) -> tuple[list[Any], list[int]]:
    """Block by block: who has each, then what the rows say of it."""
    april = release == "2025-04"
    real = [-(-n // 64) for n in lengths]
    blocks = real if april else [max(n, 1) for n in real]
    budget = -(-sum(n + 5 for n in blocks) // parts) + 5
    budget = max(budget, 10) if april else budget
    queue = [(i, j) for i, n in enumerate(blocks) for j in range(max(n, 1))]
    owner: dict[tuple[int, int], int] = {}
    for part in range(parts):
        left, seen = budget, -1
        while queue:
            request = queue[0][0]
            cost = (1 if blocks[request] else 0) + (5 if request != seen else 0)
            if left < cost:
                break
            left, seen = left - cost, request
            owner[queue.pop(0)] = part
    assert not queue
    pieces = [sorted({p for (i, _), p in owner.items() if i == r}) for r in range(len(lengths))]
    rows = []
    for part in range(parts):
        own = sorted(key for key, p in owner.items() if p == part)
        if not own:
            last, start = len(lengths) - 1, 0 if april else blocks[0] - 1
            rows.append([len(lengths), start, last, real[last], 0, 0, 0])
            continue
        (first, start), (last, end) = own[0], own[-1]
        stop = min(end + 1, real[last])
        split = pieces[first].index(part)
        rows.append(
            [first, start, last, stop, split, len(pieces[first]) > 1, len(pieces[last]) > 1]
        )
    num_splits = [sum(map(len, pieces[:i])) for i in range(len(lengths) + 1)]
    if april:
        ends = [min(row[3] * 64, lengths[row[2]]) for row in rows]
        rows = [
            [*row[:1], row[1] * 64, row[2], end, row[4]]
            for row, end in zip(rows, ends, strict=True)
        ]
    elif release == "2025-09":
        rows = [row[:5] for row in rows]
    else:
        rows = [[row[0], row[2], row[1], *row[3:]] for row in rows]
    return [[int(x) for x in row] + [0] * (8 - len(row)) for row in rows], num_splits


@settings(max_examples=60, deadline=None)
@given(lengths_of, st.integers(1, 40), st.sampled_from(RELEASES))
def test_the_algorithm_restated(lengths: list[int], parts: int, release: Release) -> None:
    assert tensors_of(lengths, parts, release) == restated(lengths, parts, release)


@settings(max_examples=40, deadline=None)
@given(lengths_of, st.integers(1, 40), st.sampled_from(RELEASES))
def test_every_block_is_computed_once(lengths: list[int], parts: int, release: Release) -> None:
    tokens = torch.tensor(lengths, dtype=torch.int32)
    work, num_splits = flash_mla_schedule(tokens, parts, release)
    check_plan(work, num_splits, lengths)
    assert torch.equal(from_columns_of(release, in_columns_of(release, work, tokens)), work)


@pytest.mark.parametrize("release", RELEASES)
def test_the_kernel(device: torch.device, seed: int, release: Release) -> None:
    generator = torch.Generator().manual_seed(seed)
    for most, parts in ((4000, 20), (90, 20), (30, 132)):
        lengths = torch.randint(0, most, (30,), generator=generator, dtype=torch.int32)
        lengths[:: 1 + most % 7] = 0
        lengths[0] = 3 * most
        work = torch.full((parts, 8), 0, dtype=torch.int32, device=device)
        num_splits = torch.full((31,), -1, dtype=torch.int32, device=device)
        plan_flash_mla(lengths.to(device), work, num_splits, release)
        want = flash_mla_schedule(lengths, parts, release)
        assert torch.equal(work.cpu(), want[0]) and torch.equal(num_splits.cpu(), want[1])


def test_the_number_of_parts() -> None:
    """By query rows, whatever the path: 132 SMs, a tile of 64 rows each."""
    rows = {1: 132, 16: 132, 64: 132, 65: 66, 128: 66, 129: 44, 256: 33, 1024: 8}
    assert {n: num_parts(132, n) for n in rows} == rows
    assert num_parts(4, 512) == 1
    lengths = torch.tensor([100, 3000], dtype=torch.int32)
    for path in ("sm90", "triton"):
        for heads, tokens, parts in ((16, 1, 132), (128, 1, 66), (128, 2, 33)):
            selection = forced(MlaSpec(heads, 64, query_tokens=tokens), path, num_sms=132)
            planner = MlaPlanner(selection, schedule="flash_mla")
            assert planner._allocate(lengths, selection.path(2)).work.shape == (parts, 8)


@pytest.mark.parametrize("release", RELEASES)
def test_decode_takes_the_tensors_of_a_release(
    device: torch.device, seed: int, release: Release
) -> None:
    case = make_case(MlaSpec(4, 64, query_tokens=2), [40, 0, 300], seed=seed, device=device)
    tensors = get_mla_metadata(case.lengths, 8, 1, schedule="flash_mla", release=release)
    out, lse = flash_mla_with_kvcache(
        torch.cat([case.q_latent, case.q_rope], -1),
        torch.cat([case.kv_latent, case.kv_rope], -1).unsqueeze(2),
        case.block_table, case.lengths, 512, *tensors, SCALE, True, release=release,
    )  # fmt: skip
    assert_close((out, lse.transpose(1, 2)), expected(case))


def test_the_object_holds_the_tensors_of_2026(device: torch.device, seed: int) -> None:
    case = make_case(MlaSpec(4, 64), [40, 1000, 300], seed=seed, device=device)
    metadata, none = get_mla_metadata(schedule="flash_mla")
    assert not metadata.have_initialized and none is None  # type: ignore[union-attr]
    arguments = (
        torch.cat([case.q_latent, case.q_rope], -1),
        torch.cat([case.kv_latent, case.kv_rope], -1).unsqueeze(2),
        case.block_table, case.lengths, 512, metadata,
    )  # fmt: skip
    for _ in range(2):
        out, lse = flash_mla_with_kvcache(*arguments, softmax_scale=SCALE)  # type: ignore[arg-type]
        assert_close((out, lse.transpose(1, 2)), expected(case))
    want = get_mla_metadata(case.lengths, 4, 1, schedule="flash_mla", release="2026-01")
    got = (metadata.tile_scheduler_metadata, metadata.num_splits)  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"release": "2025-10"}, "release must be one of 2025-04, 2025-09, 2026-01, got"),
        ({"release": "2026-01"}, "release must be 2025-09 unless schedule is flash_mla, got 2026"),
    ],
)
def test_bad_releases_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_mla_metadata(torch.tensor([3], dtype=torch.int32), 4, 1, **options)
