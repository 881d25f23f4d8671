"""One of vLLM's compressors, main or indexer, with its step as one call of this package.

vLLM's own code stores the tokens' state rows in one launch, pools, norms, applies RoPE, quantises
and stores in a second. Here a decode step is one launch and a step with prefills one or two
(docs/families/dsv4.md); parameters, projections, state cache and record caches are vLLM's. Decode
steps for which the table says that vLLM's own kernels are faster stay vLLM's.

vLLM rotates neither the indexer's keys nor its queries by Hadamard, and neither does this.

On ROCm with ``indexer_kv_dtype="mxfp4"`` on gfx950 vLLM 0.33 has an indexer whose compressor is a
class of its own. It is replaced too, and writes records where aiter reads them, which `vllm_rocm`
asks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v4.compressor import (
    CompressorBackend,
    CompressorMetadataBuilder,
    CompressorStateCache,
    DeepseekCompressor,
)
from vllm.platforms import current_platform

from backend_core.engines import seams, vllm_flag
from backend_core.engines.log import chosen
from backend_core.engines.vllm_blocks import block_tokens
from backend_core.engines.vllm_flag import flag_name, say
from backend_core.launch.streams import is_capturing
from backend_core.strict import fallback
from backend_core.target import detect_target
from dsv4_backend import (
    CompressorCall,
    CompressorLayer,
    CompressorSpec,
    PagedDecode,
    PagedPrefill,
    compress_decode_,
    compress_prefill_,
    warm_up,
    window_ends,
)
from dsv4_backend.engines import seam_list, vllm_rocm
from dsv4_backend.engines.vllm_states import with_plans
from dsv4_backend.selection import decode_selection, in_words, prefill_selection
from dsv4_backend.spec import ROPE_DIM, CacheFormat


def adopt(compressor: Any, vllm_config: VllmConfig) -> str | None:
    """Make a compressor that vLLM just built a `FusedCompressor`; or why it stays vLLM's."""
    reason = _refusal(compressor, vllm_config)
    if reason is not None:
        return reason
    device = torch.device(vllm_config.device_config.device_type)
    upstream, cache_format = type(compressor), _format(compressor)
    compressor.__class__ = FusedCompressor
    try:
        spec = _spec(compressor, cache_format, _page_tokens(compressor, vllm_config))
        _choose(device, spec)
    except (LookupError, ValueError) as error:
        compressor.__class__ = upstream
        return str(error)
    compressor.cache_format = cache_format
    compressor.state_cache.__class__ = StateCache
    return None


