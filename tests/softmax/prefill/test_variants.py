"""Every hook on both paths beside its formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from softmax_backend import reference_block_sparse as reference
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.plan import intervals
from softmax_backend.testing.prefill_cases import BLOCKS, assert_matches, causal_seen, inputs
from softmax_backend.variants import variant as variants
from softmax_backend.variants.variant import SOFTMAX, Variant

H, M, N, D = 2, 40, 70, 64
POSITION_Q = torch.arange(M)[:, None] + N - M
POSITION_K = torch.arange(N)[None]
SLOPES = torch.tensor([0.1, 0.02])


@triton.jit
def alibi_biased(s, scale, q_pos, k_pos, head, aux_ptr, value):  # type: ignore[no-untyped-def]
    slope = tl.load(aux_ptr + head)
    return (s * scale - slope * (q_pos - k_pos).to(tl.float32)) * 1.4426950408889634


ALIBI = {
    "logits": alibi_biased,
    "torch_logits": lambda s, q, k, head, aux, value: s - aux[head].to(s.dtype) * (q - k),
}
"""A user's own hook with a tensor."""

Logits = Callable[[Tensor], Tensor]
FORMULAS: dict[str, tuple[Callable[[torch.device], Variant], Logits]] = {
    "soft_cap": (lambda device: variants.soft_cap(2.0), lambda s: 2.0 * torch.tanh(s / 2.0)),
    "alibi": (
        lambda device: replace(SOFTMAX, name="alibi", **ALIBI, aux=SLOPES.to(device)),
        lambda s: s - SLOPES[:, None, None] * (POSITION_Q - POSITION_K),
    ),
}


def call(variant: Variant, path: str, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    q, k, v = inputs((H, M, D), (1, N, D), seed=seed, device=device)
    plan = intervals.causal(M, N, H, **BLOCKS, device=device)
    return block_sparse_attention(q, k, v, plan, variant=variant, path=path)


def expected(seed: int, logits: Logits | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = inputs((H, M, D), (1, N, D), seed=seed, device=torch.device("cpu"))
    return reference.attention(q, k, v, causal_seen(M, N), D**-0.5, logits)


PATHS = pytest.mark.parametrize("path", ["torch", "triton"])


@PATHS
@pytest.mark.parametrize("name", list(FORMULAS))
def test_logits(name: str, path: str, seed: int, device: torch.device) -> None:
    make, logits = FORMULAS[name]
    assert_matches(call(make(device), path, seed, device), expected(seed, logits))


@triton.jit
def doubled(s, scale, q_pos, k_pos, head, aux_ptr, value):  # type: ignore[no-untyped-def]
    return s.to(tl.float32) * scale * value * 1.4426950408889634


def test_a_users_own_hook(seed: int, device: torch.device) -> None:
    mine = replace(SOFTMAX, name="mine", logits=doubled, value=2.0)
    assert_matches(call(mine, "triton", seed, device), expected(seed, lambda s: 2 * s))
    with pytest.raises(ValueError, match="variant mine has no torch_logits"):
        call(mine, "torch", seed, device)
