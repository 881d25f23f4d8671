"""States inside of a prefill that the prefix cache keeps: where vLLM asks, and what is written."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig

from backend_core.testing.numerics import relative_error
from kda_backend.engines import vllm_layer
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    SLOTS,
    bind_cache,
    cache_spec,
    check,
    engine_config,
    expect_states,
    hidden,
    run_layer,
    step_metadata,
)
from tests.engines.kda.vllm.models import Model, build, definition_of

pytestmark = pytest.mark.usefixtures("in_fp32")
BLOCK = 64
TOLERANCE = 1e-5


def caching_config(*, flag: bool = True, **options: Any) -> VllmConfig:
    """With a prefix cache of blocks of 64 tokens, as the engine sets it up for a mamba model."""
    config = engine_config(**{"flag": flag, "dtype": "float32", **options})
    cache = config.cache_config
    cache.mamba_cache_mode = "align"
    cache.mamba_block_size = BLOCK
    cache.hash_block_size = BLOCK
    cache.cache_hit_alignment_tokens = BLOCK
    return config


def test_the_cache_is_asked_for_checkpoints_at_whole_chunks(model: Model) -> None:
    config = caching_config()
    spec = cache_spec(build(model, config), config)
    fields = ("num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment")
    assert [getattr(spec, name) for name in fields] == ([1, 64] if model.exports else [0, None])
    config = caching_config(flag=False)
    upstream = cache_spec(build(model, config), config)
    # without FlashKDA, which needs a GPU, upstream has none
    assert [getattr(upstream, name) for name in fields] == [0, None]


def test_blocks_of_other_sizes_have_checkpoints(model: Model) -> None:
    """The spec says where they may lie."""
    config = caching_config()
    config.cache_config.mamba_block_size = BLOCK + 16
    spec = cache_spec(build(model, config), config)
    assert spec.num_prefill_checkpoint_blocks == int(model.exports)


def layer_of(model: Model, config: VllmConfig) -> Any:
    if not model.exports:
        pytest.skip("upstream's layer has no checkpoints")
    layer = build(model, config)
    bind_cache(layer, config)
    return layer


@pytest.mark.parametrize("most", [4, 24])
def test_checkpoints_are_the_states_in_the_middle_of_prefills(model: Model, most: int) -> None:
    """Beside a decode: a prompt with a checkpoint, a short one, and one that continues. The three
    are one call or two."""
    config = caching_config()
    layer = layer_of(model, config)
    layer.kda_runtime = replace(layer.kda_runtime, most_chunks=most)
    blocks = torch.tensor(
        [[1, 0, 0, 0], [2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 8, 9]], dtype=torch.int32
    )
    texts = [hidden(n, seed=n) for n in (30, 150, 40, 204)]
    definitions = [definition_of(model) for _ in texts]
    x = torch.cat([texts[0][:20], texts[3][:BLOCK]])
    metadata = step_metadata(layer, config, (20, BLOCK), (0, 0), blocks[[0, 3]])
    o = run_layer(layer, config, x, metadata)
    check(layer, o, x, (20, BLOCK), (1, 6), [definitions[0], definitions[3]])
    for pool in layer.kv_cache:
        pool[9] = pool[6]  # the engine's copy to the block that the step ends in
    before = [pool.clone() for pool in layer.kv_cache]
    done, lengths = (20, 0, 0, BLOCK), (1, 150, 40, 140)
    x = torch.cat([t[d : d + n] for t, d, n in zip(texts, done, lengths, strict=True)])
    metadata = step_metadata(layer, config, lengths, done, blocks)
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 3)
    assert sorted(metadata.checkpoint.checkpoint_offsets.tolist())[-2:] == [128, 128]
    o = run_layer(layer, config, x, metadata)
    check(layer, o, x, lengths, (1, 4, 5, 9), definitions)
    for text, length, slot in ((texts[1], 128, 3), (texts[3], 192, 8)):
        inside = definition_of(model)
        inside.run(text[:length])
        expect_states(layer, slot, inside)
    untouched = [slot for slot in range(SLOTS) if slot not in (1, 4, 5, 9, 3, 8)]
    for pool, kept in zip(layer.kv_cache, before, strict=True):
        assert torch.equal(pool[untouched], kept[untouched])


class Allocated(TorchDispatchMode):
    """The shapes of what torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_scan_writes_checkpoints_to_the_cache(model: Model, dtype: str) -> None:
    """No memory for such states is taken on the way; pages of no request are NaN and stay so."""
    blocks = torch.tensor([[2, 3, 4, 0], [5, 0, 0, 0], [6, 7, 8, 0]], dtype=torch.int32)
    lengths = (150, 40, 130)
    texts = [hidden(n, seed=n) for n in lengths]
    config = caching_config()
    config.cache_config.mamba_ssm_cache_dtype = dtype  # which vLLM takes on a GPU alone
    vllm_layer._runtime.cache_clear()
    layer = layer_of(model, config)
    for pool in layer.kv_cache:
        pool.fill_(math.nan)
    metadata = step_metadata(layer, config, lengths, (0, 0, 0), blocks)
    assert (metadata.checkpoint.checkpoint_offsets > 0).sum() == 2
    with Allocated() as made:
        run_layer(layer, config, torch.cat(texts), metadata)
    state_shape = tuple(layer.get_state_shape()[1])
    assert not [shape for shape in made.shapes if shape[1:] == (1, *state_shape)]
    for pool in layer.kv_cache:
        assert [not page.isnan().any() for page in pool] == [
            slot in (4, 5, 8, 3, 7) for slot in range(SLOTS)
        ]
    assert layer.kv_cache[1].dtype == getattr(torch, dtype)
    for text, slot in ((texts[0], 3), (texts[2], 7)):
        definition = definition_of(model)
        definition.run(text[:128])
        want, got = definition.state[0], layer.kv_cache[1][slot].float()
        assert relative_error(got, want) < (TOLERANCE if dtype == "float32" else 1e-3)
    vllm_layer._runtime.cache_clear()


