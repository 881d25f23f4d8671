"""vLLM's DeepSeek-V4.1: a compressor and the indexer's keys as one call of this package.

vLLM's compressor returns a latent. The attention layer hands it to the compressor's `insert_cache`,
which writes the main record, and to the indexer's `_produce_k`, which projects it to a key and
writes that. Both do nothing where the latent is ``None``, as in a profile run. So a compressor that
has written both records by itself returns ``None``.

Parameters, projections, rings and record caches are vLLM's. What the adapter changes is the forward
of compressors whose layer is served, and their rings' metadata, to which it adds the length of the
longest chunk.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer
from vllm.models.deepseek_v41.compressor import (
    CompressorBackend,
    CompressorMetadataBuilder,
    CompressorStateCache,
    DeepseekCompressor,
)
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import mqa_logits_use_mx_scales

from backend_core.engines import vllm_flag
from backend_core.engines.vllm_blocks import block_tokens
from backend_core.engines.vllm_flag import flag_name, say
from backend_core.launch.streams import is_capturing
from backend_core.strict import fallback
from dsv4_backend import (
    RecordSpec,
    V41Call,
    V41Layer,
    V41Spec,
    V41Step,
    compress_v41_,
    warm_up,
)
from dsv4_backend.engines.v41_paths import say_paths
from dsv4_backend.engines.vllm_states import with_plans
from dsv4_backend.spec import KEY_DIM, LATENT_DIM, ROPE_DIM, CacheFormat

_PACKED: dict[int, CacheFormat] = {584: "fp8_ds_mla", 528: "mxfp8_rows", 288: "nvfp4_rows"}
"""The format of a packed main record by its bytes."""


def adopt(attention: Any, vllm_config: VllmConfig) -> str | None:
    """Let the compressor of a layer that vLLM just built write both records; or why it does not."""
    compressor, indexer = attention.compressor, attention.indexer
    reason = _refusal(attention, vllm_config)
    if reason is not None:
        return reason
    device = torch.device(vllm_config.device_config.device_type)
    tokens = block_tokens(attention, vllm_config) // int(compressor.compress_ratio)
    try:
        spec = _spec(attention, tokens, tokens)
        say_paths(say, device, spec)
    except (LookupError, ValueError) as error:
        return str(error)
    compressor.__class__ = V41Compressor
    # in a tuple: as an attribute of its own the indexer would be a submodule
    compressor.source = (attention, indexer)
    if compressor.state_cache is not None:
        compressor.state_cache.__class__ = V41StateCache
    return None


def _refusal(attention: Any, vllm_config: VllmConfig) -> str | None:
    compressor, indexer = attention.compressor, attention.indexer
    kind = type(compressor)
    if kind is not DeepseekCompressor:
        return f"{kind.__module__}.{kind.__name__} is a compressor that is not replaced"
    if indexer is None or not indexer.owns_k:
        return f"layer {attention.layer_id} makes latents and no indexer's keys of them"
    if type(indexer)._produce_k is not DeepseekV4Indexer._produce_k:
        where = f"{type(indexer).__module__}.{type(indexer).__name__}"
        return f"{where} stores the indexer's keys in an order of its own, which is not served"
    if vllm_flag.batch_invariant():
        return "VLLM_BATCH_INVARIANT is set, and the paths of this backend change with the batch"
    if compressor.pcp_size > 1:
        return "prefill context parallelism gathers latents of all ranks, which is not served"
    extra = vllm_config.additional_config
    if isinstance(extra, dict) and extra.get("decode_backend", "auto") != "auto":
        return f"decode_backend {extra['decode_backend']} has launches of its own"
    if compressor.rope_head_dim != ROPE_DIM or indexer.rope_dim != ROPE_DIM:
        return f"RoPE must turn {ROPE_DIM} channels, got {compressor.rope_head_dim}"
    if indexer.k_norm.variance_epsilon != compressor.rms_norm_eps:
        return "the latent's norm and the key's must have one eps"
    weight, shape = indexer.wk.weight, (KEY_DIM, LATENT_DIM)
    if weight.dtype is not torch.bfloat16 or tuple(weight.shape) != shape:
        return f"wk must be {list(shape)} of bfloat16, got {list(weight.shape)} of {weight.dtype}"
    if _main_format(attention) is None:
        return (
            f"main records of kv_cache_dtype {attention.kv_cache_dtype} are not served:"
            " fp8_ds_mla, nvfp4_ds_mla and bf16 are"
        )
    return None


def _main_format(attention: Any) -> CacheFormat | None:
    if attention.kv_cache_torch_dtype is torch.uint8:
        return _PACKED.get(attention.compressed_bytes_per_token)
    # e4m3 rows have their scale on the device, where no launch parameter can be read from
    return "bf16_rows" if attention.kv_cache_torch_dtype is torch.bfloat16 else None


def _index_format(indexer: Any) -> CacheFormat:
    if indexer.use_fp4_kv:
        return "indexer_mxfp4"
    if current_platform.is_rocm():
        return "indexer_fp8_tiles"
    return "indexer_fp8_ue8m0" if mqa_logits_use_mx_scales() else "indexer_fp8"


def _spec(attention: Any, main_tokens: int, index_tokens: int) -> V41Spec:
    main = _main_format(attention)
    assert main is not None  # refused when the model was loaded
    records = functools.partial(RecordSpec, rounding="vllm", fp8="ocp")
    return V41Spec(
        compress_ratio=attention.compress_ratio,
        main=records(cache_format=main, page_tokens=main_tokens),
        index=records(cache_format=_index_format(attention.indexer), page_tokens=index_tokens),
        rope_layout="split",
        eps=attention.compressor.rms_norm_eps,
    )


class V41Compressor(DeepseekCompressor):  # type: ignore[misc]
    """vLLM's compressor with a step of its own; built by vLLM, see `adopt`."""

    source: tuple[Any, Any]  # the attention layer and its indexer, set by `adopt`

    # the record caches as the engine bound them, their pages as bytes, the layer that writes them
    _bound: (
        tuple[
            tuple[torch.Tensor, torch.Tensor],
            tuple[torch.Tensor, torch.Tensor],
            V41Layer,
        ]
        | None
    ) = None

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """The ring rows of all tokens and both records of the groups that end with them.

        Args:
            kv_score: ``[T, 512]`` of ratio 1, ``[T, 1024]`` of ratio 2, fp32; T may be padded.
            positions: ``[T]`` int64.

        Returns:
            ``None``: nothing is left to do with the latent. Where the caches cannot be served,
            upstream's latent.
        """
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return None  # the profile run, which has no caches
        attention, indexer = self.source
        plan = _plan(self, attn_metadata, positions)
        if plan.num_tokens == 0:
            return None
        state = None if self.state_cache is None else self.state_cache.kv_cache
        main, index = attention.kv_cache, indexer.k_cache.kv_cache
        if self._bound is None or self._bound[0][0] is not main or self._bound[0][1] is not index:
            try:
                self._bound = _bind(self, main, index, kv_score, state, plan)
            except ValueError as error:
                self.__class__ = DeepseekCompressor
                fallback(f"--attention-backend {flag_name('dsv4')}: {error}")
                upstream: torch.Tensor | None = self.forward(kv_score, positions)
                return upstream
        _, pages, layer = self._bound
        try:
            compress_v41_(layer, kv_score, state, *pages, plan)
        except Exception as error:
            vllm_flag.log_failed_step(f"compressor {self.prefix}", error)
            raise
        return None


