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


def test_thresholds_of_each_head_are_refused(device: torch.device) -> None:
    q, k, v = inputs((2, 128, 64), (2, 128, 64), seed=0, device=device)
    each = torch.tensor([0.5, 0.9])
    for call, options in (
        (spargeattn.spas_sage2_attn_meansim_cuda, {"cdfthreshd": each}),
        (spargeattn.spas_sage2_attn_meansim_topk_cuda, {"topk": each}),
        (spargeattn.spas_sage2_attn_meansim_topk_cuda, {"simthreshd1": each}),
    ):
        with pytest.raises(ValueError, match="must be one number for all heads, got Tensor"):
            call(q, k, v, **options)  # type: ignore[operator]
    with pytest.raises(ValueError, match="cdfthreshd must be None where topk chooses"):
        spargeattn.spas_sage2_attn_meansim_topk_cuda(q, k, v, cdfthreshd=0.9)  # type: ignore[arg-type]
