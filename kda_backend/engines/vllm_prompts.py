"""MLA layers inside of vLLM's prefill graphs, in steps that begin all of their requests.

Upstream a graph of a step with prefills breaks at every MLA layer, and where several GPUs share the
work of a step, they wait there for the host. A request that begins has nothing in the cache, so its
attention is that of its own tokens, and its launches depend on the lengths alone. A third graph of
each size holds the layer in that form; its kernels read the lengths from `StepTables`. A step that
continues a prompt, has decodes or found a prefix in the cache breaks the graph as before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from backend_core.engines import seams
from backend_core.engines.vllm_flag import say
from kda_backend.engines.vllm_seams import VLLM_PROMPTS
from kda_backend.engines.vllm_tables import pass_on_tables

FLASH_ATTENTION = 3
"""The version of FlashAttention whose launches are captured; it plans a batch on the GPU."""


class PromptAttention:
    """The MLA layers of one model, ``MultiHeadLatentAttention``, whose ``_attention`` becomes
    `run`."""

    def __init__(self, layers: list[Any]) -> None:
        self._slots: dict[str, int] = {}
        for layer in layers:
            layer._attention = functools.partial(self.run, layer)

    def fits(self, slot_mapping: Mapping[str, torch.Tensor]) -> bool:
        """Whether a pass finds the slots of its tokens in the memory that was captured."""
        return all(
            slot_mapping[name].data_ptr() == address for name, address in self._slots.items()
        )

    def run(self, layer: Any, *tensors: torch.Tensor) -> None:
        """Run ``_attention`` of a layer, inside of the graph where the pass holds it.

        Args:
            tensors: positions ``[T]``, queries ``[T, H, D]``, normed latents ``[T, L]``, keys with
                RoPE ``[T, 1, R]`` and the output ``[T, H * V]``; T is the graph's.
        """
        upstream, current = type(layer)._attention, pass_on_tables()
        if current is None or not current.prompts:
            upstream(layer, *tensors)
            return
        context = get_forward_context()
        metadata, name = context.attn_metadata, layer.layer_name
        slots, (_, q, latents, _, out) = context.slot_mapping[name], tensors
        self._slots[name] = slots.data_ptr()
        padding = (slots[: len(q)] < 0)[:, None]
        latents.masked_fill_(padding, 0.0)  # a tile of values has some, with weights of 0
        out.masked_fill_(padding, 0.0)
        cu_seqlens = current.tables.cu_seqlens(q.shape[0])
        context.attn_metadata = {name: _of_prompts(layer, metadata[name], q, cu_seqlens)}
        try:
            upstream.__wrapped__(layer, *tensors)  # without the break
        finally:
            context.attn_metadata = metadata


def _of_prompts(layer: Any, metadata: Any, q: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
    """Metadata of a step in which every token belongs to a request that begins."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonPrefillMetadata

    backend = layer.prefill_backend.clone()
    prefill = MLACommonPrefillMetadata(
        block_table=cu_seqlens.new_empty(0),  # of the context, of which there is none
        query_start_loc=cu_seqlens,
        max_query_len=q.shape[0],
        q_data_type=q.dtype,
        output_dtype=q.dtype,
        prefill_backend=backend,
    )
    backend.prepare_metadata(prefill)
    return dataclasses.replace(
        metadata,
        num_actual_tokens=q.shape[0],
        num_decodes=0,
        num_decode_tokens=0,
        num_prefills=cu_seqlens.shape[0] - 1,
        prefill=prefill,
        decode=None,
    )


def layers_of(model: torch.nn.Module) -> list[Any]:
    """A model's MLA layers; none where any of them cannot be captured."""
    if (reason := seams.refusal(VLLM_PROMPTS)) is not None:
        say(f"prefill graphs break at the MLA layers: {reason}")
        return []
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    layers = [each for each in model.modules() if isinstance(each, MultiHeadLatentAttention)]
    if not layers:
        return []
    from vllm.v1.attention.backends.mla.prefill.flash_attn import FlashAttnPrefillBackend
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    for layer in layers:
        backend = layer.prefill_backend
        version = getattr(backend, "vllm_flash_attn_version", None)
        if not isinstance(backend, FlashAttnPrefillBackend) or version != FLASH_ATTENTION:
            say(
                "prefill graphs break at the MLA layers: expected their prefills on FlashAttention"
                f" {FLASH_ATTENTION}, got {backend.get_name()} {version or ''}".rstrip()
            )
            return []
        if is_quantized_kv_cache(layer.kv_cache_dtype):
            say(f"prefill graphs break at the MLA layers, whose cache is {layer.kv_cache_dtype}")
            return []
    return layers
