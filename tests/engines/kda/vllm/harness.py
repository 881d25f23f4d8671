"""The engine's own objects around one KDA layer of the recall checkpoint, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from backend_core.testing.numerics import relative_error
from tests.engines.kda.vllm.models import MODELS, load
from tests.engines.kda.weights import CHECKPOINT, Definition, Weights, checkpoint_weights
from tests.engines.vllm_process import builder_of, common_metadata, config_of, forward_pass

SLOTS = 12
DRAFT = 4  # the token sampled last, and three that are proposed
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFT - 1, "prompt_lookup_max": 3}


def engine_config(*, flag: bool, **options: Any) -> VllmConfig:
    """The checkpoint's."""
    options = {"enable_prefix_caching": False, **options}
    return config_of(CHECKPOINT, "kda" if flag else None, **options)


def build_layer(config: VllmConfig, index: int = 0, weights: Weights | None = None) -> Any:
    """A KDA layer as the model builds it, with the checkpoint's weights by its own loaders."""
    prefix = f"model.layers.{index}.self_attn"
    with set_current_vllm_config(config):
        layer = KimiGatedDeltaNetAttention(config.model_config.hf_config, config, prefix=prefix)
    load(layer, MODELS["Kimi-Linear"], weights or checkpoint_weights(index))
    return layer


def bind_cache(layer: Any, config: VllmConfig, padding: int = 256, slots: int = SLOTS) -> None:
    """A cache of pages that hold both states each, filled with old requests' noise."""
    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    page = sum(sizes) + padding
    memory = torch.zeros(slots * page, dtype=torch.uint8)
    states, offset = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        item = dtype.itemsize
        inner = torch.empty(shape, device="meta").stride()
        state = memory.view(dtype).as_strided(
            (slots, *shape), (page // item, *inner), offset // item
        )
        state.copy_(torch.randn(slots, *shape, generator=torch.Generator().manual_seed(1)))
        states.append(state)
        offset += size
    layer.kv_cache = tuple(states)


def cache_spec(layer: Any, config: VllmConfig) -> MambaSpec:
    """The layer's own."""
    if config.cache_config.mamba_block_size is None:
        config.cache_config.mamba_block_size = config.model_config.max_model_len
    spec: MambaSpec = layer.get_kv_cache_spec(config)
    return spec


def step_metadata(
    layer: Any,
    config: VllmConfig,
    query_lens: Sequence[int],
    computed: Sequence[int],
    block_table: torch.Tensor,
    accepted: Sequence[int] | None = None,
) -> Any:
    """The metadata of one step, by the builder that the engine uses for this layer.

    Args:
        query_lens: tokens of each request in this step; computed: those before it.
        block_table: ``[N, blocks]`` int32.
        accepted: of each request's draft before; 0 for one that has no draft to verify.
    """
    spec = cache_spec(layer, config)
    builder = builder_of(layer, config, spec)
    bounds = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    queries = torch.tensor(query_lens, dtype=torch.int32)
    before = torch.tensor(computed, dtype=torch.int32)
    seq_lens = queries + before
    slots = torch.zeros(sum(query_lens), dtype=torch.int64)
    common = common_metadata(bounds, seq_lens, block_table, slots, is_prefilling=before == 0)
    kinds = type(builder).__mro__
    upstream = next(base for base in kinds if base.__module__.startswith("vllm."))
    if spec.mamba_cache_mode == "align" and upstream is not GDNAttentionMetadataBuilder:
        # what the runner precomputes on a GPU: each request's blocks from its last one on
        first = (seq_lens - 1).clamp(min=0) // spec.block_size
        slots = first[:, None] + torch.arange(1 + spec.num_speculative_blocks)
        builder.mamba_aligned_state_indices = block_table.gather(1, slots.long())
    if accepted is None:
        return builder.build(0, common)
    number = torch.tensor(accepted, dtype=torch.int32)
    drafted = torch.where(number > 0, queries - 1, -1)
    return builder.build(0, common, number.clamp(min=1), drafted)


def run_layer(
    layer: Any, config: VllmConfig, hidden_states: torch.Tensor, metadata: Any | None
) -> torch.Tensor:
    """The layer's forward as the model calls it, under the engine's forward context."""
    (output,) = run_layers([layer], config, hidden_states, None if metadata is None else [metadata])
    return output


def run_layers(
    layers: Sequence[Any],
    config: VllmConfig,
    hidden_states: torch.Tensor,
    metadata: Sequence[Any] | None,
) -> list[torch.Tensor]:
    """Each layer on the same input, with its own metadata, in one forward context."""
    positions = torch.zeros(hidden_states.shape[0], dtype=torch.int64)
    attn_metadata = None
    if metadata is not None:
        attn_metadata = {layer.prefix: m for layer, m in zip(layers, metadata, strict=True)}
    outputs = []
    with forward_pass(config, attn_metadata, hidden_states.shape[0]):
        for layer in layers:
            output = torch.empty_like(hidden_states)
            try:
                result = layer(hidden_states=hidden_states, positions=positions, output=output)
            except TypeError as error:
                if "output" not in str(error):
                    raise
                result = layer(hidden_states=hidden_states, positions=positions)
            outputs.append(output if result is None else result)
    return outputs


def hidden(tokens: int, seed: int = 0) -> torch.Tensor:
    """``[tokens, hidden]`` in the dtype under which vLLM builds the layers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tokens, 256, generator=generator, dtype=torch.float32)
    return drawn.to(torch.get_default_dtype())


def table(*slots: int) -> torch.Tensor:
    """The block table of requests that have one block each; rows are further apart than one."""
    wide = torch.zeros(len(slots), 4, dtype=torch.int32)
    wide[:, 0] = torch.tensor(slots)
    return wide


def expect_states(layer: Any, slot: int, definition: Definition, tolerance: float = 1e-5) -> None:
    assert relative_error(layer.kv_cache[1][slot], definition.state[0]) < tolerance
    assert relative_error(layer.kv_cache[0][slot].T[:, :3], definition.window) < tolerance


def check(
    layer: Any,
    o: torch.Tensor,
    x: torch.Tensor,
    lengths: Sequence[int],
    slots: Sequence[int],
    definitions: Sequence[Definition],
    tolerance: float = 1e-5,
) -> None:
    """Outputs and states of each request, which its definition has not run yet."""
    begin = 0
    for length, slot, definition in zip(lengths, slots, definitions, strict=True):
        want = definition.run(x[begin : begin + length])
        assert relative_error(o[begin : begin + length], want) < tolerance
        expect_states(layer, slot, definition, tolerance)
        begin += length
