"""Plans whose rows are runs of keys: dense, causal and ragged.

Causal attention is aligned to the bottom right: the last query stands at the last key. With more
queries than keys the first queries see nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from backend_core.contracts import expect_device, expect_tensors, whole_number
from block_sparse_backend import masks
from block_sparse_backend.plan import PackedShape, Pair, PlanPath
from block_sparse_backend.plan.block_plan import BlockPlan, uniform_sequences, work_list
from block_sparse_backend.selection import Paths, paths_on


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
    """Every query sees every key.

    Raises:
        ValueError: a size is not a whole number, or too small.
    """
    _expect_sizes(q_len, kv_len, block_m, block_n)
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
    """Query i sees keys up to i + kv_len - q_len.

    Raises:
        ValueError: a size is not a whole number, or too small.
    """
    _expect_sizes(q_len, kv_len, block_m, block_n)
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
    path: str | None = None,
) -> BlockPlan:
    """Sequences packed one after another along the tokens of batch entry 0.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [S + 1], where sequences begin and end. Values
            in host memory are checked; values on a GPU are trusted.
        max_q_len, max_kv_len: capacities; what of a sequence is beyond them is left out.
        tokens: the most queries and keys of all sequences together, by which the plan is sized;
            default as many as if each sequence had the most.
        path: ``"torch"`` or ``"triton"``; by default the one for the device.

    Raises:
        ValueError: an argument is not as described.
    """
    expect_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    _expect_sizes(0, 0, block_m, block_n)
    most = whole_number("max_q_len", max_q_len, 0), whole_number("max_kv_len", max_kv_len, 0)
    paths = paths_on(cu_seqlens_q.device, path, "plan")
    offsets = (cu_seqlens_q, cu_seqlens_k)
    return packed(offsets, most, tokens, num_heads, (block_m, block_n), is_causal, paths)


def packed(
    offsets: tuple[Tensor, Tensor],
    longest: Pair,
    tokens: Pair | None,
    num_heads: int,
    sizes: Pair,
    is_causal: bool,
    paths: Paths,
) -> BlockPlan:
    """``ragged`` by the paths of a call, its arguments in pairs of queries and keys."""
    cu_seqlens_q, cu_seqlens_k = offsets
    totals = (None, None) if tokens is None else tokens
    _expect_offsets("cu_seqlens_q", cu_seqlens_q, totals[0])
    _expect_offsets("cu_seqlens_k", cu_seqlens_k, totals[1])
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must be of equally many sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    expect_device("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.device)
    count = len(cu_seqlens_q) - 1
    tiles, blocks = (
        count * -(-most // block) if total is None else min(total // block, count * most) + count
        for most, total, block in zip(longest, totals, sizes, strict=True)
    )
    selection = paths.select("plan", None, "cu_seqlens_q", cu_seqlens_q)
    run: PlanPath = selection.run(tiles * num_heads)
    shape = PackedShape(longest, (tiles, blocks), num_heads, sizes, is_causal)
    # kernels read them one after another
    made = run.packed(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), shape)
    rows, work, sequences, key_blocks, first_blocks = made
    cols = torch.arange(max(-(-longest[1] // sizes[1]), 1), dtype=torch.int32, device=rows.device)
    return BlockPlan(
        rows,
        cols,
        work,
        sequences,
        num_heads,
        *sizes,
        mask=masks.causal if is_causal else masks.everything,
        is_packed=True,
        key_blocks=key_blocks,
        first_blocks=first_blocks,
    )


def interval_rows(
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
    rows = interval_rows(tile, q_len, kv_len, position, block_m, block_n, is_causal)
    live = tile * block_m < q_len
    row_of = torch.arange(len(sequences) * tiles, device=device).view(len(sequences), 1, tiles)
    row_of = row_of.expand(-1, num_heads, -1)
    cols = torch.arange(max(blocks, 1), dtype=torch.int32, device=device)
    mask = masks.causal if is_causal else masks.everything
    work = work_list(rows, row_of, live[:, None])
    lists, lengths = (rows, cols, work, sequences), (max_q_len, max_kv_len)
    return BlockPlan(*lists, num_heads, block_m, block_n, mask=mask, lengths=lengths)


def _expect_sizes(q_len: int, kv_len: int, block_m: int, block_n: int) -> None:
    for name, size, least in (
        ("q_len", q_len, 0),
        ("kv_len", kv_len, 0),
        ("block_m", block_m, 1),
        ("block_n", block_n, 1),
    ):
        whole_number(name, size, least)


def _expect_offsets(name: str, offsets: Tensor, most: int | None) -> None:
    if offsets.dim() != 1 or len(offsets) < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be int32 or int64 [S + 1] with S at least 1, got {list(offsets.shape)} "
            f"{offsets.dtype}"
        )
    if offsets.is_cpu:
        values = offsets.tolist()
        if values[0] < 0 or any(a > b for a, b in itertools.pairwise(values)):
            raise ValueError(f"{name} must begin at 0 or later and not decrease, got {values}")
        if most is not None and values[-1] > most:
            raise ValueError(f"{name} must end at {most} tokens at most, got {values[-1]}")
