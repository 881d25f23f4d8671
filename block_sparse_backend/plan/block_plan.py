"""The plan of block-sparse attention: for each query tile of each head, a list of key blocks.

A plan is data on the device, made without reading a device value on the host wherever the
generator's input allows it, and of fixed capacity.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from backend_core.ready import Prepared
from block_sparse_backend import masks
from block_sparse_backend.masks import Mask

SKIP, FULL, PARTIAL = 0, 1, 2
"""Kinds of block: not attended, attended whole, attended where the plan's mask says so."""


@dataclass(frozen=True)
class BlockPlan:
    """Lists of the key blocks that each query tile of each head attends.

    Three bounds rather than one ``indptr``: rows of fixed capacity (made on the GPU), compact rows
    and rows that share one column list (dense, causal) are the same thing to a kernel. FULL blocks
    come before PARTIAL ones, so that no kernel asks a block for its kind.

    Attributes:
        rows: int32 [R, 4]: ``begin``, ``full_end`` and ``end`` in ``cols``, and 0.
            ``cols[begin:full_end]`` are FULL, ``cols[full_end:end]`` PARTIAL.
        cols: int32 [C], key blocks.
        work: int32 [W, 4], one entry for each program: sequence, head, tile, row. Sequence -1 is
            no work.
        sequences: int32 [S, 6]: index in the batch dimension, first query, number of queries, first
            key, number of keys, position of query 0.
        num_heads: query heads.
        block_m, block_n: queries in a tile, keys in a block.
        has_partial: whether there may be PARTIAL blocks; without them no mask is compiled.
        mask, mask_aux: what of a PARTIAL block is attended.
        is_packed: sequences follow one another in a tensor, so what lies beyond the end of one is
            another's.
        key_blocks: of packed sequences, int32 [K, 3]: first key, number of keys and sequence of
            each block of keys; blocks without keys stand last.
        first_blocks: of packed sequences, int32 [S + 1], where in ``key_blocks`` each begins.
        lengths: queries and keys, of a batch of equal sequences; ``None`` where the host does not
            know them.
    """

    rows: Tensor
    cols: Tensor
    work: Tensor
    sequences: Tensor
    num_heads: int
    block_m: int
    block_n: int
    has_partial: bool = True
    mask: Mask = masks.everything
    mask_aux: Tensor | None = None
    is_packed: bool = False
    key_blocks: Tensor | None = None
    first_blocks: Tensor | None = None
    lengths: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """All tensors are on one device, which is what operators look at.

        Raises:
            ValueError: one is on another device than the rows.
        """
        device = self.rows.device
        for name, x in (
            ("cols", self.cols),
            ("work", self.work),
            ("sequences", self.sequences),
            ("mask_aux", self.mask_aux),
            ("key_blocks", self.key_blocks),
            ("first_blocks", self.first_blocks),
        ):
            if x is not None and x.device != device:
                raise ValueError(f"the plan's {name} must be on {device}, got {x.device}")

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @functools.cached_property
    def prepared(self) -> Prepared:
        """The runs of calls of this plan, by the layout of their tensors."""
        return Prepared()

    def density(self) -> float:
        """Blocks attended as a share of all blocks of all tiles. Reads the device: for reports."""
        live = self.work[:, 0] >= 0
        keys = self.sequences[self.work[:, 0].clamp(min=0).long(), 4]
        blocks = -(-keys // self.block_n) * live
        row = self.rows.long()[self.work[:, 3].long()]
        return float(((row[:, 2] - row[:, 0]) * live).sum() / blocks.sum().clamp(min=1))


def uniform_sequences(batch: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """``BlockPlan.sequences`` of a batch of equal sequences; the last query stands at the last
    key."""
    table = torch.zeros(batch, 6, dtype=torch.int32, device=device)
    table[:, 0] = torch.arange(batch, dtype=torch.int32, device=device)
    for column, value in ((2, q_len), (4, kv_len), (5, kv_len - q_len)):
        table[:, column].fill_(value)  # a kernel, which a graph can hold, where a copy cannot be
    return table


def work_list(rows: Tensor, row_of: Tensor, is_live: Tensor | None = None) -> Tensor:
    """``BlockPlan.work``: head after head, whose keys then stay in L2, longest rows first.

    Args:
        rows: ``BlockPlan.rows``.
        row_of: int [S, H, tiles], the row of each tile.
        is_live: bool [S, 1 or H, tiles], whether a tile has queries.
    """
    s, h, tiles = row_of.shape
    row_of = row_of.long()
    amount = (rows[:, 2] - rows[:, 0])[row_of]
    if is_live is not None:
        amount = amount.masked_fill(~is_live, -1)
    amount, tile = torch.sort(amount, dim=2, descending=True, stable=True)
    sequence = torch.arange(s, device=rows.device)[:, None, None].expand(s, h, tiles)
    head = torch.arange(h, device=rows.device)[None, :, None].expand(s, h, tiles)
    sequence = sequence.masked_fill(amount < 0, -1)
    row = row_of.gather(2, tile)
    return torch.stack([sequence, head, tile, row], -1).view(-1, 4).int()


def compact(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """``rows`` and ``cols`` of int8 kinds [R, blocks], each row with room for all blocks."""
    count, blocks = kinds.shape
    rank = torch.where(kinds == FULL, 0, torch.where(kinds == PARTIAL, 1, 2))
    cols = torch.sort(rank, dim=1, stable=True).indices.int()
    full, partial = (kinds == FULL).sum(1), (kinds == PARTIAL).sum(1)
    begin = torch.arange(count, device=kinds.device) * blocks
    rows = [begin, begin + full, begin + full + partial, torch.zeros_like(begin)]
    return torch.stack(rows, 1).int(), cols.flatten()


def from_kinds(
    kinds: Tensor,
    num_heads: int,
    sequences: Tensor,
    block_m: int,
    block_n: int,
    *,
    mask: Mask = masks.everything,
    mask_aux: Tensor | None = None,
    has_partial: bool = True,
    lengths: tuple[int, int] | None = None,
) -> BlockPlan:
    """A plan from the kind of every block.

    Args:
        kinds: int8 [S or 1, G, tiles, blocks] of SKIP, FULL and PARTIAL; one sequence shares its
            pattern with all, and each of G heads with its group of ``num_heads / G``.
        sequences: ``BlockPlan.sequences``.
        has_partial: ``False`` promises that no kind is PARTIAL.
        lengths: ``BlockPlan.lengths``.

    Raises:
        ValueError: a shape is wrong.
    """
    if kinds.dim() != 4 or kinds.shape[0] not in (1, len(sequences)):
        raise ValueError(
            f"kinds must have shape [1 or {len(sequences)}, heads, tiles, blocks], "
            f"got {list(kinds.shape)}"
        )
    s, h, tiles, blocks = kinds.shape
    if not h or num_heads % h:
        raise ValueError(f"heads of kinds must divide {num_heads}, got {h}")
    if kinds.numel() >= 1 << 31:  # columns are numbered in int32
        raise ValueError(f"kinds must be fewer than 2^31, got {kinds.numel()}")
    rows, cols = compact(kinds.reshape(s * h * tiles, blocks))
    row_of = torch.arange(s * h * tiles, device=kinds.device).view(s, h, tiles)
    row_of = row_of.repeat_interleave(num_heads // h, 1).expand(len(sequences), -1, -1)
    live = torch.arange(tiles, device=kinds.device) * block_m < sequences[:, 2, None]
    work = work_list(rows, row_of, live[:, None])
    lists = (rows, cols, work, sequences)
    return BlockPlan(
        *lists, num_heads, block_m, block_n, has_partial, mask, mask_aux, lengths=lengths
    )
