"""The recall checkpoint with a bounded gate: Kimi-K3's own layer in the wheel loads and runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backend_core.testing.numerics import relative_error
from tests.engines.kda.vllm import models
from tests.engines.kda.vllm.harness import (
    CHECKPOINT,
    Weights,
    bind_cache,
    engine_config,
    run_layer,
    step_metadata,
)
from tests.engines.kda.vllm.models import MODELS, Definition, build

PARTS = {
    **{part: f"{part}_proj.weight" for part in ("q", "k", "v", "b", "g", "o", "f_a", "f_b")},
    **{f"{part}_conv": f"{part}_conv1d.weight" for part in "qkv"},
    "A_log": "A_log",
    "dt_bias": "dt_bias",
    "o_norm": "o_norm.weight",
}


def weights_of(index: int) -> Weights:
    """A KDA layer's parameters under the names that the engine tests give them."""
    file = load_file(CHECKPOINT.with_name("checkpoint_bounded") / "model.safetensors")
    prefix = f"model.layers.{index}.self_attn."
    found = {name.removeprefix(prefix): x for name, x in file.items() if name.startswith(prefix)}
    assert set(found) == set(PARTS.values())
    return {part: found[name] for part, name in PARTS.items()}


@pytest.mark.parametrize("index", [0, 5])
def test_k3s_layer_runs_the_checkpoint(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["Kimi-K3"]
    torch.set_default_dtype(torch.float32)  # `under_the_models_dtype` sets it back
    monkeypatch.setattr(models, "drawn", lambda *_: weights_of(index))
    config = engine_config(flag=True, dtype="float32")
    layer: Any = build(model, config)
    assert type(layer).__module__.startswith("kda_backend.engines.vllm_")
    bind_cache(layer, config)
    x = torch.randn(150, models.HIDDEN, generator=torch.Generator().manual_seed(2))
    definition = Definition(model)
    blocks = torch.tensor([[4, 0, 0, 0]], dtype=torch.int32)
    for begin, length in ((0, 90), (90, 60)):
        metadata = step_metadata(layer, config, (length,), (begin,), blocks)
        part = x[begin : begin + length]
        o = run_layer(layer, config, part, metadata)
        assert relative_error(o, definition.run(part)) < 1e-4
    assert relative_error(layer.kv_cache[1][4], definition.state[0]) < 1e-4
