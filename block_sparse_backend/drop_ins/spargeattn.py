"""SpargeAttn's entry points: predicted block-sparse attention in 8 bits.

Causal calls mask the diagonal (the original's recommended path does not), fewer queries than keys
are aligned to the bottom right, any length is served, and the current stream is used. The LSE is
natural and always complete.

What is kept differs in two places. Of a sum ``cdfthreshd`` the original leaves out the block that
reaches it, so that less is kept than asked; here it is kept. A share ``topk`` is rounded down
there, and of all blocks under a causal mask too; here it is rounded up, and of the blocks that a
tile may see. Of grouped heads, which the original does not have, thresholds are the query heads'.

``pvthreshd`` is taken and no product is left out for it: the branch was measured to cost a quarter
of the speed until well over half of the blocks skip, and not skipping is the more accurate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from backend_core.contracts import expect_device
from backend_core.launch.streams import is_elsewhere, run_there
from block_sparse_backend.drop_ins.sageattention import heads_first, refuse_mask
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice, PerHead
from block_sparse_backend.plan.predicted import from_map
from block_sparse_backend.sage import DEFAULT_MODE, predicted_attention, quantised_attention
from block_sparse_backend.spec import SageMode

_predicted = torch.compiler.disable(predicted_attention)  # type: ignore[no-untyped-call]
Result = Tensor | tuple[Tensor, float] | tuple[Tensor, Tensor]
Threshold = float | Sequence[float] | Tensor
"""A number for all heads, or a list or tensor with one for each query head. Within a CUDA graph's
capture a tensor has to be on the device."""


def spas_sage2_attn_meansim_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: Threshold = 0.6,
    cdfthreshd: Threshold = 0.98,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
    *,
    mode: SageMode = DEFAULT_MODE,
) -> Result:
    """Blocks by the sum of pooled weights; ``spas_sage2_attn_meansim_topk_cuda`` by their number.

    Args:
        q, k, v: [B, H, L, D] ("HND") or [B, L, H, D] ("NHD"), bf16 or fp16, D of 64 or 128.
        simthreshd1: least mean cosine of a block that is pooled; others are kept.
        cdfthreshd: the sum of pooled weights to keep. Both are a number, or one for each head.
        attention_sink: keep the first block of keys.
        mode: how the inputs are quantised.

    Returns:
        The output in q's layout; with ``return_sparsity`` also the share of blocks left out (reads
        the device); else with ``return_lse`` also the natural LSE [B, H, M].

    Raises:
        ValueError: an argument is not as described or not served.
    """
    _refuse(attn_mask, dropout_p, smooth_k, output_dtype)
    q, k, v = heads_first(tensor_layout, q, k, v)
    cdf = _of_heads("cdfthreshd", cdfthreshd, q.shape[1])
    likeness = _of_heads("simthreshd1", simthreshd1, q.shape[1])
    choice = Choice(cdf, None, likeness, bool(is_causal), bool(attention_sink))
    attend = _predicted if torch.compiler.is_compiling() else predicted_attention
    result = attend(q, k, v, choice, scale=scale, mode=mode)
    return _returned(result, tensor_layout, output_dtype, return_sparsity, return_lse)


def spas_sage2_attn_meansim_topk_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    smooth_k: bool = True,
    simthreshd1: Threshold = -0.1,
    cdfthreshd: None = None,
    topk: Threshold = 0.5,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
    *,
    mode: SageMode = DEFAULT_MODE,
) -> Result:
    """Do as ``spas_sage2_attn_meansim_cuda``, with a share ``topk`` of the blocks kept; it
    too is a number, or one for each head."""
    _refuse(attn_mask, dropout_p, smooth_k, output_dtype)
    if cdfthreshd is not None:
        raise ValueError(f"cdfthreshd must be None where topk chooses, got {cdfthreshd}")
    q, k, v = heads_first(tensor_layout, q, k, v)
    share = _of_heads("topk", topk, q.shape[1])
    likeness = _of_heads("simthreshd1", simthreshd1, q.shape[1])
    choice = Choice(None, share, likeness, bool(is_causal), bool(attention_sink))
    attend = _predicted if torch.compiler.is_compiling() else predicted_attention
    result = attend(q, k, v, choice, scale=scale, mode=mode)
    return _returned(result, tensor_layout, output_dtype, return_sparsity, return_lse)


spas_sage_attn_meansim_cuda = functools.partial(
    spas_sage2_attn_meansim_cuda, mode=SageMode(fp8_values=False)
)
"""``spas_sage2_attn_meansim_cuda`` with values in 16 bits."""
spas_sage_attn_meansim_topk_cuda = functools.partial(
    spas_sage2_attn_meansim_topk_cuda, mode=SageMode(fp8_values=False)
)
"""``spas_sage2_attn_meansim_topk_cuda`` with values in 16 bits."""


def block_sparse_sage2_attn_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_id: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    smooth_k: bool = True,
    pvthreshd: Threshold = 50,
    attention_sink: bool = False,
    tensor_layout: str = "HND",
    output_dtype: torch.dtype | None = None,
    return_sparsity: bool = False,
    return_lse: bool = False,
) -> Result:
    """Attention over the blocks of a map: ``mask_id`` bool or int [B, H, tiles, blocks], tiles of
    64 queries by 128 keys (the original's SM90 map) or 128 by 64 (its map elsewhere)."""
    _refuse(None, dropout_p, smooth_k, output_dtype)
    q, k, v = heads_first(tensor_layout, q, k, v)
    b, h, m, n = *q.shape[:3], k.shape[2]
    shapes = {(b, h, -(-m // bm), -(-n // bn)): (bm, bn) for bm, bn in ((128, 64), (64, 128))}
    got = tuple(mask_id.shape) if isinstance(mask_id, Tensor) else None
    if mask_id is None or got not in shapes:
        raise ValueError(f"mask_id must have one of the shapes {list(shapes)}, got {got}")
    expect_device("mask_id", mask_id, q.device)
    block_m, block_n = shapes[got]
    attend = _mapped if torch.compiler.is_compiling() else mapped_attention
    result = attend(q, k, v, mask_id, (block_m, block_n), attention_sink, scale)
    return _returned(result, tensor_layout, output_dtype, return_sparsity, return_lse)


def mapped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Tensor,
    blocks: tuple[int, int],
    keep_first: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, BlockPlan]:
    """Output and LSE of ``quantised_attention`` over the blocks of a map, and its plan.

    Args:
        kept, keep_first: as ``from_map`` takes them.
        blocks: queries in a tile and keys in a block.
    """
    if is_elsewhere(q):
        return run_there(q, mapped_attention, locals())
    plan = from_map(kept, (q.shape[2], k.shape[2]), blocks, keep_first)
    return (*quantised_attention(q, k, v, plan, scale=scale), plan)


_mapped = torch.compiler.disable(mapped_attention)  # type: ignore[no-untyped-call]


def _of_heads(name: str, given: Threshold, heads: int) -> PerHead:
    """A number for all heads, or a tensor [heads].

    Raises:
        ValueError: it is neither, nor can be made one.
    """
    if isinstance(given, float | int):
        return float(given)
    is_list = isinstance(given, list | tuple) and all(isinstance(x, float | int) for x in given)
    found = torch.tensor(given, dtype=torch.float32) if is_list else given
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{name} must be a number, or a list or tensor of one for each head, got "
            f"{type(given).__name__}"
        )
    if found.dim() == 0:
        return found.expand(heads)
    if found.shape != (heads,):
        raise ValueError(f"{name} must have shape [{heads}], got {list(found.shape)}")
    return found


def _refuse(attn_mask: object, dropout_p: float, smooth_k: bool, output_dtype: object) -> None:
    refuse_mask(attn_mask, dropout_p)
    if output_dtype is not None and not isinstance(output_dtype, torch.dtype):
        raise ValueError(f"output_dtype must be a torch.dtype or None, got {output_dtype!r}")
    if not smooth_k:
        raise ValueError("smooth_k must be True: 8-bit keys are always smoothed")


def _returned(
    result: tuple[Tensor, Tensor, BlockPlan],
    tensor_layout: str,
    output_dtype: torch.dtype | None,
    return_sparsity: bool,
    return_lse: bool,
) -> Result:
    out, lse, plan = result
    out = out if tensor_layout == "HND" else out.transpose(1, 2)
    if output_dtype is not None:
        out = out.to(output_dtype)
    if return_sparsity:
        return out, 1.0 - plan.density()
    return (out, lse) if return_lse else out
