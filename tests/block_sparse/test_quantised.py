"""8-bit attention: the quantisers beside torch, and the kernel beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend_core.target import KNOWN_TARGETS
from backend_core.testing.numerics import relative_error
from block_sparse_backend import reference, selection
from block_sparse_backend.launch_params import TritonParams
from block_sparse_backend.plan import intervals
from block_sparse_backend.quantise.torch import dequantised
from block_sparse_backend.sage import quantised_attention
from block_sparse_backend.spec import SageMode
from block_sparse_backend.testing.cases import (
    BLOCKS,
    attention_of,
    causal_seen,
    inputs,
    quantised,
)
from tests.block_sparse.results import assert_matches

MODES = {
    "e4m3_values": (SageMode(), 6e-2, 0.25),
    "half_values": (SageMode(fp8_values=False), 2e-2, 0.25),
}
M, N = 40, 100


def offset_inputs(seed: int, device: torch.device, m: int = M) -> list[Tensor]:
    """Inputs with an offset in every channel, as models have: what smoothing is for."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = inputs((2, m, 64), (1, N, 64), seed=seed, device=torch.device("cpu"))
    spread = ((q, 2.0), (k, 3.0), (v, 1.0))
    made = [x.float() + s * torch.randn(x.shape[1], 1, 64, generator=generator) for x, s in spread]
    return [x.half().to(device) for x in made]


@pytest.mark.parametrize("name", list(MODES))
def test_quantisers_are_as_in_torch(name: str, seed: int, device: torch.device) -> None:
    mode = MODES[name][0]
    q, k, v = offset_inputs(seed, device)
    got = quantised(q, k, v, mode, 0.125, 32)
    want = quantised(q.cpu(), k.cpu(), v.cpu(), mode, 0.125, 32, "torch")
    for field in ("q_scale", "k_scale", "v_scale", "shift", "k_mean"):
        ours, theirs = getattr(got, field), getattr(want, field)
        assert (ours is None) == (theirs is None) == (field == "v_scale" and not mode.fp8_values)
        if ours is not None:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=2e-4)
    for field in ("q", "k"):  # a tie may fall either way
        gap = getattr(got, field).cpu().int() - getattr(want, field).int()
        assert int(gap.abs().max()) <= 1 and float((gap != 0).float().mean()) < 5e-3
    same = got.v.cpu().float() == want.v.float()
    assert float(same.float().mean()) > 0.999


def test_a_block_of_one_token_is_rounded_to_nearest() -> None:
    """Nothing in it makes up the error of a value that is rounded the other way."""
    q, k, v = (
        torch.randn(1, 1, 65, 64, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    got = quantised(q, k, v, SageMode(), 0.125, 64, "torch")
    assert got.v_scale is not None
    scaled = (v - v.mean(2, keepdim=True))[0, 0, 64] / got.v_scale[0, 0]
    last = got.v[0, 0, :, 64:].float()
    assert torch.equal(last.sum(1), scaled.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", list(MODES))
@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("m", [M, 120])
def test_causal(name: str, path: str, m: int, seed: int, device: torch.device) -> None:
    """Of more queries than keys, the first see nothing."""
    mode, out_error, lse_error = MODES[name]
    q, k, v = offset_inputs(seed, device, m)
    kept = [x.clone() for x in (q, k, v)]
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(m, N), 0.125)
    plan = intervals.causal(m, N, 2, **BLOCKS, device=device)
    got = quantised_attention(q, k, v, plan, mode=mode, path=path)
    assert_matches(got, want, (out_error, lse_error))
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True))


@pytest.mark.parametrize("fp8_values", [True, False])
@pytest.mark.parametrize("m", [M, 120])
def test_wide_logits(
    fp8_values: bool,
    m: int,
    seed: int,
    device: torch.device,
) -> None:
    """Logits are some hundreds wide, where what is rounded off the exponent costs the most; some
    rows see nothing."""
    q, k, v = offset_inputs(seed, device, m)
    q = 4 * q
    plan = intervals.causal(m, N, 2, **BLOCKS, device=device)
    x = quantised(q, k, v, SageMode(fp8_values=fp8_values), 0.125, 32)
    q8, k8, v8 = (t.cpu() for t in dequantised(x))
    assert x.shift is not None
    k8 = k8 - x.k_mean.cpu()[:, :, None]  # the shift of the LSE is of the queries as they came
    want = reference.attention(q8, k8, v8, causal_seen(m, N), 0.125)
    want = (want[0], want[1] + x.shift.cpu())
    # three steps of q8 k8^T, in logits: what is rounded off
    unit = 3 * 0.125 * float(x.q_scale.max() * x.k_scale.max())
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device=device)
    params = TritonParams(**BLOCKS, num_warps=4, num_stages=2)
    attention_of(x, plan, params)(x, plan, 0.125, out, lse)
    assert_matches((out, lse), want, (6e-2 if fp8_values else 2e-3, 1e-3 + unit))


