"""Where vLLM's kernels on ROCm look for the indexer's records in a page.

They are asked when a model is loaded, since they differ by release. In 0.30 they take the fp8 keys
of every model in tiles of 16 x 16, while vLLM's own compressor of DeepSeek-V4 writes them one after
another, so that upstream's top-k is that of other keys (vllm#52109). From 0.31 on they take them as
that compressor writes them. With ``indexer_kv_dtype="mxfp4"`` aiter says where records lie.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from vllm.platforms import current_platform

from dsv4_backend.spec import CacheFormat

_READERS = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
_AITERS = ("vllm.models.deepseek_v4.amd.rocm", "DeepseekV4RocmMxfp4Compressor")
# of aiter's MXFP4 pages: tokens and bytes of a tile, and lanes that share a token's scales
_AITERS_TILES = (32, 16, 2)


def is_aiters(kind: type) -> bool:
    """Whether ``kind`` is vLLM's class of compressors whose MXFP4 pages aiter's kernel reads."""
    return (kind.__module__, kind.__name__) == _AITERS


def fp8_format() -> CacheFormat:
    """The format of the indexer's fp8 records that vLLM's readers take on this platform."""
    return "indexer_fp8_tiles" if _gather_takes_tiles() else "indexer_fp8"


def two_readers() -> str | None:
    """Why no format of fp8 records serves prefill and decode.

    Prefill gathers keys with vLLM's own kernel. For decode in 0.30 only aiter's kernel for gfx942
    and gfx950 takes tiles; what replaces it elsewhere takes flat pages.
    """
    if not _gather_takes_tiles() or _decode_takes_tiles(_readers()):
        return None
    return (
        "in 0.30 vllm's prefill reads the indexer's keys in tiles of 16 tokens, and without"
        " aiter's paged MQA logits for gfx942 or gfx950 its decode reads them one after another"
    )


def other_tiles(index_heads: int, head_dim: int, page_tokens: int) -> str | None:
    """Why aiter's kernel reads other MXFP4 pages than this package writes; it is asked as vLLM
    asks it.

    Args:
        index_heads: query heads of the indexer, all of them.
        page_tokens: compressed tokens in a page.
    """
    try:
        from vllm.v1.attention.ops.rocm_paged_mxfp4_indexer import rocm_paged_mxfp4_cache_layout

        got = tuple(rocm_paged_mxfp4_cache_layout(index_heads, head_dim, page_tokens))
    except (ImportError, ValueError) as error:
        return f"aiter does not say how its MXFP4 pages lie: {error}"
    if got == _AITERS_TILES:
        return None
    return f"aiter's MXFP4 pages must have tiles of {_AITERS_TILES}, got {got}"


def _readers() -> ModuleType:
    return importlib.import_module(_READERS)


def _gather_takes_tiles() -> bool:
    if not current_platform.is_rocm():
        return False
    is_flat: Any = getattr(_readers(), "_indexer_k_is_c4a_block_flat", None)
    return is_flat is None or not is_flat(4)


def _decode_takes_tiles(readers: ModuleType) -> bool:
    from vllm._aiter_ops import rocm_aiter_ops

    is_served = readers._ON_GFX942 or readers._ON_GFX950
    is_served = bool(is_served and rocm_aiter_ops.is_enabled())
    return is_served and readers.paged_mqa_logits_module() is not None
