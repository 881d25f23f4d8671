"""Where vLLM's kernels on ROCm look for the indexer's MXFP4 records in a page, which aiter says."""

from __future__ import annotations

_AITERS = ("vllm.models.deepseek_v4.amd.rocm", "DeepseekV4RocmMxfp4Compressor")
# of aiter's MXFP4 pages: tokens and bytes of a tile, and lanes that share a token's scales
_AITERS_TILES = (32, 16, 2)


def is_aiters(kind: type) -> bool:
    """Whether ``kind`` is vLLM's class of compressors whose MXFP4 pages aiter's kernel reads."""
    return (kind.__module__, kind.__name__) == _AITERS


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
