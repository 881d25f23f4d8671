"""Predicted plans, what they keep, and the entry points of SageAttention and SpargeAttn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from block_sparse_backend import reference
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.drop_ins import sageattention, spargeattn
from block_sparse_backend.plan import predicted
from block_sparse_backend.plan.block_plan import BlockPlan, from_kinds, uniform_sequences, work_list
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.sage import predicted_attention, quantised_attention
from block_sparse_backend.selection import paths_on
from block_sparse_backend.spec import PredictSpec, QuantiseSpec, SageMode
from block_sparse_backend.testing.cases import (
    BLOCKS,
    causal_seen,
    elements_seen,
    inputs,
)
from tests.block_sparse.results import assert_matches
from tests.engines.kda.sglang.device_graph import DeviceGraph

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


def predictor(q: Tensor, k: Tensor, choice: Choice, blocks: tuple[int, int], path: str) -> Any:
    """A path, which does the two steps of `predicted.predict`."""
    is_centred = choice.kind.has_likeness
    spec = PredictSpec.of(q, k, choice.kind, blocks, is_centred=is_centred)
    return paths_on(q.device, path, "predict").select("predict", spec, "q", q).run(1)


def kept(plan: BlockPlan, head: int | None = None) -> list[list[int]]:
    """The sorted columns of each tile of one head, or of every head."""
    rows, cols = plan.rows.tolist(), plan.cols.tolist()
    work = [entry for entry in sorted(plan.work.tolist()) if head in (None, entry[1])]
    return [sorted(cols[rows[r][0] : rows[r][2]]) for *_, r in work]


@pytest.mark.parametrize("amount", [{"cdf": 0.7}, {"topk": 0.3}, {"cdf": 1.0}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_are_as_in_torch(
    amount: dict[str, float],
    is_causal: bool,
    seed: int,
    device: torch.device,
) -> None:
    q, k, _ = smooth_inputs(seed, device)
    options = amount | {"is_causal": is_causal, "min_likeness": 0.3, "keep_first": True}
    got = predicted.predict(q, k, **options, **BLOCKS, path="triton")
    want = predicted.predict(q.cpu(), k.cpu(), **options, **BLOCKS, path="torch")
    assert got.has_partial == want.has_partial
    assert kept(got) == kept(want)
    assert all(0 in cols for cols in kept(got) if cols)


EACH = {
    "cdf": {"cdf": torch.tensor([0.3, 1.0, 0.8, 0.5])},
    "topk": {"topk": torch.tensor([0.1, 1.0, 0.5, 0.31])},
    "cdf and likeness": {"cdf": 0.6, "min_likeness": torch.tensor([-0.1, 0.9, 0.3, 0.99])},
    "topk and likeness": {
        "topk": torch.tensor([0.1, 0.2, 0.5, 0.8]),
        "min_likeness": torch.tensor([0.97, -1.0, 0.3, 0.0]),
    },
}


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("name", list(EACH))
def test_each_head_has_a_threshold_of_its_own(
    name: str, path: str, seed: int, device: torch.device
) -> None:
    """A head keeps what it keeps where all heads have its numbers; with its neighbour's it keeps
    other blocks, so that a threshold of the wrong head is seen."""
    q, k, _ = (torch.cat([x, x.flip(2)], 1) for x in smooth_inputs(seed, device))
    q = torch.cat([q, q.roll(1, 1)])  # two entries of the batch, whose heads are not each other's
    k = torch.cat([k, k.flip(1)])
    given = EACH[name]
    fixed: dict[str, Any] = {"is_causal": "likeness" in name, "path": path, **BLOCKS}
    on_device = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in given.items()}
    got = predicted.predict(q, k, **on_device, **fixed)
    of_all = [
        predicted.predict(
            q, k, **{key: float(x[i]) if isinstance(x, Tensor) else x for key, x in given.items()},
            **fixed,
        )
        for i in range(4)
    ]  # fmt: skip
    assert all(kept(got, i) == kept(of_all[i], i) for i in range(4))
    assert sum(kept(got, i) != kept(of_all[i - 1], i) for i in range(4)) >= 2


def test_thresholds_of_heads_in_a_recorded_graph(seed: int, device: torch.device) -> None:
    """On the device they are read by the kernels alone: a replay has the numbers of then."""
    q, k, v = smooth_inputs(seed, device)
    cdf, likeness = (torch.full((2,), x, device=device) for x in (0.3, 0.5))
    graph, blocks = DeviceGraph(), (BLOCKS["block_m"], BLOCKS["block_n"])

    def call() -> tuple[Tensor, Tensor, BlockPlan]:
        choice = Choice(cdf=cdf, min_likeness=likeness)
        return predicted_attention(q, k, v, choice, blocks=blocks, path="triton")

    out, _, plan = graph.record(call)
    before = kept(plan)
    cdf.copy_(torch.tensor([0.9, 0.2]))
    likeness.copy_(torch.tensor([0.0, 0.99]))
    graph.replay()
    want, _, fresh = call()
    assert kept(plan) == kept(fresh) != before
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_thresholds_of_heads_that_are_refused(seed: int, device: torch.device) -> None:
    q, k, v = smooth_inputs(seed, device)
    out = torch.full_like(q, torch.nan)
    three = torch.full((3,), 0.5)
    for given, message in (
        ({"cdf": three}, "cdf must have one number for each of 2 heads, got 3"),
        (
            {"topk": 0.5, "min_likeness": three},
            "min_likeness must have one number for each of 2 heads, got 3",
        ),
        ({"topk": three[None]}, r"topk must have shape \[heads\], got \[1, 3\]"),
        (
            {"cdf": torch.tensor([0.5, 0.0])},
            r"cdf and topk must be above 0 and at most 1, got \[0.5, 0.0\]",
        ),
        ({"cdf": 0.5, "topk": three[:2]}, "exactly one of cdf and topk must be given"),
        ({"topk": [0.5, 0.5]}, "topk must be a number or a tensor of one for each head"),
        ({"topk": 0.5, "min_likeness": "low"}, "min_likeness must be a number or a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            predicted_attention(q, k, v, Choice(**given), out=out)
        with pytest.raises(ValueError, match=message):
            predicted.predict(q, k, **given)  # type: ignore[arg-type]
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("is_causal", "amount", "min_likeness"),
    [
        (False, {"cdf": 0.7}, 0.3),
        (False, {"topk": 0.3}, -0.1),
        (True, {"cdf": 0.7}, -0.1),
        (True, {"topk": 0.3}, 0.3),
    ],
)
def test_prediction_while_quantising(
    is_causal: bool, amount: dict[str, float], min_likeness: float, seed: int, device: torch.device
) -> None:
    """The kernels that quantise pool as the kernel that only pools, and the plans are the same."""
    q, k, v = (torch.cat([x, x.flip(2)]) for x in smooth_inputs(seed, device))
    options = {**amount, "is_causal": is_causal, "min_likeness": min_likeness}
    want_plan = predicted.predict(q, k, **options, **BLOCKS, path="triton")
    want = quantised_attention(q, k, v, want_plan, path="triton")
    choice = Choice(**options)
    out = torch.full_like(q, torch.nan)
    blocks = (BLOCKS["block_m"], BLOCKS["block_n"])
    *got, plan = predicted_attention(q, k, v, choice, blocks=blocks, path="triton", out=out)
    assert got[0] is out and kept(plan) == kept(want_plan)
    for name in ("rows", "work", "sequences"):
        assert torch.equal(getattr(plan, name), getattr(want_plan, name)), name
    torch.testing.assert_close(got, list(want), rtol=0, atol=0)
    has_likeness = choice.kind.has_likeness
    asked = QuantiseSpec(SageMode(), *blocks, True, has_likeness)
    paths = paths_on(q.device, "triton", "quantise")
    quantise = paths.select("quantise", asked, "q", q).run(1)(q, k, v, None)
    pooled = [quantise(q, k, v, 0.125, None)[1]]
    for path in ("torch", "triton"):
        pooled.append(predictor(q, k, choice, blocks, path).pool(q, k))
    for name in ("q_sums", "k_sums", "q_likeness", "k_likeness"):
        made = [getattr(x, name) for x in pooled]
        if not has_likeness and name == "k_sums":  # they still have their mean
            count = (N - torch.arange(made[2].shape[2], device=device) * blocks[1]).clamp(max=32)
            made[2] = made[2] - count[:, None] * k.float().mean(2, keepdim=True)
        for x in made:
            assert x is None or torch.allclose(x, made[1], rtol=1e-4, atol=1e-3), name


@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_beside_float64(is_causal: bool, seed: int, device: torch.device) -> None:
    """Keys have a common part ten times as large as what tells them apart. Rows may differ by a
    number each. The bound is the format's rounding of both factors, over their lengths."""
    q, k, _ = inputs((2, 140, 64), (1, 700, 64), seed=seed, device=device)
    k = k + 10 * torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(seed)).to(k)
    run = predictor(q, k, Choice(topk=0.5, is_causal=is_causal), (16, 32), "triton")
    got = run.scores(run.pool(q, k), 0.25)[..., :22].cpu().double()
    middle = 11 * 32

    def means(t: Tensor, block: int) -> Tensor:
        return torch.stack([part.mean(2) for part in t.cpu().double().split(block, 2)], 2)

    q_mean, k_mean = means(q, 16), means(k, 32)
    k_mean = k_mean - k.cpu().double()[:, :, middle : middle + 32].mean(2, keepdim=True)
    want = 0.25 * q_mean @ k_mean.mT
    room = 0.25 * q_mean.norm(dim=-1)[..., None] * k_mean.norm(dim=-1)[:, :, None]
    first = torch.arange(9)[:, None] * 16 + 560
    seen = torch.arange(22) * 32 < first + 16
    seen = seen if is_causal else torch.ones_like(seen)
    gap = got - want
    gap = (gap - gap[..., :1])[..., seen]
    share = gap.abs() / (room + room[..., :1])[..., seen].clamp(min=room.mean())
    assert float(share.max()) < 2.0**-16


