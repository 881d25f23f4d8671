"""vLLM: its MLA layers on this family, where it is ahead of vLLM's own choice.

    vllm serve MODEL --attention-backend MLA   # KDA turns it on too

The flag is `backend_core.engines.vllm_flag`'s. What serves is a subclass of what vLLM chooses by
itself, so that caches, and steps in which vLLM's kernel is ahead, stay as they are: of its backend
for dense MLA, of which decodes are taken (`vllm_mla`), and of its layers for DeepSeek-V4's and
V4.1's sparse MLA (`vllm_sparse`). Whether it serves is decided as the layers are built, and logged.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from backend_core.engines import seams, vllm_flag
from backend_core.engines.vllm_flag import (
    Request,
    VllmBackendClaim,
    VllmLayerClaim,
    batch_invariant,
    say,
)
from backend_core.strict import fallback
from backend_core.target import detect_target
from mla_backend.engines import seam_list
from mla_backend.engines.mla_decoder import decode_paths, describe
from mla_backend.engines.vllm_facts import KERNELS, one_rank_refusal, query_tokens
from mla_backend.spec import LATENT_DIM, ROPE_DIM

FAMILY = "mla"
SPARSE = ("vllm.models.deepseek_v4.attention", "vllm.models.deepseek_v41.attention")
FLASHMLA = {
    "vllm.models.deepseek_v4.nvidia.flashmla.DeepseekV4FlashMLAAttention": seam_list.VLLM_V4,
    "vllm.models.deepseek_v41.nvidia.flashmla.DeepseekV4FlashMLAAttention": seam_list.VLLM_V41,
}


def register() -> None:
    """Make the flag known and wait for vLLM's DeepSeek-V4; a second call changes nothing."""
    sparse = VllmLayerClaim("sparse_mla", "DeepSeek-V4 attention", SPARSE, _install)
    vllm_flag.register_family(FAMILY, [VllmBackendClaim("mla", "MLA", choose), sparse])


def _install(module: ModuleType) -> None:
    """Let the class of DeepSeek-V4's attention layers end its ``__init__`` with a decision."""
    vllm_flag.after_init(module.DeepseekV4Attention, adopt)


def adopt(layer: Any, vllm_config: Any) -> None:
    """Take over an attention layer that vLLM just built, or say why it stays vLLM's.

    Raises:
        FallbackError: something of this family failed, in strict mode.
    """
    kind = type(layer)
    if (name := f"{kind.__module__}.{kind.__qualname__}") not in FLASHMLA:
        _stays(kind, "the calls that are served are FlashMLA's")
        return
    reason = vllm_flag.broken(FAMILY) or seams.refusal(FLASHMLA[name])
    if reason is None:
        try:
            ours = importlib.import_module("mla_backend.engines.vllm_sparse")
            if (stays := ours.refusal(layer, vllm_config)) is not None:
                _stays(kind, stays)
                return
            reason = ours.adopt(layer, vllm_config)
        except Exception as error:
            reason = vllm_flag.report_broken(FAMILY, error)
    if reason is not None:
        fallback(f"--attention-backend {vllm_flag.requested(vllm_config)}: {reason}")


def _stays(kind: type, reason: str) -> None:
    say(f"DeepSeek-V4 attention stays {kind.__name__}'s: {reason}")


def choose(request: Request) -> type[Any] | str:
    """The backend class that serves a layer's decodes here, or why vLLM's own choice stays."""
    name = request.upstream.get_name()
    refusal = _layer_refusal(request.selector)
    if refusal is None and name not in KERNELS:
        known = ", ".join(KERNELS)
        refusal = f"decode is served in the place of {known}, and vLLM chooses {name} here"
    refusal = refusal or _engine_refusal(request)
    if refusal is not None:
        return refusal
    target = detect_target(torch.device(request.vllm_config.device_config.device_type))
    steps = query_tokens(request.vllm_config)
    try:
        # vLLM's pages are multiples of 16 tokens here, and paths differ in nothing else
        paths = decode_paths(target, request.num_heads, 16, KERNELS[name], steps)
    except ValueError as error:
        return str(error)
    if not paths.served:
        return paths.why
    if (reason := seams.refusal(seam_list.VLLM_DENSE)) is not None:
        return reason
    from mla_backend.engines import vllm_mla

    say(*describe(paths, target, request.num_heads, name))
    return vllm_mla.BACKENDS[name]


def _layer_refusal(selector: Any) -> str | None:
    if selector.head_size != LATENT_DIM + ROPE_DIM:
        return (
            f"a token of the cache must have {LATENT_DIM} + {ROPE_DIM} channels,"
            f" got {selector.head_size}"
        )
    if selector.dtype != torch.bfloat16:
        return f"queries must be in bfloat16, got {str(selector.dtype).removeprefix('torch.')}"
    if selector.kv_cache_dtype not in (None, "auto", "bfloat16"):
        return (
            f"the cache must be in bfloat16, got {selector.kv_cache_dtype}: this package reads fp8"
            " caches in Triton alone, which no result compares with vLLM's kernels"
        )
    if selector.has_sink or selector.has_sliding_window or selector.use_non_causal:
        return "layers with sinks, a sliding window or attention to later tokens are not served"
    if selector.use_adaptive_verification:
        return "adaptive verification changes the lengths of drafts within a CUDA graph"
    return None


def _engine_refusal(request: Request) -> str | None:
    if batch_invariant():
        return "VLLM_BATCH_INVARIANT is set, and plans change with the batch"
    return one_rank_refusal(request.vllm_config.parallel_config)
