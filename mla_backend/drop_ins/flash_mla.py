"""FlashMLA's interface to sparse decoding for DeepSeek-V4, served by this package.

Names, argument order, defaults, shapes and results are those of FlashMLA while it served Hopper and
the format of 584 bytes, which vLLM keeps. A user changes an import::

    from mla_backend.drop_ins.flash_mla import flash_mla_with_kvcache, get_mla_metadata

What differs: 1 to 128 heads without padding, any page size whose pages start at multiples of 16
bytes, GPUs of both vendors, and no schedule, since the number of splits follows from the shapes.
Dense decoding and prefill are absent: FlashMLA's own are faster on Hopper.
"""

from __future__ import annotations

import torch

from backend_core.contracts import expect_tensors
from mla_backend.contract.sparse_mla import NamedRows, at_one_stride
from mla_backend.sparse_mla import selection_for, sparse_mla
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

_NAMES = {
    "rows.cache": "k_cache",
    "rows.indices": "indices",
    "rows.lengths": "topk_length",
    "extra.cache": "extra_k_cache",
    "extra.indices": "extra_indices_in_kvcache",
    "extra.lengths": "extra_topk_length",
    "sinks": "attn_sink",
    "scale": "softmax_scale",
}
"""FlashMLA's names of the operator's arguments."""


def get_mla_metadata(*args: object, **options: object) -> tuple[None, None]:
    """The schedule of one step, which is empty here; takes FlashMLA's arguments, of any release."""
    return None, None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decoding over one or two paged caches of 584-byte records.

    Args:
        q: ``[batch, seq_len_q, heads, 512]`` bf16. Of several query tokens q and the indices are
            copied where the tokens of all requests do not lie at one stride.
        k_cache: ``[blocks, page size, 1, 584]`` bytes; of a page first the data of all rows, then
            their scales.
        block_table, cache_seqlens, num_splits: ``None``: the indices name rows of the cache.
        head_dim_v: 512.
        tile_scheduler_metadata: taken and not used.
        softmax_scale: by default ``512 ** -0.5``.
        causal: False; is_fp8_kvcache: True.
        indices: ``[batch, seq_len_q, topk]`` int32, page times page size plus row, or -1.
        attn_sink: ``[heads]`` float32 natural logits; without effect on the LSE.
        extra_k_cache, extra_indices_in_kvcache: a second cache and its lists, in the same forms.
        topk_length, extra_topk_length: ``[batch]`` int32: how many indices count, from the left.
        out: ``[batch, seq_len_q, heads, 512]`` bf16, contiguous.

    Returns:
        (out ``[batch, seq_len_q, heads, 512]``, natural LSE ``[batch, heads, seq_len_q]`` float32).
        Where nothing is named the output is 0 and the LSE +inf.

    Raises:
        ValueError: an argument is not as described; nothing has been written then.
    """
    if indices is None:
        raise ValueError(
            "indices must be given: dense attention is not served here, where FlashMLA is faster"
        )
    expect_tensors(q=q, k_cache=k_cache, indices=indices)
    optional = {"attn_sink": attn_sink, "topk_length": topk_length, "out": out,
                "extra_k_cache": extra_k_cache, "extra_topk_length": extra_topk_length,
                "extra_indices_in_kvcache": extra_indices_in_kvcache}  # fmt: skip
    expect_tensors(**{name: x for name, x in optional.items() if x is not None})
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens),
                        ("num_splits", num_splits)):  # fmt: skip
        if value is not None:
            raise ValueError(f"{name} must be None with indices")
    if head_dim_v != HEAD_DIM:
        raise ValueError(f"head_dim_v must be {HEAD_DIM}, got {head_dim_v}")
    if causal or not is_fp8_kvcache:
        raise ValueError(
            "causal must be False and is_fp8_kvcache True with indices, got"
            f" {causal} and {is_fp8_kvcache}"
        )
    if q.dim() != 4:
        raise ValueError(f"q must have shape [batch, seq_len_q, heads, 512], got {list(q.shape)}")
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache must be given together")
    if extra_k_cache is None and extra_topk_length is not None:
        raise ValueError("extra_topk_length must be None without extra_k_cache")
    rows = NamedRows(_pages("k_cache", k_cache), at_one_stride(indices), topk_length)
    extra = None
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        pages = _pages("extra_k_cache", extra_k_cache)
        extra = NamedRows(pages, at_one_stride(extra_indices_in_kvcache), extra_topk_length)
    spec = SparseMlaSpec(
        q.shape[2],
        page_size=rows.cache.shape[1],
        extra_page_size=0 if extra is None else extra.cache.shape[1],
    )
    try:
        out, lse = sparse_mla(
            at_one_stride(q),
            rows,
            selection_for(q.device, spec),
            scale=HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale,
            extra=extra,
            sinks=attn_sink,
            out=out,
        )
    except ValueError as error:
        name, _, said = str(error).partition(" ")
        raise ValueError(f"{_NAMES.get(name, name)} {said}") from error
    return out, lse.transpose(1, 2).contiguous()


def _pages(name: str, cache: torch.Tensor) -> torch.Tensor:
    if cache.dim() != 4 or cache.shape[2] != 1 or cache.shape[3] != 584:
        raise ValueError(
            f"{name} must have shape [blocks, page size, 1, 584], got {list(cache.shape)}"
        )
    return cache.squeeze(2)
