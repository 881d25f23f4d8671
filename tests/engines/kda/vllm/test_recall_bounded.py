"""The recall checkpoint with a bounded gate: Kimi-K3's own layer in the wheel loads and runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.testing.numerics import relative_error
from tests.engines.kda.vllm.harness import (
    bind_cache,
    engine_config,
    hidden,
    run_layer,
    step_metadata,
    table,
)
from tests.engines.kda.vllm.models import MODELS, build
from tests.engines.kda.weights import Definition, checkpoint_weights


@pytest.mark.parametrize("index", [0, 5])
def test_k3s_layer_runs_the_checkpoint(index: int) -> None:
    torch.set_default_dtype(torch.float32)  # `under_the_models_dtype` sets it back
    weights = checkpoint_weights(index, "checkpoint_bounded")
    config = engine_config(flag=True, dtype="float32")
    layer: Any = build(MODELS["Kimi-K3"], config, weights=weights)
    assert type(layer).__module__.startswith("kda_backend.engines.vllm_")
    bind_cache(layer, config)
    x, definition = hidden(150, seed=2), Definition(weights, -5.0)
    for begin, length in ((0, 90), (90, 60)):
        metadata = step_metadata(layer, config, (length,), (begin,), table(4))
        part = x[begin : begin + length]
        o = run_layer(layer, config, part, metadata)
        assert relative_error(o, definition.run(part)) < 1e-4
    assert relative_error(layer.kv_cache[1][4], definition.state[0]) < 1e-4
