"""Plans that kernels make from values on the device, without a read of it."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.kernels import plans as kernels
from block_sparse_backend.launches import prepared
from block_sparse_backend.plan import PackedShape, Pair, PlanPath
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.predict.triton import ordered


def bind(row: Row, spec: None, target: Target) -> PlanPath:
    return PlanPath(packed, of_map)


def packed(cu_q: Tensor, cu_k: Tensor, shape: PackedShape) -> tuple[Tensor, ...]:
    longest, room, num_heads, sizes, is_causal = shape
    count, step = len(cu_q) - 1, 64
    new = functools.partial(torch.empty, dtype=torch.int32, device=cu_q.device)
    rows, work, sequences = new(room[0], 4), new(num_heads * room[0], 4), new(count, 6)
    key_blocks, first_blocks = new(room[1], 3), new(count + 1)
    flags = {"BLOCK_M": sizes[0], "BLOCK_N": sizes[1], "IS_CAUSAL": is_causal, "STEP": step}
    prepared(kernels.packed_plan_kernel, 4, HEADS=num_heads, **flags).launch(
        (sum(-(-n // step) for n in (*room, count + 1)), 1, 1),
        cu_q_ptr=cu_q,
        cu_k_ptr=cu_k,
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


def of_map(kept: Tensor, lengths: Pair, sizes: Pair, keep_first: bool) -> BlockPlan:
    b, h, tiles, blocks = kept.shape
    kept = kept.contiguous()
    new = functools.partial(torch.empty, dtype=torch.int32, device=kept.device)
    rows, cols = new(b * h * tiles, 4), new(b * h * tiles * blocks)
    width = max(64, triton.next_power_of_2(blocks))
    flags = {"BLOCK_N": sizes[1], "WIDTH": width, "HAS_SINK": keep_first}
    prepared(kernels.map_rows_kernel, max(1, width // 1024), **flags).launch(
        (b * h * tiles, 1, 1),
        map_ptr=kept.view(torch.uint8) if kept.dtype == torch.bool else kept,
        rows_ptr=rows,
        cols_ptr=cols,
        blocks=blocks,
        kv_len=lengths[1],
    )
    work, sequences = ordered(rows, (b, h, tiles), lengths)
    has_partial = lengths[1] % sizes[1] != 0
    return BlockPlan(rows, cols, work, sequences, h, *sizes, has_partial, lengths=lengths)
