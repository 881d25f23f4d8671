"""The flag: entry point, parser, backend class, registrations, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from backend_core.engines import Engine, entry, vllm_flag
from backend_core.strict import FallbackError
from kda_backend.engines import vllm as adapter
from kda_backend.engines import vllm_packed
from kda_backend.engines.vllm import LAYER
from tests.engines.kda.vllm.harness import build_layer, engine_config
from tests.engines.vllm_process import cuda_platform

NEW_NAMES = Engine("vllm", "0.32.0", None).supports(vllm.__version__)
FLAG = "KDA" if NEW_NAMES else "CUSTOM"


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


@pytest.mark.skipif(NEW_NAMES, reason="this release takes new names")
def test_the_new_name_is_unknown_where_vllm_takes_none() -> None:
    with pytest.raises(ValueError, match="Unknown attention backend: 'KDA'"):
        AttentionConfig(backend="KDA")


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


@pytest.mark.parametrize("module", sorted(adapter.REPLACED))
def test_the_classes_that_are_replaced_exist_under_their_names(module: str) -> None:
    """vLLM looks a replacement up by the class's name, and our subclasses are made of the class."""
    name = adapter.REPLACED[module].name
    source = Path(vllm.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    if not source.exists():
        pytest.skip("this release does not have the model")
    assert f"\nclass {name}(" in source.read_text()  # some of them need a GPU to be imported


def break_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(upstream: type) -> type:
        raise ImportError("no layer")

    monkeypatch.setattr(vllm_packed, "layer_class", missing)


def test_a_broken_install_serves_stock(
    clean: None, monkeypatch: pytest.MonkeyPatch, hopper: Any, log_lines: list[str]
) -> None:
    with monkeypatch.context() as patch:
        break_install(patch)
        entry.vllm.kda()
    config = engine_config(flag=True)
    assert select(hopper, flag=True, config=config) == select(hopper, flag=False, config=config)
    assert type(build_layer(config)) is KimiGatedDeltaNetAttention
    assert log_lines[0].startswith("kda-dsv4-backend could not register kda with vllm: ImportError")
    assert any(
        "falling back to upstream's code: kda-dsv4-backend could not" in line for line in log_lines
    )


def test_a_broken_install_fails_in_strict_mode(
    clean: None, monkeypatch: pytest.MonkeyPatch, hopper: Any
) -> None:
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with monkeypatch.context() as patch:
        break_install(patch)
        entry.vllm.kda()  # an exception here would end servers that do not use the flag
    with pytest.raises(FallbackError, match="could not register kda with vllm: ImportError"):
        select(hopper, flag=True, config=engine_config(flag=True))


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("method", ["__init__", "forward", "_forward"])
def test_overridden_methods_have_stocks_signatures(method: str) -> None:
    entry.vllm.kda()
    ours, upstream = op_registry_oot[LAYER], KimiGatedDeltaNetAttention
    assert parameters(getattr(ours, method)) == parameters(getattr(upstream, method))


def test_the_backend_class_validates_what_vllm_passes() -> None:
    upstream = inspect.signature(AttentionBackend.validate_configuration).parameters
    passed = {"device_capability", *AttentionSelectorConfig._fields}
    assert set(upstream) <= passed
    abstract = AttentionBackend.__abstractmethods__ - vars(vllm_flag.PlatformDelegate).keys()
    assert not abstract


def test_the_fields_of_the_metadata_that_are_read_exist() -> None:
    fields = GDNAttentionMetadata.__dataclass_fields__
    assert {
        "num_prefills",
        "num_prefill_tokens",
        "num_decode_tokens",
        "has_initial_state",
        "spec_sequence_masks",
        "non_spec_query_start_loc",
        "non_spec_state_indices_tensor",
        "prefill_query_start_loc",
        "prefill_state_indices",
        "prefill_has_initial_state",
    } <= fields.keys()
