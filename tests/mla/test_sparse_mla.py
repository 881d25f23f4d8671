"""Sparse MLA on every path against float64: caches, lists, lengths, sinks, splits, prefill."""

from __future__ import annotations

import math

import pytest
import torch

from mla_backend import reference_sparse_mla as reference
from mla_backend.contract.sparse_mla import NamedRows
from mla_backend.drop_ins.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from mla_backend.sparse_mla import sparse_mla
from mla_backend.spec_sparse_mla import SparseMlaSpec
from mla_backend.testing.cases import forced
from mla_backend.testing.sparse_mla_cases import (
    SCALE,
    SparseCase,
    assert_close,
    expected,
    make_case,
    run_case,
)

PATHS = ("torch", "triton")


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def check(path: str, case: SparseCase, splits: int | None = None) -> None:
    assert_close(run_case(case, forced(case.spec, path), splits), expected(case))


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64])
def test_any_number_of_heads(path: str, path_device: torch.device, heads: int, seed: int) -> None:
    lists = [(64, 40, [40, 0, 7]), (64, 70, [70, 0, 33])]
    check(path, make_case(heads, lists, seed=seed, has_sinks=True, device=path_device), 2)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_query_tokens_have_lists_of_their_own(
    path: str, path_device: torch.device, tokens: int, seed: int
) -> None:
    lists: list[tuple[int, int, list[int] | None]] = [(64, 33, None), (2, 40, [40, 1])]
    case = make_case(8, lists, requests=2, tokens=tokens, seed=seed, device=path_device)
    check(path, case)


def test_one_query_token_with_lists_in_wider_memory(
    path: str, path_device: torch.device, seed: int
) -> None:
    """A view adds the dimension of one query token with a stride that says nothing of the rows."""
    lists = [(64, 40, [40, 3, 7]), (64, 50, [50, 0, 33])]
    case = make_case(8, lists, seed=seed, device=path_device)
    assert case.extra is not None
    want = expected(case)

    def spread(rows: NamedRows) -> NamedRows:
        requests, _, topk = rows.indices.shape
        wide = torch.full((requests, 3 * topk), 10**6, dtype=torch.int32, device=path_device)
        wide[:, :topk] = rows.indices[:, 0]
        view = wide[:, :topk].view(requests, 1, topk)
        assert view.stride() == (3 * topk, topk, 1)
        return NamedRows(rows.cache, view, rows.lengths)

    case.rows, case.extra = spread(case.rows), spread(case.extra)
    assert_close(run_case(case, forced(case.spec, path)), want)


@pytest.mark.parametrize(("size", "page_bytes"), [(2, 1168), (2, None), (61, None), (64, 37376),
                                                  (64, 64 * 584 + 4096), (256, None)])  # fmt: skip
def test_page_layouts(
    path: str, path_device: torch.device, size: int, page_bytes: int | None, seed: int
) -> None:
    """Pages one behind another, rounded up to 576 bytes, and further apart."""
    lists = [(size, 50, [50, 20, 1])]
    check(path, make_case(8, lists, seed=seed, page_bytes=page_bytes, device=path_device))


def test_without_an_extra_cache(path: str, path_device: torch.device, seed: int) -> None:
    check(path, make_case(8, [(64, 100, None)], seed=seed, device=path_device), 3)


@pytest.mark.parametrize("splits", [1, 2, 5, 7])
def test_splits_meet_both_lists(
    path: str, path_device: torch.device, splits: int, seed: int
) -> None:
    """A split may end in the window, begin in the extra list, or have nothing at all."""
    lists = [(64, 70, [70, 3, 0]), (64, 100, [100, 0, 64])]
    check(path, make_case(8, lists, seed=seed, has_sinks=True, device=path_device), splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_nothing_is_named(path: str, path_device: torch.device, splits: int, seed: int) -> None:
    """By lengths of 0 and below, and by indices that all name nothing."""
    lists = [(64, 70, [0, -1, 70]), (64, 40, [0, 0, 40])]
    case = make_case(8, lists, seed=seed, invalid=1.0, has_sinks=True, device=path_device)
    check(path, case, splits)
    out, lse = run_case(case, forced(case.spec, path), splits)
    assert (out == 0).all() and (lse == math.inf).all()


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 5.0])
@pytest.mark.parametrize("splits", [1, 3])
def test_sinks_weigh_and_leave_the_lse(
    path: str, path_device: torch.device, sink: float, splits: int, seed: int
) -> None:
    case = make_case(8, [(64, 90, [90, 20, 0])], seed=seed, device=path_device)
    without = run_case(case, forced(case.spec, path), splits)
    case.sinks = torch.full((8,), sink, device=path_device)
    got = run_case(case, forced(case.spec, path), splits)
    assert_close(got, expected(case))
    assert torch.equal(got[1], without[1])
    if sink == math.inf:
        assert (got[0] == 0).all()


