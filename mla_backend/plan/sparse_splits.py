"""How many programs share the rows of query tokens, from shapes alone.

The lists' lengths are the device's; a program finds its share of the blocks that are really there,
so the plan of a step is one number, and a CUDA graph serves any lengths.
"""

from __future__ import annotations

import functools

from mla_backend.spec import MAX_SPLITS

OVERHEAD = 2
"""Cost of a program before its first block, in blocks."""
MERGE = 1
"""Cost of merging, in blocks."""


@functools.lru_cache(maxsize=4096)
def sparse_splits(tiles: int, blocks: int, slots: int) -> int:
    """The number of splits that ends first by a simple count.

    A split of ``n`` blocks takes ``n + OVERHEAD``; the programs run in rounds of ``slots``. Merging
    takes ``MERGE`` blocks, and a sixteenth of one for each split, whose partial output is written
    and read again.

    Args:
        tiles: query tokens times tiles of heads.
        blocks: of one token's lists, if they are full.
        slots: programs that run at once.

    Returns:
        1 to ``min(blocks, MAX_SPLITS)``; the smallest of equals.
    """
    best, least = 1, float("inf")
    for splits in range(1, max(1, min(blocks, MAX_SPLITS)) + 1):
        rounds = -(-tiles * splits // slots)
        time = rounds * (-(-blocks // splits) + OVERHEAD) + (MERGE + splits / 16) * (splits > 1)
        if time < least:
            best, least = splits, time
    return best


@functools.lru_cache(maxsize=4096)
def sparse_shares(items: int, blocks: int, slots: int) -> int:
    """The number of equal shares of all items that ends first by a simple count.

    If the lists are full, a whole number of shares for each item cuts it into equal pieces. As many
    shares as slots leave no slot idle, but each then begins and ends within an item.

    Args:
        items: query tokens times tiles of heads.
        blocks: of one token's lists, if they are full.
        slots: programs that run at once.

    Returns:
        1 to ``slots``.
    """
    splits = sparse_splits(items, blocks, slots)
    if items * splits > slots:
        return slots
    each = -(-blocks // splits) + OVERHEAD + (MERGE + splits / 16) * (splits > 1)
    return items * splits if each <= items * blocks / slots + 2 * OVERHEAD + MERGE else slots


def blocks_of(topks: tuple[int, ...], block_kv: int) -> int:
    """Blocks of one token's lists, if they are full."""
    return sum(-(-topk // block_kv) for topk in topks)
