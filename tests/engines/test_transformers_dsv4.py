"""transformers' deepseek_v4 on this backend against upstream."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

import dsv4_backend
from backend_core.strict import FallbackError
from dsv4_backend.engines import transformers as dsv4
from tests.engines.test_transformers import (  # tests too, of this module's model
    TOLERANCE,
    logits,
    test_bf16_agrees_as_far_as_bf16_goes,  # noqa: F401
    test_training_is_refused,  # noqa: F401
    test_undo_restores_the_same_objects,  # noqa: F401
    tokens,
)

OPERATOR = "compress_norm_rope_hadamard_"
C128 = modeling.DeepseekV4HCACompressor


@pytest.fixture(autouse=True)
def strict_and_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fallback would compare upstream with itself: it is an error here."""
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    yield
    dsv4.disable()


@pytest.fixture
def adapter() -> ModuleType:
    return dsv4


@pytest.fixture
def replaced() -> list[tuple[Any, str]]:
    attention = (C128, modeling.DeepseekV4CSACompressor, modeling.DeepseekV4Indexer)
    owners = (modeling.DeepseekV4RMSNorm, *attention)
    return [(modeling, "apply_rotary_pos_emb"), *((owner, "forward") for owner in owners)]


@pytest.fixture(scope="module")
def model() -> Any:
    return dsv4.tiny_model(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(head_dim, ratio, rows) of every call of the operator."""
    seen = []
    operator = dsv4_backend.compress_norm_rope_hadamard_

    def spy(kv: torch.Tensor, *arguments: Any, **named: Any) -> None:
        seen.append((named["head_dim"], named["compress_ratio"], kv.shape[0]))
        operator(kv, *arguments, **named)

    monkeypatch.setattr(dsv4_backend, OPERATOR, spy)
    return seen


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("length", [3, 4, 131, 300])
def test_logits_agree(
    model: Any, calls: list[tuple[int, int, int]], length: int, use_cache: bool
) -> None:
    ids = tokens(model, 2, length)
    upstream = logits(model, ids, use_cache=use_cache)
    assert not calls
    dsv4.enable()
    torch.testing.assert_close(logits(model, ids, use_cache=use_cache), upstream, **TOLERANCE)
    c4, c128 = 2 * (length // 4), 2 * (length // 128)
    wanted = [(512, 4, c4), (128, 4, c4), (512, 128, c128), (512, 4, c4), (128, 4, c4)]
    assert calls == [call for call in wanted if call[2]]


def test_generated_tokens_agree(model: Any, calls: list[tuple[int, int, int]]) -> None:
    ids = tokens(model, 2, 120)
    arguments = {"max_new_tokens": 16, "do_sample": False}
    upstream = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    dsv4.enable()
    ours = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(ours, upstream) and ours.shape == (2, 136)
    # windows that end while decoding: one of 128 tokens, three of 4 after the prompt's thirty
    assert calls.count((512, 128, 2)) == 1
    assert calls.count((512, 4, 2)) == calls.count((128, 4, 2)) == 2 * 3


@pytest.mark.parametrize("split", [1, 30, 127, 128])
def test_continued_prefill_and_decode_agree_with_one_call(model: Any, split: int) -> None:
    ids = tokens(model, 2, 262)
    upstream = logits(model, ids)
    dsv4.enable()
    cache = DynamicCache(config=model.config)
    parts = ids.split([split, 254 - split, *[1] * 8], 1)
    ours = torch.cat([logits(model, part, past_key_values=cache) for part in parts], 1)
    torch.testing.assert_close(ours, upstream, **TOLERANCE)


@pytest.mark.parametrize("first", ["upstream", "ours"])
def test_caches_can_be_handed_over(model: Any, first: str) -> None:
    ids = tokens(model, 2, 140)
    whole = logits(model, ids)
    cache = DynamicCache(config=model.config)
    change = (dsv4.disable, dsv4.enable)
    change[first == "ours"]()
    logits(model, ids[:, :125], past_key_values=cache)
    change[first == "upstream"]()
    rest = [logits(model, ids[:, i : i + 1], past_key_values=cache) for i in range(125, 140)]
    torch.testing.assert_close(torch.cat(rest, 1), whole[:, 125:], **TOLERANCE)


def test_a_renamed_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = C128.forward
    monkeypatch.delattr(modeling, "DeepseekV4Indexer")
    with pytest.raises(ImportError, match=r"has no DeepseekV4Indexer in transformers\.models"):
        dsv4.enable()
    assert C128.forward is upstream and not dsv4.is_enabled()


def test_rows_that_are_not_rotated_next_are_an_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = modeling.apply_rotary_pos_emb
    dsv4.enable()
    ours = modeling.apply_rotary_pos_emb
    with monkeypatch.context() as patch:
        patch.setattr(modeling, "apply_rotary_pos_emb", upstream)
        with pytest.raises(RuntimeError, match="Indexer must rotate its rows, got rows without"):
            logits(model, tokens(model, 1, 8))
        patch.setattr(modeling, "apply_rotary_pos_emb", lambda x, *rest: ours(x.clone(), *rest))
        with pytest.raises(RuntimeError, match="of its kv_norm next, got another tensor"):
            logits(model, tokens(model, 1, 8))


def test_a_norm_with_its_own_forward_falls_back(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tokens(model, 1, 140)
    upstream = logits(model, ids)
    norm = model.model.layers[2].self_attn.compressor.kv_norm
    monkeypatch.setattr(norm, "forward", norm.forward, raising=False)
    dsv4.enable()
    with pytest.raises(FallbackError, match=r"kv_norm .* has a forward of its own"):
        logits(model, ids)
    monkeypatch.delenv("KDA_DSV4_STRICT")
    torch.testing.assert_close(logits(model, ids), upstream, **TOLERANCE)
    assert "kv_norm of a DeepSeek-V4 compressor has a forward of its own" in caplog.text


def test_without_a_path_stock_runs_and_strict_mode_refuses(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = model.config.to_dict() | {"head_dim": 256, "partial_rotary_factor": 64 / 256}
    del settings["rope_parameters"]
    narrow = DeepseekV4ForCausalLM(DeepseekV4Config(**settings)).eval().to(model.device)
    ids = tokens(model, 1, 20)
    upstream = logits(narrow, ids)
    dsv4.enable()
    with pytest.raises(FallbackError, match="head_dim must be 128 or 512, got 256"):
        logits(narrow, ids)
    monkeypatch.delenv("KDA_DSV4_STRICT")
    torch.testing.assert_close(logits(narrow, ids), upstream, **TOLERANCE)
    assert "head_dim must be 128 or 512, got 256" in caplog.text
