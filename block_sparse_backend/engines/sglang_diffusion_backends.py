"""The attention classes that sglang's video server builds under ``sparge_attn``,
``sliding_tile_attn`` and ``sage_attn``.

Imported by sglang alone, by the dotted paths of ``sglang_diffusion.BACKENDS``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.multimodal_gen.runtime.layers.attention.backends.attention_backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum
from sglang.multimodal_gen.runtime.server_args import get_global_server_args
from torch import Tensor
from torch.nn import functional

from backend_core.strict import fallback
from block_sparse_backend.engines.sglang_diffusion import MAX_HEAD_SIZE
from block_sparse_backend.plan.sliding_tile import check_windows
from block_sparse_backend.plan.token_order import Box
from block_sparse_backend.video import VideoAttention

HEAD_SIZES = list(range(1, MAX_HEAD_SIZE + 1))
TILE = (6, 8, 8)
VIDEO_FIRST = {"HunyuanVideoConfig", "LTX2Config", "MOVAVideoConfig", "WanVideoConfig"}
"""sglang's configurations of models whose self-attention is over the video's tokens in their order,
and of text behind them."""


def configuration() -> dict[str, Any]:
    """``--attention-backend-config``, without what sglang's dictionary answers to absent keys."""
    return dict(get_global_server_args().attention_backend_config or {})


def box(name: str, value: Any) -> Box:
    """Three whole numbers, along time, height and width.

    Raises:
        ValueError: they are not.
    """
    found = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(found) != 3 or any(not isinstance(x, int) or x < 1 for x in found):
        raise ValueError(f"{name} must be three positive integers (t, h, w), got {value!r}")
    return found[0], found[1], found[2]


def windows_of(value: Any) -> tuple[Box, ...]:
    """One window for all heads, or a list of one for each.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Sequence) and value and isinstance(value[0], int):
        return (box("windows", value),)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"windows must be one (t, h, w) or a list of them, got {value!r}")
    return tuple(box("windows", x) for x in value)


class _Impl(AttentionImpl):  # type: ignore[misc]
    """Self-attention through ``VideoAttention``, and through torch all that is not by its layer,
    causal calls, and what ``VideoAttention`` does not take (reported once)."""

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
            raise ValueError(f"head_size must be 1 to {MAX_HEAD_SIZE}, got {head_size}")
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.prefix = prefix
        self.is_cross = bool(extra_impl_args.get("is_cross_attention", False)) or any(
            part == "attn2" or "cross" in part for part in prefix.split(".")
        )
        self.config = configuration()
        self.eight_bit = bool(self.config.get("eight_bit", True))
        self.prepare()

    def prepare(self) -> None:
        """Read and check the configuration."""

    def attention(self, heads: int, metadata: AttentionMetadata | None) -> VideoAttention:
        """The settings of a self-attention of so many heads."""
        raise NotImplementedError

    def serves(self, query: Tensor, key: Tensor, metadata: AttentionMetadata | None) -> bool:
        """Whether a call that is neither causal nor a cross-attention by its layer runs here: other
        keys than queries are none of the whole video."""
        return query.shape[1] == key.shape[1]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None
    ) -> Tensor:
        """[B, L, H, D] in and out."""
        if not (self.causal or self.is_cross) and self.serves(query, key, attn_metadata):
            attend = self.attention(query.shape[2], attn_metadata)
            why = attend.refusal(query, key, value)
            if why is None:
                return attend(query, key, value, self.softmax_scale).contiguous()
            if not torch.compiler.is_compiling():
                fallback(why)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.softmax_scale, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous()

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens: Tensor,
        max_seqlen: int,
        cu_seqlens_host: tuple[int, ...] | None = None,
    ) -> Tensor:
        """[tokens, H, D] in and out, each sequence on its own; sglang 0.5.23 has it of FLUX.3 and
        MiniMax-H3. The offsets are read from the device where sglang has none on the host."""
        bounds = cu_seqlens.tolist() if cu_seqlens_host is None else cu_seqlens_host
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                q, k, v = (x[None, begin:end] for x in (query, key, value))
                out[begin:end] = self.forward(q, k, v, None)[0]
        return out


class PredictedImpl(_Impl):
    """``--attention-backend-config topk=0.5``: the share of blocks kept."""

    def prepare(self) -> None:
        topk = float(self.config.get("topk", 0.5))
        if not 0.0 < topk <= 1.0:
            raise ValueError(f"topk must be above 0 and at most 1, got {topk}")
        self.settings = VideoAttention("predicted", eight_bit=self.eight_bit, topk=topk)

    def attention(self, heads: int, metadata: AttentionMetadata | None) -> VideoAttention:
        return self.settings


class DenseImpl(_Impl):
    """All blocks, in 8 bits."""

    def serves(self, query: Tensor, key: Tensor, metadata: AttentionMetadata | None) -> bool:
        """By default each of two GPUs has half of the queries and all keys."""
        return key.shape[1] >= query.shape[1]

    def attention(self, heads: int, metadata: AttentionMetadata | None) -> VideoAttention:
        return VideoAttention("dense", eight_bit=self.eight_bit)


@dataclass
class SlidingTileMetadata(AttentionMetadata):  # type: ignore[misc]
    """A step's canvas, and sglang's own windows for it where it has some.

    Attributes:
        canvas: tokens along time, height and width.
        windows: for each layer, a window for each head.
    """

    canvas: Box
    windows: Sequence[Sequence[Any]] | None


def expect_video_first() -> None:
    """Raises ValueError: the tokens of the server's model do not, or not surely, begin with the
    video's."""
    model = type(get_global_server_args().pipeline_config.dit_config)
    if not VIDEO_FIRST & {known.__name__ for known in model.__mro__}:
        raise ValueError(
            "sliding_tile_attn needs a model whose tokens begin with the video's, one of"
            f" {', '.join(sorted(VIDEO_FIRST))}, got {model.__name__}"
        )


class SlidingTileMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Built by sglang for each step."""

    def build(
        self,
        current_timestep: int,
        raw_latent_shape: Sequence[int],
        patch_size: Sequence[int] | int,
        STA_param: Sequence[Any] | None = None,
        **unused: Any,
    ) -> SlidingTileMetadata:
        """See ``SlidingTileMetadata``; a token is a patch of the latent.

        Args:
            patch_size: along time, height and width, or one number, beside which a model has
                another along time (HunyuanVideo).

        Raises:
            ValueError: the latent is not a video's, or the model's tokens may begin with text.
        """
        expect_video_first()
        if isinstance(patch_size, int):
            model = get_global_server_args().pipeline_config.dit_config
            along_time = getattr(model, "patch_size_t", None)
            patch_size = (along_time or patch_size, patch_size, patch_size)
        if len(raw_latent_shape) != 3 or len(patch_size) != 3:
            raise ValueError(
                "sliding_tile_attn needs latents and patches along time, height and width, got"
                f" {tuple(raw_latent_shape)} and {tuple(patch_size)}"
            )
        canvas = [n // p for n, p in zip(raw_latent_shape, patch_size, strict=True)]
        windows = STA_param[current_timestep] if STA_param else None
        return SlidingTileMetadata(current_timestep, box("the canvas", canvas), windows)


class SlidingTileImpl(_Impl):
    """``--attention-backend-config '{"windows": [3, 3, 3]}'``: tiles around each tile, one window
    or one for each head of the model; ``"tile": [6, 8, 8]`` its tokens; ``"even_windows"`` as in
    ``plan.sliding_tile``."""

    def prepare(self) -> None:
        self.windows = windows_of(self.config.get("windows", (3, 3, 3)))
        self.tile = box("tile", self.config.get("tile", TILE))
        self.even_windows = self.config.get("even_windows")
        check_windows(self.windows, self.even_windows)

    def serves(self, query: Tensor, key: Tensor, metadata: AttentionMetadata | None) -> bool:
        """Fewer tokens than the video has are text's alone, and a layer's name says what is of
        sound."""
        is_text = isinstance(metadata, SlidingTileMetadata) and query.shape[1] < math.prod(
            metadata.canvas
        )
        is_sound = "audio" in self.prefix
        return query.shape[1] == key.shape[1] and not (is_text or is_sound)

    def attention(self, heads: int, metadata: AttentionMetadata | None) -> VideoAttention:
        if not isinstance(metadata, SlidingTileMetadata):
            raise ValueError(
                f"sliding_tile_attn needs the canvas in the attention metadata, got {metadata!r}"
            )
        windows = self.windows
        if metadata.windows is not None:
            # a layer's name ends in its number, the layer's attention and "impl"
            windows = windows_of(metadata.windows[int(self.prefix.split(".")[-3])])
        return VideoAttention(
            "sliding_tile",
            eight_bit=self.eight_bit,
            canvas=metadata.canvas,
            tile=self.tile,
            windows=_of_rank(windows, heads),
            even_windows=self.even_windows,
        )


def _of_rank(windows: tuple[Box, ...], heads: int) -> tuple[Box, ...]:
    """The windows of this rank's heads, where sequence parallelism shares them out.

    Raises:
        ValueError: there is neither one window nor one for each head.
    """
    if len(windows) in (1, heads):
        return windows
    from sglang.multimodal_gen.runtime.distributed import get_sp_group

    group = get_sp_group()
    if len(windows) != heads * group.world_size:
        raise ValueError(
            f"windows must be one, or one for each of {heads * group.world_size} heads, "
            f"got {len(windows)}"
        )
    begin = group.rank_in_group * heads
    return windows[begin : begin + heads]


class _Backend(AttentionBackend):  # type: ignore[misc]
    """The base class of the backends."""

    ENUM: AttentionBackendEnum
    IMPL: type[_Impl]
    METADATA: type[AttentionMetadata] = AttentionMetadata
    BUILDER: type[AttentionMetadataBuilder] | None = None

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return HEAD_SIZES

    @classmethod
    def get_enum(cls) -> AttentionBackendEnum:
        return cls.ENUM

    @classmethod
    def get_impl_cls(cls) -> type[_Impl]:
        return cls.IMPL

    @classmethod
    def get_metadata_cls(cls) -> type[AttentionMetadata]:
        return cls.METADATA

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder] | None:
        return cls.BUILDER


class PredictedBackend(_Backend):
    """``sparge_attn``."""

    ENUM, IMPL = AttentionBackendEnum.SPARGE_ATTN, PredictedImpl


class DenseBackend(_Backend):
    """``sage_attn``."""

    ENUM, IMPL = AttentionBackendEnum.SAGE_ATTN, DenseImpl


class SlidingTileBackend(_Backend):
    """``sliding_tile_attn``."""

    ENUM, IMPL = AttentionBackendEnum.SLIDING_TILE_ATTN, SlidingTileImpl
    METADATA, BUILDER = SlidingTileMetadata, SlidingTileMetadataBuilder
