"""Means and ranges of each channel over the tokens of a tensor, by small kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.prepared import prepared

E4M3_MAX = 448.0


Of = Callable[[Tensor, BlockPlan | None], Tensor]
"""Of a tensor like that which it was made for, and the plan of its packed sequences."""


def column_mean(x: Tensor) -> Tensor:
    """Mean over the tokens of [B, H, L, D]: float32 [B, H, D]."""
    return column_mean_of(x, None, 0)(x, None)


def column_mean_of(x: Tensor, key_blocks: Tensor | None, block: int) -> Of:
    """What computes the mean over the tokens of [B, H, L, D], float32 [B, H, D]; or of packed
    sequences, each of which has a mean of its keys, [S, H, D].

    Args:
        key_blocks, block: of the plan of packed sequences.
    """
    b, h, length, d = x.shape
    partial, parts = partial_stats_of(x, False, key_blocks, block)
    launch = prepared(kernels.mean_kernel, 4, HEADS=h, D=d, STEP=32).launch
    device = x.device

    def mean_of(x: Tensor, packed: BlockPlan | None) -> Tensor:
        rows, first_blocks, sequences = b, None, None
        if packed is not None:
            first_blocks, sequences = packed.first_blocks, packed.sequences
            rows = len(sequences)
        mean = torch.empty((rows, h, d), dtype=torch.float32, device=device)
        launch(
            (rows * h, 1, 1),
            sums_ptr=partial(x, packed),
            mean_ptr=mean,
            first_blocks_ptr=first_blocks,
            sequences_ptr=sequences,
            parts=parts,
            length=length,
        )
        return mean

    return mean_of


def partial_stats_of(
    x: Tensor, has_range: bool, key_blocks: Tensor | None, key_block: int
) -> tuple[Of, int]:
    """What computes [B * H, parts of sums, or of sums, minima and maxima one after another, D]; and
    the number of parts. Of packed sequences a part is a block of keys."""
    b, h, length, d = x.shape
    block = min(32, triton.next_power_of_2(length))
    chunk, parts = max(block, 512), -(-length // max(block, 512))
    if key_blocks is not None:
        chunk, block, parts = key_block, min(32, key_block), len(key_blocks)
    shape = (b * h, (3 if has_range else 1) * parts, d)
    sizes = {"HEADS": h, "D": d, "CHUNK": chunk, "BLOCK": block}
    launch = prepared(kernels.column_stats_kernel, 4, "x", HAS_RANGE=has_range, **sizes).launch
    grid, device = (parts * b * h, 1, 1), x.device

    def partial(x: Tensor, packed: BlockPlan | None) -> Tensor:
        part = torch.empty(shape, dtype=torch.float32, device=device)
        spans = None if packed is None else packed.key_blocks
        launch(grid, x_ptr=x, stats_ptr=part, spans_ptr=spans, length=length, parts=parts)
        return part

    return partial, parts
