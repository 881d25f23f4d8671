"""diffusers: ``enable(transformer, VideoAttention(...))`` makes self-attention run here.

diffusers (0.42.1) keeps its attention backends in a closed ``str`` enumeration and a dictionary,
without an entry point: ``enable`` adds a member of its own, and nothing that was there changes.
Which calls are self-attention follows from the names of a model's attention modules, whatever the
lengths of queries and keys: all others keep the backend that they had. What is not served runs in
diffusers' ``native`` backend, which is torch's, and is reported once (`backend_core.strict`):
self-attention with a mask that hides anything, causal, with dropout, that needs gradients, or of
another dtype or head size than ``VideoAttention`` takes. A mask that hides nothing is none; to know
that it is read on the host, and within a CUDA graph's capture it counts as one that hides
something.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backend_core.launch.streams import is_capturing
from backend_core.strict import fallback
from block_sparse_backend.contract import needs_gradient
from block_sparse_backend.video import VideoAttention

SELF = frozenset({"attn", "attn1", "attention", "self_attn", "self_attention"})
"""Names of modules of self-attention, where ``is_cross_attention`` says nothing else."""
TEXT_BEHIND = {
    "ChronoEditTransformer3DModel": False,
    "HunyuanVideo15Transformer3DModel": True,
    "HunyuanVideoTransformer3DModel": True,
    "LTX2VideoTransformer3DModel": False,
    "LTXVideoTransformer3DModel": False,
    "SkyReelsV2Transformer3DModel": False,
    "WanTransformer3DModel": False,
    "WanVACETransformer3DModel": False,
}
"""Models whose self-attention begins with the video's tokens in their order, which sliding tiles
need, and whether text follows."""
BLOCKS = ("blocks.", "vace_blocks.", "transformer_blocks.", "single_transformer_blocks.")
"""Where in these models the self-attention of the video is."""
_registered: dict[tuple[VideoAttention, bool], str] = {}
_calls: dict[str, Callable[..., Tensor]] = {}


def enable(transformer: Any, attention: VideoAttention) -> str:
    """Run the self-attention of a diffusers transformer, and of no other model, through
    ``attention``.

    ``transformer.reset_attention_backend()`` undoes it.

    Args:
        transformer: a diffusers model whose attention processors have a backend of their own.

    Returns:
        The name of the backend, by which reports call it. ``set_attention_backend`` would give it
        to cross-attention too.

    Raises:
        ValueError: the model has no ``set_attention_backend``, or no self-attention whose processor
            has a backend; CogVideoX, Mochi and Stable Diffusion 3 are such, whose processors call
            torch. Or sliding tiles are asked for and the order of its tokens is not known.
    """
    model = type(transformer).__name__
    if not hasattr(transformer, "set_attention_backend"):
        raise ValueError(f"transformer must have set_attention_backend, got {model}")
    is_tiled = attention.kind == "sliding_tile"
    if is_tiled and model not in TEXT_BEHIND:
        raise ValueError(
            "sliding tiles need a transformer whose self-attention begins with the video's tokens,"
            f" one of {', '.join(TEXT_BEHIND)}, got {model}"
        )
    processors = {
        name: module.processor
        for name, module in transformer.named_modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    }
    ours = {
        name: processor
        for name, processor in processors.items()
        if _is_self(transformer.get_submodule(name), name, is_tiled)
    }
    if not ours:
        raise ValueError(
            "transformer must have self-attention whose processors have a backend of their own,"
            f" got {model}, which is not served"
        )
    from diffusers.models.attention_dispatch import AttentionBackendName
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    key = (attention, TEXT_BEHIND.get(model, True))
    if key not in _registered:
        name = f"kda_dsv4_{attention.kind}_{len(_registered)}"
        _register(name, *key)
        _registered[key] = name
    name = _registered[key]
    before = {id(x): x._attention_backend for x in processors.values()}
    active = registry._active_backend
    transformer.set_attention_backend(name)  # which refuses what diffusers does not allow
    # and which is also made the one of every model in the process that was given none
    registry.set_active_backend(active)
    for processor in processors.values():
        previous = before[id(processor)]
        if getattr(previous, "value", previous) in _calls:
            previous = None  # of an earlier call of this function
        processor._attention_backend = previous
    others = {id(x) for module, x in processors.items() if module not in ours}
    for module, processor in ours.items():
        if id(processor) in others:  # one that all modules share
            processor = transformer.get_submodule(module).processor = copy.copy(processor)
        processor._attention_backend = AttentionBackendName(name)
    return name


def _is_self(module: Any, name: str, is_tiled: bool) -> bool:
    """Whether a module of this name is self-attention; with tiles, of the video."""
    if getattr(module, "is_cross_attention", None) or name.rpartition(".")[2] not in SELF:
        return False
    return not is_tiled or name.startswith(BLOCKS)


def _is_full(mask: Tensor) -> bool:
    """Whether a mask, of booleans or added to the logits, hides no key."""
    return bool((mask if mask.dtype == torch.bool else mask == 0).all())


def _register(name: str, attention: VideoAttention, has_text: bool) -> None:
    from diffusers.models import attention_dispatch as dispatch

    names = dispatch.AttentionBackendName
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = member
    names._member_names_.append(member._name_)
    names._value2member_map_[name] = member
    native = dispatch._AttentionBackendRegistry._backends[names.NATIVE]

    def refusal(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool,
        scale: float | None,
    ) -> str | None:
        """Why a call is not served."""
        hides = mask is not None and (is_capturing(q.device) or not _is_full(mask))
        if hides or is_causal or dropout:
            got = f"{'a mask' if hides else 'none'}, {is_causal} and {dropout}"
            return f"self-attention must have no mask, causality or dropout for {name}, got {got}"
        if scale is not None and not 0.0 < scale < math.inf:
            return f"scale must be positive and finite for {name}, got {scale}"
        if needs_gradient(q, k, v):
            return f"{name} has no backward pass, and gradients are asked for"
        if attention.canvas is not None and q.shape[1] != k.shape[1]:
            return f"sliding tiles need as many keys as queries, got {k.shape[1]} and {q.shape[1]}"
        return attention.refusal(q, k, v)

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        if attention.canvas is not None and not has_text:
            tokens = math.prod(attention.canvas)
            if query.shape[1] != tokens:
                raise ValueError(
                    f"the video must have the {tokens} tokens of canvas {attention.canvas}, got"
                    f" {query.shape[1]}"
                )
        why = refusal(query, key, value, attn_mask, dropout_p, is_causal, scale)
        if why is None:
            return attention(query, key, value, scale)
        fallback(why)
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        out: Tensor = native(
            query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **options
        )
        return out

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
        options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
        # what needs gradients is for the native backend, and the operator has none
        if torch.compiler.is_compiling() and not needs_gradient(query, key, value):
            out: Tensor = _opaque(query, key, value, *options, name)
            return out
        return call(query, key, value, *options)

    _calls[name] = call
    dispatch._AttentionBackendRegistry.register(member)(attend)


@torch.library.custom_op("block_sparse_backend::diffusers_attention", mutates_args=())
def _opaque(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    name: str,
) -> torch.Tensor:
    """A call as torch.compile sees it, which traces no further: a mask is read on the host."""
    options = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return _calls[name](query, key, value, *options).contiguous()


@_opaque.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])
