"""SageAttention's functions: the same calls, in INT8 and e4m3, right where the originals are not.

Causal attention is aligned to the bottom right (the original's SM90 kernel takes the top left), and
the caller's tensors stay as they are (the original's Triton release subtracts the key mean in
place). Keys are smoothed in any case, which neither the output nor the LSE shows, and products are
summed in float32: ``smooth_k``, ``smooth_v``, ``pv_accum_dtype`` and ``quantization_backend`` are
taken and change nothing.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from backend_core.contracts import (
    expect_device,
    expect_shape,
    expect_tensors,
    number,
    whole_number,
)
from block_sparse_backend.contract import empty_output
from block_sparse_backend.plan import kept
from block_sparse_backend.sage import DEFAULT_MODE, packed_attention, quantised_attention
from block_sparse_backend.selection import default_blocks_int8
from block_sparse_backend.spec import SageMode

_packed = torch.compiler.disable(packed_attention)  # type: ignore[no-untyped-call]
Result = Tensor | tuple[Tensor, Tensor]
Groups = Literal["per_warp", "per_thread"]


def sageattn(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    mode: SageMode = DEFAULT_MODE,
    *,
    smooth_k: bool = True,
    smooth_v: bool = False,
    qk_quant_gran: Groups = "per_thread",
    pv_accum_dtype: str = "fp32+fp16",
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Result:
    """Attention in 8 bits.

    It can replace ``torch.nn.functional.scaled_dot_product_attention``, as the original's README
    shows, and takes the other arguments of that function by name. The original silently ignores
    them, including a mask and a scale. Here a mask is refused and a scale is used.

    Args:
        q: [B, H, M, D] ("HND") or [B, M, H, D] ("NHD"), bf16 or fp16, D at most 128.
        k, v: [B, Hkv, N, D] or [B, N, Hkv, D].
        tensor_layout: "HND" or "NHD".
        is_causal: query i sees keys up to i + N - M.
        sm_scale: default 1 / sqrt(D).
        return_lse: return the natural LSE [B, H, M] too.
        mode: how the inputs are quantised.
        smooth_k, smooth_v, qk_quant_gran, pv_accum_dtype: without effect.
        query, key, value: torch's names for ``q``, ``k`` and ``v``.
        attn_mask, dropout_p: must be ``None`` and 0.
        scale: torch's name for ``sm_scale``.
        enable_gqa: grouped heads are served in any case.

    Raises:
        ValueError: an argument is not as described.
    """
    refuse_mask(attn_mask, dropout_p)
    _check_groups(qk_quant_gran)
    if sm_scale is not None and scale is not None:
        raise ValueError(f"only one of sm_scale and scale may be given, got {sm_scale} and {scale}")
    q, k, v = (_one("q", q, "query", query), _one("k", k, "key", key), _one("v", v, "value", value))
    sm_scale = scale if sm_scale is None else sm_scale
    q, k, v = heads_first(tensor_layout, q, k, v)
    (q, k, v), d, sm_scale = _padded(q, k, v, sm_scale)
    if torch.compiler.is_compiling():
        # a tensor's number parts the graph, as the operator takes none
        numbers = bool(is_causal), number("sm_scale", sm_scale)
        out, lse = _opaque(q, k, v, *numbers, mode.fp8_values)
    else:
        out, lse = _attend(q, k, v, is_causal, sm_scale, mode)
    out = out[..., :d]
    out = out if tensor_layout == "HND" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, mode: SageMode
) -> tuple[Tensor, Tensor]:
    expect_device("k", k, q.device)
    (b, h, m, _), n = q.shape, k.shape[2]
    plans = kept.causal if is_causal else kept.dense
    plan = plans.of(q.device, m, n, h, b, *default_blocks_int8(q.device))
    return quantised_attention(q, k, v, plan, scale=scale, mode=mode)


@torch.library.custom_op("block_sparse_backend::sageattn", mutates_args=())
def _opaque(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    fp8_values: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_attend`` as torch.compile sees it, which traces no further."""
    return _attend(q, k, v, is_causal, scale, SageMode(fp8_values))