def test_a_request_resumes_from_a_checkpoint(model: Model) -> None:
    config = caching_config()
    layer = layer_of(model, config)
    x, definition = hidden(190), definition_of(model)
    want = definition.run(x)
    blocks = torch.tensor([[2, 3, 4, 0]], dtype=torch.int32)
    run_layer(layer, config, x[:150], step_metadata(layer, config, (150,), (0,), blocks))
    for pool in layer.kv_cache:
        pool[7] = pool[3]
    hit = torch.tensor([[2, 3, 7, 0]], dtype=torch.int32)
    metadata = step_metadata(layer, config, (62,), (128,), hit)
    o = run_layer(layer, config, x[128:], metadata)
    assert relative_error(o, want[128:]) < TOLERANCE
    expect_states(layer, 7, definition)


def test_checkpoints_of_prefills_beside_drafts(model: Model) -> None:
    config = caching_config(speculative_config=NGRAM)
    layer = layer_of(model, config)
    blocks = torch.tensor([[5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 0, 0]], dtype=torch.int32)
    texts = [hidden(150, seed=1), hidden(30, seed=2)]
    first = step_metadata(layer, config, (20,), (0,), blocks[1:], (0,))
    run_layer(layer, config, texts[1][:20], first)
    x = torch.cat([texts[0], texts[1][20 : 20 + DRAFT]])
    metadata = step_metadata(layer, config, (150, DRAFT), (0, 20), blocks, (0, 1))
    assert (metadata.num_spec_decodes, metadata.num_prefills) == (1, 1)
    assert metadata.checkpoint is not None
    o = run_layer(layer, config, x, metadata)
    definition = definition_of(model)
    want = definition.run(texts[0][:128])
    expect_states(layer, 6, definition)
    assert relative_error(o[:128], want) < TOLERANCE
    want = definition.run(texts[0][128:])
    expect_states(layer, 7, definition)
    assert relative_error(o[128:150], want) < TOLERANCE
    definition = definition_of(model)
    definition.run(texts[1][:20])
    assert relative_error(o[150:], definition.run(texts[1][20 : 20 + DRAFT])) < TOLERANCE


def test_an_offset_within_a_chunk_is_refused_before_anything_is_written(model: Model) -> None:
    config = caching_config()
    layer = layer_of(model, config)
    blocks = torch.tensor([[2, 3, 4, 0]], dtype=torch.int32)
    metadata = step_metadata(layer, config, (150,), (0,), blocks)
    metadata.checkpoint.checkpoint_offsets[0] = 112
    before = [pool.clone() for pool in layer.kv_cache]
    with pytest.raises(ValueError, match=r"multiples of 64, got \[112\]"):
        run_layer(layer, config, hidden(150), metadata)
    for pool, kept in zip(layer.kv_cache, before, strict=True):
        assert torch.equal(pool, kept)
