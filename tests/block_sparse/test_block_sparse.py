"""The operator beside float64: every plan, head layout and size, on the torch and Triton paths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend_core.testing.numerics import relative_error
from block_sparse_backend import masks, reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.plan import intervals
from block_sparse_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from block_sparse_backend.testing.cases import (
    BLOCKS,
    causal_seen,
    inputs,
)
from tests.block_sparse.results import assert_matches

PATHS = pytest.mark.parametrize("path", ["torch", "triton"])


def run_and_check(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, seen: Tensor, path: str = "triton"
) -> tuple[Tensor, Tensor]:
    """One call over poisoned outputs beside the reference over ``seen``."""
    scale = q.shape[3] ** -0.5
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, scale)
    out = torch.full_like(want[0], torch.nan, dtype=q.dtype).to(q.device)
    lse = torch.full_like(want[1], torch.nan, dtype=torch.float32).to(q.device)
    got = block_sparse_attention(q, k, v, plan, out=out, lse=lse, path=path)
    assert_matches(got, want)
    return got


@PATHS
@pytest.mark.parametrize("lengths", [(70, 100), (100, 70), (64, 64), (1, 33), (33, 1)])
def test_causal(path: str, lengths: tuple[int, int], seed: int, device: torch.device) -> None:
    m, n = lengths
    q, k, v = inputs((4, m, 64), (2, n, 64), seed=seed, device=device)
    plan = intervals.causal(m, n, 4, **BLOCKS, device=device)
    run_and_check(q, k, v, plan, causal_seen(m, n), path)


@PATHS
def test_dense_batch(path: str, seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 50, 64), (1, 64, 64), seed=seed, device=device, batch=3)
    plan = intervals.dense(50, 64, 2, batch=3, **BLOCKS, device=device)
    run_and_check(q, k, v, plan, torch.ones(1, dtype=torch.bool), path)


@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=lambda d: f"{d[0]}-{d[1]}"
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_sizes(
    dims: tuple[int, int], dtype: torch.dtype, seed: int, device: torch.device
) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bf16 as integers")
    q, k, v = inputs(
        (1, 40, dims[0]), (1, 60, dims[0]), seed=seed, device=device, dv=dims[1], dtype=dtype
    )
    plan = intervals.causal(40, 60, 1, **BLOCKS, device=device)
    run_and_check(q, k, v, plan, causal_seen(40, 60))


@PATHS
def test_rows_that_differ_by_head_and_an_empty_one(
    path: str, seed: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = (torch.rand(1, 2, 3, 4, generator=generator) < 0.5).to(torch.int8)
    kinds[0, 0, 1] = 0
    kinds[0, 1, 0] = 1
    plan = from_kinds(kinds.to(device), 2, uniform_sequences(1, 96, 128, device), 32, 32)
    seen = kinds[0].bool().repeat_interleave(32, 1).repeat_interleave(32, 2)
    q, k, v = inputs((2, 96, 64), (2, 128, 64), seed=seed, device=device)
    run_and_check(q, k, v, plan, seen, path)


@PATHS
def test_ragged(path: str, seed: int, device: torch.device) -> None:
    q_lens, kv_lens = [40, 0, 5, 33], [40, 7, 64, 20]
    cu_q, cu_k = (torch.tensor([0, *x], device=device).cumsum(0).int() for x in (q_lens, kv_lens))
    q, k, v = inputs((2, sum(q_lens), 64), (1, sum(kv_lens), 64), seed=seed, device=device)
    plan = intervals.ragged(cu_q, cu_k, 64, 64, 2, **BLOCKS)
    out, lse = block_sparse_attention(q, k, v, plan, path=path)
    for i, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        at_q, at_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        want = reference.attention(
            q[:, :, at_q].cpu(), k[:, :, at_k].cpu(), v[:, :, at_k].cpu(), causal_seen(m, n), 0.125
        )
        if m:
            assert_matches((out[:, :, at_q], lse[:, :, at_q]), want)


def test_nan_outside_the_plan_stays_there(seed: int, device: torch.device) -> None:
    """Blocks that no row names, and packed neighbours, may hold anything."""
    q, k, v = inputs((1, 32, 64), (1, 128, 64), seed=seed, device=device)
    kinds = torch.tensor([[[[1, 0, 0, 2]]]], dtype=torch.int8, device=device)
    sequences = uniform_sequences(1, 32, 110, device)
    plan = from_kinds(kinds, 1, sequences, 32, 32, mask=masks.everything)
    seen = torch.zeros(32, 128, dtype=torch.bool)
    seen[:, :32] = seen[:, 96:110] = True
    k[:, :, ~seen[0]] = torch.nan
    v[:, :, ~seen[0]] = torch.nan
    clean = [torch.where(seen[0, :, None], x.cpu(), 0.0) for x in (k, v)]
    want = reference.attention(q.cpu(), *clean, seen, 0.125)
    assert_matches(block_sparse_attention(q, k, v, plan, path="triton"), want)


def test_partial_everywhere_is_the_same(seed: int, device: torch.device) -> None:
    """A block that is PARTIAL under a mask that hides nothing gives what a FULL one gives."""
    q, k, v = inputs((1, 64, 64), (1, 96, 64), seed=seed, device=device)
    sequences = uniform_sequences(1, 64, 96, device)
    kinds = torch.ones(1, 1, 2, 3, dtype=torch.int8, device=device)
    full, partial = (from_kinds(kinds * x, 1, sequences, 32, 32) for x in (1, 2))
    got = [block_sparse_attention(q, k, v, p, path="triton") for p in (full, partial)]
    assert torch.equal(got[0][0], got[1][0]) and torch.equal(got[0][1], got[1][1])
    whole = intervals.dense(64, 96, 1, **BLOCKS, device=device)
    assert torch.equal(block_sparse_attention(q, k, v, whole, path="triton")[0], got[0][0])


def test_a_permutation_and_its_inverse_change_nothing(seed: int, device: torch.device) -> None:
    q, k, v = inputs((1, 64, 64), (1, 64, 64), seed=seed, device=device)
    plan = intervals.dense(64, 64, 1, **BLOCKS, device=device)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).to(device)
    out, lse = block_sparse_attention(*(x[:, :, order] for x in (q, k, v)), plan, path="triton")
    want, want_lse = block_sparse_attention(q, k, v, plan, path="triton")
    inverse = torch.argsort(order)
    assert relative_error(out[:, :, inverse], want) < 1e-3
    assert float((lse[:, :, inverse] - want_lse).abs().max()) < 1e-5


def test_bad_input_is_one_sentence(seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 64, 64), (1, 64, 64), seed=seed, device=device)
    plan = intervals.dense(64, 64, 2, **BLOCKS, device=device)
    for bad, message in (
        ((q[0], k, v), "q must have 4 dimensions, got"),
        ((q, k[..., :32], v), r"k must have shape \[1, Hkv, N, 64\], got \[1, 1, 64, 32\]"),
        ((q, k.float(), v), "k must have dtype float16, got float32"),
        ((q[:, :1], k, v), "q must have the plan's 2 heads, got 1"),
        ((q, k.expand(1, 3, 64, 64), v.expand(1, 3, 64, 64)), "heads of k must divide those of q"),
        ((q.float(), k.float(), v.float()), "q must have dtype bfloat16 or float16, got float32"),
        ((q[..., :32], k[..., :32], v[..., :32]), "head sizes"),
        ((q, k.transpose(2, 3), v), "k must have stride 1 in dimension 3"),
    ):
        with pytest.raises(ValueError, match=message):
            block_sparse_attention(*bad, plan, path="triton")
    with pytest.raises(ValueError, match="path must be one of"):
        block_sparse_attention(q, k, v, plan, path="cuda")


def test_a_shared_prefix_is_two_plans_and_a_merge(seed: int, device: torch.device) -> None:
    """Two requests behind one prefix: dense over the prefix for all queries, causal over each
    request's own keys, merged by LSE."""
    prefix, own = 40, [30, 50]
    cu = torch.tensor([0, *own], device=device).cumsum(0).int()
    q, k, v = inputs((2, sum(own), 64), (1, prefix + sum(own), 64), seed=seed, device=device)
    shared = intervals.dense(sum(own), prefix, 2, **BLOCKS, device=device)
    suffix = intervals.ragged(cu, cu, 64, 64, 2, **BLOCKS)
    parts = [
        block_sparse_attention(q, k[:, :, at], v[:, :, at], plan, path="triton")
        for plan, at in ((shared, slice(0, prefix)), (suffix, slice(prefix, None)))
    ]
    lses = torch.stack([x for _, x in parts])
    lse = lses.logsumexp(0)
    out = sum(o.float() * (x - lse).exp()[..., None] for o, x in parts)
    for i, n in enumerate(own):
        at = slice(int(cu[i]), int(cu[i + 1]))
        keys = torch.cat([torch.arange(prefix), prefix + torch.arange(at.start, at.stop)])
        whole = (x[:, :, keys].cpu() for x in (k, v))
        want = reference.attention(q[:, :, at].cpu(), *whole, causal_seen(n, prefix + n), 0.125)
        assert_matches((out[:, :, at].to(q.dtype), lse[:, :, at]), want)
