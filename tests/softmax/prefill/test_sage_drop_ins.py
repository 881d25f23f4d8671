"""Where the drop-ins of SageAttention and SpargeAttn part from the originals, and where not.

Neither original has forward tests; these are of its README's calls and of what its source does.
"""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from softmax_backend import sageattention, spargeattn
from softmax_backend.sage import default_blocks
from softmax_backend.testing.prefill_cases import causal_seen, inputs, relative_error

ERROR = 6e-2


def test_sageattn_in_the_place_of_torchs_attention(seed: int, device: torch.device) -> None:
    q, k, v = inputs((4, 70, 64), (2, 70, 64), seed=seed, device=device)
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.2}
    want = scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    got = sageattention.sageattn(q, k, v, enable_gqa=True, **options)
    assert isinstance(got, torch.Tensor)
    assert relative_error(got, want) < ERROR
    unscaled = sageattention.sageattn(q, k, v, is_causal=True)
    assert isinstance(unscaled, torch.Tensor) and relative_error(unscaled, want) > ERROR


def test_what_sageattn_would_ignore_is_refused(device: torch.device) -> None:
    q, k, v = inputs((2, 64, 64), (2, 64, 64), seed=0, device=device)
    for options, message in (
        ({"attn_mask": causal_seen(64, 64)}, "attn_mask must be None"),
        ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"sm_scale": 0.1, "scale": 0.2}, "only one of sm_scale and scale may be given"),
    ):
        with pytest.raises(ValueError, match=message):
            sageattention.sageattn(q, k, v, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        (
            "spas_sage2_attn_meansim_cuda",
            {"simthreshd1": 0.6, "cdfthreshd": 0.98, "pvthreshd": 50, "attention_sink": False},
        ),
        (
            "spas_sage2_attn_meansim_topk_cuda",
            {"simthreshd1": -0.1, "cdfthreshd": None, "topk": 0.5, "pvthreshd": 50},
        ),
        ("block_sparse_sage2_attn_cuda", {"mask_id": None, "pvthreshd": 50}),
    ],
)
def test_sparge_s_defaults_are_the_originals(name: str, defaults: dict[str, object]) -> None:
    found = inspect.signature(getattr(spargeattn, name)).parameters
    assert {key: found[key].default for key in defaults} == defaults
    first = ["q", "k", "v", "mask_id" if "block" in name else "attn_mask", "dropout_p"]
    assert list(found)[:5] == first


@pytest.mark.parametrize("topk", [0.01, 0.3, 0.5, 0.51, 1.0])
def test_a_share_of_blocks_is_rounded_up(topk: float, seed: int, device: torch.device) -> None:
    q, k, v = inputs((1, 64, 64), (1, 512, 64), seed=seed, device=device)
    result = spargeattn.spas_sage2_attn_meansim_topk_cuda(
        q, k, v, topk=topk, simthreshd1=-0.1, return_sparsity=True
    )
    blocks = 512 // default_blocks(device)[1]
    assert result[1] == pytest.approx(1.0 - math.ceil(topk * blocks) / blocks)


def test_thresholds_of_each_head(seed: int, device: torch.device) -> None:
    """A list, a tensor and one number are the same where all heads have that number; and a head's
    output is that of its own."""
    q, k, v = inputs((2, 300, 64), (2, 300, 64), seed=seed, device=device)
    sum_of, share_of = (
        spargeattn.spas_sage2_attn_meansim_cuda,
        spargeattn.spas_sage2_attn_meansim_topk_cuda,
    )
    for call, name, low, high in ((sum_of, "cdfthreshd", 0.2, 1.0), (share_of, "topk", 0.2, 1.0)):
        options = {"simthreshd1": -0.1, "is_causal": True}
        few, all_of = (call(q, k, v, **{name: x}, **options) for x in (low, high))  # type: ignore[arg-type]
        assert isinstance(few, torch.Tensor) and isinstance(all_of, torch.Tensor)
        assert not torch.equal(few[:, 0], all_of[:, 0])
        for each in ([low, high], (low, high), torch.tensor([low, high]).to(device)):
            got = call(q, k, v, **{name: each}, **options, pvthreshd=[50, 50])  # type: ignore[arg-type]
            assert isinstance(got, torch.Tensor)
            assert torch.equal(got[:, 0], few[:, 0]) and torch.equal(got[:, 1], all_of[:, 1])
        scalar = call(q, k, v, **{name: torch.tensor(low)}, **options)  # type: ignore[arg-type]
        assert isinstance(scalar, torch.Tensor) and torch.equal(scalar, few)
    whole, own = (
        sum_of(q, k, v, simthreshd1=x, cdfthreshd=0.1) for x in (1.0, torch.tensor([1.0, -0.1]))
    )
    assert isinstance(whole, torch.Tensor) and isinstance(own, torch.Tensor)
    assert torch.equal(own[:, 0], whole[:, 0]) and not torch.equal(own[:, 1], whole[:, 1])
    dense = scaled_dot_product_attention(q, k, v)
    assert relative_error(own[:, 0], dense[:, 0]) < ERROR < relative_error(own[:, 1], dense[:, 1])


def test_thresholds_that_are_refused(device: torch.device) -> None:
    q, k, v = inputs((2, 128, 64), (2, 128, 64), seed=0, device=device)
    for name, given, message in (
        ("topk", torch.tensor([0.5, 0.9, 0.9]), r"topk must have shape \[2\], got \[3\]"),
        ("topk", [0.5], r"topk must have shape \[2\], got \[1\]"),
        ("simthreshd1", torch.zeros(1, 2), r"simthreshd1 must have shape \[2\], got \[1, 2\]"),
        ("simthreshd1", "0.5", "simthreshd1 must be a number, or a list or tensor .* got str"),
        ("topk", [0.5, 1.5], "cdf and topk must be above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            spargeattn.spas_sage2_attn_meansim_topk_cuda(q, k, v, **{name: given})  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="cdfthreshd must be None where topk chooses"):
        spargeattn.spas_sage2_attn_meansim_topk_cuda(q, k, v, cdfthreshd=0.9)  # type: ignore[arg-type]
