"""DeepSeek-V4's and V4.1's attention in vLLM with FlashMLA's calls made here, where it is ahead.

Which rows a token attends to, the caches and the split into decodes and prefills are vLLM's; so is
in V4.1 that several layers read the rows of one, and lists of one indexer. Its layer hands FlashMLA
queries, caches and index lists, and a layer that was taken over (`adopt`) has those two calls made
here. The queries of such a layer keep their own number of heads, where FlashMLA has them padded to
64, if every call of the layer is made here.

Where a batch is served follows from its number of query tokens alone. A FULL graph is captured for
one number of them; in PIECEWISE graphs vLLM runs its attention eagerly.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.config import VllmConfig

from backend_core.engines.in_place import in_place_of
from backend_core.engines.vllm_blocks import block_tokens
from backend_core.engines.vllm_flag import batch_invariant, log_failed_step, say
from backend_core.target import Target, detect_target
from mla_backend.engines.flash_mla_calls import make
from mla_backend.engines.seam_list import DECODE, PREFILL
from mla_backend.engines.sparse_layer import (
    MIN_WIDTH,
    LayerShape,
    SparseLayer,
    runs_all,
    sparse_paths,
)
from mla_backend.engines.vllm_facts import one_rank_refusal
from mla_backend.scratch import SplitScratch
from mla_backend.spec_sparse_mla import HEAD_DIM

_PADDED = (8, 16, 32)
"""Heads that vLLM's kernel which makes the queries is compiled for, below FlashMLA's 64."""

_layer: ContextVar[SparseAttention | None] = ContextVar("layer", default=None)
# Layers hold theirs, so that both end with the engine: under --enable-sleep-mode their memory is of
# vLLM's pool of weights, which must be empty before the process makes another engine.
_served: WeakValueDictionary[tuple[Target, LayerShape, torch.device], SparseLayer]
_served = WeakValueDictionary()
_scratches: WeakValueDictionary[torch.device, SplitScratch] = WeakValueDictionary()


def adopt(layer: Any, vllm_config: VllmConfig) -> str | None:
    """Take over a layer whose base class vLLM just built; or why it stays vLLM's, as something
    failed."""
    kind: Any = type(layer)
    flashmla = sys.modules[kind.__module__]  # of this kind, which calls FlashMLA by these names
    for name in (DECODE, PREFILL):
        _let_layers_call_here(flashmla, name)
    try:
        served = _sparse_layer(layer, vllm_config)
    except LookupError as error:
        return str(error)
    if layer.padded_heads != served.form.heads:
        _keep_heads(layer, served.form.heads)
    layer.served = served
    layer.__class__ = _served_kind(kind)
    say(*served.describe(layer.n_local_heads))
    return None


def refusal(layer: Any, vllm_config: VllmConfig) -> str | None:
    """Why vLLM's choice stays for a layer, from what the layer and the engine are."""
    if batch_invariant():
        return "VLLM_BATCH_INVARIANT is set, and the splits of a step change with the batch"
    if vllm_config.parallel_config.use_ubatching:
        return "micro-batches run layers at the same time, and these share one scratch memory"
    # V4.1 calls its records of Blackwell so too
    records = "mxfp8" if getattr(layer, "kv_mxfp8", False) else layer.kv_cache_dtype
    if layer.head_dim != HEAD_DIM or records != "fp8_ds_mla":
        return (
            f"rows must be fp8_ds_mla records of {HEAD_DIM} channels, got {records}"
            f" of {layer.head_dim}"
        )
    if vllm_config.model_config.dtype != torch.bfloat16:
        return f"queries must be in bfloat16, got {vllm_config.model_config.dtype}"
    reason = one_rank_refusal(vllm_config.parallel_config)
    if reason is not None:
        return reason
    paths = sparse_paths(_target(vllm_config), layer.n_local_heads)
    return None if paths.served else paths.why


def _target(vllm_config: VllmConfig) -> Target:
    return detect_target(torch.device(vllm_config.device_config.device_type))


def _sparse_layer(layer: Any, vllm_config: VllmConfig) -> SparseLayer:
    heads = layer.padded_heads
    if runs_all(sparse_paths(_target(vllm_config), layer.n_local_heads)):
        heads = next((n for n in _PADDED if n >= layer.n_local_heads), heads)
    topks: tuple[int, ...] = (layer.window_size,)
    extra_page_size, ratio = 0, layer.compress_ratio
    # V4.1's layers, which name the one whose rows they read, have rows of ratio 1 too
    if ratio > (0 if hasattr(layer, "compressed_cache_prefix") else 1):
        topk = vllm_config.model_config.hf_config.index_topk  # the indexer's choice
        if ratio > 4:  # all compressed tokens of a request
            topk = -(-vllm_config.model_config.max_model_len // ratio)
            topk = -(-topk // MIN_WIDTH) * MIN_WIDTH
        topks = (layer.window_size, topk)
        extra_page_size = max(1, block_tokens(layer, vllm_config) // ratio)
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    scheduler = vllm_config.scheduler_config
    form = LayerShape(
        heads=heads,
        page_size=layer.swa_cache_layer.block_size,
        extra_page_size=extra_page_size,
        topks=topks,
        max_tokens=min(scheduler.max_num_seqs * (1 + drafts), scheduler.max_num_batched_tokens),
    )
    device = torch.device(vllm_config.device_config.device_type)
    return _of_form(_target(vllm_config), form, device)


def _of_form(target: Target, form: LayerShape, device: torch.device) -> SparseLayer:
    """One for all layers that are alike, its kernels compiled."""
    served = _served.get((target, form, device))
    if served is None:
        served = SparseLayer(target, form, _scratches.setdefault(device, SplitScratch(device)))
        served.warm_up(device)
        _served[target, form, device] = served
    return served


def _keep_heads(layer: Any, heads: int) -> None:
    """Queries, outputs and sinks of a layer with so many heads, before weights are loaded."""
    sink = torch.nn.Parameter(layer.attn_sink.data[:heads].clone(), requires_grad=False)
    vars(sink).update(vars(layer.attn_sink))  # the release's way to load it
    layer.attn_sink = sink
    layer.padded_heads = heads


class SparseAttention:
    """Mixin for vLLM's layers, the other base: their calls of FlashMLA are made here (`adopt`)."""

    prefix: str
    served: SparseLayer

    def forward_mqa(
        self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
    ) -> None:
        token = _layer.set(self)
        try:
            super().forward_mqa(q, kv, positions, output)  # type: ignore[misc]
        finally:
            _layer.reset(token)


@functools.cache
def _served_kind(upstream: Any) -> Any:
    return type("SparseAttention", (SparseAttention, upstream), {})


def _let_layers_call_here(flashmla: Any, name: str) -> None:
    """Let FlashMLA's function in vLLM's module be ours for layers that are served."""
    phase, upstream = "decode" if name == DECODE else "prefill", getattr(flashmla, name)

    @in_place_of(flashmla, name)
    def call(*args: Any, **arguments: Any) -> Any:
        layer = _layer.get()
        # vLLM's attention layer names the arguments of these calls
        if args or layer is None or not layer.served.covers(phase, arguments["q"].shape[0]):
            return upstream(*args, **arguments)
        try:
            return make(layer.served, name, arguments)
        except Exception as error:
            log_failed_step(f"sparse attention {layer.prefix}", error)
            raise