@pytest.mark.parametrize("is_causal", [False, True])
def test_work_is_in_the_order_of_the_plans(
    is_causal: bool, seed: int, device: torch.device
) -> None:
    """Longest rows first, of equals the first, as every plan has it; and the same sequences."""
    q, k, _ = inputs((3, 300, 64), (3, 300, 64), seed=seed, device=device, batch=2)
    options = {"cdf": 0.5, "min_likeness": 0.05, "is_causal": is_causal}
    plan = predicted.predict(q, k, **options, block_m=16, block_n=16, path="triton")
    row_of = torch.arange(2 * 3 * 19, device=device).view(2, 3, 19)
    assert torch.equal(plan.work, work_list(plan.rows, row_of))
    assert torch.equal(plan.sequences, uniform_sequences(2, 300, 300, device))
    count = plan.rows[:, 2] - plan.rows[:, 0]
    assert len(count.unique()) > 1 and len(count.unique()) < len(count)  # both rules decide


@pytest.mark.parametrize("spread", [1.0, 12.0])
def test_as_many_blocks_as_asked(spread: float, seed: int, device: torch.device) -> None:
    """Without ties the count is exact, also where most weights are below 2^-26, and no smaller set
    of blocks has the sum."""
    n, block = 40 * 16, 16
    generator = torch.Generator().manual_seed(seed)
    height = spread * torch.randn(40, generator=generator)
    q = torch.zeros(1, 1, 16, 64)
    q[..., 0] = 8.0  # undone by the scale of the logits
    k = torch.zeros(1, 1, n, 64)
    k[0, 0, :, 0] = height.half().float().repeat_interleave(block)
    q, k = q.half().to(device), k.half().to(device)
    weight = torch.softmax(k[0, 0, ::block, 0].cpu().double(), 0)
    order = weight.argsort(descending=True)
    for path in ("torch", "triton"):
        for share in (0.01, 0.25, 0.7):
            plan = predicted.predict(q, k, topk=share, block_m=16, block_n=block, path=path)
            count = max(1, math.ceil(share * 40))
            assert kept(plan) == [sorted(order[:count].tolist())]
            plan = predicted.predict(q, k, cdf=share, block_m=16, block_n=block, path=path)
            count = int((weight[order].cumsum(0) < share).sum()) + 1
            assert kept(plan) == [sorted(order[:count].tolist())]