@_opaque.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def sageattn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    *,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``sageattn`` of each sequence of a packed batch, in one launch.

    Args:
        q: [tokens, H, D]; k, v: [tokens, Hkv, D].
        cu_seqlens_q, cu_seqlens_k: [S + 1], where sequences begin and end.
        max_seqlen_q, max_seqlen_k: no sequence is longer. A tensor on a GPU is read for it.
        smooth_k: without effect.
        attn_mask, dropout_p: must be ``None`` and 0.

    Returns:
        [tokens, H, D]; 0 for a sequence without keys.

    Raises:
        ValueError: an argument is not as described.
    """
    refuse_mask(attn_mask, dropout_p)
    expect_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_shape(name, x, ("tokens", "heads", "D"))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    (q, k, v), d, scale = _padded(q, k, v, sm_scale)
    attend = _packed if torch.compiler.is_compiling() else packed_attention
    offsets = cu_seqlens_q, cu_seqlens_k
    lengths = (
        whole_number("max_seqlen_q", max_seqlen_q, 0),
        whole_number("max_seqlen_k", max_seqlen_k, 0),
    )
    out: Tensor = attend(q, k, v, *offsets, lengths, is_causal=is_causal, scale=scale)
    return out[0, ..., :d].transpose(0, 1)


def _padded(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[tuple[Tensor, Tensor, Tensor], int, float]:
    """The tensors with channels that the kernels take, the number that they have, and the scale.

    Raises:
        ValueError: there is no channel or more than 128, or not as many in each.
    """
    d = q.shape[3]
    if not 0 < d <= 128:
        raise ValueError(f"head size must be at most 128 and not 0, got {d}")
    if k.shape[3] != d or v.shape[3] != d:
        raise ValueError(
            f"head size must be the same in q, k and v, got {d}, {k.shape[3]} and {v.shape[3]}"
        )
    scale = d**-0.5 if scale is None else scale
    if d in (64, 128):
        return (q, k, v), d, scale
    pad = (0, (64 if d < 64 else 128) - d)  # zeros add nothing to a product
    q, k, v = (torch.nn.functional.pad(x, pad) for x in (q, k, v))
    return (q, k, v), d, scale


def _qk_int8_cuda(
    fp8_values: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: Groups = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: None = None,
    dropout_p: float = 0.0,
) -> Result:
    refuse_mask(attn_mask, dropout_p)
    _check_groups(qk_quant_gran)
    mode = SageMode(fp8_values)
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, mode)


sageattn_qk_int8_pv_fp8_cuda = functools.partial(_qk_int8_cuda, True)
"""``sageattn``, whose scales are finer than ``"per_warp"`` and ``"per_thread"`` ones."""
sageattn_qk_int8_pv_fp16_cuda = functools.partial(_qk_int8_cuda, False)
"""``sageattn_qk_int8_pv_fp8_cuda`` with values in 16 bits."""


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    dropout_p: float = 0.0,
) -> Result:
    """``sageattn`` with values in 16 bits, and a scale for each query where the original has one
    for 128. By position ``sm_scale`` comes after ``attn_mask``; releases of the original that have
    no mask took it in that place, where it is refused here."""
    refuse_mask(attn_mask, dropout_p)
    mode = SageMode(fp8_values=False)
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, mode)


def _check_groups(groups: str) -> None:
    if groups not in ("per_warp", "per_thread"):
        raise ValueError(f'qk_quant_gran must be "per_warp" or "per_thread", got {groups!r}')


def _one(name: str, given: Tensor | None, other: str, value: Tensor | None) -> Tensor:
    if given is None and value is not None:
        return value
    if given is None or value is not None:
        raise ValueError(f"exactly one of {name} and {other} must be given")
    return given


def refuse_mask(attn_mask: object, dropout_p: float) -> None:
    """Refuse what of torch's attention is not served.

    Raises:
        ValueError: a mask is given, or dropout.
    """
    if isinstance(attn_mask, float | int):  # a scale by its position in releases without a mask
        raise ValueError(f"attn_mask must be None, got {attn_mask}; pass sm_scale by name")
    if attn_mask is not None:
        raise ValueError("attn_mask must be None: masks are plans (block_sparse_backend.plan)")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")


def heads_first(tensor_layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, L, D] views of tensors in either layout."""
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f'tensor_layout must be "HND" or "NHD", got {tensor_layout!r}')
    for x in tensors:
        expect_tensors(**{"each of q, k and v": x})
        if x.dim() != 4:
            raise ValueError(f"q, k and v must have 4 dimensions, got {list(x.shape)}")
    return tensors if tensor_layout == "HND" else tuple(x.transpose(1, 2) for x in tensors)
