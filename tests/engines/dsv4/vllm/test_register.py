"""The flag: entry points, parser, the name that both families share, and what is left alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from typing import Any

import pytest
import torch
from vllm import plugins
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from backend_core.engines import entry, seams, vllm_flag
from backend_core.engines.after_import import _AfterImport
from dsv4_backend.engines import seam_list
from dsv4_backend.engines import vllm as adapter
from tests.engines.dsv4.vllm.harness import engine_config

FLAG = "DSV4"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries as before any plug-in, for the test alone."""
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(vllm_flag, "_families", {})
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not is_ours(f)])


def is_ours(finder: object) -> bool:
    return type(finder) is _AfterImport


def test_vllm_finds_and_loads_all_plug_ins(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plugins.load_plugins_by_group("vllm.general_plugins")
    assert all(found[name] is getattr(entry.vllm, name) for name in ("kda", "dsv4", "mla"))
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()
    assert set(vllm_flag._families) == {"kda", "dsv4", "mla"}
    for name in ("KDA", "DSV4", "MLA"):
        assert AttentionBackendEnum[name].get_class() is vllm_flag.PlatformDelegate


def test_registering_again_changes_nothing(log_lines: list[str]) -> None:
    entry.vllm.dsv4()
    path, finders = AttentionBackendEnum[FLAG].get_path(), list(sys.meta_path)
    entry.vllm.dsv4()
    assert AttentionBackendEnum[FLAG].get_path() == path
    assert sys.meta_path == finders and log_lines == []


SELECTION = AttentionSelectorConfig(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None, use_mla=True
)


def validate(monkeypatch: pytest.MonkeyPatch, config: Any) -> list[str]:
    """The answer of the backend class where a platform asks it for a layer of this model."""
    import vllm.platforms

    path = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
    platform = types.SimpleNamespace(
        get_attn_backend_cls=lambda *args, **kwargs: path, is_rocm=lambda: False
    )
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    with set_current_vllm_config(config):
        reasons = vllm_flag.PlatformDelegate.validate_configuration(None, **SELECTION._asdict())
    if not reasons:
        assert ".".join(vllm_flag.PlatformDelegate.full_cls_name()) == path
    return reasons


def test_other_models_are_refused_in_one_sentence_for_each_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry.vllm.dsv4()
    entry.vllm.kda()
    config = engine_config(flag=True)
    importlib.import_module(adapter.COMPRESSOR)
    assert validate(monkeypatch, config) == []
    for family in vllm_flag._families.values():
        for claim in family.claims:
            for module in getattr(claim, "modules", ()):
                monkeypatch.delitem(sys.modules, module, raising=False)
    reasons = validate(monkeypatch, config)
    assert reasons == [
        f"--attention-backend {FLAG} is for models with DeepSeek-V4 compressor layers, of which"
        " DeepseekV4ForCausalLM has none"
    ]


def test_a_release_without_the_compressor_class_still_imports(
    clean: None, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, adapter.COMPRESSOR, types.ModuleType("empty"))
    entry.vllm.dsv4()
    assert log_lines == [vllm_flag.broken("dsv4")]
    assert log_lines[0].startswith(
        "kda-dsv4-backend could not register dsv4 with vllm: AttributeError"
    )


def test_an_adapter_that_cannot_be_imported_leaves_the_layer_to_stock(
    clean: None, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry.vllm.dsv4()

    def missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    with monkeypatch.context() as patch:
        patch.setattr(adapter.importlib, "import_module", missing)
        compressor = types.SimpleNamespace()
        adapter.adopt(compressor, engine_config(flag=True))
    assert type(compressor) is types.SimpleNamespace
    assert any("falling back to upstream's code" in s and "ImportError" in s for s in log_lines)


@pytest.mark.parametrize(("model", "part"), [("v4", "VLLM_V4"), ("v41", "VLLM_V41")])
def test_the_compressors_of_another_release_stay_upstreams_and_it_is_said(
    model: str, part: str, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    entry.vllm.dsv4()
    own = getattr(seam_list, part)
    reason = f"vllm 0.34.0 does not fit the {own.name}"
    monkeypatch.setattr(seams, "refusal", {own: reason}.get)
    built = types.SimpleNamespace(compressor=object()) if model == "v41" else object()
    adapter.adopt(built, engine_config(flag=True))
    assert log_lines == [f"falling back to upstream's code: --attention-backend DSV4: {reason}"]
    assert vllm_flag.broken("dsv4") is None