def test_a_list_may_be_longer_than_its_lengths_say(
    path: str, path_device: torch.device, seed: int
) -> None:
    """Lengths beyond the list count no more than it has."""
    case = make_case(8, [(64, 40, None)], seed=seed, device=path_device)
    lengths = torch.tensor([1000, 40, 41], dtype=torch.int32, device=path_device)
    case.rows = NamedRows(case.rows.cache, case.rows.indices, lengths)
    got = run_case(case, forced(case.spec, path))
    lengths.clamp_(max=40)
    assert_close(got, expected(case))


def test_every_code_and_scale(path: str, path_device: torch.device) -> None:
    """All 254 finite e4m3 codes under scales of 2^-127 to 2^100 give what the reference reads."""
    rows = torch.zeros(1, 64, 512)
    case = make_case(1, [(64, 1, None)], requests=64, invalid=0.0)
    spec = case.spec
    from mla_backend.testing.sparse_mla_cases import write_records

    cache = write_records(rows)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0
    data = cache.as_strided((64, 576), (576, 1))
    data[:, :448] = torch.cat([codes, codes[:192]])[None]
    scales = cache.as_strided((64, 8), (8, 1), 64 * 576)
    scales[:] = (torch.arange(64) * 3 + 30).clamp(max=227).to(torch.uint8)[:, None]
    scales[0], scales[1] = 0, 1
    plain = reference.read_records(cache).view(-1, 512)
    indices = torch.arange(64, dtype=torch.int32).view(64, 1, 1)
    q = torch.zeros(64, 1, 1, 512, dtype=torch.bfloat16)
    out, _ = sparse_mla(
        q.to(path_device),
        NamedRows(cache.to(path_device), indices.to(path_device)),
        forced(spec, path),
        scale=SCALE,
        splits=1,
    )
    want = plain.float().bfloat16()
    small = want.abs().float() < 2.0**-126  # a GPU may flush these
    got = out.view(64, 512).cpu()
    assert torch.equal(got[~small], want[~small])
    assert (got[small].float().abs() <= 2.0**-126).all()


@pytest.mark.parametrize("heads", [8, 20])
def test_prefill_over_rows(path: str, path_device: torch.device, heads: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = (0.1 * torch.randn(90, 512, generator=generator)).bfloat16()
    indices = torch.randint(-5, 100, (4, 1, 70), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([70, 33, 0, 5], dtype=torch.int32)
    indices[3] = -1
    seen = torch.zeros(100, dtype=torch.bool)
    for i in range(4):
        chosen = indices[i, 0, : int(lengths[i])].long()
        seen[chosen[chosen >= 0]] = True
    kv[~seen[:90]] = math.nan
    q = (8 * torch.randn(4, 1, heads, 512, generator=generator)).bfloat16()
    sinks = torch.randn(heads, generator=generator)
    spec = SparseMlaSpec(heads, "bf16_rows")
    q, kv, indices, lengths, sinks = (x.to(path_device) for x in (q, kv, indices, lengths, sinks))
    named = NamedRows(kv, indices, lengths)
    got = sparse_mla(q, named, forced(spec, path), scale=SCALE, sinks=sinks)
    want = reference.sparse_mla(q, [(kv, indices, lengths)], SCALE, sinks=sinks)
    assert_close(got, want)


@pytest.mark.parametrize("sliced", [False, True])
def test_the_drop_in_of_decoding(device: torch.device, sliced: bool, seed: int) -> None:
    lists: list[tuple[int, int, list[int] | None]] = [(64, 40, [40, 7]), (2, 30, [30, 0])]
    case = make_case(8, lists, requests=2, tokens=2, seed=seed, has_sinks=True, device=device)
    assert case.extra is not None
    out = torch.full_like(case.q, math.nan)
    q, indices, more = case.q, case.rows.indices, case.extra.indices
    if sliced:  # two query tokens of three, and lists whose elements lie apart
        q = torch.cat([q, q[:, :1]], 1)[:, :2]
        indices, more = (torch.stack([x, x], -1)[..., 0] for x in (indices, more))
    got, lse = flash_mla_with_kvcache(
        q=q, k_cache=case.rows.cache.unsqueeze(-2), block_table=None, head_dim_v=512,
        tile_scheduler_metadata=get_mla_metadata()[0], cache_seqlens=None, is_fp8_kvcache=True,
        indices=indices, topk_length=case.rows.lengths, softmax_scale=SCALE,
        attn_sink=case.sinks, extra_k_cache=case.extra.cache.unsqueeze(-2),
        extra_indices_in_kvcache=more, extra_topk_length=case.extra.lengths, out=out,
    )  # fmt: skip
    assert got is out and lse.shape == (2, 8, 2) and lse.is_contiguous()
    assert_close((got, lse.transpose(1, 2)), expected(case))
