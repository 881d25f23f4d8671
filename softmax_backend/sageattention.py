"""SageAttention's ``sageattn``: the same call, in INT8 and e4m3, right where the original is not.

Causal attention is aligned to the bottom right (the original's SM90 kernel takes the top left), and
the caller's tensors stay as they are (the original's Triton release subtracts the key mean in
place).
"""

from __future__ import annotations

import torch
from torch import Tensor

from softmax_backend.plan import intervals
from softmax_backend.sage import default_blocks, quantised_attention
from softmax_backend.variants.sage import SageMode

DEFAULT_MODE = SageMode()


def sageattn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    mode: SageMode = DEFAULT_MODE,
    *,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
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
        attn_mask, dropout_p: must be ``None`` and 0.
        scale: torch's name for ``sm_scale``.
        enable_gqa: grouped heads are served in any case.

    Raises:
        ValueError: an argument is not as described.
    """
    if attn_mask is not None:
        raise ValueError("attn_mask must be None: masks are plans (softmax_backend.plan)")
    if dropout_p != 0.0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p}")
    if sm_scale is not None and scale is not None:
        raise ValueError(f"only one of sm_scale and scale may be given, got {sm_scale} and {scale}")
    sm_scale = scale if sm_scale is None else sm_scale
    q, k, v = heads_first(tensor_layout, q, k, v)
    d = q.shape[3]
    if d > 128:
        raise ValueError(f"head size must be at most 128, got {d}")
    sm_scale = d**-0.5 if sm_scale is None else sm_scale
    if d not in (64, 128):  # zeros add nothing to a product
        pad = (0, (64 if d < 64 else 128) - d)
        q, k, v = (torch.nn.functional.pad(x, pad) for x in (q, k, v))
    block_m, block_n = default_blocks(q.device)
    make = intervals.causal if is_causal else intervals.dense
    plan = make(
        q.shape[2],
        k.shape[2],
        q.shape[1],
        batch=q.shape[0],
        block_m=block_m,
        block_n=block_n,
        device=q.device,
    )
    out, lse = quantised_attention(q, k, v, plan, scale=sm_scale, mode=mode)
    out = out[..., :d]
    out = out if tensor_layout == "HND" else out.transpose(1, 2)
    return (out, lse) if return_lse else out


def heads_first(tensor_layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, L, D] views of tensors in either layout."""
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f'tensor_layout must be "HND" or "NHD", got {tensor_layout!r}')
    for x in tensors:
        if x.dim() != 4:
            raise ValueError(f"q, k and v must have 4 dimensions, got {list(x.shape)}")
    return tensors if tensor_layout == "HND" else tuple(x.transpose(1, 2) for x in tensors)
