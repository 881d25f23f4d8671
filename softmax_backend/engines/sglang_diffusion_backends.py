"""The attention classes that sglang's video server builds under ``sparge_attn`` and ``sage_attn``.

Imported by sglang alone, by the dotted paths of ``sglang_diffusion.BACKENDS``.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from softmax_backend.video import VideoAttention

HEAD_SIZES = [64, 128]


class _Impl(AttentionImpl):  # type: ignore[misc]
    """Self-attention through ``VideoAttention``; the rest through torch."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        **extra_impl_args: Any,
    ) -> None:
        if head_size not in HEAD_SIZES:
            raise ValueError(f"head_size must be one of {HEAD_SIZES}, got {head_size}")
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.attention = self.settings()

    def settings(self) -> VideoAttention:
        raise NotImplementedError

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata
    ) -> Tensor:
        """[B, L, H, D] in and out; cross-attention and causal calls are torch's."""
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        if query.shape == key.shape and not self.causal and is_half:
            return self.attention(query, key, value, self.softmax_scale).contiguous()
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()


class PredictedImpl(_Impl):
    """``--attention-backend-config topk=0.5``: the share of blocks kept."""

    def settings(self) -> VideoAttention:
        from sglang.multimodal_gen.runtime.server_args import get_global_server_args

        config = get_global_server_args().attention_backend_config or {}
        return VideoAttention("predicted", topk=float(config.get("topk", 0.5)))


class DenseImpl(_Impl):
    """All blocks, in 8 bits."""

    def settings(self) -> VideoAttention:
        return VideoAttention("dense")


class _Backend(AttentionBackend):  # type: ignore[misc]
    """What the two backends share: they need no metadata of their own."""

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return HEAD_SIZES

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata  # type: ignore[no-any-return]

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder] | None:
        return None


class PredictedBackend(_Backend):
    """``sparge_attn``."""

    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        return AttentionBackendEnum.SPARGE_ATTN

    @staticmethod
    def get_impl_cls() -> type[PredictedImpl]:
        return PredictedImpl


class DenseBackend(_Backend):
    """``sage_attn``."""

    @staticmethod
    def get_enum() -> AttentionBackendEnum:
        return AttentionBackendEnum.SAGE_ATTN

    @staticmethod
    def get_impl_cls() -> type[DenseImpl]:
        return DenseImpl