def _bind(
    compressor: V41Compressor,
    main: torch.Tensor,
    index: torch.Tensor,
    kv_score: torch.Tensor,
    state: torch.Tensor | None,
    plan: V41Step,
) -> tuple[
    tuple[torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor],
    V41Layer,
]:
    """At the first step that has caches: check them, and compile what a later step may launch.

    Raises:
        ValueError: the caches are not what the operator takes.
    """
    attention, indexer = compressor.source
    spec = _spec(attention, main.shape[1], index.shape[1])
    layer = V41Layer(
        spec,
        norm_weight=compressor.norm.weight,
        key_projection=indexer.wk.weight,
        key_norm_weight=indexer.k_norm.weight,
        rope_table=attention.rotary_emb.cos_sin_cache,
    )
    pages = _pages(main, spec.main), _pages(index, spec.index)
    warm_up(V41Call(layer, kv_score, state, *pages), plan)
    return (main, index), pages, layer


def _pages(cache: torch.Tensor, records: RecordSpec) -> torch.Tensor:
    """An engine's ``[blocks, tokens, channels or bytes]`` as pages of bytes."""
    memory = cache.view(torch.uint8)
    return memory.as_strided((memory.shape[0], records.page_bytes), (memory.stride(0), 1))


def _plan(
    compressor: V41Compressor, attn_metadata: dict[str, Any], positions: torch.Tensor
) -> V41Step:
    """The step's plan, of ratio 2 built once for the layers whose records share their slots.

    A capture and the run before it never share one: a graph has to hold what the plan is made of.
    """
    _, indexer = compressor.source
    main = attn_metadata[compressor.k_cache_prefix].slot_mapping
    index = attn_metadata[indexer.k_cache.prefix].slot_mapping
    if compressor.state_cache is None:
        tokens = min(main.shape[0], index.shape[0], positions.shape[0])
        return V41Step(positions[:tokens], main[:tokens], index[:tokens])
    rings = attn_metadata[compressor.state_cache.prefix]
    capturing = is_capturing(positions.device)
    key = (id(main), id(index), capturing)
    if key in rings.plans:
        plan: V41Step = rings.plans[key][0]
        return plan
    tokens = min(x.shape[0] for x in (main, index, positions, rings.slot_mapping))
    plan = V41Step(
        positions[:tokens],
        main[:tokens],
        index[:tokens],
        rings.slot_mapping[:tokens],
        rings.query_start_loc,
        # Only a graph of decodes replays nothing but decodes. Any other graph is captured with a
        # dummy batch and replayed with whatever has as many tokens.
        None if capturing and not rings.replays_decodes_alone else rings.longest,
    )
    rings.plans[key] = (plan, main, index)  # the objects too: their ids are the key
    return plan


def _extend(builder: Any, metadata: Any, common: Any) -> None:
    """Add the longest chunk, and take from padding the ring slots that vLLM gives it."""
    # of the first request's ring, which its own kernels find out of all requests' bounds
    metadata.slot_mapping[int(common.query_start_loc_cpu[-1]) :] = -1
    # where drafts are verified adaptively the device alone knows which request has how many
    metadata.longest = max(common.max_query_len, 1 + builder.vllm_config.num_speculative_tokens)


V41StateCache = with_plans(
    CompressorStateCache, CompressorBackend, CompressorMetadataBuilder, _extend
)
