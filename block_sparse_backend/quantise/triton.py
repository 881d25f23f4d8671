"""Quantisation by kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.kernels import quantise as kernels
from block_sparse_backend.launches import prepared
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.predict import Pooled
from block_sparse_backend.quantise import E4M3_MAX, Quantise, Quantised, QuantisePath
from block_sparse_backend.spec import QuantiseSpec


def bind(row: Row, spec: QuantiseSpec, target: Target) -> QuantisePath:
    return functools.partial(_prepare, spec)


def _prepare(
    spec: QuantiseSpec, q: Tensor, k: Tensor, v: Tensor, key_blocks: Tensor | None
) -> Quantise:
    mode, block_m, block_n = spec.mode, spec.block_m, spec.block_n
    assert key_blocks is None or not mode.fp8_values
    (b, h, m, d), hk = q.shape, k.shape[1]
    n, has_shift = k.shape[2], key_blocks is None
    tiles, rows = -(-m // block_m), b * hk
    blocks = -(-n // block_n) if key_blocks is None else len(key_blocks)
    shape_q, span = (b, h, m, d), mode.span(block_n)
    shape_k = (b, hk, blocks * block_n if mode.fp8_values else n, d)
    k_scales = (b, hk, blocks, 4 * (block_n // span))
    pools = {"HAS_POOL": spec.has_pool, "HAS_LIKENESS": spec.has_likeness}
    sizes = {"HEADS": hk, "D": d, "BLOCK": block_n}
    of_keys = prepared(kernels.quantise_keys_kernel, 8, "k", SPAN=span, **sizes, **pools).launch
    sizes_q = {"HEADS": h, "GROUP": h // hk, "D": d, "BLOCK": block_m}
    of_queries = prepared(kernels.quantise_queries_kernel, 1, "q", **sizes_q, **pools).launch
    mean_of = column_mean_of(k, key_blocks, block_n)
    finish = _bind_values(v, block_n) if mode.fp8_values else None
    int8 = functools.partial(torch.empty, dtype=torch.int8, device=q.device)
    fp32 = functools.partial(torch.empty, dtype=torch.float32, device=q.device)

    def run(
        q: Tensor, k: Tensor, v: Tensor, scale: float, plan: BlockPlan | None
    ) -> tuple[Quantised, Pooled | None]:
        tops = fp32(b * h + (b if plan is None else len(plan.sequences)) * hk)
        k_mean = mean_of(k, plan, tops)
        k8, k_scale = int8(shape_k), fp32(k_scales)
        q_top, k_top = tops[: b * h], tops[b * h :]
        order = None
        if mode.fp8_values:
            order = k.new_empty((b, hk, blocks, block_n), dtype=torch.int8)
        q8, q_scale = int8(shape_q), fp32((b, h, m))
        shift = fp32((b, h, m)) if has_shift else None
        pooled = None
        k_sums = k_likeness = q_sums = q_likeness = q_scale
        if spec.has_pool:
            q_sums, k_sums = fp32((b, h, tiles, d)), fp32((b, hk, blocks, d))
            pooled = Pooled(q_sums, k_sums, None, None, (m, n))
        if spec.has_likeness:
            q_likeness, k_likeness = fp32((b, h, tiles)), fp32((b, hk, blocks))
            pooled = Pooled(q_sums, k_sums, q_likeness, k_likeness, (m, n))
        of_keys(
            (blocks * rows, 1, 1),
            k_ptr=k,
            k_mean_ptr=k_mean,
            out_ptr=k8,
            scale_ptr=k_scale,
            top_ptr=k_top,
            order_ptr=order,
            sums_ptr=k_sums,
            likeness_ptr=k_likeness,
            spans_ptr=None if plan is None else plan.key_blocks,
            length=n,
            blocks=blocks,
        )
        of_queries(
            (tiles * b * h, 1, 1),
            q_ptr=q,
            k_mean_ptr=k_mean,
            out_ptr=q8,
            scale_ptr=q_scale,
            top_ptr=q_top,
            shift_ptr=shift,
            sums_ptr=q_sums,
            likeness_ptr=q_likeness,
            softmax_scale=scale,
            length=m,
            blocks=tiles,
        )
        v8, v_scale, offset = (
            (v, None, None) if finish is None or order is None else finish(v, order)
        )
        scales = (q_scale, k_scale, v_scale)
        x = Quantised(
            *(mode, q8, k8, v8, *scales, offset, shift, k_mean, block_n),
            length=n,
            order=order,
            q_top=q_top,
            k_top=k_top,
        )
        return x, pooled

    return run


def _bind_values(
    v: Tensor, block_n: int
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """A function that rounds such values to e4m3, in the order of ``quantise_values_kernel``; it
    returns them, their scale and the offset of the output."""
    b, h, n, d = v.shape
    blocks, rows = -(-n // block_n), b * h
    statistics, parts = partial_stats_of(v, True, None, 0)
    small = {"D": d, "STEP": 32}
    scales_of = prepared(kernels.value_scales_kernel, 4, **small, E4M3_MAX=E4M3_MAX).launch
    rounded = prepared(kernels.quantise_values_kernel, 16, "v", HEADS=h, D=d, BLOCK=block_n).launch
    offset_of = prepared(kernels.value_offset_kernel, 4, **small).launch
    fp32 = functools.partial(torch.empty, dtype=torch.float32, device=v.device)
    fp8 = functools.partial(torch.empty, dtype=torch.float8_e4m3fn, device=v.device)

    def finish(v: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, scale, inverse, offset = (fp32((b, h, d)) for _ in range(4))
        grid = (rows, 1, 1)
        scales_of(
            grid,
            stats_ptr=statistics(v, None),
            mean_ptr=mean,
            scale_ptr=scale,
            inverse_ptr=inverse,
            parts=parts,
            length=n,
        )
        v8, sums = fp8((b, h, d, blocks * block_n)), fp32((rows, blocks, d))
        rounded(
            (blocks * rows, 1, 1),
            v_ptr=v,
            order_ptr=order,
            inverse_ptr=inverse,
            mean_ptr=mean,
            out_ptr=v8,
            sums_ptr=sums,
            length=n,
            blocks=blocks,
        )
        named = {"sums_ptr": sums, "mean_ptr": mean, "scale_ptr": scale, "offset_ptr": offset}
        offset_of(grid, **named, parts=blocks, length=n)
        return v8, scale, offset

    return finish


Of = Callable[[Tensor, BlockPlan | None], Tensor]
"""Takes a tensor like that which it was made for, and the plan of its packed sequences."""
MeanOf = Callable[[Tensor, BlockPlan | None, Tensor | None], Tensor]
"""Takes what `Of` takes, and floats that it sets to 0."""


def column_mean(x: Tensor) -> Tensor:
    """Mean over the tokens of [B, H, L, D]: float32 [B, H, D]."""
    return column_mean_of(x, None, 0)(x, None, None)


def column_mean_of(x: Tensor, key_blocks: Tensor | None, block: int) -> MeanOf:
    """A function that computes the mean over the tokens of [B, H, L, D], float32 [B, H, D]; or of
    packed sequences, each of which has a mean of its keys, [S, H, D].

    Args:
        key_blocks, block: of the plan of packed sequences.
    """
    b, h, length, d = x.shape
    partial, parts = partial_stats_of(x, False, key_blocks, block)
    launch = prepared(kernels.mean_kernel, 4, HEADS=h, D=d, STEP=32).launch
    device = x.device

    def mean_of(x: Tensor, plan: BlockPlan | None, tops: Tensor | None) -> Tensor:
        rows, first_blocks, sequences = b, None, None
        if plan is not None:
            first_blocks, sequences = plan.first_blocks, plan.sequences
            rows = len(sequences)
        mean = torch.empty((rows, h, d), dtype=torch.float32, device=device)
        launch(
            (rows * h, 1, 1),
            sums_ptr=partial(x, plan),
            mean_ptr=mean,
            tops_ptr=tops,
            first_blocks_ptr=first_blocks,
            sequences_ptr=sequences,
            parts=parts,
            length=length,
            tops=0 if tops is None else len(tops),
        )
        return mean

    return mean_of


def partial_stats_of(
    x: Tensor, has_range: bool, key_blocks: Tensor | None, key_block: int
) -> tuple[Of, int]:
    """A function that computes [B * H, parts of sums, or of sums, minima and maxima, D]; and
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

    def partial(x: Tensor, plan: BlockPlan | None) -> Tensor:
        part = torch.empty(shape, dtype=torch.float32, device=device)
        spans = None if plan is None else plan.key_blocks
        launch(grid, x_ptr=x, stats_ptr=part, spans_ptr=spans, length=length, parts=parts)
        return part

    return partial, parts