def _page_tokens(compressor: Any, vllm_config: VllmConfig) -> int:
    block_size = block_tokens(_record_cache(compressor), vllm_config)
    return max(1, block_size // int(compressor.compress_ratio))


def _refusal(compressor: Any, vllm_config: VllmConfig) -> str | None:
    kind = type(compressor)
    if kind is not DeepseekCompressor and not vllm_rocm.is_aiters(kind):
        return f"{kind.__module__}.{kind.__name__} is a compressor that is not replaced"
    if vllm_flag.batch_invariant():
        return "VLLM_BATCH_INVARIANT is set, and the paths of this backend change with the batch"
    if compressor.rope_head_dim != ROPE_DIM:
        return f"RoPE must turn {ROPE_DIM} channels, got {compressor.rope_head_dim}"
    cache_format = _format(compressor)
    if cache_format is None:
        kind = _record_cache(compressor).kv_cache_dtype
        return f"main records of kv_cache_dtype {kind} are not served: fp8_ds_mla and bf16 are"
    if cache_format == "indexer_fp8" and current_platform.is_rocm():
        return seams.refusal(seam_list.VLLM_AMD)
    if cache_format == "indexer_fp8" and _packs_scales():
        return "on Blackwell vllm keeps the indexer's fp8 scales as four bytes, not as fp32"
    if cache_format == "indexer_mxfp4_tiles":
        heads = vllm_config.model_config.hf_config.index_n_heads
        tokens = _page_tokens(compressor, vllm_config)
        return vllm_rocm.other_tiles(heads, compressor.head_dim, tokens)
    return None


def _record_cache(compressor: Any) -> Any:
    """The layer whose pages the compressor writes, registered before the compressor is built."""
    return compressor._static_forward_context[compressor.k_cache_prefix]


def _format(compressor: Any) -> CacheFormat | None:
    if vllm_rocm.is_aiters(type(compressor)):
        return "indexer_mxfp4_tiles"
    if compressor.head_dim == 128:
        return "indexer_mxfp4" if compressor.use_fp4_cache else "indexer_fp8"
    cache = _record_cache(compressor)
    if cache.kv_cache_dtype == "fp8_ds_mla":
        return "fp8_ds_mla"
    # e4m3 rows have their scale on the device, where no launch parameter can be read from
    return "bf16_rows" if cache.kv_cache_torch_dtype is torch.bfloat16 else None


def _packs_scales() -> bool:
    """Whether the GPU's logits kernel takes UE8M0 scales only."""
    return current_platform.is_cuda() and bool(current_platform.is_device_capability_family(100))


def _spec(compressor: Any, cache_format: CacheFormat | None, page_tokens: int) -> CompressorSpec:
    assert cache_format is not None  # refused when the model was loaded
    return CompressorSpec(
        head_dim=compressor.head_dim,
        compress_ratio=compressor.compress_ratio,
        cache_format=cache_format,
        page_tokens=page_tokens,
        rounding="vllm",
        rotate=False,
        fp8="ocp",  # vLLM keeps the compressed caches in OCP on gfx942 too
        rope_layout="split",
        eps=compressor.rms_norm_eps,
    )


@functools.cache
def _choose(device: torch.device, spec: CompressorSpec) -> None:
    """Select the paths of a kind of compressor and log once which they are."""
    target = detect_target(device)
    selections = decode_selection(target, spec), prefill_selection(target, spec, "paged")
    layers, paths = in_words(spec, selections)
    say(*chosen(layers, target, "; ".join(paths), (), selections))


class FusedCompressor(DeepseekCompressor):  # type: ignore[misc]
    """vLLM's compressor with a step of its own; built by vLLM, see `adopt`."""

    cache_format: CacheFormat  # set by `adopt`

    # the record cache as the engine bound it, its pages as bytes, the layer that writes them
    _bound: tuple[torch.Tensor, torch.Tensor, CompressorLayer] | None = None

    def forward(self, kv_score: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        """The state rows of all tokens and the records of the windows that end with them.

        Args:
            kv_score: ``[T, 2·C·d]`` fp32; positions: ``[T]`` int64. T may be padded.
            rotary_emb: has ``cos_sin_cache [positions, 64]``, cosines first.
        """
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            return  # the profile run, which has no caches
        states = attn_metadata[self.state_cache.prefix]
        if _tokens(states) == 0:
            return
        plan = _plan(self, states, attn_metadata[self.k_cache_prefix], positions)
        kv_cache = _record_cache(self).kv_cache
        if self._bound is None or self._bound[0] is not kv_cache:
            try:
                self._bound = _bind(self, kv_cache, kv_score, states, plan, rotary_emb)
            except ValueError as error:
                # aiter's kernel needs memory that upstream's class reserves in the profile run,
                # which was this one's
                if self.cache_format == "indexer_mxfp4_tiles":
                    raise
                self.__class__ = DeepseekCompressor
                fallback(f"--attention-backend {flag_name('dsv4')}: {error}")
                self.forward(kv_score, positions, rotary_emb)
                return
        _, pages, layer = self._bound
        state = self.state_cache.kv_cache
        try:
            if isinstance(plan, PagedDecode):
                compress_decode_(layer, kv_score, state, pages, plan)
            else:
                compress_prefill_(layer, kv_score, state, pages, plan)
        except Exception as error:
            vllm_flag.log_failed_step(f"compressor {self.state_cache.prefix}", error)
            raise


def _bind(
    compressor: FusedCompressor,
    kv_cache: torch.Tensor,
    kv_score: torch.Tensor,
    states: Any,
    plan: PagedDecode | PagedPrefill,
    rotary_emb: Any,
) -> tuple[torch.Tensor, torch.Tensor, CompressorLayer]:
    """At the first step that has caches, which is the engine's own warm-up where it makes one:
    check them, and compile every kernel that a later step may launch.

    Raises:
        ValueError: the caches are not what the operators take.
    """
    spec = _spec(compressor, compressor.cache_format, kv_cache.shape[1])
    ape = compressor.ape.view(spec.compress_ratio, spec.halves, spec.head_dim)
    layer = CompressorLayer(spec, ape, compressor.norm.weight, rotary_emb.cos_sin_cache)
    memory = kv_cache.view(torch.uint8)
    pages = memory.as_strided((memory.shape[0], spec.page_bytes), (memory.stride(0), 1))
    state = compressor.state_cache.kv_cache
    decode = PagedDecode(
        plan.positions,
        plan.state_slots,
        plan.requests,
        plan.block_table,
        plan.slots,
        pdl_prefetch_safe=True,
    )
    for other in (decode, _prefill(decode, states, spec.compress_ratio)):
        warm_up(CompressorCall(layer, kv_score, state, pages), other)
    return kv_cache, pages, layer


def _plan(
    compressor: FusedCompressor, states: Any, records: Any, positions: torch.Tensor
) -> PagedDecode | PagedPrefill:
    """The step's plan, built once for the layers of one kind and kept with their metadata.

    Main and indexer never share one: vLLM runs them on two streams at the same time. Nor do a
    capture and the run before it, which may have the same metadata: a graph has to hold what
    derives the plan from the step's lengths.
    """
    kept = states.plans
    capturing = is_capturing(positions.device)
    key = (compressor.head_dim, compressor.compress_ratio, id(records), capturing)
    if key in kept:
        plan: PagedDecode | PagedPrefill = kept[key][0]
        return plan
    tokens = _tokens(states)
    decode = PagedDecode(
        positions[:tokens],
        states.slot_mapping[:tokens],
        states.token_to_req_indices[:tokens],
        states.block_table,
        records.slot_mapping[:tokens],
        pdl_prefetch_safe=True,  # written before the forward pass, whose projections lie between
    )
    plan = decode
    # Only a graph of decodes replays nothing but decodes. Any other graph is captured with a dummy
    # batch, often of one token per request, and replayed with whatever has as many tokens. A step
    # that verifies drafts has several tokens per request. State rows and records lie where their
    # position says, so the next step, which starts behind the last accepted token, writes over
    # those of rejected drafts, and until then no token sees them.
    if states.max_query_len > 1 or (capturing and not states.replays_decodes_alone):
        plan = _prefill(decode, states, compressor.compress_ratio)
    kept[key] = (plan, records)  # the object too: its id is the key
    return plan


def _tokens(states: Any) -> int:
    """Tokens of a step. Model Runner V2 pads the slots of every batch, and its requests only in
    FULL graphs: a token that no request has is padding."""
    slots, requests = states.slot_mapping, states.token_to_req_indices
    return min(int(slots.shape[0]), int(requests.shape[0]))


def _prefill(decode: PagedDecode, states: Any, compress_ratio: int) -> PagedPrefill:
    requests = states.query_start_loc.shape[0] - 1
    return PagedPrefill(
        decode.positions,
        decode.state_slots,
        decode.requests,
        decode.block_table,
        decode.slots,
        states.query_start_loc,
        window_ends(decode.positions, decode.state_slots, requests, compress_ratio),
    )


StateCache = with_plans(CompressorStateCache, CompressorBackend, CompressorMetadataBuilder)
