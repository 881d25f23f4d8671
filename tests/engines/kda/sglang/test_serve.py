"""``kda-dsv4 serve`` describes the layers that sglang takes from the same configuration."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest

from backend_core.target import KNOWN_TARGETS
from kda_backend import selection
from kda_backend.family import FAMILY
from kda_backend.selection import select

LING = {
    "model_type": "bailing_hybrid",
    "num_attention_heads": 32,
    "head_dim": 128,
    "layer_group_size": 6,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
}


def upstream(module: str, name: str, fields: dict[str, Any]) -> Any:
    """sglang's configuration of a model with these fields."""
    cls = getattr(importlib.import_module(f"sglang.srt.configs.{module}"), name)
    return cls(**{key: x for key, x in fields.items() if key != "model_type"})


def described(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, bool]:
    """Heads, channels and whether the gate is bounded, as `describe_model` finds them."""
    asked = []
    monkeypatch.setattr(selection, "select", lambda *args: asked.append(args) or select(*args))
    FAMILY.describe_model(KNOWN_TARGETS["H200"], fields, 1, "sglang")
    ((_, shape),) = asked
    return shape.num_heads, shape.key_dim, shape.bounded_gate


@pytest.mark.parametrize("safe_gate", [True, False])
def test_ling(safe_gate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**LING, "kda_safe_gate": safe_gate, "kda_lower_bound": -5.0}
    config = upstream("bailing_hybrid", "BailingHybridConfig", fields)
    assert config.use_kda and FAMILY.model_refusal(fields) is None
    heads = (config.num_attention_heads, config.head_dim, config.kda_lower_bound is not None)
    assert described(fields, monkeypatch) == heads
    before_kda = {key: x for key, x in fields.items() if key != "short_conv_kernel_size"}
    assert not upstream("bailing_hybrid", "BailingHybridConfig", before_kda).use_kda
    assert FAMILY.model_refusal(before_kda) is not None


@pytest.mark.parametrize("bound", [-5.0, None])
def test_glm(bound: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {
        "model_type": "glm5_next_text",
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "linear_lower_bound": bound,
    }
    linear = upstream("glm5_next", "Glm5NextTextConfig", fields).linear_attn_config
    assert linear["kda_layers"] and FAMILY.model_refusal(fields) is None
    heads = (linear["num_heads"], linear["head_dim"], linear["gate_lower_bound"] is not None)
    assert described(fields, monkeypatch) == heads
