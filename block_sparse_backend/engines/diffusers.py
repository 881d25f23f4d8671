"""diffusers: ``enable(transformer, VideoAttention(...))`` makes self-attention run here.

diffusers (0.42.1) keeps its attention backends in a closed ``str`` enumeration and a dictionary,
without an entry point: ``enable`` adds a member of its own, and nothing that was there changes.
Cross-attention stays with diffusers' ``native`` backend, which is torch's. So does self-attention
with a mask that hides anything, which is reported once (`backend_core.strict`); a mask that hides
nothing is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backend_core.strict import fallback
from block_sparse_backend.video import VideoAttention

_registered: dict[VideoAttention, str] = {}


def enable(transformer: Any, attention: VideoAttention) -> str:
    """Run the self-attention of a diffusers transformer, and of no other model, through
    ``attention``.

    ``transformer.reset_attention_backend()`` undoes it.

    Args:
        transformer: a diffusers model whose attention processors have a backend of their own.

    Returns:
        The name of the backend, which ``set_attention_backend`` and the context manager
        ``attention_backend`` of diffusers take from now on.

    Raises:
        ValueError: the model has no ``set_attention_backend``, or no processor with a backend.
            CogVideoX, Mochi and Stable Diffusion 3 are such: their processors call torch.
    """
    if not hasattr(transformer, "set_attention_backend"):
        raise ValueError(
            f"transformer must have set_attention_backend, got {type(transformer).__name__}"
        )
    if attention not in _registered:
        name = f"kda_dsv4_{attention.kind}_{len(_registered)}"
        _register(name, attention)
        _registered[attention] = name
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    name = _registered[attention]
    active = registry._active_backend
    transformer.set_attention_backend(name)
    # which is also made the one of every model in the process that was given none
    registry.set_active_backend(active)
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    if not any(getattr(x, "_attention_backend", None) == name for x in processors):
        model = type(transformer).__name__
        calls = (getattr(type(x).__call__, "__code__", None) for x in processors)
        if any("dispatch_attention_fn" in code.co_names for code in calls if code is not None):
            advice = f"may be called within attention_backend({name!r})"
        else:
            advice = "is not served: its processors call torch's attention themselves"
        raise ValueError(
            "transformer must have attention processors with a backend of their own, got"
            f" {model}, which {advice}"
        )
    return name


def _is_full(mask: Tensor) -> bool:
    """Whether a mask, of booleans or added to the logits, hides no key."""
    return bool((mask if mask.dtype == torch.bool else mask == 0).all())


def _register(name: str, attention: VideoAttention) -> None:
    from diffusers.models import attention_dispatch as dispatch

    names = dispatch.AttentionBackendName
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = member
    names._member_names_.append(member._name_)
    names._value2member_map_[name] = member

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """[B, L, H, D] in and out."""
        if query.shape[:2] == key.shape[:2]:
            hides = attn_mask is not None and not _is_full(attn_mask)
            if not (hides or is_causal or dropout_p):
                return attention(query, key, value, scale)
            fallback(
                f"self-attention must have no mask, causality or dropout for {name}, got"
                f" {'a mask' if hides else 'none'}, {is_causal} and {dropout_p}"
            )
        out: Tensor = native(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out

    native = dispatch._AttentionBackendRegistry._backends[names.NATIVE]
    dispatch._AttentionBackendRegistry.register(member)(attend)
