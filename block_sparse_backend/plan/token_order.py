"""A video's tokens in the order of tiles, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from backend_core.contracts import whole_number

Box = tuple[int, int, int]


def box_of(name: str, value: object) -> Box:
    """Three whole numbers, along time, height and width.

    Raises:
        ValueError: they are not.
    """
    found = tuple(value) if isinstance(value, list | tuple) else ()
    if len(found) != 3 or any(not isinstance(x, int) or x < 1 for x in found):
        raise ValueError(f"{name} must be three positive integers (t, h, w), got {value!r}")
    return found[0], found[1], found[2]


@dataclass(frozen=True)
class TileOrder:
    """A video's tokens tile after tile, text tokens after them, each tile padded to whole blocks.

    Attributes:
        index: int64 [slots], the token in a slot. Empty slots repeat those of their tile, so that
            what 8-bit values make up in the sum of a block (``kernels.quantise``) is of its tokens.
        is_token: bool [slots]; a tile's tokens come first, its empty slots after them.
        slot_of: int64 [tokens], the inverse.
        grid: tiles along time, height and width.
        slots_per_tile: a multiple of ``block``.
        text_slots: slots after the video's, a multiple of ``block``.
        block: slots in the unit that tiles are padded to.
    """

    index: Tensor
    is_token: Tensor
    slot_of: Tensor
    grid: Box
    slots_per_tile: int
    text_slots: int
    block: int

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Tokens to slots along ``dim``."""
        return x.index_select(dim, self.index)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Slots back to tokens along ``dim``."""
        return x.index_select(dim, self.slot_of)

    def block_ends(self, block_n: int) -> Tensor:
        """int32 [slots / block_n]: the slot after each block's last token, for
        ``masks.block_end``."""
        count = self.is_token.view(-1, block_n).sum(1, dtype=torch.int32)
        start = torch.arange(len(count), dtype=torch.int32, device=count.device) * block_n
        return start + count


def tile_order(
    canvas: Box,
    tile: Box,
    *,
    text: int = 0,
    block: int = 128,
    device: torch.device | str = "cuda",
) -> TileOrder:
    """Tokens of a [T, H, W] canvas in tiles, ``text`` tokens after them.

    Args:
        canvas, tile: tokens along time, height and width; tiles at the far edges may be cut.
        text: text tokens, which follow the video's in the token order.
        block: every tile, and the text, is padded to a multiple of so many slots.

    Raises:
        ValueError: a size is no whole number, or not positive.
    """
    canvas, tile = box_of("canvas", canvas), box_of("tile", tile)
    text, block = whole_number("text", text, 0), whole_number("block", block, 1)
    grid = _grid(canvas, tile)
    number = torch.zeros(1, dtype=torch.long, device=device)
    for length, size, count in zip(canvas, tile, grid, strict=True):
        axis = torch.arange(length, device=device) // size
        number = (number[:, None] * count + axis).flatten()
    slots_per_tile = -(-(tile[0] * tile[1] * tile[2]) // block) * block
    text_slots = -(-text // block) * block
    per_tile = torch.bincount(number, minlength=grid[0] * grid[1] * grid[2])
    # the text is one more tile, whose number of slots is another
    tokens = functional.pad(per_tile, (0, 1), value=text)
    slots = torch.full_like(tokens, slots_per_tile)
    slots[-1] = text_slots
    order = torch.argsort(functional.pad(number, (0, text), value=len(per_tile)), stable=True)

    def of_slots(x: Tensor) -> Tensor:
        return torch.repeat_interleave(x, slots)

    place = torch.arange(int(slots.sum()), device=device) - of_slots(slots.cumsum(0) - slots)
    is_token = place < of_slots(tokens)
    index = order[of_slots(tokens.cumsum(0) - tokens) + place % of_slots(tokens)]
    slot_of = torch.empty_like(order)
    slot_of[index[is_token]] = torch.nonzero(is_token)[:, 0]
    return TileOrder(index, is_token, slot_of, grid, slots_per_tile, text_slots, block)


def _grid(canvas: Box, tile: Box) -> Box:
    t, h, w = (-(-c // s) for c, s in zip(canvas, tile, strict=True))
    return t, h, w