@pytest.mark.parametrize("min_likeness", [-0.1, 0.3])
def test_blocks_without_a_score_are_kept(
    min_likeness: float, seed: int, device: torch.device
) -> None:
    q, k, _ = inputs((1, 64, 64), (1, 256, 64), seed=seed, device=device)
    q[0, 0, 40] = torch.nan
    for path in ("torch", "triton"):
        plan = predicted.predict(
            q, k, topk=0.3, min_likeness=min_likeness, block_m=32, block_n=32, path=path
        )
        first, second = kept(plan)
        assert second == list(range(8)) and len(first) >= 3
        assert min_likeness > 0 or len(first) == 3


def test_means_beyond_fp16(seed: int, device: torch.device) -> None:
    """What all keys share has no part in a score; of one tile's mean alone there is none."""
    q, k, _ = (x.bfloat16() for x in inputs((1, 64, 64), (1, 256, 64), seed=seed, device=device))
    asked: dict[str, Any] = {"topk": 0.3, "block_m": 32, "block_n": 32, "path": "triton"}
    k[..., 5] = 0.0
    want = kept(predicted.predict(q, k, **asked))
    k[..., 5] = 2.0**17
    assert kept(predicted.predict(q, k, **asked)) == want and len(want[1]) == 3
    q[0, 0, 32:, 5] = 2.0**20
    assert kept(predicted.predict(q, k, **asked)) == [want[0], list(range(8))]


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_a_prediction(
    path: str, is_causal: bool, seed: int, device: torch.device
) -> None:
    q, k, v = smooth_inputs(seed, device)
    plan = predicted.predict(q, k, topk=0.3, is_causal=is_causal, **BLOCKS)
    seen = elements_seen(plan)
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


