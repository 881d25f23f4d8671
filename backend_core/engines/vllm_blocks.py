"""vLLM: the size of a cache's blocks, which a model that is being built does not know yet."""

from __future__ import annotations

from typing import Any


def block_tokens(layer: Any, vllm_config: Any) -> int:
    """Tokens of a block of a layer's cache.

    Unless the user gives one, vLLM chooses it once the model is built, from what the attention
    backends of its layers take; until then the configuration has a default for all models.

    Args:
        layer: has ``get_attn_backend``.
    """
    cache_config = vllm_config.cache_config
    block_size: int = cache_config.block_size
    if not cache_config.user_specified_block_size:
        block_size = layer.get_attn_backend().get_preferred_block_size(block_size)
    return block_size
