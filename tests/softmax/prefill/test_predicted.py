"""Predicted plans, what they keep, and the entry points of SageAttention and SpargeAttn."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from softmax_backend import reference_block_sparse as reference
from softmax_backend import sageattention, spargeattn
from softmax_backend.block_sparse import block_sparse_attention
from softmax_backend.plan import predicted
from softmax_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences
from softmax_backend.testing.prefill_cases import (
    BLOCKS,
    assert_matches,
    causal_seen,
    inputs,
    relative_error,
)
from softmax_backend.variants.sage import SageMode

M, N = 80, 200
LOOSE = (6e-2, 0.25)


def smooth_inputs(seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Neighbouring tokens resemble one another, as a prediction supposes."""
    q, k, v = inputs((2, M, 64), (1, N, 64), seed=seed, device=torch.device("cpu"))
    q, k = (
        torch.nn.functional.interpolate(x[0].float().mT, scale_factor=1 / 16, mode="nearest")
        for x in (q, k)
    )
    wide_q, wide_k = (
        torch.nn.functional.interpolate(x, length).mT for x, length in ((q, M), (k, N))
    )
    generator = torch.Generator().manual_seed(seed)
    made = [2 * x + 0.2 * torch.randn(x.shape, generator=generator) for x in (wide_q, wide_k)]
    q, k = (x[None].contiguous().half().to(device) for x in made)
    return q, k, v.to(device)


def kept(plan: BlockPlan) -> list[list[int]]:
    """The sorted columns of each tile of each head."""
    rows, cols = plan.rows.tolist(), plan.cols.tolist()
    order = sorted(plan.work.tolist())
    return [sorted(cols[rows[r][0] : rows[r][2]]) for _, _, _, r in order]


@pytest.mark.parametrize("amount", [{"cdf": 0.7}, {"topk": 0.3}, {"cdf": 1.0}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_are_as_in_torch(
    amount: dict[str, float],
    is_causal: bool,
    seed: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, _ = smooth_inputs(seed, device)
    options = amount | {"is_causal": is_causal, "min_likeness": 0.3, "keep_first": True}
    got = predicted.predict(q, k, **options, **BLOCKS)
    monkeypatch.setattr(predicted, "_has_kernels", lambda x: False)
    want = predicted.predict(q.cpu(), k.cpu(), **options, **BLOCKS)
    assert got.has_partial == want.has_partial
    assert kept(got) == kept(want)
    assert all(0 in cols for cols in kept(got) if cols)


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_a_prediction(
    path: str, is_causal: bool, seed: int, device: torch.device
) -> None:
    q, k, v = smooth_inputs(seed, device)
    plan = predicted.predict(q, k, topk=0.3, is_causal=is_causal, **BLOCKS)
    seen = reference.elements_seen(plan)
    if is_causal:
        assert not bool((seen & ~causal_seen(M, N)).any())
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, 0.125)
    assert_matches(block_sparse_attention(q, k, v, plan, path=path), want)
    share = predicted.recall(plan, q, k).cpu().double()
    full = causal_seen(M, N) if is_causal else torch.ones(1, dtype=torch.bool)
    total = reference.attention(q.cpu(), k.cpu(), v.cpu(), full, 0.125)[1]
    torch.testing.assert_close(share, (want[1] - total).exp().mean(2), rtol=1e-3, atol=1e-3)
    assert bool((share > 0.3).all()) and bool((share < 1.0).all())


def test_all_blocks_kept_is_causal_attention(seed: int, device: torch.device) -> None:
    """SpargeAttn's recommended causal path fails this with an error of 0.68."""
    q, k, v = inputs((2, M, 64), (1, N, 64), seed=seed, device=device)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(M, N), 0.125)
    plan = predicted.predict(q, k, cdf=1.0, is_causal=True, **BLOCKS)
    assert_matches(block_sparse_attention(q, k, v, plan, path="triton"), want)
    assert bool((predicted.recall(plan, q, k) > 0.999).all())


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("d", [40, 64])
def test_sageattn(layout: str, d: int, seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 50, d), (1, 90, d), seed=seed, device=device, batch=2)
    given = [x if layout == "HND" else x.transpose(1, 2) for x in (q, k, v)]
    out, lse = sageattention.sageattn(*given, tensor_layout=layout, is_causal=True, return_lse=True)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(50, 90), d**-0.5)
    assert out.shape == given[0].shape
    assert_matches((out if layout == "HND" else out.transpose(1, 2), lse), want, LOOSE)
    with pytest.raises(ValueError, match='tensor_layout must be "HND" or "NHD"'):
        sageattention.sageattn(*given, tensor_layout="BHLD")


