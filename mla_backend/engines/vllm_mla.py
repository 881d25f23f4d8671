"""vLLM's FLASH_ATTN_MLA with the decodes of this family: backend, metadata builder and layer.

Prefills and the cache are the base classes'. A step's decodes are planned here, once for all
layers, where every request has the same number of query tokens and the batch is one in which this
family is ahead; other steps, such as those that mix decodes with short pieces of prompts, are the
base class's whole. Which of the two a step is follows from the padded batch alone, that is from
what a CUDA graph is keyed by: a graph is never replayed for a step of the other sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLADecodeMetadata,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

from backend_core.engines.vllm_flag import log_failed_step
from backend_core.target import detect_target
from mla_backend.contract.mla_decode import split_cache
from mla_backend.engines.mla_decoder import MlaDecoder, MlaStep
from mla_backend.engines.vllm_facts import KERNELS, query_tokens
from mla_backend.spec import LATENT_DIM, ROPE_DIM


@dataclass
class PlannedDecode(FlashAttnMLADecodeMetadata):  # type: ignore[misc]
    """The metadata of decodes that are planned here; ``step`` is never ``None``."""

    step: MlaStep | None = None


class SplitKvMLABuilder(FlashAttnMLAMetadataBuilder):  # type: ignore[misc]
    """Plans the decodes of a step, on the device and without a host sync."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        sizes = (
            vllm_config.scheduler_config.max_num_seqs,
            vllm_config.compilation_config.max_cudagraph_capture_size or 0,
        )
        self.decoder = MlaDecoder(
            detect_target(device),
            device,
            heads=_heads(vllm_config, layer_names),
            page_size=kv_cache_spec.block_size,
            kernel=KERNELS[FlashAttnMLABackend.get_name()],
            query_tokens=query_tokens(vllm_config),
            max_requests=max(sizes),
        )
        self.decoder.warm_up()

    def _build_decode(self, **batch: Any) -> Any:
        """``batch``: the release's own arguments, which all come by name."""
        lengths = batch["seq_lens_device"]
        requests = lengths.shape[0]
        tokens = _uniform_tokens(batch["query_start_loc_cpu"].tolist(), batch["num_decode_tokens"])
        if tokens is None or not self.decoder.covers(requests, tokens):
            return super()._build_decode(**batch)
        block_table = batch["block_table_tensor"]
        return PlannedDecode(
            block_table=block_table,
            seq_lens=lengths,
            dcp_tot_seq_lens=batch["dcp_tot_seq_lens_device"],
            query_start_loc=batch["query_start_loc_device"],
            max_query_len=tokens,
            max_seq_len=batch["max_seq_len"],
            step=self.decoder.step(lengths, block_table, tokens),
        )


def _heads(vllm_config: Any, layer_names: list[str]) -> int:
    """This rank's query heads of the layers that share metadata; a draft model may have others.

    Those of their implementations: a layer's own ``num_heads`` may count all ranks'.
    """
    layers = vllm_config.compilation_config.static_forward_context
    heads = {layers[name].impl.num_heads for name in layer_names}
    if len(heads) > 1:
        raise ValueError(
            f"MLA layers that share a cache must have one number of heads, got {sorted(heads)}"
        )
    return int(heads.pop())


def _uniform_tokens(bounds: list[int], num_tokens: int) -> int | None:
    """The query tokens that every request of a batch has, or ``None`` where they differ.

    Args:
        bounds: of the requests' tokens; requests that a CUDA graph is padded with come last and
            have none.
        num_tokens: of the batch, those of its padding included.
    """
    requests = len(bounds) - 1
    tokens, rest = divmod(num_tokens, requests)
    if rest or not tokens:
        return None
    most = bounds[-1]
    expected = [min(tokens * number, most) for number in range(requests + 1)]
    return tokens if bounds == expected and most % tokens == 0 else None


class SplitKvMLAImpl(FlashAttnMLAImpl):  # type: ignore[misc]
    """A layer; its decodes are those of the step where there is one."""

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        decode = attn_metadata.decode
        if not isinstance(decode, PlannedDecode):
            result: tuple[torch.Tensor, torch.Tensor | None] = super().forward_mqa(
                q, kv_c_and_k_pe_cache, attn_metadata, layer
            )
            return result
        assert decode.step is not None
        latent, rope = q if isinstance(q, tuple) else q.split([LATENT_DIM, ROPE_DIM], -1)
        try:
            cache = split_cache(kv_c_and_k_pe_cache, decode.step.selection.spec)
            return decode.step.attend(latent, rope, *cache, self.scale)
        except Exception as error:
            log_failed_step(f"MLA layer {layer.layer_name}", error)
            raise


class SplitKvMLABackend(FlashAttnMLABackend):  # type: ignore[misc]
    """Keeps its base's name, by which vLLM knows what a backend can do."""

    @staticmethod
    def get_builder_cls() -> type[SplitKvMLABuilder]:
        return SplitKvMLABuilder

    @staticmethod
    def get_impl_cls() -> type[SplitKvMLAImpl]:
        return SplitKvMLAImpl


BACKENDS = {FlashAttnMLABackend.get_name(): SplitKvMLABackend}
