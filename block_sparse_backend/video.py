"""Self-attention of a video transformer: which blocks and how many bits, in one frozen value."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from backend_core.contracts import expect_device, expect_shape, number
from backend_core.launch.streams import is_capturing
from block_sparse_backend.block_sparse import block_sparse_attention
from block_sparse_backend.contract import readable, refuse_gradients
from block_sparse_backend.plan import kept
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.plan.predicted import predict
from block_sparse_backend.plan.sliding_tile import EvenWindows, check_windows, sliding_tile
from block_sparse_backend.plan.token_order import Box, TileOrder, box_of, tile_order
from block_sparse_backend.sage import predicted_attention, quantised_attention
from block_sparse_backend.selection import default_blocks, default_blocks_int8

Kind = Literal["dense", "predicted", "sliding_tile"]
HEAD_SIZES = (64, 128, 256)
"""Channels that the kernels of any kind have."""
MAX_HEAD_SIZE = {True: 128, False: 256}
"""In 8 bits, and else."""


@dataclass(frozen=True)
class VideoAttention:
    """Attention of [B, L, H, D] tensors; plans are made once for each shape, and serve all streams.

    Tensors whose strides kernels cannot read are copied. Lists are taken for tuples. Heads of other
    sizes than the kernels have are filled with zeros. It can be captured in a CUDA graph; sliding
    tiles after a call of the same shape.

    Attributes:
        kind: ``"dense"``; ``"predicted"``, the blocks that SpargeAttn's prediction keeps; or
            ``"sliding_tile"``, the tiles around each tile.
        eight_bit: INT8 and e4m3 products (bf16 and fp16 inputs), else as the inputs are.
        topk: share of blocks that a prediction keeps.
        canvas: tokens along time, height and width, for sliding tiles; tokens beyond them are
            text, which attends and is attended by all.
        tile: tokens of a tile along the same axes.
        windows: tiles along the same axes, one window for all heads or one for each.
        even_windows: see ``plan.sliding_tile``.
    """

    kind: Kind = "dense"
    eight_bit: bool = True
    topk: float = 0.5
    canvas: Box | None = None
    tile: Box = (6, 8, 8)
    windows: tuple[Box, ...] = ((3, 3, 3),)
    even_windows: EvenWindows | None = None
    _text: ClassVar[str]

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "predicted", "sliding_tile"):
            raise ValueError(
                f'kind must be "dense", "predicted" or "sliding_tile", got {self.kind!r}'
            )
        if (self.kind == "sliding_tile") != (self.canvas is not None):
            raise ValueError(f"canvas must be given for sliding tiles alone, got {self.canvas}")
        keep = functools.partial(object.__setattr__, self)
        keep("canvas", None if self.canvas is None else box_of("canvas", self.canvas))
        keep("tile", box_of("tile", self.tile))
        if not isinstance(self.eight_bit, bool):
            raise ValueError(f"eight_bit must be True or False, got {self.eight_bit!r}")
        if not isinstance(self.topk, float | int) or not 0.0 < self.topk <= 1.0:
            raise ValueError(f"topk must be a number above 0 and at most 1, got {self.topk!r}")
        if not isinstance(self.windows, list | tuple) or not self.windows:
            raise ValueError(f"windows must be a tuple of (t, h, w), got {self.windows!r}")
        keep("windows", tuple(box_of("each of windows", window) for window in self.windows))
        check_windows(self.windows, self.even_windows)
        values = [getattr(self, field.name) for field in fields(self)]
        keep("_text", repr(values))  # which another process can read too

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention of q, k and v [B, L, H, D] in the same layout. To ``torch.compile`` it is one
        operator, so that plans are kept there too.

        Raises:
            ValueError: the tensors do not fit the settings.
        """
        if torch.compiler.is_compiling():
            scale = None if scale is None else number("scale", scale)
            out: Tensor = _opaque(q, k, v, scale, self._text)
            return out
        return self._attention(q, k, v, scale)

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why tensors cannot be served for their dtype or head size, if so."""
        if not self.eight_bit and q.is_cpu:
            return None  # torch takes any
        most = MAX_HEAD_SIZE[self.eight_bit]
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"query must be bfloat16 or float16, got {q.dtype}"
        if max(q.shape[-1], v.shape[-1]) > most:
            return f"heads must have at most {most} channels, got {q.shape[-1]} and {v.shape[-1]}"
        return None

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        refuse_gradients(q, k, v)
        expect_device("k", k, q.device)
        expect_device("v", v, q.device)
        expect_shape("q", q, ("B", "L", "H", "D"))
        if not q.shape[3]:
            raise ValueError(f"q must have at least one channel, got shape {list(q.shape)}")
        expect_shape("k", k, (q.shape[0], "L", "H", q.shape[3]))
        expect_shape("v", v, (*k.shape[:3], "D"))
        if why := self.refusal(q, k, v):
            raise ValueError(why)
        if not q.numel():
            return q.new_empty(*q.shape[:3], v.shape[3])
        d, dv = q.shape[3], v.shape[3]
        scale = d**-0.5 if scale is None else scale
        size = next((n for n in HEAD_SIZES if n >= max(d, dv)), 0)
        if (d, dv) != (size, size) and not (q.is_cpu and not self.eight_bit):
            # zeros add nothing to a product
            q, k = (functional.pad(x, (0, size - d)) for x in (q, k))
            return self._served(q, k, functional.pad(v, (0, size - dv)), scale)[..., :dv]
        return self._served(q, k, v, scale)

    def _served(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = (readable(x) for x in (q, k, v))
        if self.kind == "sliding_tile":
            return self._tiles(q, k, v, scale)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.kind == "predicted" and self.eight_bit:
            choice = Choice(topk=self.topk)
            return predicted_attention(q, k, v, choice, scale=scale)[0].transpose(1, 2)
        block_m, block_n = self._blocks(q)
        if self.kind == "predicted":
            plan = predict(q, k, topk=self.topk, scale=scale, block_m=block_m, block_n=block_n)
        else:
            b, h, m, _ = q.shape
            plan = kept.dense.of(q.device, m, k.shape[2], h, b, block_m, block_n)
        return self._attend(q, k, v, plan, scale).transpose(1, 2)

    def _tiles(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        assert self.canvas is not None
        b, length, h, _ = q.shape
        tokens = self.canvas[0] * self.canvas[1] * self.canvas[2]
        if q.shape[:2] != k.shape[:2] or length < tokens:
            raise ValueError(
                f"sliding tiles are of self-attention over at least {tokens} tokens, got queries "
                f"{list(q.shape)} and keys {list(k.shape)}"
            )
        block_m, block_n = self._blocks(q.transpose(1, 2))
        order, plan = _tile_plans.of(q.device, self, length - tokens, h, b, block_m, block_n)
        q, k, v = (order.gather(x, 1).transpose(1, 2) for x in (q, k, v))
        return order.scatter(self._attend(q, k, v, plan, scale).transpose(1, 2), 1)

    def _blocks(self, q: Tensor) -> tuple[int, int]:
        if self.eight_bit:
            return default_blocks_int8(q.device)
        return default_blocks(q.device, q.shape[3])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float) -> Tensor:
        attend = quantised_attention if self.eight_bit else block_sparse_attention
        return attend(q, k, v, plan, scale=scale)[0]


@torch.library.custom_op("block_sparse_backend::video_attention", mutates_args=())
def _opaque(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, settings: str
) -> torch.Tensor:
    """``VideoAttention`` as torch.compile sees it, which traces no further."""
    return _of_text(settings)._attention(q, k, v, scale).contiguous()


@_opaque.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None, settings: str) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@functools.cache
def _of_text(settings: str) -> VideoAttention:
    return VideoAttention(*ast.literal_eval(settings))


def _tile_plan(
    device: torch.device,
    settings: VideoAttention,
    text: int,
    heads: int,
    batch: int,
    block_m: int,
    block_n: int,
) -> tuple[TileOrder, BlockPlan]:
    assert settings.canvas is not None
    if is_capturing(device):
        raise ValueError(
            f"sliding tiles over {settings.canvas} tokens must be called once before a CUDA graph"
            " captures them: their plan reads sizes on the host"
        )
    block = max(block_m, block_n)
    order = tile_order(settings.canvas, settings.tile, text=text, block=block, device=device)
    plan = sliding_tile(
        order,
        settings.windows,
        heads,
        even_windows=settings.even_windows,
        batch=batch,
        block_m=block_m,
        block_n=block_n,
    )
    return order, plan


_tile_plans = kept.Plans(_tile_plan)
