"""Equal shares of all query tokens' rows: the merge finds what the kernel's CTAs have cut."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_backend.kernels.sm90.sparse_mla_compute import BLOCK, OVERHEAD
from mla_backend.plan.sparse_splits import sparse_shares
from mla_backend.sparse.combine import combine_shares

State = tuple[torch.Tensor, torch.Tensor]
"""(outputs ``[heads, 512]``, base-2 log-sum-exps ``[heads]``) of some rows."""


def merged(states: torch.Tensor, weights: torch.Tensor) -> State:
    """Of blocks ``[blocks, heads, 512]`` with log-sum-exps ``[blocks, heads]``."""
    l2 = torch.logsumexp(weights * math.log(2), 0) / math.log(2)
    factors = torch.exp2(weights - l2).nan_to_num(0.0)
    return (factors[..., None] * states).sum(0), l2


@pytest.mark.parametrize(
    ("heads", "tile", "query_tokens", "shares"), [(8, 8, 1, 11), (20, 16, 2, 7), (8, 8, 1, 1)]
)
def test_what_shares_cut_is_merged(
    heads: int, tile: int, query_tokens: int, shares: int, seed: int, device: torch.device
) -> None:
    """A line of all items is cut here by fractions. What the kernel would not write is NaN, as are
    the outputs of whole items, which it writes itself."""
    generator = torch.Generator().manual_seed(seed)
    own, extra = (torch.randint(0, n, (5,), generator=generator) for n in (129, 700))
    own[2] = extra[2] = 0
    blocks = (-(-own // BLOCK.value) - (-extra // BLOCK.value)).tolist()
    tokens, tiles = 5 * query_tokens, -(-heads // tile)
    sinks = torch.randn(heads, generator=generator)
    out = torch.full((tokens, 1, heads, 512), math.nan)
    lse = torch.full((tokens, 1, heads), math.nan)
    want_out, want_lse = out.clone(), lse.clone()
    partial_out = torch.full((2 * shares, tile, 512), math.nan)
    partial_lse = torch.full((2 * shares, tile), math.nan)
    each = query_tokens * tiles
    total, before = sum(n + OVERHEAD.value for n in blocks) * each, 0
    for item in range(tokens * tiles):
        token, count = item // tiles, blocks[item // each]
        at = slice(item % tiles * tile, min(item % tiles * tile + tile, heads))
        live = at.stop - at.start
        states = torch.randn(count, live, 512, generator=generator)
        weights = 3 * torch.randn(count, live, generator=generator)
        weight, cut = count + OVERHEAD.value, False
        for share in range(shares):
            begin = max(Fraction(total * share, shares), Fraction(before))
            end = min(Fraction(total * (share + 1), shares), Fraction(before + weight))
            if begin < end < begin + weight:
                lo, hi = (math.floor((x - before) * count / weight) for x in (begin, end))
                slot, cut = 2 * share + (begin == before), True
                assert partial_lse[slot].isnan().all()
                o, l2 = merged(states[lo:hi], weights[lo:hi])
                partial_out[slot, :live], partial_lse[slot, :live] = o, l2
        if cut:
            o, l2 = merged(states, weights)
            all_l2 = torch.logaddexp2(l2, sinks[at] / math.log(2))
            want_out[token, 0, at] = o * torch.exp2(l2 - all_l2)[:, None]
            want_lse[token, 0, at] = torch.where(l2 == -math.inf, math.inf, l2 * math.log(2))
        before += weight
    assert want_lse.isnan().all() == (shares == 1)

    x: Any = SimpleNamespace(
        **{"spec": SimpleNamespace(num_heads=heads), "tokens": tokens, "sinks": sinks.to(device)},
        **{"query_tokens": query_tokens, "out": out.to(device), "lse": lse.to(device)},
        rows=SimpleNamespace(lengths=own.int().to(device), topk=128),
        extra=SimpleNamespace(lengths=extra.int().to(device), topk=699),
    )
    combine_shares(x, partial_out.to(device), partial_lse.to(device), shares, 128)
    options = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(x.out.cpu(), want_out, **options)
    torch.testing.assert_close(x.lse.cpu(), want_lse, **options)


@pytest.mark.parametrize(("items", "blocks"), [(1, 18), (64, 10), (100, 18), (128, 18), (300, 9)])
def test_full_lists_are_cut_evenly_unless_slots_would_idle(items: int, blocks: int) -> None:
    shares = sparse_shares(items, blocks, 132)
    assert 1 <= shares <= 132
    assert shares % items == 0 or shares == 132
