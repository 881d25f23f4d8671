"""Plans made in torch from values on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.plan import PackedShape, Pair, PlanPath
from block_sparse_backend.plan.block_plan import (
    FULL,
    PARTIAL,
    BlockPlan,
    from_kinds,
    uniform_sequences,
)
from block_sparse_backend.plan.intervals import interval_rows


def bind(row: Row, spec: None, target: Target) -> PlanPath:
    return PlanPath(packed, of_map)


def packed(cu_q: Tensor, cu_k: Tensor, shape: PackedShape) -> tuple[Tensor, ...]:
    longest, room, num_heads, sizes, is_causal = shape
    q_len, kv_len = (
        x.diff().clamp(max=most) for x, most in zip((cu_q, cu_k), longest, strict=True)
    )
    starts = (cu_q[:-1], cu_k[:-1])
    columns = [torch.zeros_like(q_len), starts[0], q_len, starts[1], kv_len, kv_len - q_len]
    sequences = torch.stack(columns, 1).int()
    tile_of, tile, _ = _numbered(q_len, room[0], sizes[0])
    block_of, block, first_blocks = _numbered(kv_len, room[1], sizes[1])
    own = sequences.long()[tile_of.clamp(min=0)].masked_fill(tile_of[:, None] < 0, 0)
    rows = interval_rows(tile, own[:, 2], own[:, 4], own[:, 5], *sizes, is_causal)
    # head after head, each from the last tile to the first: causal rows grow
    of_tile = torch.stack([tile_of, tile, torch.arange(room[0], device=tile.device)], 1).flip(0)
    work = of_tile[:, [0, 0, 1, 2]].int().expand(num_heads, -1, -1).clone()
    work[:, :, 1] = torch.arange(num_heads, dtype=torch.int32, device=work.device)[:, None]
    of, begin = block_of.clamp(min=0), block * sizes[1]
    spans = [starts[1][of] + begin, (kv_len[of] - begin).clamp(max=sizes[1]), of]
    key_blocks = torch.stack(spans, 1).int().masked_fill(block_of[:, None] < 0, 0)
    return rows, work.view(-1, 4), sequences, key_blocks, first_blocks


def of_map(kept: Tensor, lengths: Pair, sizes: Pair, keep_first: bool) -> BlockPlan:
    b, h = kept.shape[:2]
    kinds = (kept != 0).to(torch.int8) * FULL
    if keep_first:
        kinds[..., 0] = FULL
    if lengths[1] % sizes[1]:
        kinds[..., -1] *= PARTIAL
    sequences = uniform_sequences(b, *lengths, kept.device)
    return from_kinds(kinds, h, sequences, *sizes, lengths=lengths)


def _numbered(lengths: Tensor, room: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks of all sequences, one after another: of each its sequence, -1 of those beyond the
    last, and its number in the sequence, int64; and int32 [S + 1], where each sequence begins."""
    ends = ((lengths + block - 1) // block).cumsum(0)
    begins = torch.nn.functional.pad(ends, (1, 0))
    number = torch.arange(room, device=lengths.device)
    of = torch.searchsorted(ends, number, right=True)
    inside = of < len(lengths)
    place = number - begins[of]
    return torch.where(inside, of, -1), torch.where(inside, place, 0), begins.int()
