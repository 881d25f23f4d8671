"""SpargeAttn's entry points: predicted block-sparse attention in 8 bits.

Causal calls mask the diagonal (the original's recommended path does not), fewer queries than keys
are aligned to the bottom right, any length is served, and the current stream is used. The LSE is
natural and always complete.

What is kept differs in two places. Of a sum ``cdfthreshd`` the original leaves out the block that
reaches it, so that less is kept than asked; here it is kept. A share ``topk`` is rounded down
there, and of all blocks under a causal mask too; here it is rounded up, and of the blocks that a
tile may see. Thresholds are numbers, where the original also takes one for each head.

``pvthreshd`` is taken and no product is left out for it: the branch was measured to cost a quarter
of the speed until well over half of the blocks skip, and not skipping is the more accurate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_backend.plan.block_plan import FULL, PARTIAL, BlockPlan, from_kinds, uniform_sequences
from softmax_backend.plan.predicted import Choice
from softmax_backend.sage import predicted_attention, quantised_attention
from softmax_backend.sageattention import heads_first

Result = Tensor | tuple[Tensor, float] | tuple[Tensor, Tensor]


def spas_sage2_attn_meansim_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: float = 0.6,
    cdfthreshd: float = 0.98,
    pvthreshd: float = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """Blocks by the sum of pooled weights; ``spas_sage2_attn_meansim_topk_cuda`` by their number.

    Args:
        q, k, v: [B, H, L, D] ("HND") or [B, L, H, D] ("NHD"), bf16 or fp16, D of 64 or 128.
        simthreshd1: least mean cosine of a block that is pooled; others are kept.
        cdfthreshd: the sum of pooled weights to keep.
        attention_sink: keep the first block of keys.

    Returns:
        The output in q's layout; with ``return_sparsity`` also the share of blocks left out (reads
        the device); else with ``return_lse`` also the natural LSE [B, H, M].

    Raises:
        ValueError: an argument is not as described or not served.
    """
    _refuse(attn_mask, dropout_p, smooth_k, simthreshd1=simthreshd1, cdfthreshd=cdfthreshd)
    q, k, v = heads_first(tensor_layout, q, k, v)
    choice = Choice(
        cdf=cdfthreshd,
        min_likeness=simthreshd1,
        is_causal=is_causal,
        keep_first=attention_sink,
    )
    out, lse, plan = predicted_attention(q, k, v, choice, scale=scale)
    return _returned(out, lse, plan, tensor_layout, output_dtype, return_sparsity, return_lse)


def spas_sage2_attn_meansim_topk_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: float = -0.1,
    cdfthreshd: None = None,
    topk: float = 0.5,
    pvthreshd: float = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """As ``spas_sage2_attn_meansim_cuda``, with a share ``topk`` of the blocks kept."""
    _refuse(attn_mask, dropout_p, smooth_k, simthreshd1=simthreshd1, topk=topk)
    if cdfthreshd is not None:
        raise ValueError(f"cdfthreshd must be None where topk chooses, got {cdfthreshd}")
    q, k, v = heads_first(tensor_layout, q, k, v)
    choice = Choice(
        topk=topk,
        min_likeness=simthreshd1,
        is_causal=is_causal,
        keep_first=attention_sink,
    )
    out, lse, plan = predicted_attention(q, k, v, choice, scale=scale)
    return _returned(out, lse, plan, tensor_layout, output_dtype, return_sparsity, return_lse)


def block_sparse_sage2_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_id: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: float = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention over the blocks of a map: ``mask_id`` bool or int [B, H, tiles, blocks], tiles of
    64 queries by 128 keys (the original's SM90 map) or 128 by 64 (its map elsewhere)."""
    _refuse(None, dropout_p, smooth_k)
    q, k, v = heads_first(tensor_layout, q, k, v)
    b, h, m, n = *q.shape[:3], k.shape[2]
    shapes = {(b, h, -(-m // bm), -(-n // bn)): (bm, bn) for bm, bn in ((128, 64), (64, 128))}
    got = None if mask_id is None else tuple(mask_id.shape)
    if mask_id is None or got not in shapes:
        raise ValueError(f"mask_id must have one of the shapes {list(shapes)}, got {got}")
    block_m, block_n = shapes[got]
    kinds = torch.where(mask_id != 0, FULL, 0).to(torch.int8)
    if n % block_n:
        kinds[..., -1] *= PARTIAL
    if attention_sink:
        kinds[..., 0] = torch.where(kinds[..., 0] == 0, PARTIAL, kinds[..., 0])
    sequences = uniform_sequences(b, m, n, q.device)
    plan = from_kinds(kinds, h, sequences, block_m, block_n)
    out, lse = quantised_attention(q, k, v, plan, scale=scale)
    return _returned(out, lse, plan, tensor_layout, output_dtype, return_sparsity, return_lse)


def _refuse(attn_mask: object, dropout_p: float, smooth_k: bool, **thresholds: object) -> None:
    if attn_mask is not None:
        raise ValueError("attn_mask must be None: masks are plans (softmax_backend.plan)")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    if not smooth_k:
        raise ValueError("smooth_k must be True: 8-bit keys are always smoothed")
    for name, given in thresholds.items():
        if not isinstance(given, float | int):
            raise ValueError(f"{name} must be one number for all heads, got {type(given).__name__}")


def _returned(
    out: Tensor,
    lse: Tensor,
    plan: BlockPlan,
    tensor_layout: str,
    output_dtype: torch.dtype | None,
    return_sparsity: bool,
    return_lse: bool,
) -> Result:
    out = out if tensor_layout == "HND" else out.transpose(1, 2)
    if output_dtype is not None:
        out = out.to(output_dtype)
    if return_sparsity:
        return out, 1.0 - plan.density()
    return (out, lse) if return_lse else out
