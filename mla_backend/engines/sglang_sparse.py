"""DeepSeek-V4's and V4.1's attention in sglang: FlashMLA's calls on this family, where it is ahead.

Which rows a token attends to, the caches and the kinds of steps are sglang's: its attention backend
hands FlashMLA queries, caches and index lists, and those two calls are made here for layers that
were taken over (`install`). If every call of a layer is made here its queries keep their own number
of heads, where sglang has them padded to 64.

Where a batch is served follows from its number of query tokens alone, which a CUDA graph is
captured for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.models.deepseek_v4 import MQALayer
from sglang.srt.runtime_context import get_schedule, max_speculative_num_draft_tokens

from backend_core.engines.in_place import in_place_of
from backend_core.engines.sglang_flag import say
from backend_core.strict import fallback
from backend_core.target import detect_target
from mla_backend.beside import Beside
from mla_backend.engines.flash_mla_calls import make
from mla_backend.engines.seam_list import DECODE, PREFILL
from mla_backend.engines.sparse_layer import (
    MIN_WIDTH,
    LayerShape,
    SparseLayer,
    runs_all,
    sparse_paths,
)
from mla_backend.scratch import SplitScratch

RECORD_BYTES, WINDOW = 584, 128
_layer: ContextVar[SparseLayer | None] = ContextVar("layer", default=None)


def install(backend: Any, runner: Any) -> None:
    """Take over the calls of FlashMLA that ``backend`` makes for its layers; or say why not."""
    stays = _refusal(backend, runner)
    if stays is not None:
        say(f"DeepSeek-V4 attention stays {type(backend).__name__}'s: {stays}")
        return
    target, scratch = detect_target(backend.device), SplitScratch(backend.device)
    served: dict[int, SparseLayer] = {}
    native: list[Any] = []
    said: set[str] = set()
    for module in runner.model.modules():
        if not isinstance(module, MQALayer):
            continue
        ratio, heads = module.compress_ratio, module.n_local_heads
        paths = sparse_paths(target, heads)
        stays = _layer_refusal(module, paths, backend.token_to_kv_pool)
        if stays is None and ratio not in served:
            try:
                form = _form(backend, runner, module, runs_all(paths))
                served[ratio] = layer = SparseLayer(target, form, scratch)
                layer.warm_up(backend.device)
            except LookupError as error:
                fallback(f"--attention-backend dsv4: {error}")
                return
            say(*layer.describe(heads))
        if stays is None and served[ratio].form.heads == heads:
            native.append(module)
        elif stays is not None and stays not in said:
            said.add(stays)
            say(f"DeepSeek-V4 attention of ratio {ratio} stays FlashMLA's: {stays}")
    if served:
        _take_over(backend, served)
    for module in native:
        module._kernel_num_heads = _own_heads(module.n_local_heads)


def _refusal(backend: Any, runner: Any) -> str | None:
    """Why no layer is taken over, from what sglang serves the model with."""
    kind = type(backend)
    if kind is not DeepseekV4AttnBackend:
        return "the calls that are served are those of DeepseekV4AttnBackend"
    if not hasattr(backend, "_flash_mla_with_kvcache") or backend.trtllm_attn:
        return "sglang does not call FlashMLA here"
    if runner.is_draft_worker:
        return "the steps of a draft have attention backends of their own"
    if runner.model_config.dtype != torch.bfloat16:
        return f"queries must be in bfloat16, got {runner.model_config.dtype}"
    return _other_records(backend.token_to_kv_pool.get_swa_key_bytes_per_token())


def _other_records(size: int) -> str | None:
    return None if size == RECORD_BYTES else f"records must have {RECORD_BYTES} bytes, got {size}"


def _layer_refusal(module: Any, paths: Beside[str, Any], pool: Any) -> str | None:
    if module.compress_ratio:
        other = _other_records(pool.get_extra_key_bytes_per_token(module.layer_id))
        if other is not None:
            return other
    if module.use_mega_attention:
        return "attention that is fused with its output projection is not served"
    return None if paths.served else paths.why


def _form(backend: Any, runner: Any, module: Any, runs_all: bool) -> LayerShape:
    pool, ratio = backend.token_to_kv_pool, module.compress_ratio
    topks: tuple[int, ...] = (WINDOW,)
    extra_page_size = 0
    if ratio:
        topk = -(-backend.max_context_len // ratio) if ratio == 128 else backend.index_topk
        topks = (WINDOW, -(-topk // MIN_WIDTH) * MIN_WIDTH)
        extra_page_size = pool.get_extra_key_page_size(module.layer_id)
    # what sglang has resolved: the arguments of a ModelRunner are those that a user gave
    drafts, chunk = max_speculative_num_draft_tokens() or 1, get_schedule().chunked_prefill_size
    return LayerShape(
        heads=module.n_local_heads if runs_all else max(module.n_local_heads, 64),
        page_size=pool.get_swa_key_page_size(),
        extra_page_size=extra_page_size,
        topks=topks,
        # without sparse prefill, pieces of prompts make the decode call too
        max_tokens=max(runner.req_to_token_pool.size * drafts, chunk or 0),
    )


def _own_heads(heads: int) -> Callable[[int], int]:
    """In the place of what gives the heads that queries are padded to."""
    return lambda num_tokens: heads


def _take_over(backend: Any, served: dict[int, SparseLayer]) -> None:
    """Let the calls of FlashMLA that this backend makes go through here."""
    from sglang.kernels.ops.attention import flash_mla_interface  # needs FlashMLA itself

    by_page = {layer.form.extra_page_size: layer for layer in served.values()}
    decode = backend._flash_mla_with_kvcache

    def flash_mla_with_kvcache(**call: Any) -> Any:
        extra = call["extra_k_cache"]
        layer = by_page.get(0 if extra is None else extra.shape[1])
        return _here_or_there(layer, DECODE, decode, call)

    backend._flash_mla_with_kvcache = flash_mla_with_kvcache
    prefill = backend._forward_prefill_sparse

    def forward_prefill_sparse(**call: Any) -> Any:
        token = _layer.set(served.get(call["compress_ratio"]))
        try:
            return prefill(**call)
        finally:
            _layer.reset(token)

    backend._forward_prefill_sparse = forward_prefill_sparse
    upstream = flash_mla_interface.flash_mla_sparse_fwd

    @in_place_of(flash_mla_interface, PREFILL)
    def flash_mla_sparse_fwd(*args: Any, **call: Any) -> Any:
        if args:  # another model's
            return upstream(*args, **call)
        return _here_or_there(_layer.get(), PREFILL, upstream, call)


def _here_or_there(
    layer: SparseLayer | None, name: str, upstream: Callable[..., Any], call: dict[str, Any]
) -> Any:
    phase = "decode" if name == DECODE else "prefill"
    q: torch.Tensor = call["q"]
    # a layer that stays FlashMLA's pads its queries, and may have pages of the same size
    if layer is None or q.shape[-2] != layer.form.heads or not layer.covers(phase, q.shape[0]):
        return upstream(**call)
    return make(layer, name, call)
