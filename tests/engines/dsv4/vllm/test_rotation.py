"""rotate_indexer: keys and queries of vLLM's indexer, both or neither."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v4 import attention
from vllm.models.deepseek_v4.attention import DeepseekV4Indexer
from vllm.models.deepseek_v4.compressor import DeepseekCompressor

from backend_core.engines import entry, seams
from backend_core.strict import FallbackError
from dsv4_backend import reference
from dsv4_backend.engines import vllm_rotation
from dsv4_backend.engines.seam_list import VLLM_ROTATION
from dsv4_backend.engines.vllm_compressor import FusedCompressor
from tests.dsv4.cases import make_history, make_spec
from tests.engines.dsv4.vllm.harness import Step, engine_config, rotary

entry.vllm.dsv4()

QUANTISE = "fused_indexer_q_rope_quant"
HEADS = 4


@pytest.fixture(autouse=True)
def stocks_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts with upstream's function, and leaves it."""
    upstream = getattr(attention, QUANTISE)
    assert upstream is not vllm_rotation.quantise_queries
    monkeypatch.setattr(attention, QUANTISE, upstream)


class Logits(torch.nn.Module):
    """In the place of vLLM's logits and top-k, which need a GPU: keeps what it is given."""

    def forward(self, hidden_states: Any, q_quant: Any, k: Any, weights: Any) -> Any:
        return q_quant, weights


def config_with(**additional: Any) -> VllmConfig:
    config = engine_config(flag=True)
    config.additional_config = additional
    return config


