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
SINKS = torch.tensor([1.5, -0.5])

Logits = Callable[[Tensor], Tensor]
FORMULAS: dict[str, tuple[Callable[[torch.device], Variant], Logits]] = {
    "soft_cap": (lambda device: variants.soft_cap(2.0), lambda s: 2.0 * torch.tanh(s / 2.0)),
    "alibi": (
        lambda device: variants.alibi(SLOPES.to(device)),
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


@PATHS
def test_sinks_without_bounds(path: str, seed: int, device: torch.device) -> None:
    """-inf is no sink, +inf takes all; a query that sees nothing has output 0 under both."""
    q, k, v = inputs((H, 40, D), (1, 20, D), seed=seed, device=device)
    plan = intervals.causal(40, 20, H, **BLOCKS, device=device)
    sinks = torch.tensor([-torch.inf, torch.inf], device=device)
    plain, plain_lse = block_sparse_attention(q, k, v, plan, path=path)
    out, lse = block_sparse_attention(q, k, v, plan, variant=variants.sink(sinks), path=path)
    assert torch.equal(out[:, 0], plain[:, 0]) and bool((out[:, 1] == 0).all())
    assert torch.equal(lse, plain_lse) and bool((lse[..., 0] == -torch.inf).all())


@PATHS
def test_sink(path: str, seed: int, device: torch.device) -> None:
    out, lse = expected(seed)
    share = torch.sigmoid(lse - SINKS[:, None].double())
    got = call(variants.sink(SINKS.to(device)), path, seed, device)
    assert_matches(got, (out * share[..., None], lse))


@PATHS
def test_sigmoid(path: str, seed: int, device: torch.device) -> None:
    q, k, v = (
        x.double() for x in inputs((H, M, D), (1, N, D), seed=seed, device=torch.device("cpu"))
    )
    weights = torch.sigmoid(q @ k.transpose(2, 3) * D**-0.5 - 1.0) * causal_seen(M, N)
    want = weights @ v
    assert_matches(
        call(variants.sigmoid(-1.0), path, seed, device), (want, torch.zeros(1, H, M).double())
    )


@PATHS
def test_keys_rotated_on_load(path: str, seed: int, device: torch.device) -> None:
    angle = torch.arange(96)[:, None] * 1e4 ** (-torch.arange(D // 2) / (D // 2))
    table = torch.stack([angle.cos(), angle.sin()], 1)
    q, k, v = inputs((H, M, D), (1, N, D), seed=seed, device=torch.device("cpu"))
    low, high = k.double().chunk(2, -1)
    cos, sin = table[:N].double().unbind(1)
    k = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    want = reference.attention(q, k, v, causal_seen(M, N), D**-0.5)
    assert_matches(call(variants.rotated_keys(table.to(device)), path, seed, device), want)


@PATHS
def test_a_sink_and_rotated_keys_of_other_variants(
    path: str, seed: int, device: torch.device
) -> None:
    cap = variants.soft_cap(2.0)
    out, lse = expected(seed, FORMULAS["soft_cap"][1])
    share = torch.sigmoid(lse - SINKS[:, None].double())
    got = call(variants.sink(SINKS.to(device), cap), path, seed, device)
    assert_matches(got, (out * share[..., None], lse))
    still = torch.stack([torch.ones(96, D // 2), torch.zeros(96, D // 2)], 1).to(device)
    assert_matches(call(variants.rotated_keys(still, cap), path, seed, device), (out, lse))


def test_variants_that_do_not_go_together_are_refused() -> None:
    table = torch.zeros(4, 2, 32)
    for make, message in (
        (lambda: variants.sink(SINKS, variants.alibi(SLOPES)), "base of sink must have no tensor"),
        (
            lambda: variants.rotated_keys(table, variants.sink(SINKS)),
            "base of rotated_keys must have no tensor of its own, got sink",
        ),
        (lambda: variants.sink(SINKS, variants.sigmoid()), "base must have softmax weights"),
        (lambda: variants.rotated_keys(table[..., :24]), "with D a power of 2, got"),
        (lambda: variants.rotated_keys(table[:, :1]), r"table must have shape \[N, 2, D / 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@triton.jit
def doubled(s, scale, q_pos, k_pos, head, aux_ptr, value):  # type: ignore[no-untyped-def]
    return s.to(tl.float32) * scale * value * 1.4426950408889634


def test_a_users_own_hook(seed: int, device: torch.device) -> None:
    mine = replace(SOFTMAX, name="mine", logits=doubled, value=2.0)
    assert_matches(call(mine, "triton", seed, device), expected(seed, lambda s: 2 * s))
    with pytest.raises(ValueError, match="variant mine has no torch_logits"):
        call(mine, "torch", seed, device)


@PATHS
def test_causal_window(path: str, seed: int, device: torch.device) -> None:
    q, k, v = inputs((H, 70, D), (1, 100, D), seed=seed, device=device)
    plan = intervals.causal(70, 100, H, window=37, **BLOCKS, device=device)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(70, 100, 37), D**-0.5)
    assert_matches(block_sparse_attention(q, k, v, plan, path=path), want)