@pytest.mark.parametrize("groups", ["per_warp", "per_thread"])
def test_sageattn_of_one_key_is_its_value(
    groups: Literal["per_warp", "per_thread"], seed: int, device: torch.device
) -> None:
    q = torch.randn(1, 2, 65, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    k, v = q[:, :, :1] + 1.0, q[:, :, 1:2] - 1.0
    mode = SageMode(groups, smooth_q=groups == "per_thread")
    q, k, v = (x.to(device) for x in (q, k, v))
    out, lse = sageattention.sageattn(q, k, v, return_lse=True, mode=mode)
    torch.testing.assert_close(out, v.expand_as(out), atol=0.02, rtol=0.02)
    want = (q.double() @ k.double().mT)[..., 0] / 8
    torch.testing.assert_close(lse.double(), want, atol=0.1, rtol=0.01)


def test_spargeattn(seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 130, 64), (2, 130, 64), seed=seed, device=device)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(130, 130), 0.125)
    for call, options in (
        (spargeattn.spas_sage2_attn_meansim_topk_cuda, {"topk": 1.0}),
        (spargeattn.spas_sage2_attn_meansim_cuda, {"cdfthreshd": 1.0}),
    ):
        got = call(q, k, v, is_causal=True, return_lse=True, **options)  # type: ignore[operator]
        assert_matches(got, want, LOOSE)
    out, sparsity = spargeattn.spas_sage2_attn_meansim_topk_cuda(
        q, k, v, topk=0.1, simthreshd1=-1.0, return_sparsity=True
    )
    assert out.shape == q.shape and 0.3 < sparsity < 1.0
    with pytest.raises(ValueError, match="attn_mask must be None"):
        spargeattn.spas_sage2_attn_meansim_cuda(q, k, v, attn_mask=q)  # type: ignore[arg-type]


def test_sparge_with_a_map(seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 130, 64), (2, 200, 64), seed=seed, device=device)
    block_map = torch.rand(1, 2, 3, 2, generator=torch.Generator().manual_seed(seed)) < 0.5
    block_map[..., 0] = True
    seen = block_map.repeat_interleave(64, 2).repeat_interleave(128, 3)[..., :130, :200]
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), seen, 0.125)
    got = spargeattn.block_sparse_sage2_attn_cuda(q, k, v, block_map.to(device), return_lse=True)
    assert_matches(got, want, LOOSE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask_id must have one of the shapes"):
        spargeattn.block_sparse_sage2_attn_cuda(q, k, v, block_map[:, :1].to(device))


def test_recall_of_a_random_plan_is_its_density(seed: int, device: torch.device) -> None:
    """Without structure in the inputs the kept mass is the kept share: nothing is promised."""
    q, k, _ = inputs((1, 64, 64), (1, 512, 64), seed=seed, device=device)
    kinds = (torch.arange(16) % 4 == 0).to(torch.int8).expand(1, 1, 2, 16).contiguous().to(device)
    plan = from_kinds(kinds, 1, uniform_sequences(1, 64, 512, device), 32, 32)
    assert abs(float(predicted.recall(plan, 0.1 * q, k)) - 0.25) < 0.05


def test_bad_amounts() -> None:
    q = torch.zeros(1, 1, 64, 64)
    with pytest.raises(ValueError, match="exactly one of cdf and topk"):
        predicted.predict(q, q)
    with pytest.raises(ValueError, match=r"above 0 and at most 1, got 1\.5"):
        predicted.predict(q, q, cdf=1.5)


def test_relative_error_fails_on_nan() -> None:
    assert not relative_error(torch.tensor([torch.nan]), torch.ones(1)) < 1.0
