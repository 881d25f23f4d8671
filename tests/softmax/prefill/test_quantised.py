"""8-bit attention: the quantisers beside torch, and the kernel beside float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softmax_backend import reference_block_sparse as reference
from softmax_backend.plan import intervals
from softmax_backend.sage import quantised_attention
from softmax_backend.testing.prefill_cases import (
    BLOCKS,
    assert_matches,
    causal_seen,
    inputs,
    relative_error,
)
from softmax_backend.variants import sage
from softmax_backend.variants.sage import SageMode

MODES = {
    "per_warp": (SageMode(), 6e-2, 0.25),
    "per_thread": (SageMode("per_thread"), 6e-2, 0.25),
    "smooth_q": (SageMode("per_thread", smooth_q=True), 6e-2, 0.12),
    "smooth_q_per_warp": (SageMode(smooth_q=True, smooth_v=False), 6e-2, 0.12),
    "half_values": (SageMode("per_thread", smooth_q=True, fp8_values=False), 3e-2, 0.12),
    "int4": (SageMode("per_thread", levels=7, smooth_q=True), 0.5, 2.0),
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
    got = sage._with_triton(q, k, v, mode, 0.125, 32)
    want = sage._with_torch(q.cpu(), k.cpu(), v.cpu(), mode, 0.125, 32)
    for field in ("q_scale", "k_scale", "v_scale", "v_mean", "shift", "k_mean", "bias"):
        ours, theirs = getattr(got, field), getattr(want, field)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=2e-4)
    for field in ("q", "k"):  # a tie may fall either way
        gap = getattr(got, field).cpu().int() - getattr(want, field).int()
        assert int(gap.abs().max()) <= 1 and float((gap != 0).float().mean()) < 5e-3
    same = got.v.cpu().float() == want.v.float()
    # Triton 3.6's interpreter truncates e4m3 and loses the carry into the exponent
    assert float(same.float().mean()) > (0.4 if device.type == "cpu" else 0.999)


@pytest.mark.parametrize("name", list(MODES))
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_causal(name: str, path: str, seed: int, device: torch.device) -> None:
    mode, out_error, lse_error = MODES[name]
    q, k, v = offset_inputs(seed, device)
    kept = [x.clone() for x in (q, k, v)]
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(M, N), 0.125)
    plan = intervals.causal(M, N, 2, **BLOCKS, device=device)
    got = quantised_attention(q, k, v, plan, mode=mode, path=path)
    assert_matches(got, want, (out_error, lse_error))
    assert all(torch.equal(a, b) for a, b in zip(kept, (q, k, v), strict=True))


def test_rows_that_see_nothing(seed: int, device: torch.device) -> None:
    q, k, v = offset_inputs(seed, device, 120)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(120, N), 0.125)
    plan = intervals.causal(120, N, 2, **BLOCKS, device=device)
    assert_matches(quantised_attention(q, k, v, plan, path="triton"), want, (6e-2, 0.25))


def test_kernel_is_the_product_of_what_was_quantised(seed: int, device: torch.device) -> None:
    """With 16-bit values the kernel adds only its own rounding to that of the inputs."""
    mode = SageMode("per_thread", fp8_values=False)
    q, k, v = offset_inputs(seed, device)
    x = sage.quantise(q, k, v, mode, 0.125, 32, "triton")
    exact = [t.cpu() for t in sage.dequantised(x)]
    want = reference.attention(*exact, causal_seen(M, N), 0.125)
    plan = intervals.causal(M, N, 2, **BLOCKS, device=device)
    got = quantised_attention(q, k, v, plan, mode=mode, path="triton")
    assert relative_error(got[0], want[0]) < 1e-3


def test_canary_without_the_lse_shift(seed: int, device: torch.device) -> None:
    q, k, v = offset_inputs(seed, device)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(M, N), 0.125)
    plan = intervals.causal(M, N, 2, **BLOCKS, device=device)
    out, lse = quantised_attention(q, k, v, plan, path="triton")
    x = sage.quantise(q, k, v, SageMode(), 0.125, 32, "triton")
    assert_matches((out, lse), want, (6e-2, 0.25))
    with pytest.raises(AssertionError):
        assert_matches((out, lse - x.shift), want, (6e-2, 0.25))


def test_smooth_q_helps_int4(seed: int, device: torch.device) -> None:
    q, k, v = offset_inputs(seed, device)
    want = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal_seen(M, N), 0.125)[0]
    plan = intervals.causal(M, N, 2, **BLOCKS, device=device)

    def error(smooth_q: bool) -> float:
        mode = SageMode("per_thread", levels=7, smooth_q=smooth_q, fp8_values=False)
        return relative_error(quantised_attention(q, k, v, plan, mode=mode, path="triton")[0], want)

    assert error(True) < error(False)


def test_bad_input_is_one_sentence(seed: int, device: torch.device) -> None:
    q, k, v = inputs((2, 64, 64), (1, 64, 64), seed=seed, device=device)
    plan = intervals.dense(64, 64, 2, **BLOCKS, device=device)
    twice = [x.expand(2, -1, -1, -1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="2 equal sequences, one for each batch entry, got 1"):
        quantised_attention(*twice, plan)
    with pytest.raises(ValueError, match="head size must be 64 or 128"):
        quantised_attention(q[..., :32], k[..., :32], v[..., :32], plan)
    with pytest.raises(ValueError, match="levels must be 127"):
        SageMode(levels=15)
