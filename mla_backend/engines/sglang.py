"""sglang: MLA layers on this family, where it is ahead of sglang's own kernel.

    sglang serve --model-path MODEL --page-size 64 --attention-backend mla
    sglang serve --model-path MODEL --attention-backend dsv4

The flag is `backend_core.engines.sglang_flag`'s; ``kda`` turns dense MLA on too. What serves is
sglang's own attention backend. Of dense MLA the decodes are taken, by a subclass in its place
(`sglang_mla`); of DeepSeek-V4's sparse MLA the two calls of FlashMLA (`sglang_sparse`).
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel, get_spec

from backend_core.engines.sglang_flag import (
    SglangBackendClaim,
    SglangLayerClaim,
    register_family,
    say,
)
from backend_core.family import ModelConfig
from backend_core.target import detect_target
from mla_backend.engines import seam_list
from mla_backend.engines.mla_decoder import decode_paths, describe
from mla_backend.engines.sglang_facts import KERNELS, PAGE_MULTIPLE, mla_layers
from mla_backend.family import SPARSE_MODELS, model_refusal


def register() -> None:
    """Make ``mla`` known; see `sglang_flag.register_family` for what it raises."""
    dense = SglangBackendClaim(
        kind="mla",
        title="MLA",
        part=seam_list.SGLANG_DENSE,
        of_model=lambda config: not _is_v4(config) and model_refusal(config) is None,
        choose=choose,
    )
    sparse = SglangLayerClaim(
        kind="sparse_mla",
        title="DeepSeek-V4 attention",
        part=seam_list.SGLANG_SPARSE,
        of_model=_is_v4,
        present=_present,
        install=_install,
    )
    register_family("mla", [dense, sparse])


def choose(runner: Any, upstream: Any) -> type | str:
    """The class that serves a model's MLA decodes here, or why sglang's own backend stays."""
    name = type(upstream).__name__
    if name not in KERNELS:
        return f"decode is served in the place of {', '.join(KERNELS)}, and sglang chooses {name}"
    reason = _engine_refusal(runner, upstream) or _layer_refusal(runner, upstream)
    if reason is not None:
        return reason
    heads = mla_layers(runner.model)[0].tp_q_head_num
    target = detect_target(torch.device(upstream.device))
    try:
        paths = decode_paths(target, heads, PAGE_MULTIPLE, KERNELS[name], (1,))
    except ValueError as error:
        return str(error)
    if paths.refused:
        return paths.why
    if upstream.page_size % PAGE_MULTIPLE:
        return (
            f"pages must have a multiple of {PAGE_MULTIPLE} tokens, got {upstream.page_size}:"
            " --page-size 64 gives such pages"
        )
    from mla_backend.engines import sglang_mla

    say(*describe(paths, target, heads, name))
    return sglang_mla.SplitKvAttnBackend


def _engine_refusal(runner: Any, upstream: Any) -> str | None:
    if upstream.fa_impl_ver != 3:
        return f"decode was compared with FlashAttention 3, got {upstream.fa_impl_ver}"
    if runner.is_draft_worker or get_spec().speculative_algorithm is not None:
        return "speculative decoding verifies drafts in sglang's calls for prompts"
    if upstream.attn_cp_size > 1 or get_parallel().dcp_enabled:
        return "a request must have its whole cache on one rank"
    if upstream.kv_index_translator.is_translating:
        return "pages of the unified memory pool are not served"
    if getattr(upstream, "_kv_shard_pool", None) is not None:
        return "a cache whose pages are spread over ranks is not served"
    return None


def _layer_refusal(runner: Any, upstream: Any) -> str | None:
    if (dtype := runner.model_config.dtype) != torch.bfloat16:
        return f"queries must be in bfloat16, got {str(dtype).removeprefix('torch.')}"
    if (dtype := upstream.kv_cache_dtype) != torch.bfloat16:
        return (
            f"the cache must be in bfloat16, got {str(dtype).removeprefix('torch.')}: this package"
            " reads fp8 caches in Triton alone, which no result compares with sglang's kernels"
        )
    layers = mla_layers(runner.model)
    if not layers:
        return "no layer has a latent head of 512 + 64 channels"
    heads = sorted({layer.tp_q_head_num for layer in layers})
    if len(heads) > 1:
        return f"MLA layers must have one number of heads, got {heads}"
    if any(layer.logit_cap or (layer.sliding_window_size or -1) > -1 for layer in layers):
        return "layers with a cap of the logits or a sliding window are not served"
    return None


def _is_v4(config: ModelConfig) -> bool:
    return config.get("model_type") in SPARSE_MODELS


def _present(backend: Any, runner: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_v4

    return bool(is_deepseek_v4(runner.model_config.hf_config))


def _install(backend: Any, runner: Any) -> None:
    from mla_backend.engines import sglang_sparse

    sglang_sparse.install(backend, runner)
