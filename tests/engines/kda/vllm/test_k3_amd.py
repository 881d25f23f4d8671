"""Kimi-K3's layer of vLLM's ROCm platform: its own class and metadata builder, on the CPU."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from typing import Any

import pytest
import torch
from vllm.model_executor.custom_op import op_registry_oot

from kda_backend.engines import vllm_seams
from kda_backend.engines.draft_records import VARIABLE
from kda_backend.engines.vllm import register
from tests.engines.kda.vllm.harness import (
    NGRAM,
    bind_cache,
    check,
    engine_config,
    expect_states,
    hidden,
    run_layer,
    step_metadata,
)
from tests.engines.kda.vllm.models import MODELS, Model, build, definition_of
from tests.engines.kda.vllm.test_checkpoints import caching_config
from tests.engines.kda.vllm.test_models import (  # its tests too, of this module's model
    test_chunked_prefill_continues_from_the_cache,  # noqa: F401
    test_decodes_alone_and_beside_prefills,  # noqa: F401
    test_drafts_are_verified_from_what_was_accepted,  # noqa: F401
    verify_and_commit,
)

pytestmark = pytest.mark.usefixtures("in_fp32")
MODULE = "vllm.models.kimi_k3.amd.kda"
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def a_part_without_fused_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform's module asks a GPU as it is imported; the layer asks it which GPU that is."""
    rocm = types.ModuleType("vllm.platforms.rocm")
    for name in ("on_gfx942", "on_gfx950"):
        setattr(rocm, name, lambda: False)
    monkeypatch.setitem(sys.modules, rocm.__name__, rocm)


@pytest.fixture(scope="module")
def model() -> Model:
    return dataclasses.replace(MODELS["Kimi-K3"], module=MODULE, build=_build)


def _build(upstream: Any, config: Any, vllm_config: Any, prefix: str) -> Any:
    """Our class of ROCm's: on this platform it is in the place of nothing."""
    adapter = importlib.import_module("kda_backend.engines.vllm_packed")
    return adapter.layer_class(upstream, vllm_seams.K3_AMD)(config, vllm_config, prefix=prefix)


def test_elsewhere_it_replaces_nothing(model: Model) -> None:
    register()
    importlib.import_module("vllm.models.kimi_k3.nvidia.kda")
    present = op_registry_oot["KimiK3DeltaAttention"]
    model.upstream()
    assert MODULE in sys.modules
    assert op_registry_oot["KimiK3DeltaAttention"] is present
    assert not issubclass(present, model.upstream())


def test_checkpoints_beside_a_decode(model: Model) -> None:
    """ROCm's metadata has rows of the prefills alone."""
    config = caching_config()
    layer = build(model, config)
    bind_cache(layer, config)
    blocks = torch.tensor([[1, 0, 0, 0], [5, 0, 0, 0], [2, 3, 4, 0]], dtype=torch.int32)
    texts = [hidden(n, seed=n) for n in (30, 40, 150)]
    definitions = [definition_of(model) for _ in texts]
    first = step_metadata(layer, config, (20,), (0,), blocks[:1])
    o = run_layer(layer, config, texts[0][:20], first)
    check(layer, o, texts[0][:20], (20,), (1,), definitions[:1])
    lengths, done = (1, 40, 150), (20, 0, 0)
    x = torch.cat([t[d : d + n] for t, d, n in zip(texts, done, lengths, strict=True)])
    metadata = step_metadata(layer, config, lengths, done, blocks)
    assert metadata.checkpoint.checkpoint_offsets.tolist() == [0, 128]
    o = run_layer(layer, config, x, metadata)
    check(layer, o, x, lengths, (1, 5, 4), definitions)
    inside = definition_of(model)
    inside.run(texts[2][:128])
    expect_states(layer, 3, inside)


def test_the_option_against_checkpoints_is_kept(model: Model) -> None:
    config = caching_config()
    config.additional_config = {"kda_prefill_checkpoint": False}
    spec = build(model, config).get_kv_cache_spec(config)
    assert (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment) == (0, None)


def test_drafts_as_records(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable of this package: upstream's class has none."""
    monkeypatch.setenv(VARIABLE, "1")
    config = engine_config(flag=True, dtype="float32", speculative_config=NGRAM)
    layer = build(model, config)
    if layer.recoverssm_records is None:
        pytest.skip("this release is not served")
    layer.recoverssm_records.committed = True
    bind_cache(layer, config)
    verify_and_commit(model, layer, config)
