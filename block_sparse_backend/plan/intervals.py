"""Plans whose rows are runs of keys: dense, causal and ragged.

Causal attention is aligned to the bottom right: the last query stands at the last key. With more
queries than keys the first queries see nothing.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from backend_core.contracts import expect_device
from block_sparse_backend.kernels import plans as kernels
from block_sparse_backend.plan.block_plan import BlockPlan, uniform_sequences, work_list
from block_sparse_backend.prepared import has_kernels, prepared
from block_sparse_backend.variants import masks


def dense(
    q_len: int,
    kv_len: int,
    num_heads: int,
    *,
    batch: int = 1,
    block_m: int = 128,
    block_n: int = 128,
    device: torch.device | str = "cuda",
) -> BlockPlan:
    """Every query sees every key."""
    sequences = uniform_sequences(batch, q_len, kv_len, torch.device(device))
    plan = _interval_plan(sequences, q_len, kv_len, num_heads, block_m, block_n, False)
    return replace(plan, has_partial=kv_len % block_n != 0)


def causal(
    q_len: int,
    kv_len: int,
    num_heads: int,
    *,
    batch: int = 1,
    block_m: int = 128,
    block_n: int = 128,
    device: torch.device | str = "cuda",
) -> BlockPlan:
    """Query i sees keys up to i + kv_len - q_len."""
    sequences = uniform_sequences(batch, q_len, kv_len, torch.device(device))
    return _interval_plan(sequences, q_len, kv_len, num_heads, block_m, block_n, True)


def ragged(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q_len: int,
    max_kv_len: int,
    num_heads: int,
    *,
    tokens: tuple[int, int] | None = None,
    is_causal: bool = True,
    block_m: int = 128,
    block_n: int = 128,
) -> BlockPlan:
    """Sequences packed one after another along the tokens of batch entry 0.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 [S + 1], where sequences begin and end.
        max_q_len, max_kv_len: capacities; what of a sequence is beyond them is left out.
        tokens: the most queries and keys of all sequences together, by which the plan is sized;
            default as many as if each sequence had the most.
    """
    _expect_offsets("cu_seqlens_q", cu_seqlens_q)
    _expect_offsets("cu_seqlens_k", cu_seqlens_k)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of equally many sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    expect_device("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.device)
    count, totals = len(cu_seqlens_q) - 1, (None, None) if tokens is None else tokens
    sizes = (block_m, block_n)
    tiles, blocks = (
        count * -(-most // block) if total is None else min(total // block, count * most) + count
        for most, total, block in zip((max_q_len, max_kv_len), totals, sizes, strict=True)
    )
    make = _with_kernel if has_kernels(cu_seqlens_q) else _with_torch
    offsets, longest = (cu_seqlens_q, cu_seqlens_k), (max_q_len, max_kv_len)
    made = make(offsets, longest, (tiles, blocks), num_heads, sizes, is_causal)
    rows, work, sequences, key_blocks, first_blocks = made
    cols = torch.arange(max(-(-max_kv_len // block_n), 1), dtype=torch.int32, device=rows.device)
    return BlockPlan(
        rows,
        cols,
        work,
        sequences,
        num_heads,
        block_m,
        block_n,
        mask=masks.causal if is_causal else masks.everything,
        is_packed=True,
        key_blocks=key_blocks,
        first_blocks=first_blocks,
    )


Pair = tuple[int, int]


def _with_kernel(
    offsets: tuple[Tensor, Tensor],
    longest: Pair,
    room: Pair,
    num_heads: int,
    sizes: Pair,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    """Rows, work, sequences, key blocks and first blocks of ``BlockPlan``."""
    count, step = len(offsets[0]) - 1, 64
    new = functools.partial(torch.empty, dtype=torch.int32, device=offsets[0].device)
    rows, work, sequences = new(room[0], 4), new(num_heads * room[0], 4), new(count, 6)
    key_blocks, first_blocks = new(room[1], 3), new(count + 1)
    flags = {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1], "IS_CAUSAL": is_causal, "STEP": step}
    prepared(kernels.packed_plan_kernel, 4, HEADS=num_heads, **flags).launch(
        (sum(-(-n // step) for n in (*room, count + 1)), 1, 1),
        cu_q_ptr=offsets[0],
        cu_k_ptr=offsets[1],
        rows_ptr=rows,
        work_ptr=work,
        sequences_ptr=sequences,
        key_blocks_ptr=key_blocks,
        first_blocks_ptr=first_blocks,
        count=count,
        tiles=room[0],
        blocks=room[1],
        longest_q=longest[0],
        longest_k=longest[1],
    )
    return rows, work, sequences, key_blocks, first_blocks


def _with_torch(
    offsets: tuple[Tensor, Tensor],
    longest: Pair,
    room: Pair,
    num_heads: int,
    sizes: Pair,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    q_len, kv_len = (x.diff().clamp(max=most) for x, most in zip(offsets, longest, strict=True))
    starts = (offsets[0][:-1], offsets[1][:-1])
    columns = [torch.zeros_like(q_len), starts[0], q_len, starts[1], kv_len, kv_len - q_len]
    sequences = torch.stack(columns, 1).int()
    tile_of, tile, _ = _numbered(q_len, room[0], sizes[0])
    block_of, block, first_blocks = _numbered(kv_len, room[1], sizes[1])
    own = sequences.long()[tile_of.clamp(min=0)].masked_fill(tile_of[:, None] < 0, 0)
    rows = _rows(tile, own[:, 2], own[:, 4], own[:, 5], *sizes, is_causal)
    # head after head, each from the last tile to the first: causal rows grow
    of_tile = torch.stack([tile_of, tile, torch.arange(room[0], device=tile.device)], 1).flip(0)
    work = of_tile[:, [0, 0, 1, 2]].int().expand(num_heads, -1, -1).clone()
    work[:, :, 1] = torch.arange(num_heads, dtype=torch.int32, device=work.device)[:, None]
    of, begin = block_of.clamp(min=0), block * sizes[1]
    spans = [starts[1][of] + begin, (kv_len[of] - begin).clamp(max=sizes[1]), of]
    key_blocks = torch.stack(spans, 1).int().masked_fill(block_of[:, None] < 0, 0)
    return rows, work.view(-1, 4), sequences, key_blocks, first_blocks


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


def _rows(
    tile: Tensor,
    q_len: Tensor,
    kv_len: Tensor,
    position: Tensor,
    block_m: int,
    block_n: int,
    is_causal: bool,
) -> Tensor:
    """``BlockPlan.rows`` of tiles with so many queries and keys in their sequence, the first query
    of which is at ``position``; all of a shape that broadcasts."""
    first = tile * block_m + position
    last = torch.minimum((tile + 1) * block_m, q_len) - 1 + position
    full, end = kv_len // block_n, -(-kv_len // block_n)
    if is_causal:
        full = torch.minimum((first + 1).clamp(min=0) // block_n, full)
        end = torch.minimum(-(-(last + 1).clamp(min=0) // block_n), end)
    full, end = (torch.broadcast_to(x, first.shape) for x in (torch.minimum(full, end), end))
    zero = torch.zeros_like(full)
    return torch.stack([zero, full, end, zero], -1).view(-1, 4).int()


def _interval_plan(
    sequences: Tensor,
    max_q_len: int,
    max_kv_len: int,
    num_heads: int,
    block_m: int,
    block_n: int,
    is_causal: bool,
) -> BlockPlan:
    device = sequences.device
    tiles, blocks = -(-max_q_len // block_m), -(-max_kv_len // block_n)
    q_len, kv_len, position = (sequences[:, i, None].long() for i in (2, 4, 5))
    tile = torch.arange(tiles, device=device)
    rows = _rows(tile, q_len, kv_len, position, block_m, block_n, is_causal)
    live = tile * block_m < q_len
    row_of = torch.arange(len(sequences) * tiles, device=device).view(len(sequences), 1, tiles)
    row_of = row_of.expand(-1, num_heads, -1)
    cols = torch.arange(max(blocks, 1), dtype=torch.int32, device=device)
    mask = masks.causal if is_causal else masks.everything
    work = work_list(rows, row_of, live[:, None])
    return BlockPlan(rows, cols, work, sequences, num_heads, block_m, block_n, mask=mask)


def _expect_offsets(name: str, offsets: Tensor) -> None:
    if offsets.dim() != 1 or len(offsets) < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 [S + 1] with S at least 1, got {list(offsets.shape)} "
            f"{offsets.dtype}"
        )
