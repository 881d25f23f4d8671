"""Sliding tile attention (Zhang et al. 2025, arXiv 2502.04507) on any canvas, tile and window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from backend_core.contracts import whole_number
from block_sparse_backend import masks
from block_sparse_backend.plan.block_plan import FULL, PARTIAL, SKIP, BlockPlan, from_kinds
from block_sparse_backend.plan.block_plan import uniform_sequences as _uniform
from block_sparse_backend.plan.token_order import Box, TileOrder, box_of

EvenWindows = Literal["wide", "exact"]


def sliding_tile(
    order: TileOrder,
    windows: Sequence[Box],
    num_heads: int,
    *,
    even_windows: EvenWindows | None = None,
    batch: int = 1,
    block_m: int = 128,
    block_n: int = 128,
) -> BlockPlan:
    """Each tile attends the tiles in a window around it; text attends and is attended by all.

    The window's centre is clamped so that the window stays inside the canvas, as FastVideo does,
    and a tile is attended where it lies within window // 2 of the centre along every axis. For an
    even window that is one tile more than the window says ("wide", FastVideo's); "exact" leaves
    out the last.

    Args:
        order: the queries and keys are in this order, [B, slots, H, D]; its ``block`` must be a
            multiple of ``block_m`` and ``block_n``.
        windows: (time, height, width) in tiles for each head, or one for all heads.
        even_windows: must be given where a window is even along an axis.

    Raises:
        ValueError: a size is wrong, or an even window comes without ``even_windows``.
    """
    block_m, block_n = whole_number("block_m", block_m, 1), whole_number("block_n", block_n, 1)
    windows = [box_of("each of windows", window) for window in windows]
    if order.block % block_m or order.block % block_n:
        raise ValueError(
            f"the order's block must be a multiple of {block_m} and {block_n}, got {order.block}"
        )
    if len(windows) not in (1, num_heads):
        raise ValueError(f"windows must be 1 or {num_heads}, got {len(windows)}")
    check_windows(windows, even_windows)
    device = order.index.device
    count = order.is_token.view(-1, block_n).sum(1)
    kind = torch.where(count == block_n, FULL, torch.where(count > 0, PARTIAL, SKIP))
    kind = kind.to(torch.int8)
    distinct = {w: _tile_kinds(order, w, even_windows, kind, block_m, block_n) for w in windows}
    kinds = torch.stack([distinct[w] for w in windows])
    slots = len(order.index)
    return from_kinds(
        kinds[None],
        num_heads,
        _uniform(batch, slots, slots, device),
        block_m,
        block_n,
        mask=masks.block_end,
        mask_aux=order.block_ends(block_n),
        has_partial=slots != len(order.slot_of),
        lengths=(slots, slots),
    )


def check_windows(windows: Sequence[Box], even_windows: EvenWindows | None) -> None:
    """
    Raises:
        ValueError: an even window comes without ``even_windows``, or that is another word.
    """
    if even_windows not in (None, *get_args(EvenWindows)):
        raise ValueError(f'even_windows must be "wide" or "exact", got {even_windows!r}')
    even = [w for w in windows if any(side % 2 == 0 for side in w)]
    if even and even_windows is None:
        raise ValueError(f'even_windows must be "wide" or "exact" for the window {even[0]}')


def _tile_kinds(
    order: TileOrder,
    window: Box,
    even_windows: EvenWindows | None,
    kind: Tensor,
    block_m: int,
    block_n: int,
) -> Tensor:
    """int8 [query tiles, key blocks] for one window; ``kind`` is each key block's by its tokens."""
    t, h, w = (
        _near(g, x, even_windows, kind.device) for g, x in zip(order.grid, window, strict=True)
    )
    near = t[:, None, None, :, None, None] & h[None, :, None, None, :, None]
    near = (near & w[None, None, :, None, None, :]).flatten(3).flatten(0, 2)
    near = near.repeat_interleave(order.slots_per_tile // block_m, 0)
    near = near.repeat_interleave(order.slots_per_tile // block_n, 1)
    text_m, text_n = order.text_slots // block_m, order.text_slots // block_n
    near = torch.nn.functional.pad(near, (0, text_n, 0, text_m), value=True)
    return near.to(torch.int8) * kind


def _near(
    count: int, window: int, even_windows: EvenWindows | None, device: torch.device
) -> Tensor:
    """bool [count, count]: whether a tile attends a tile, along one axis."""
    half = window // 2
    after = half - 1 if window % 2 == 0 and even_windows == "exact" else half
    if half + after + 1 >= count:
        return torch.ones(count, count, dtype=torch.bool, device=device)
    tile = torch.arange(count, device=device)
    gap = tile[None, :] - tile.clamp(half, count - 1 - after)[:, None]
    return (gap >= -half) & (gap <= after)
