"""The flag: entry point, parser, backend class, registrations, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from backend_core.engines import entry, seams, vllm_flag
from backend_core.engines.seams import Part
from backend_core.strict import FallbackError
from kda_backend.engines import vllm as adapter
from kda_backend.engines import vllm_packed
from kda_backend.engines.vllm import LAYER
from tests.engines.kda.vllm.harness import build_layer, engine_config
from tests.engines.vllm_process import cuda_platform

FLAG = "KDA"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries as before any plug-in, for the test alone."""
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delitem(op_registry_oot, LAYER, raising=False)
    monkeypatch.setattr(vllm_flag, "_families", {})


def test_registering_again_changes_nothing(log_lines: list[str]) -> None:
    entry.vllm.kda()
    layer, path = op_registry_oot[LAYER], AttentionBackendEnum[FLAG].get_path()
    entry.vllm.kda()
    entry.vllm.kda()
    assert op_registry_oot[LAYER] is layer
    assert AttentionBackendEnum[FLAG].get_path() == path
    assert log_lines == []


def test_vllm_parses_the_flag() -> None:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--attention-backend", FLAG])
    assert AttentionConfig(backend=parsed.attention_backend).backend.name == FLAG
    config = engine_config(flag=True)
    assert vllm_flag.requested(config) == FLAG
    assert vllm_flag.requested(engine_config(flag=False)) is None


def test_one_kind_of_layers_may_ask_for_it() -> None:
    config = engine_config(flag=False)
    config.attention_config.backend_per_kind = {"mla_attention": AttentionBackendEnum[FLAG]}
    assert vllm_flag.requested(config) == FLAG


def test_a_layer_that_another_plug_in_replaced_stays_theirs(
    clean: None, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    theirs = type("Theirs", (KimiGatedDeltaNetAttention,), {})
    monkeypatch.setitem(op_registry_oot, LAYER, theirs)
    entry.vllm.kda()
    assert op_registry_oot[LAYER] is theirs
    assert len(log_lines) == 1 and "another plug-in replaces" in log_lines[0]


# What a platform passes for an MLA layer of Kimi-Linear.
SELECTION = AttentionSelectorConfig(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    return cuda_platform(monkeypatch)


def select(platform: Any, *, flag: bool, config: Any) -> Any:
    member = AttentionBackendEnum[FLAG] if flag else None
    with set_current_vllm_config(config):
        return platform.get_attn_backend_cls(member, attn_selector_config=SELECTION, num_heads=2)


def test_a_layer_that_the_platform_cannot_serve_is_refused_as_without_the_flag(hopper: Any) -> None:
    config = engine_config(flag=True)
    odd = SELECTION._replace(kv_cache_dtype="nvfp4")
    messages = []
    # the first time vLLM also names a module that cannot be imported
    for member in (None, AttentionBackendEnum[FLAG], None):
        with set_current_vllm_config(config), pytest.raises(ValueError) as refusal:
            hopper.get_attn_backend_cls(member, attn_selector_config=odd, num_heads=2)
        messages.append(str(refusal.value))
    assert messages[1] == messages[2] and "No valid attention backend" in messages[0]


def test_a_configuration_without_kda_layers_is_served(hopper: Any) -> None:
    """AliceAI's has none, and its model builds upstream's class."""
    config = engine_config(flag=True)
    config.model_config.hf_text_config.linear_attn_config = None
    assert select(hopper, flag=True, config=config) == select(hopper, flag=False, config=config)


def test_a_layer_of_another_release_stays_upstreams_and_says_why(
    clean: None, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """Planted: a release whose layer has other parameters."""
    monkeypatch.setattr(KimiGatedDeltaNetAttention, "__init__", KimiGatedDeltaNetAttention.__init__)
    reason = "vllm 0.34.0 does not fit the KDA layers of Kimi-Linear: _forward must take 5, got 6"
    with monkeypatch.context() as patch:
        patch.setattr(seams, "difference", lambda part: reason)
        adapter.register()
    assert LAYER not in op_registry_oot and not log_lines
    assert type(build_layer(engine_config(flag=False))) is KimiGatedDeltaNetAttention
    assert not log_lines
    assert type(build_layer(engine_config(flag=True))) is KimiGatedDeltaNetAttention
    assert log_lines == [f"falling back to upstream's code: --attention-backend KDA: {reason}"]


def test_a_broken_install_serves_stock_and_fails_in_strict_mode(
    clean: None, monkeypatch: pytest.MonkeyPatch, hopper: Any, log_lines: list[str]
) -> None:
    def missing(upstream: type, part: Part) -> type:
        raise ImportError("no layer")

    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with monkeypatch.context() as patch:
        patch.setattr(vllm_packed, "layer_class", missing)
        entry.vllm.kda()  # an exception here would end servers that do not use the flag
    config = engine_config(flag=True)
    with pytest.raises(FallbackError, match="could not register kda with vllm: ImportError"):
        select(hopper, flag=True, config=config)
    monkeypatch.delenv("KDA_DSV4_STRICT")
    assert select(hopper, flag=True, config=config) == select(hopper, flag=False, config=config)
    assert type(build_layer(config)) is KimiGatedDeltaNetAttention
    assert log_lines[0].startswith("kda-dsv4-backend could not register kda with vllm: ImportError")
    assert any(
        "falling back to upstream's code: kda-dsv4-backend could not" in line for line in log_lines
    )
