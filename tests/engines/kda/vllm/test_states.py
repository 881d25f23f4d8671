"""States of the dtype that ``--mamba-ssm-cache-dtype`` asks for, of every model."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from backend_core.engines import seams
from backend_core.testing.numerics import relative_error
from kda_backend.engines import vllm as adapter
from kda_backend.engines import vllm_layer, vllm_seams
from tests.engines.kda.vllm.harness import (
    bind_cache,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
    table,
)
from tests.engines.kda.vllm.models import MODELS, Model, build, definition_of

pytestmark = pytest.mark.usefixtures("in_fp32")


def config_of(dtype: str, *, flag: bool = True) -> Any:
    config = engine_config(flag=flag, dtype="float32")
    config.cache_config.mamba_ssm_cache_dtype = dtype  # which vLLM takes on a GPU alone
    return config


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_a_layer_keeps_and_reads_states_of_the_dtype_asked_for(model: Model, dtype: str) -> None:
    config = config_of(dtype)
    vllm_layer._runtime.cache_clear()
    layer = build(model, config)
    bind_cache(layer, config)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert layer.kv_cache[1].dtype == layer.get_state_dtype()[1] == wanted
    definition = definition_of(model)
    x = hidden(95)
    for begin, end in ((0, 90), (90, 91), (91, 95)):
        lengths, before = (end - begin,), (begin,)
        metadata = step_metadata(layer, config, lengths, before, table(3))
        o = run_layer(layer, config, x[begin:end], metadata)
        assert relative_error(o, definition.run(x[begin:end])) < 1e-2
    tolerance = {"bfloat16": 1e-2, "float16": 2e-3}.get(dtype, 1e-3)
    assert relative_error(layer.kv_cache[1][3].float(), definition.state[0]) < tolerance


def test_a_layer_that_becomes_upstreams_cannot_keep_16_bits(
    monkeypatch: pytest.MonkeyPatch, model: Model
) -> None:
    """Its pages are too small for fp32, or it refuses fp16: the server ends with the reason."""
    monkeypatch.setattr(vllm_layer, "_refusal", lambda *_: "planted")
    with pytest.raises(ValueError, match=r"asks for states in torch\.float16, and vLLM's own"):
        build(model, config_of("float16"))
    assert type(build(model, config_of("float32"))) is model.upstream()
    if model in (MODELS["Kimi-Linear"], MODELS["Ling-V3"]):  # others take bf16
        with pytest.raises(ValueError, match=r"asks for states in torch\.bfloat16, and vLLM's own"):
            build(model, config_of("bfloat16"))


def test_without_the_flag_nothing_of_upstreams_changes() -> None:
    for name in ("Kimi-Linear", "Ling-V3"):
        layer = build(MODELS[name], config_of("bfloat16", flag=False))
        assert type(layer) is MODELS[name].upstream()
        assert layer.get_state_dtype()[1] == torch.float32


@pytest.mark.parametrize("part", vllm_seams.SIZING, ids=lambda part: part.name)
def test_models_size_their_pages_by_the_option_under_the_flag(part: seams.Part) -> None:
    module, _, name = part.seams[-1].place.partition(":")
    model = name.partition(".")[0]
    owner = getattr(pytest.importorskip(module), model)

    def of(dtype: str, flag: bool) -> Any:
        return owner.get_mamba_state_dtype_from_config(config_of(dtype, flag=flag))[1]

    asked = ("auto", "float32", "bfloat16", "float16")
    assert [of(dtype, flag=True) for dtype in asked] == [
        *(torch.float32, torch.float32, torch.bfloat16, torch.float16)
    ]
    if of("bfloat16", flag=False) == torch.float32:  # upstream's ignores the option
        assert of("float16", flag=False) == torch.float32
    else:
        with pytest.raises(ValueError, match="got float16"):
            of("float16", flag=False)


def test_a_release_without_the_method_keeps_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "difference", lambda part: f"another {part.name}")
    module = types.ModuleType("without the model")
    adapter._honour_state_dtype("AliceAIForCausalLM", vllm_seams.SIZING[0], module)
