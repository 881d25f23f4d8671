"""Why DeepSeek-V4.1's compressors stay sglang's: what its step makes, beside the definition here.

sglang's modules run in their torch form, its packing of the indexer's keys in the interpreter. Its
rows are the definition's after the roundings that docs/families/dsv4.md names, and not without
them. Where a test fails, the refusal and the study have to be read again.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsv4_backend import LowRatioLayer, reference
from dsv4_backend.low_ratio_step import RING_ROWS
from dsv4_backend.testing import low_ratio as kit

pytest.importorskip("sglang", minversion="0.5.23", reason="the study read 0.5.23")
sparse = pytest.importorskip("sglang.srt.layers.attention.dsv4.dsv41_sparse")
GROUPS = 128
ROUNDED = 1e-3
"""Share of a latent's channels that fp32 may round to the other bf16 than float64."""


def share(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of the values that differ."""
    return (one.double() != other.double()).double().mean().item()


def make_layer(ratio: int) -> LowRatioLayer:
    spec = kit.make_spec(ratio, "nvfp4_rows", "indexer_mxfp4")
    return kit.make_layer(spec, 1, torch.device("cpu"))


def sglangs_latents(history: torch.Tensor, layer: LowRatioLayer) -> torch.Tensor:
    spec = layer.spec
    compressor = sparse.DeepseekV41Compressor(
        64, 512, spec.compress_ratio, spec.eps, fused_compress=False
    )
    compressor.norm.weight.data.copy_(layer.norm_weight)
    if spec.compress_ratio == 2:
        history = compressor.pool_pairs(*history.view(GROUPS, 2, 2, 512).unbind(2))
    latents: torch.Tensor = compressor.finish(history)
    return latents


def test_the_pooled_row_is_rounded_before_its_norm() -> None:
    layer = make_layer(2)
    history = kit.make_history(layer.spec, 2 * GROUPS, 2)
    theirs = sglangs_latents(history, layer)
    kv, score = history.double().view(GROUPS, 2, 2, 512).unbind(2)
    rounded = reference.round_bf16(reference.pool(kv, score))
    assert share(theirs, reference.latents(rounded, make_layer(1))) < ROUNDED
    assert share(theirs, reference.latents(history, layer)) > 0.1


def test_a_latent_of_ratio_1_is_the_definitions() -> None:
    layer = make_layer(1)
    history = kit.make_history(layer.spec, GROUPS, 2).bfloat16()
    theirs = sglangs_latents(history, layer)
    assert share(theirs, reference.latents(history, layer)) < ROUNDED


def test_records_are_rounded_twice() -> None:
    from sglang.kernels.ops.quantization.fp4_indexer_quant import quantize_fp4_indexer_tensor

    layer, positions = make_layer(1), torch.arange(GROUPS)
    latent = sglangs_latents(kit.make_history(layer.spec, GROUPS, 2).bfloat16(), layer)
    angles = torch.complex(*layer.rope_table.float().chunk(2, 1))[positions]
    main, key = reference.low_ratio_rows(latent.double(), positions, layer)

    nvfp4, keys = layer.spec.main, layer.spec.index
    theirs = sparse._rope_fq4(latent, angles, 64, compressed_kv=True)
    twice = reference.quantise(reference.round_bf16(main), nvfp4)
    assert share(theirs, reference.dequantise(*twice, nvfp4)) == 0
    assert share(theirs, reference.dequantise(*reference.quantise(main, nvfp4), nvfp4)) > 0
    fp8 = kit.make_spec(1).main  # as sglang's default layout stores what it has rounded to NVFP4
    assert share(*(reference.quantise(x, fp8)[0] for x in (theirs.double(), main))) > 0.5

    norm = sparse.RMSNorm(128, layer.spec.eps)
    norm.weight.data.copy_(layer.key_norm_weight)
    wk = layer.key_projection.T
    indexer = SimpleNamespace(k_norm=norm, forward_wk=lambda x: x @ wk, rope_head_dim=64)
    theirs = sparse.DeepseekV41Indexer.index_keys(indexer, latent, angles)
    packed, scales = (x.view(torch.uint8) for x in quantize_fp4_indexer_tensor(theirs, rne=True))
    record = packed, scales.view(GROUPS, 4)
    once = reference.quantise(key, keys)
    assert share(reference.dequantise(*record, keys), reference.dequantise(*once, keys)) == 0
    assert all(share(*pair) > 0.1 for pair in zip(record, once, strict=True))
    codes, units = reference.quantise(reference.dequantise(*once, keys), keys)
    low, high = codes & 15, codes >> 4
    unsigned = torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4
    assert torch.equal(record[0], unsigned) and torch.equal(record[1], units)


def test_layouts_and_rings_are_others() -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
        get_compress_state_ring_size,
        resolve_compressed_kv_layout,
    )

    assert envs.SGLANG_DSV4_KV_LAYOUT.get() == "v4"
    for ratio in (1, 2):
        assert resolve_compressed_kv_layout(KVLayout.V41, ratio) is KVLayout.V41_FP4
    rings = [get_compress_state_ring_size(2, drafts) for drafts in range(4)]
    assert rings == [2, 4, 4, 8] and rings[2] < RING_ROWS