@pytest.mark.parametrize("fp8_values", [True, False])
def test_sageattn_of_one_key_is_its_value(
    fp8_values: bool, seed: int, device: torch.device
) -> None:
    q = torch.randn(1, 2, 65, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    k, v = q[:, :, :1] + 1.0, q[:, :, 1:2] - 1.0
    mode = SageMode(fp8_values)
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


def test_bad_input_is_one_sentence() -> None:
    q = torch.zeros(1, 1, 64, 64)
    long = torch.zeros(1, 1, 1, 64).expand(1, 1, 1 << 22, 64)
    with pytest.raises(ValueError, match=r"fewer than 2\^31 blocks of 64 queries by 128 keys"):
        predicted.predict(long, long, topk=0.5)
    with pytest.raises(ValueError, match="path must be one of torch, triton, got 'gluon'"):
        predicted.predict(q, q, topk=0.5, path="gluon")
    with pytest.raises(ValueError, match=r"v must have shape \[1, 1, 64, DV\]"):
        predicted_attention(q.half(), q.half(), q.half()[:, :, :3], Choice(topk=0.5))
    with pytest.raises(ValueError, match="head size must be 64 or 128"):
        predicted_attention(*[q.half()[..., :32]] * 3, Choice(topk=0.5))
    with pytest.raises(ValueError, match="exactly one of cdf and topk"):
        predicted.predict(q, q)
    with pytest.raises(ValueError, match=r"above 0 and at most 1, got 1\.5"):
        predicted.predict(q, q, cdf=1.5)


@pytest.mark.parametrize("size", [8, 72, 80, 96, 192, 256])
@pytest.mark.parametrize("least", [-0.1, 0.3])
def test_heads_of_any_size(size: int, least: float, seed: int, device: torch.device) -> None:
    """Kernels keep the blocks that torch keeps."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, 5, 1, size, generator=generator)
    q = (2 * x + 0.2 * torch.randn(1, 2, 5, 32, size, generator=generator)).flatten(2, 3)
    asked: dict[str, Any] = {"topk": 0.4, "min_likeness": least, "block_m": 32, "block_n": 32}
    q, k = q.half(), q.roll(40, 2).half()
    want = predicted.predict(q, k, path="torch", **asked)
    got = predicted.predict(q.to(device), k.to(device), path="triton", **asked)
    assert torch.equal(elements_seen(got), elements_seen(want))