@pytest.mark.parametrize("fp8_values", [True, False])
@pytest.mark.parametrize(("size", "m"), [(20.0, 200), (900.0, 64), (5500.0, 200), (60000.0, 64)])
def test_a_massive_key(
    size: float, m: int, fp8_values: bool, seed: int, device: torch.device
) -> None:
    """All weight is on one key, or half of it on each of two in different blocks, whose logits are
    up to 10^9: a weight beyond e4m3's range would be clipped, and its sum would not. The first
    queries of the causal call see neither."""
    q, k, v = inputs((2, m, 128), (1, 200, 128), seed=seed, device=torch.device("cpu"))
    q[..., 0] = size * (1 - 0.1 * torch.rand(2, m, generator=torch.Generator().manual_seed(seed)))
    k[..., 0] = 0
    k[:, :, 70, 0] = size
    twice = k.clone()
    twice[:, :, 150] = k[:, :, 70]
    bound = 6e-2 if fp8_values else 2e-2
    mode = SageMode(fp8_values)
    for keys, at in ((k, [70]), (twice, [70, 150])):
        want = v[:, :, at].float().mean(2, keepdim=True).expand(1, 2, m, 128)
        q1, k1, v1 = (x.to(device) for x in (q, keys, v))
        for make, seeing in ((intervals.dense, 0), (intervals.causal, max(m - 49, 0))):
            plan = make(m, 200, 2, block_m=64, block_n=64, device=device)
            out, _ = quantised_attention(q1, k1, v1, plan, mode=mode, path="triton")
            assert relative_error(out.cpu()[:, :, seeing:], want[:, :, seeing:]) < bound


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_rounded_values_keep_their_mean(path: str, seed: int, device: torch.device) -> None:
    """The mean of what rounding left would not average away over many keys."""
    q, k, v = offset_inputs(seed, device)
    x = quantised(q, k, v, SageMode(), 0.125, 32, path)
    gap = dequantised(x)[2].double().mean(2) - v.double().mean(2)
    assert float(gap.abs().max()) < 1e-5


def test_rounded_values_of_a_block_are_nearer_in_sum(seed: int, device: torch.device) -> None:
    """Nearest values are off by 0.026 standard deviations, and sums of 128 by 0.3."""
    q, k, v = inputs((1, 128, 128), (1, 1280, 128), seed=seed, device=device)
    for path in ("torch", "triton"):
        x = quantised(q, k, v, SageMode(), 0.125, 128, path)
        left = (dequantised(x)[2].double() - v.double()).cpu()
        blocks = left.unflatten(2, (10, 128)).sum(3)
        assert float(blocks.square().mean().sqrt()) < 0.24
        assert float(left.square().mean().sqrt()) < 0.028


def test_a_scale_is_of_few_tokens(seed: int, device: torch.device) -> None:
    """Of one query, and of 16 keys: the error of logits is below that of scales of two queries and
    32 keys."""
    q, k, v = inputs((8, 256, 128), (8, 256, 128), seed=seed, device=device)
    x = quantised(q, k, v, SageMode(), 0.125, 128)
    got = dequantised(x)
    errors = [relative_error(ours.cpu(), y.cpu()) for ours, y in zip(got, (q, k), strict=False)]
    assert errors[0] < 6.7e-3 and errors[1] < 8.4e-3


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_an_order_has_each_token_of_a_block(
    path: str, value: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of keys that do not compare: a place without one would be read as any token's."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda *args, **more: empty(*args, **more).fill_(77)
    )
    q, k, v = inputs((2, 40, 64), (1, 100, 64), seed=0, device=device)
    k[:, :, 40:70] = value
    x = quantised(q, k, v, SageMode(), 0.125, 32, path)
    assert x.order is not None
    tokens = torch.arange(32, dtype=torch.int8).expand_as(x.order)
    assert torch.equal(x.order.cpu().sort(3).values, tokens)


def test_bad_input_is_one_sentence(seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 64, 64), (1, 64, 64), seed=seed, device=device)
    plan = intervals.dense(64, 64, 2, **BLOCKS, device=device)
    twice = [x.expand(2, -1, -1, -1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="each of the 2 entries of q's batch, got 1"):
        quantised_attention(*twice, plan)
    with pytest.raises(ValueError, match="head size must be 64 or 128"):
        quantised_attention(q[..., :32], k[..., :32], v[..., :32], plan)


def test_a_named_path_is_held_to_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """MI300X's table takes e4m3 values away from the Triton path."""
    monkeypatch.setattr(selection, "detect_target", lambda device: KNOWN_TARGETS["MI300X"])
    q, k, v = inputs((2, 64, 64), (2, 64, 64), seed=0, device=torch.device("cpu"))
    plan = intervals.dense(64, 64, 2, **BLOCKS, device="cpu")
    with pytest.raises(LookupError, match=r"no quantise path .* triton lacks e4m3_values"):
        quantised_attention(q, k, v, plan, path="triton")
