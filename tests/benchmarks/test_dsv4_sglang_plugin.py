"""The torch function that stands in for mHC's Sinkhorn step in sglang."""

from __future__ import annotations

import torch

from benchmarks.engines import dsv4_sglang_plugin


def test_sinkhorn_rows_and_columns_sum_up_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    mixes = torch.randn(5, 1, 24, generator=generator)
    scale, base = torch.ones(3), torch.randn(24, generator=generator)
    pre, post, comb = dsv4_sglang_plugin.split_sinkhorn(mixes, scale, base, 4, 40, 1e-6)
    assert pre.shape == post.shape == (5, 1, 4) and comb.shape == (5, 1, 4, 4)
    ones = torch.ones(5, 1, 4)
    torch.testing.assert_close(comb.sum(-1), ones, atol=1e-3, rtol=0)
    torch.testing.assert_close(comb.sum(-2), ones, atol=1e-3, rtol=0)
    assert bool(((post > 0) & (post < 2)).all()) and bool((pre > 0).all())
