"""FlashMLA's interface to dense MLA decoding, served by this package.

Names, argument order, defaults, shapes and results are those of FlashMLA while it served Hopper:
the form with tensors (2025) and the form with `FlashMLASchedMeta` (2026). A user changes an
import::

    from mla_backend.drop_ins.flash_mla import flash_mla_with_kvcache, get_mla_metadata

What differs: any page size, 1 to 128 heads without padding, and a schedule of our own
(``step_plan.py`` describes its tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend_core.contracts import expect_device
from mla_backend.api import mla_decode, selection_for
from mla_backend.contract.mla_decode import split_cache
from mla_backend.contract.sparse_mla import at_one_stride
from mla_backend.plan.planner import MlaPlanner
from mla_backend.spec import LATENT_DIM, ROPE_DIM, MlaSpec
from mla_backend.step_plan import StepPlan

HEAD_DIM = LATENT_DIM + ROPE_DIM
_NO_LISTS = (None, None, None, None)


@dataclass
class FlashMLASchedMeta:
    """The schedule of one step; filled by the first call that uses it.

    It may be used again while the shapes and the values of ``cache_seqlens`` stay the same.
    """

    config: tuple[int, ...] | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None

    @property
    def have_initialized(self) -> bool:
        return self.tile_scheduler_metadata is not None


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor | FlashMLASchedMeta, torch.Tensor | None]:
    """The schedule of one step, shared by its layers; no host sync.

    Args:
        cache_seqlens: ``[batch]`` int32; without it the result is (an empty `FlashMLASchedMeta`,
            ``None``), as FlashMLA returns since 2026.
        num_q_tokens_per_head_k: query tokens times query heads per key head.
        num_heads_k: 1.
        num_heads_q, is_fp8_kvcache: as in FlashMLA; without effect on the schedule.
        topk: must be ``None``: sparse attention is not served here.

    Returns:
        (tile_scheduler_metadata ``[parts, 8]``, num_splits ``[batch + 1]``), int32.
        Columns: first request, first block, last request, end block, number of the first split.

    Raises:
        ValueError: an argument is not as described.
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    if topk is not None:
        raise ValueError(f"topk must be None (dense attention), got {topk}")
    if num_heads_k != 1:
        raise ValueError(f"num_heads_k must be 1, got {num_heads_k}")
    if num_q_tokens_per_head_k is None or not 1 <= num_q_tokens_per_head_k <= 1024:
        raise ValueError(
            f"num_q_tokens_per_head_k must be 1 to 1024, got {num_q_tokens_per_head_k}"
        )
    rows = num_q_tokens_per_head_k
    tokens = next((n for n in range(1, 9) if rows % n == 0 and rows // n <= 128), 0)
    if not tokens:
        raise ValueError(
            f"num_q_tokens_per_head_k must be 1 to 8 query tokens times 1 to 128 heads, got {rows}"
        )
    spec = MlaSpec(rows // tokens, 64, query_tokens=tokens)
    plan = MlaPlanner(selection_for(cache_seqlens.device, spec)).plan(cache_seqlens)
    return plan.work, plan.num_splits


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: None = None,
    extra_indices_in_kvcache: None = None,
    topk_length: None = None,
    extra_topk_length: None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense MLA decoding over a paged cache.

    Args:
        q: ``[batch, seq_len_q, heads, 576]`` bf16 or fp16.
        k_cache: ``[blocks, page size, 1, 576]`` in q's dtype.
        block_table: ``[batch, max_blocks]`` int32; cache_seqlens: ``[batch]`` int32.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: of `get_mla_metadata`.
        softmax_scale: by default ``576 ** -0.5``.
        causal: query token i of s sees all keys but the last s - 1 - i.
        is_fp8_kvcache: must be False.
        indices, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: must be
            ``None``: sparse attention is not served here.
        attn_sink: ``[heads]`` float32 natural logits; without effect on the LSE.

    Returns:
        (out ``[batch, seq_len_q, heads, 512]``, natural LSE ``[batch, heads, seq_len_q]`` float32).

    Raises:
        ValueError: an argument is not as described; nothing has been written then.
    """
    if indices is not None:
        raise ValueError("indices must be None: sparse attention is not served here")
    if (extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length) != _NO_LISTS:
        raise ValueError(
            "extra_k_cache, extra_indices_in_kvcache, topk_length and extra_topk_length must be"
            " None: sparse attention is not served here"
        )
    if is_fp8_kvcache:
        raise ValueError("is_fp8_kvcache must be False: caches of 8 bits are not served here")
    if head_dim_v != LATENT_DIM:
        raise ValueError(f"head_dim_v must be {LATENT_DIM}, got {head_dim_v}")
    if q.dim() != 4 or q.shape[-1] != HEAD_DIM:
        raise ValueError(f"q must have shape [batch, seq_len_q, heads, 576], got {list(q.shape)}")
    if k_cache.dim() != 4 or k_cache.shape[2] != 1:
        raise ValueError(
            f"k_cache must have shape [blocks, page size, 1, 576], got {list(k_cache.shape)}"
        )
    batch, tokens, heads, _ = q.shape
    q = at_one_stride(q)
    spec = MlaSpec(heads, k_cache.shape[1], query_tokens=tokens, dtype=q.dtype)
    selection = selection_for(q.device, spec)
    work, slots = _schedule(tile_scheduler_metadata, num_splits, cache_seqlens, spec)
    plan = StepPlan(cache_seqlens, work, slots, tokens, batch + work.shape[0])
    latent, rope = split_cache(k_cache.squeeze(2), spec)
    out, lse = mla_decode(
        q[..., :LATENT_DIM],
        q[..., LATENT_DIM:],
        latent,
        rope,
        block_table,
        plan,
        selection,
        scale=HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        sinks=attn_sink,
    )
    return out, lse.transpose(1, 2).contiguous()


def _schedule(
    given: torch.Tensor | FlashMLASchedMeta,
    num_splits: torch.Tensor | None,
    cache_seqlens: torch.Tensor,
    spec: MlaSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(given, torch.Tensor):
        if num_splits is None:
            raise ValueError("num_splits must come with tile_scheduler_metadata, got None")
        if given.dim() != 2 or given.shape[1] != 8 or given.dtype != torch.int32:
            raise ValueError(
                "tile_scheduler_metadata must have shape [parts, 8] and dtype int32, got"
                f" {list(given.shape)} and {given.dtype}"
            )
        if num_splits.shape != (cache_seqlens.shape[0] + 1,) or num_splits.dtype != torch.int32:
            raise ValueError(
                f"num_splits must have shape [{cache_seqlens.shape[0] + 1}] and dtype int32, got"
                f" {list(num_splits.shape)} and {num_splits.dtype}"
            )
        for name, tensor in (("tile_scheduler_metadata", given), ("num_splits", num_splits)):
            expect_device(name, tensor, cache_seqlens.device)
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
        return given, num_splits
    if num_splits is not None:
        raise ValueError("num_splits must be None with a FlashMLASchedMeta")
    config = (*cache_seqlens.shape, spec.query_tokens, spec.num_heads, spec.page_size)
    if given.tile_scheduler_metadata is None or given.num_splits is None:
        plan = MlaPlanner(selection_for(cache_seqlens.device, spec)).plan(cache_seqlens)
        given.tile_scheduler_metadata, given.num_splits = plan.work, plan.num_splits
        given.config = config
    expect_device("tile_scheduler_metadata", given.tile_scheduler_metadata, cache_seqlens.device)
    if given.config != config:
        raise ValueError(
            "tile_scheduler_metadata must be used with the shapes (batch, seq_len_q, heads, page"
            f" size) of its first call, {given.config}, got {config}"
        )
    return given.tile_scheduler_metadata, given.num_splits
