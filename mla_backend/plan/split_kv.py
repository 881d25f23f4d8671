"""The split-KV schedule in torch: the definition that the planners' kernels are compared with.

A tile has ``ceil(tokens / 64)`` blocks, and a CTA pays ``overhead`` blocks for each tile that it
touches. The blocks are shared out in one of two ways:

even
    A tile is cut into ``ceil(blocks / c)`` splits, as even as can be, and each has a CTA of its
    own. c is the smallest of 17 candidates for which the CTAs suffice; they go up to a 32nd more
    than the contiguous way's share, which is what fewer splits are worth. Taken where one
    suffices: few requests, and batches of like lengths.
contiguous
    CTA g has the g-th of equal shares of the line on which each tile takes ``overhead + blocks``.
    A boundary less than ``min_blocks`` from a tile's start or end moves there.
"""

from __future__ import annotations

import torch

BLOCK = 64
CANDIDATES = 17


def _ceil_div(a: torch.Tensor, b: int | torch.Tensor) -> torch.Tensor:
    return (a + b - 1) // b


def split_kv(
    lengths: torch.Tensor, ctas: int, overhead: int, min_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The work list of one step.

    Args:
        lengths: ``[tiles]`` int32 tokens; a negative one is a tile that is not there.
        ctas: rows of the work list.

    Returns:
        (work ``[ctas, 8]``, num_splits ``[tiles + 1]``), int32, as `MlaPlan` describes them.
    """
    lengths = lengths.long()
    there = lengths >= 0
    blocks = _ceil_div(lengths.clamp(min=0), BLOCK)
    total = int(blocks.sum())
    share = max(min_blocks, 1, -(-(total + overhead * int(there.sum())) // ctas))
    least = max(min_blocks, 1, -(-total // ctas))
    most = share + share // 32
    for step in range(CANDIDATES):
        size = least - (-step * (most - least) // (CANDIDATES - 1))
        pieces = _ceil_div(blocks, size).clamp(min=1) * there
        if int(pieces.sum()) <= ctas:
            return _even(blocks, pieces, ctas)

    extent = (blocks + overhead) * there
    start = extent.cumsum(0) - extent
    zero = start + overhead
    end = int(there.nonzero().max()) + 1
    inside = (zero + blocks - min_blocks) // share - _ceil_div(zero + min_blocks, share) + 1
    count = (1 + inside.clamp(min=0)) * there
    cta = torch.arange(ctas + 1, device=lengths.device)
    at = cta * share
    live = at < int(extent.sum())
    tile = torch.searchsorted(start, torch.where(live, at, 0), right=True) - 1
    block = at - zero[tile]
    split = cta - _ceil_div(zero[tile] + min_blocks, share) + 1
    at_start = block < min_blocks
    at_end = blocks[tile] - block < min_blocks
    keep = live & ~at_start & ~at_end
    tile = torch.where(live, tile + (~at_start & at_end).long(), end)
    block, split = torch.where(keep, block, 0), torch.where(keep, split, 0)
    after, stop = tile[1:], block[1:]
    whole = torch.where(after > 0, blocks[(after - 1).clamp(min=0)], 0)
    last = torch.where(stop > 0, after, after - 1)
    return (
        _rows(tile[:-1], block[:-1], last, torch.where(stop > 0, stop, whole), split[:-1]),
        _prefix_sum(count),
    )


def _even(
    blocks: torch.Tensor, pieces: torch.Tensor, ctas: int
) -> tuple[torch.Tensor, torch.Tensor]:
    first = pieces.cumsum(0) - pieces
    cta = torch.arange(ctas, device=blocks.device)
    live = cta < int(pieces.sum())
    end = int(pieces.nonzero().max()) + 1
    tile = torch.searchsorted(first, torch.where(live, cta, 0), right=True) - 1
    split, n, of = cta - first[tile], blocks[tile], pieces[tile]
    work = _rows(tile, split * n // of, tile, (split + 1) * n // of, split)
    idle = torch.tensor([end, 0, end - 1, 0, 0, 0, 0, 0], dtype=work.dtype, device=work.device)
    return torch.where(live[:, None], work, idle), _prefix_sum(pieces)


def _rows(*columns: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros_like(columns[0])
    return torch.stack([*columns, zero, zero, zero], 1).int()


def _prefix_sum(count: torch.Tensor) -> torch.Tensor:
    return torch.cat([count.new_zeros(1), count.cumsum(0)]).int()
