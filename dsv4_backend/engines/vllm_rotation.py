"""vLLM: the Walsh-Hadamard rotation of the indexer, keys and queries together.

    vllm serve MODEL --attention-backend DSV4 --additional-config '{"rotate_indexer": true}'

vLLM rotates neither. Rotating spreads outliers over the channels before quantisation, and leaves
the product of key and query as it is; rotating one side alone destroys the top-k. So the two are
decided together, once for a process, and keys that another engine wrote are not read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.models.deepseek_v4 import attention
from vllm.platforms import current_platform

from backend_core.engines.vllm_flag import say
from backend_core.operator import select
from backend_core.target import detect_target
from dsv4_backend import CompressorSpec, quantise_indexer_queries
from dsv4_backend.engines.vllm_compressor import FusedCompressor
from dsv4_backend.launch_params import TABLES

_QUANTISE = "fused_indexer_q_rope_quant"
# the methods of the indexer's class that decide how its queries are quantised
_METHODS = ("forward", "_q_rope_quant")


def rotate(indexer: Any, vllm_config: Any) -> str | None:
    """Rotate keys and queries of an indexer that vLLM just built; or why both stay as they are.

    Raises:
        RuntimeError: the queries of this process are rotated already, which takes all indexers.
    """
    reason = _refusal(indexer, vllm_config)
    is_rotated = getattr(attention, _QUANTISE) is quantise_queries
    if reason is not None:
        if is_rotated:
            raise RuntimeError(f"queries are rotated for all indexers, and one cannot be: {reason}")
        return reason
    indexer.compressor.rotates = True
    if not is_rotated:
        setattr(attention, _QUANTISE, quantise_queries)
        say("the indexer's keys and queries are rotated (rotate_indexer)")
    return None


def _refusal(indexer: Any, vllm_config: Any) -> str | None:
    if type(indexer.compressor) is not FusedCompressor:
        return "the indexer's compressor is not on this backend"
    if vllm_config.kv_transfer_config is not None:
        return "pages that come through a KV connector do not say whether their keys are rotated"
    kind = type(indexer)
    for name in _METHODS:
        if getattr(kind, name, None) is not getattr(attention.DeepseekV4Indexer, name, None):
            return f"{kind.__name__} quantises queries in a {name} of its own"
    if current_platform.fp8_dtype() is not torch.float8_e4m3fn:
        return f"queries must be float8_e4m3fn on this part, got {current_platform.fp8_dtype()}"
    device = torch.device(vllm_config.device_config.device_type)
    try:
        select(TABLES, "queries", detect_target(device), None)
    except LookupError as error:
        return str(error)
    return None


@functools.cache
def _spec(use_fp4: bool) -> CompressorSpec:
    return CompressorSpec(
        head_dim=128,
        compress_ratio=4,
        cache_format="indexer_mxfp4" if use_fp4 else "indexer_fp8",
        page_tokens=64,  # of the keys alone
        rounding="vllm",
        rotate=True,
        fp8="ocp",
        rope_layout="split",
    )


def quantise_queries(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
    weights_out_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """``fused_indexer_q_rope_quant`` with the rotation before the quantisation.

    Returns:
        e4m3 ``[T, H, 128]``, or e2m1 pairs ``[T, H, 64]`` with four UE8M0 bytes as an int32
        ``[T, H]``; weights ``[T, H]``.
    """
    codes, scales, weights = quantise_indexer_queries(
        _spec(use_fp4),
        index_q,
        positions,
        index_q_cos_sin_cache,
        index_weights,
        index_weights_softmax_scale,
        index_weights_head_scale,
    )
    weights = weights.to(weights_out_dtype)
    if scales is None:
        return codes.view(torch.float8_e4m3fn), weights
    return (codes, scales.view(torch.int32).squeeze(-1)), weights
