"""A soft cap of the logits on both paths beside its formula in float64."""

from __future__ import annotations

import pytest
import torch

from softmax_backend import reference_block_sparse as reference
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.plan import intervals
from softmax_backend.testing.prefill_cases import BLOCKS, assert_matches, causal_seen, inputs


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_soft_cap(path: str, seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 40, 64), (1, 70, 64), seed=seed, device=device)
    plan = intervals.causal(40, 70, 2, **BLOCKS, device=device)
    got = block_sparse_attention(q, k, v, plan, soft_cap=2.0, path=path)
    capped = lambda s: 2.0 * torch.tanh(s / 2.0)  # noqa: E731
    want = reference.attention(*(x.cpu() for x in (q, k, v)), causal_seen(40, 70), 0.125, capped)
    assert_matches(got, want)
    with pytest.raises(ValueError, match="soft_cap must be positive"):
        block_sparse_attention(q, k, v, plan, soft_cap=0.0, path=path)
