"""Plans from block maps of any block size, BSR (``indptr``, ``indices``) among them.

A map's blocks need not be the kernel's: a tile of the kernel that a map covers in part becomes a
PARTIAL block with one bit an element. These generators read sizes on the host, as their inputs are
made on the host or once a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from block_sparse_backend.plan.block_plan import (
    FULL,
    PARTIAL,
    BlockPlan,
    from_kinds,
    uniform_sequences,
)
from block_sparse_backend.variants import masks

Elements = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(head [P, 1, 1], query [P, M, 1], key [P, 1, N]) -> attended, bool."""

_CHUNK = 1 << 24  # elements of PARTIAL blocks evaluated at once


@dataclass(frozen=True)
class BsrMask:
    """The elements of BSR blocks.

    Attributes:
        block: int64 [H or 1, MB, NB], a block's number in ``bits``, -1 where the map has none.
        bits: bool [blocks, R, C].
    """

    block: Tensor
    bits: Tensor


def from_bsr(
    indptr: Tensor,
    indices: Tensor,
    q_len: int,
    kv_len: int,
    row_size: int,
    col_size: int,
    num_heads: int,
    *,
    mask: Tensor | None = None,
    block_m: int = 128,
    block_n: int = 128,
) -> BlockPlan:
    """A plan from block compressed sparse rows, one pattern for all heads or one for each.

    Args:
        indptr: int32 [MB + 1], or [H, MB + 1] with ``indices`` continued from head to head.
        indices: int32 [nnz], block columns.
        row_size, col_size: queries and keys of a block; the last block row may be cut, and
            ``col_size`` divides ``kv_len``.
        mask: bool [nnz, row_size, col_size], the elements attended; by default all.

    Raises:
        ValueError: sizes do not fit together, or an index is out of range.
    """
    if q_len < 1:
        raise ValueError(f"q_len must be at least 1, got {q_len}")
    if kv_len % col_size:
        raise ValueError(f"col_size must divide the {kv_len} keys, got {col_size}")
    mb, nb = -(-q_len // row_size), kv_len // col_size
    indptr = indptr.view(-1, indptr.shape[-1]).long()
    if indptr.shape[1] != mb + 1 or indptr.shape[0] not in (1, num_heads):
        raise ValueError(
            f"indptr must have shape [{mb + 1}] or [{num_heads}, {mb + 1}], "
            f"got {list(indptr.shape)}"
        )
    counts = indptr.diff(dim=1)
    if int(counts.min()) < 0 or int(counts.sum()) != indices.numel():
        raise ValueError(f"indptr must rise to the {indices.numel()} entries of indices")
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < nb:
        raise ValueError(f"indices must be from 0 to {nb - 1}")
    if mask is not None and mask.shape != (indices.numel(), row_size, col_size):
        expected = [indices.numel(), row_size, col_size]
        raise ValueError(f"mask must have shape {expected}, got {list(mask.shape)}")
    heads, device = indptr.shape[0], indices.device
    row = torch.repeat_interleave(
        torch.arange(heads * mb, device=device), counts.flatten().to(device)
    )
    block = torch.full((heads * mb, nb), -1, dtype=torch.long, device=device)
    block[row, indices.long()] = torch.arange(indices.numel(), device=device)
    block = block.view(heads, mb, nb)
    sizes_m = torch.full((1, mb), row_size, device=device)
    sizes_m[0, -1] = q_len - (mb - 1) * row_size
    sizes_n = torch.full((1, nb), col_size, device=device)
    bits = None if mask is None else BsrMask(block, mask.to(device).bool())
    return from_block_map(
        block >= 0, sizes_m, sizes_n, num_heads, mask=bits, block_m=block_m, block_n=block_n
    )


def from_block_map(
    block_map: Tensor,
    row_sizes: Tensor,
    col_sizes: Tensor,
    num_heads: int,
    *,
    mask: BsrMask | None = None,
    block_m: int = 128,
    block_n: int = 128,
) -> BlockPlan:
    """A plan from a map of blocks of varying size.

    Args:
        block_map: bool [H or 1, MB, NB]; with H a divisor of ``num_heads``, of groups of heads.
        row_sizes, col_sizes: int [H or 1, MB] and [H or 1, NB], queries and keys of each block;
            every head's add up to the same length.

    Raises:
        ValueError: a shape is wrong, or the sizes of heads do not add up to one length.
    """
    heads, mb, nb = block_map.shape
    if num_heads % heads:
        raise ValueError(f"heads of the map must divide {num_heads}, got {heads}")
    for name, sizes, count in (("row_sizes", row_sizes, mb), ("col_sizes", col_sizes, nb)):
        if sizes.shape not in ((1, count), (heads, count)):
            raise ValueError(
                f"{name} must have shape [1 or {heads}, {count}], got {list(sizes.shape)}"
            )
        if not bool((sizes.sum(1) == sizes[0].sum()).all()):
            raise ValueError(f"{name} must add up to one length for all heads")
    device = block_map.device
    row_of, col_of = (_block_of(x.to(device), heads) for x in (row_sizes, col_sizes))
    q_len, kv_len = row_of.shape[1], col_of.shape[1]
    head = torch.arange(heads, device=device)[:, None, None]

    def elements(i_h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        i_r, i_c = row_of[i_h, m], col_of[i_h, n]
        if mask is None:
            return block_map[i_h, i_r, i_c]
        number = mask.block[i_h, i_r, i_c]
        inside = mask.bits[number, m - starts_m[i_h, i_r], n - starts_n[i_h, i_c]]
        return inside & (number >= 0)

    if block_n % 32:
        raise ValueError(f"block_n must be a multiple of 32, got {block_n}")
    starts_m, starts_n = (
        (x.cumsum(1) - x).expand(heads, -1).to(device) for x in (row_sizes, col_sizes)
    )
    # how many set blocks are in the rectangle of blocks that a tile of the kernel touches
    total = torch.nn.functional.pad(block_map.int().cumsum(1).cumsum(2), (1, 0, 1, 0))
    (r0, r1), (c0, c1) = (_touched(x, b) for x, b in ((row_of, block_m), (col_of, block_n)))
    touching = (
        total[head, r1[:, :, None], c1[:, None]]
        - total[head, r0[:, :, None], c1[:, None]]
        - total[head, r1[:, :, None], c0[:, None]]
        + total[head, r0[:, :, None], c0[:, None]]
    )
    whole = torch.eq(touching, (r1 - r0)[:, :, None] * (c1 - c0)[:, None])
    ragged = torch.arange(c0.shape[1], device=device) == c0.shape[1] - 1
    if kv_len % block_n:  # the last block ends early, which the kernel sees to
        whole = whole & ~ragged
    if mask is not None:
        whole = torch.zeros_like(whole)
    kinds = torch.where(whole, FULL, torch.where(touching > 0, PARTIAL, 0)).to(torch.int8)
    return _with_bits(kinds, elements, num_heads, (q_len, kv_len), (block_m, block_n))


def _with_bits(
    kinds: Tensor,
    elements: Elements,
    num_heads: int,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
) -> BlockPlan:
    """A plan of kinds [heads, tiles, blocks] with one bit for each element of its PARTIAL blocks;
    those that turn out whole or empty become FULL or SKIP."""
    (q_len, kv_len), (block_m, block_n), device = lengths, blocks, kinds.device
    words = []
    for part in torch.split((kinds == PARTIAL).nonzero(), max(1, _CHUNK // (block_m * block_n))):
        head, tile, col = (part[:, i, None, None] for i in range(3))
        m = tile * block_m + torch.arange(block_m, device=device)[None, :, None]
        n = col * block_n + torch.arange(block_n, device=device)[None, None, :]
        inside = (m < q_len) & (n < kv_len)
        seen = elements(head, m.clamp(max=q_len - 1), n.clamp(max=kv_len - 1)) & inside
        kind = torch.full((len(part),), PARTIAL, dtype=torch.int8, device=device)
        whole = (seen | (m >= q_len)).flatten(1).all(1)
        whole = whole & (part[:, 2] < kv_len // block_n)  # the kernel cuts PARTIAL blocks alone
        kind[whole] = FULL
        kind[~seen.flatten(1).any(1)] = 0
        kinds[part[:, 0], part[:, 1], part[:, 2]] = kind
        words.append(pack_bits(seen[kind == PARTIAL]))
    empty = torch.zeros(1, block_m, block_n // 32, dtype=torch.int32, device=device)
    bits = torch.cat(words) if words else empty
    return from_kinds(
        kinds[None],
        num_heads,
        uniform_sequences(1, q_len, kv_len, device),
        block_m,
        block_n,
        mask=masks.element_bits,
        mask_aux=bits if len(bits) else empty,
        has_partial=bool((kinds == PARTIAL).any()),
    )


def pack_bits(seen: Tensor) -> Tensor:
    """bool [P, M, N] to int32 [P, M, N / 32], bit n % 32 of word n // 32."""
    bit = torch.arange(32, device=seen.device)
    count, rows, cols = seen.shape
    words = (seen.reshape(count, rows, cols // 32, 32).long() << bit).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _block_of(sizes: Tensor, heads: int) -> Tensor:
    """int64 [H, L]: the block of each token, from sizes [H or 1, blocks]."""
    length = int(sizes[0].sum())
    ends = sizes.long().cumsum(1).expand(heads, -1).contiguous()
    tokens = torch.arange(length, device=sizes.device).expand(heads, -1).contiguous()
    return torch.searchsorted(ends, tokens, right=True)


def _touched(block_of: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """First block and the one after the last that each tile of ``size`` tokens touches."""
    length = block_of.shape[1]
    first = torch.arange(0, length, size, device=block_of.device)
    last = (first + size).clamp(max=length) - 1
    return block_of[:, first], block_of[:, last] + 1