def build(config: VllmConfig, monkeypatch: pytest.MonkeyPatch, use_fp4: bool = False) -> Any:
    """An indexer as the attention layer builds it, with random weights."""
    config.compilation_config.static_forward_context.clear()
    monkeypatch.setattr(attention, "SparseAttnIndexer", lambda *a, **k: Logits())
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)  # of the two streams of a GPU
    monkeypatch.setattr(attention, "dsa_indexer_uses_fp4", lambda config: use_fp4)
    kinds = {"_get_attn_cls": lambda *a, **k: Logits(), "_get_compressor_cls": DeepseekCompressor}
    for name, kind in kinds.items():  # 0.32.0 has neither
        monkeypatch.setattr(DeepseekV4Indexer, name, lambda self, kind=kind: kind, raising=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            indexer = DeepseekV4Indexer(
                config,
                config.model_config.hf_config,
                hidden_size=256,
                q_lora_rank=128,
                quant_config=None,
                cache_config=config.cache_config,
                topk_indices_buffer=None,
                compress_ratio=4,
                prefix="layer",
            )
    finally:
        torch.set_default_dtype(torch.float32)
    g = torch.Generator().manual_seed(3)
    weight = (torch.randn(HEADS * 128, 128, generator=g) / 11).bfloat16()
    indexer.wq_b.weight.data.copy_(weight)
    indexer.wq_b.forward = lambda x: (x @ weight.T, None)  # vLLM's product on a CPU is compiled
    compressor = indexer.compressor
    compressor.ape.data.copy_(torch.randn(compressor.ape.shape, generator=g))
    compressor.norm.weight.data.copy_(0.5 + torch.rand(128, generator=g))
    return indexer


def values(q_quant: Any, use_fp4: bool) -> torch.Tensor:
    """The queries [T, H, 128] that vLLM's logits kernels read; of fp8 without their scale."""
    if not use_fp4:
        assert q_quant.dtype is torch.float8_e4m3fn
        return q_quant.float()
    codes, scales = q_quant
    assert scales.dtype is torch.int32 and scales.shape == codes.shape[:2]
    rows = reference.dequantise(
        codes.reshape(-1, 64), scales.reshape(-1, 1).view(torch.uint8), make_spec("indexer_mxfp4")
    )
    return rows.view(*codes.shape[:2], 128)


@pytest.mark.parametrize("use_fp4", [False, True])
def test_scores_are_those_without_rotation(use_fp4: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that the compressor stored, times queries that the indexer quantised."""
    cache_format = "indexer_mxfp4" if use_fp4 else "indexer_fp8"
    scores = {}
    for rotate in (False, True):
        config = config_with(rotate_indexer=rotate)
        indexer = build(config, monkeypatch, use_fp4)
        assert type(indexer.compressor) is FusedCompressor
        assert indexer.compressor.rotates is rotate
        indexer.compressor._static_forward_context["layer"] = (
            indexer.compressor._static_forward_context[indexer.compressor.k_cache_prefix]
        )
        indexer.compressor.k_cache_prefix = "layer"
        step = Step(indexer.compressor, cache_format, [16])
        history = make_history(step.layer.spec, 16, 0)
        step.run(config, [history], [(0, 0, 16)])
        slots = torch.tensor([step.caches.slot(0, n) for n in (4, 8, 12, 16)])
        data, scale = reference.load(step.caches.caches, slots, step.layer.spec)
        keys = reference.dequantise(data, scale, step.layer.spec)

        qr = torch.randn(3, 128, generator=torch.Generator().manual_seed(9)).bfloat16()
        q = (qr @ indexer.wq_b.weight.data.bfloat16().T).view(3, HEADS, 128)
        weights = torch.rand(3, HEADS, generator=torch.Generator().manual_seed(1)) + 0.5
        positions = torch.tensor([17, 18, 19])
        quantise = getattr(attention, QUANTISE)
        if not rotate:  # upstream's needs a GPU
            assert quantise is not vllm_rotation.quantise_queries
            rows = reference.rope(
                q.double().reshape(-1, 128),
                rotary(4).cos_sin_cache,
                positions.repeat_interleave(HEADS),
                "split",
            )
            scores[rotate] = torch.einsum("thd,kd->thk", rows.view(3, HEADS, 128), keys.double())
            scores[rotate] *= weights[:, :, None] * 128**-0.5 * HEADS**-0.5
            continue
        assert quantise is vllm_rotation.quantise_queries
        q_quant, folded = quantise(
            positions, q, rotary(4).cos_sin_cache, weights, 128**-0.5, HEADS**-0.5, use_fp4=use_fp4
        )
        raw = torch.einsum("thd,kd->thk", values(q_quant, use_fp4).double(), keys.double())
        scores[rotate] = raw * folded[:, :, None]
    size = scores[False].norm()
    # codes of 3 and of 1 bits on both sides
    assert (scores[True] - scores[False]).norm() < (0.25 if use_fp4 else 0.06) * size


def test_the_indexers_own_call_gets_rotated_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(rotate_indexer=True)
    indexer = build(config, monkeypatch)
    seen: list[Any] = []

    def record(*call: Any, **named: Any) -> Any:
        seen.append(named)
        return vllm_rotation.quantise_queries(*call, **named)

    monkeypatch.setattr(attention, QUANTISE, record)
    monkeypatch.setattr(FusedCompressor, "forward", lambda self, *call: None)
    qr, weights = torch.randn(3, 128).bfloat16(), torch.rand(3, HEADS)
    if hasattr(indexer, "_q_rope_quant"):
        q = torch.randn(3, HEADS, 128).bfloat16()
        got, _ = indexer._q_rope_quant(torch.arange(3), q, rotary(4), weights)
    else:
        with (
            set_current_vllm_config(config),
            set_forward_context(None, config, num_tokens=3),
        ):
            got, *_ = indexer(torch.randn(3, 256), qr, None, weights, torch.arange(3), rotary(4))
    (named,) = seen
    assert named == {"use_fp4": False}
    assert got.shape == (3, HEADS, 128)


def test_by_default_nothing_is_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = build(config_with(), monkeypatch)
    assert indexer.compressor.rotates is False
    assert getattr(attention, QUANTISE) is not vllm_rotation.quantise_queries


def test_the_setting_must_be_a_boolean(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rotate_indexer must be true or false, got 'yes'"):
        build(config_with(rotate_indexer="yes"), monkeypatch)


def other_forward(self: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("connector", "pages that come through a KV connector do not say"),
        ("upstream keys", "the indexer's compressor is not on this backend"),
        ("own queries", "quantises queries in a forward of its own"),
        ("release", "vllm 0.34.0 does not fit the rotation of the indexer"),
        ("fnuz", "queries must be float8_e4m3fn on this part, got torch.float8_e4m3fnuz"),
    ],
)
def test_what_cannot_be_rotated_stays_as_it_is(
    change: str, reason: str, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer = build(config_with(), monkeypatch)
    config: Any = types.SimpleNamespace(
        kv_transfer_config=object() if change == "connector" else None,
        device_config=types.SimpleNamespace(device_type="cpu"),
        additional_config={"rotate_indexer": True},
    )
    if change == "upstream keys":
        indexer.compressor.__class__ = DeepseekCompressor
    elif change == "own queries":
        indexer.__class__ = type("Other", (DeepseekV4Indexer,), {"forward": other_forward})
    elif change == "release":
        monkeypatch.setattr(seams, "refusal", {VLLM_ROTATION: reason}.get)
    elif change == "fnuz":
        monkeypatch.setattr(
            vllm_rotation,
            "current_platform",
            types.SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fnuz),
        )
    upstream = getattr(attention, QUANTISE)
    from dsv4_backend.engines import vllm as adapter

    adapter.rotate(indexer, config)
    assert getattr(attention, QUANTISE) is upstream
    assert not getattr(indexer.compressor, "rotates", False)
    assert len([line for line in log_lines if reason in line and "nothing is rotated" in line]) == 1
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="rotate_indexer"):
        adapter.rotate(indexer, config)
    if change != "release":  # another indexer's queries are rotated by now
        monkeypatch.setattr(attention, QUANTISE, vllm_rotation.quantise_queries)
        with pytest.raises(RuntimeError, match="queries are rotated for all indexers"):
            adapter.rotate(indexer, config)


def test_rotated_keys_never_go_to_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_with(rotate_indexer=True)
    compressor = build(config, monkeypatch).compressor
    registered = compressor._static_forward_context
    registered["layer"] = registered[compressor.k_cache_prefix]
    compressor.k_cache_prefix = "layer"
    step = Step(compressor, "indexer_fp8", [8])
    registered["layer"].kv_cache = registered["layer"].kv_cache[:, :, 1:]
    with pytest.raises(ValueError, match="cache must have pages aligned to 4 bytes"):
        step.run(config, [make_history(step.layer.spec, 8, 0)], [(0, 0, 8)])
