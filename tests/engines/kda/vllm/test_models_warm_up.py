"""What serving Kimi-K3, GLM-5.3-Flash and Ling-V3 launches has been compiled at model load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS
from kda_backend.engines import vllm_layer, vllm_profile
from kda_backend.engines.vllm import register
from tests.engines.kda.vllm.harness import bind_cache, engine_config, run_layer, step_metadata
from tests.engines.kda.vllm.models import MODELS, Model, build
from tests.engines.kda.vllm.test_models import DRAFT, VERIFIES
from tests.engines.launches import variant

BLOCK = 64
# (tokens of each request, tokens before them), decodes first
STEPS = [
    ((1,), (30,)),
    ((1, 1, 1), (3, 4, 5)),
    ((64,), (0,)),
    ((150,), (0,)),  # with a checkpoint
    ((1, 65), (4, 0)),
    ((1, 150, 7, 130), (4, 0, 0, 64)),  # with two
    ((1, 1, 1, 100, 5), (4, 9, 2, 0, 64)),
]
# The same with drafts, and what was accepted of the draft before (0: none).
DRAFTED = [
    ((4,), (30,), (1,)),
    ((4, 4), (3, 4), (1, 4)),
    ((1, 4), (7, 9), (0, 1)),
    ((1, 1, 3), (7, 8, 9), (0, 0, 2)),
    ((150, 4), (0, 9), (0, 2)),
    ((3, 1, 40), (9, 5, 0), (2, 0, 0)),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[Any, ...]]]:
    """The variants of kernels that are launched; none runs. On a part whose paths are Triton's."""
    register()
    found: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(
        KernelLaunch, "__call__", lambda self, grid, *args: found.add(variant(self, args))
    )
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS["A100"])
    vllm_layer._runtime.cache_clear()
    vllm_profile._warm.clear()
    yield found
    vllm_layer._runtime.cache_clear()


def served(model: Model, **options: Any) -> tuple[Any, Any]:
    """A layer with a prefix cache, where its release exports states for one."""
    config = engine_config(flag=True, **options)
    cache = config.cache_config
    if not model.exports:
        return build(model, config), config
    cache.mamba_cache_mode = "align"
    cache.mamba_block_size = BLOCK
    for name in ("hash_block_size", "cache_hit_alignment_tokens"):
        if hasattr(cache, name):
            setattr(cache, name, BLOCK)
    return build(model, config), config


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = MODELS[request.param]
    if found.module is None:
        pytest.skip("this release does not have the model")
    return found


def names(variants: set[tuple[Any, ...]]) -> set[str]:
    return {key[0] for key in variants}


def blocks(requests: int, width: int) -> torch.Tensor:
    return torch.arange(1, 1 + width * requests, dtype=torch.int32).view(-1, width).clamp(max=11)


def test_steps_with_checkpoints(model: Model, launched: set[tuple[Any, ...]]) -> None:
    layer, config = served(model)
    x = torch.randn(512, 256).bfloat16()
    run_layer(layer, config, x, None)
    compiled = set(launched)
    assert ("store_checkpoints_kernel" in names(compiled)) == model.exports
    bind_cache(layer, config)
    stored = False
    for lengths, before in STEPS:
        launched.clear()
        metadata = step_metadata(layer, config, lengths, before, blocks(len(lengths), 4))
        run_layer(layer, config, x[: sum(lengths)], metadata)
        stored |= "store_checkpoints_kernel" in names(launched)
        late = launched - compiled
        assert launched and not late, f"compiled in a step of {lengths}: {sorted(map(str, late))}"
    assert stored == model.exports


def test_steps_with_drafts(model: Model, launched: set[tuple[Any, ...]]) -> None:
    if not VERIFIES:
        pytest.skip("this release is served without drafts")
    draft = {"method": "ngram", "num_speculative_tokens": DRAFT - 1, "prompt_lookup_max": 3}
    layer, config = served(model, speculative_config=draft)
    x = torch.randn(512, 256).bfloat16()
    run_layer(layer, config, x, None)
    compiled = set(launched)
    assert "verify_step_kernel" in names(compiled)
    bind_cache(layer, config)
    for lengths, before, accepted in DRAFTED:
        launched.clear()
        table = blocks(len(lengths), 6)
        metadata = step_metadata(layer, config, lengths, before, table, accepted)
        run_layer(layer, config, x[: sum(lengths)], metadata)
        assert "verify_step_kernel" in names(launched)
        late = launched - compiled
        assert not late, f"compiled in a step of {lengths}: {sorted(map(str, late))}"
