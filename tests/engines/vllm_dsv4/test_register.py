"""The flag: entry points, parser, the name that both families share, and what is left alone."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import vllm
from vllm import plugins
from vllm.config import AttentionConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from backend_core.engines import Engine, vllm_flag
from dsv4_backend.engines import vllm as adapter
from dsv4_backend.plugin import register_vllm
from kda_backend.engines import vllm as kda_adapter
from kda_backend.plugin import register_vllm as register_kda
from tests.engines.vllm_dsv4.harness import engine_config

NEW_NAMES = Engine("vllm", "0.32.0", None).supports(vllm.__version__)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries as before any plug-in, for the test alone."""
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.setattr(vllm_flag, "_families", {})
    monkeypatch.setattr(adapter, "_broken", None)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not is_ours(f)])


def is_ours(finder: object) -> bool:
    return type(finder).__module__.startswith("dsv4_backend.")


def test_vllm_finds_and_loads_both_plug_ins(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = plugins.load_plugins_by_group("vllm.general_plugins")
    assert found["dsv4"] is register_vllm and found["kda_dsv4"] is register_kda
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()
    assert set(vllm_flag._families) == {"KDA", "DSV4"}
    names = ("KDA", "DSV4") if NEW_NAMES else ("CUSTOM",)
    for name in names:
        assert AttentionBackendEnum[name].get_class() is vllm_flag.SoftmaxBackend


def test_registering_again_changes_nothing(said: list[str]) -> None:
    register_vllm()
    path, finders = AttentionBackendEnum[adapter.flag_name()].get_path(), list(sys.meta_path)
    register_vllm()
    assert AttentionBackendEnum[adapter.flag_name()].get_path() == path
    assert sys.meta_path == finders and said == []


def test_vllm_parses_the_flag() -> None:
    assert adapter.flag_name() == ("DSV4" if NEW_NAMES else "CUSTOM")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--attention-backend", adapter.flag_name()])
    assert AttentionConfig(backend=parsed.attention_backend).backend.name == adapter.flag_name()
    assert adapter.is_requested(engine_config(flag=True))
    assert not adapter.is_requested(engine_config(flag=False))


@pytest.mark.skipif(NEW_NAMES, reason="this release takes new names")
def test_the_new_name_is_unknown_where_vllm_takes_none() -> None:
    with pytest.raises(ValueError, match="Unknown attention backend: 'DSV4'"):
        AttentionConfig(backend="DSV4")


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
        reasons = vllm_flag.SoftmaxBackend.validate_configuration(None, **SELECTION._asdict())
    if not reasons:
        assert ".".join(vllm_flag.SoftmaxBackend.full_cls_name()) == path
    return reasons


def test_each_family_gets_the_platforms_choice_and_other_models_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_vllm()
    register_kda()
    monkeypatch.setattr(kda_adapter, "_broken", None)
    config = engine_config(flag=True)
    assert validate(monkeypatch, config) == []
    model = config.model_config.hf_text_config
    monkeypatch.setattr(model, "model_type", "llama")
    reasons = validate(monkeypatch, config)
    assert (
        f"--attention-backend {adapter.flag_name()} is for DeepSeek-V4, whose configuration has"
        " model_type deepseek_v4, got llama"
    ) in reasons
    # on the shared name each family says whom it is for
    assert len(reasons) == (1 if NEW_NAMES else 2)
    monkeypatch.setattr(model, "linear_attn_config", {"kda_layers": [1]}, raising=False)
    assert validate(monkeypatch, config) == (reasons if NEW_NAMES else [])


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0"])
def test_an_unsupported_version_is_left_alone_with_one_line(
    clean: None, monkeypatch: pytest.MonkeyPatch, said: list[str], version: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    register_vllm()
    register_kda()
    assert not registry._ATTN_OVERRIDES and not any(map(is_ours, sys.meta_path))
    assert said == [
        f"kda-dsv4-backend serves vllm 0.26.0 to 0.33.0, got {version}: nothing is registered"
    ]


@pytest.mark.skipif(NEW_NAMES, reason="the plug-in has a name of its own")
def test_the_name_of_another_plug_in_is_not_taken(clean: None, said: list[str]) -> None:
    registry.register_backend(AttentionBackendEnum.CUSTOM, "theirs.Backend")
    register_vllm()
    register_kda()
    assert AttentionBackendEnum.CUSTOM.get_path() == "theirs.Backend"
    assert not any(map(is_ours, sys.meta_path))
    assert len(said) == 1 and "another plug-in holds --attention-backend CUSTOM" in said[0]


def in_a_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_registering_loads_no_model_and_the_compressor_is_met_when_it_is_imported() -> None:
    code = (
        "import sys\n"
        "from dsv4_backend.plugin import register_vllm\n"
        "register_vllm()\n"
        "assert not any(n.startswith('vllm.models.deepseek_v4') for n in sys.modules)\n"
        "from vllm.models.deepseek_v4.compressor import DeepseekCompressor as stock\n"
        "import inspect\n"
        "assert stock.__init__._kda_dsv4\n"
        "assert list(inspect.signature(stock.__init__).parameters)[:2] == ['self', 'vllm_config']\n"
        "assert 'dsv4_backend.engines.vllm_compressor' not in sys.modules\n"
        "first = stock.__init__\n"
        "register_vllm()\n"
        "assert stock.__init__ is first\n"
        "print('met')"
    )
    assert in_a_process(code).endswith("met\n")


def test_a_release_without_the_compressor_class_still_imports(
    clean: None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, adapter._COMPRESSORS[0], types.ModuleType("empty"))
    register_vllm()
    assert adapter._broken is not None and said == [adapter._broken]
    assert said[0].startswith(
        "kda-dsv4-backend could not take over vllm's DeepSeek-V4 compressor: AttributeError"
    )


def test_an_adapter_that_cannot_be_imported_leaves_the_layer_to_stock(
    clean: None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_vllm()

    def missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    with monkeypatch.context() as patch:
        patch.setattr(adapter.importlib, "import_module", missing)
        compressor = types.SimpleNamespace()
        adapter._adopt(compressor, engine_config(flag=True))
    assert type(compressor) is types.SimpleNamespace
    assert any("falling back to stock code" in s and "ImportError" in s for s in said)


@pytest.mark.skipif(not NEW_NAMES, reason="this release has no DeepSeek-V4.1")
def test_the_compressors_of_v41_stay_stocks_and_it_is_said(said: list[str]) -> None:
    register_vllm()
    from vllm.models.deepseek_v41.compressor import DeepseekCompressor

    assert hasattr(DeepseekCompressor.__init__, "_kda_dsv4")
    compressor = object.__new__(DeepseekCompressor)
    adapter._adopt(compressor, engine_config(flag=True))
    assert type(compressor) is DeepseekCompressor
    assert any("deepseek_v41.compressor.DeepseekCompressor is a compressor" in s for s in said)
