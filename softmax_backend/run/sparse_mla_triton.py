"""Sparse MLA through Triton's kernels: each token's rows shared by programs, then the merge."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from backend_core.contracts import expect_near
from backend_core.tables.schema import KernelPath
from backend_core.target import Target, detect_target
from softmax_backend.contract.sparse_mla import NamedRows, SparseMlaInputs, token_stride
from softmax_backend.launch_params_sparse import TritonSparseMlaParams
from softmax_backend.plan.sparse_splits import sparse_splits
from softmax_backend.run.mla_triton import operand_dtype
from softmax_backend.run.sparse_mla_combine import combine
from softmax_backend.scratch import Scratch
from softmax_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch


def run(path: KernelPath, x: SparseMlaInputs, scratch: Scratch, splits: int | None) -> None:
    """One launch, or two where several programs share a token's rows."""
    expect_near("q", x.q, 2)
    params: TritonSparseMlaParams = path.params
    operand = operand_dtype(x.q)
    if x.spec.cache_format == "bf16_rows":
        _run_rows(params, x, operand)
        return
    tiles = row_tiles(params, x.spec.num_heads)
    if splits is None:
        splits = splits_of(path, x.spec, x.tokens, x.topks, detect_target(x.q.device))
    partial_out, partial_lse = (
        scratch.reserve(x.tokens * splits, x.spec.num_heads, HEAD_DIM)
        if splits > 1
        else (None, None)
    )
    cache, rope, scales = record_views(x.rows)
    extra: tuple[torch.Tensor | None, ...] = (None, None, None)
    if x.extra is not None:
        extra = record_views(x.extra)
    kernel = records_kernel(params, x.spec, operand, splits > 1)
    kernel.launch(
        (x.tokens * splits * tiles, 1, 1),
        q_ptr=x.q,
        cache_ptr=cache,
        rope_ptr=rope,
        scales_ptr=scales,
        indices_ptr=x.rows.indices,
        lengths_ptr=x.rows.lengths,
        extra_cache_ptr=extra[0],
        extra_rope_ptr=extra[1],
        extra_scales_ptr=extra[2],
        extra_indices_ptr=None if x.extra is None else x.extra.indices,
        extra_lengths_ptr=None if x.extra is None else x.extra.lengths,
        sinks_ptr=None if splits > 1 else x.sinks,
        out_ptr=x.out,
        lse_ptr=x.lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        scale=x.scale,
        stride_q_t=token_stride(x.q),
        stride_q_h=x.q.stride(2),
        stride_page=x.rows.cache.stride(0),
        stride_extra_page=0 if x.extra is None else x.extra.cache.stride(0),
        stride_indices=token_stride(x.rows.indices),
        stride_extra_indices=0 if x.extra is None else token_stride(x.extra.indices),
        topk=x.rows.topk,
        extra_topk=0 if x.extra is None else x.extra.topk,
        rows=x.rows.num_rows,
        extra_rows=0 if x.extra is None else x.extra.num_rows,
        query_tokens=x.q.shape[1],
        heads=x.spec.num_heads,
        splits=splits,
    )
    if partial_out is not None and partial_lse is not None:
        combine(x.out, x.lse, partial_out, partial_lse, x.sinks, splits)


def _run_rows(params: TritonSparseMlaParams, x: SparseMlaInputs, operand: torch.dtype) -> None:
    kernel = rows_kernel(params, x.spec, operand)
    kernel.launch(
        (x.tokens * row_tiles(params, x.spec.num_heads), 1, 1),
        q_ptr=x.q,
        kv_ptr=x.rows.cache,
        indices_ptr=x.rows.indices,
        lengths_ptr=x.rows.lengths,
        sinks_ptr=x.sinks,
        out_ptr=x.out,
        lse_ptr=x.lse,
        max_logits_ptr=x.max_logits,
        scale=x.scale,
        stride_q_t=token_stride(x.q),
        stride_q_h=x.q.stride(2),
        stride_kv=x.rows.cache.stride(0),
        stride_indices=token_stride(x.rows.indices),
        topk=x.rows.topk,
        rows=x.rows.num_rows,
        query_tokens=x.q.shape[1],
        heads=x.spec.num_heads,
    )


def splits_of(
    path: KernelPath, spec: SparseMlaSpec, tokens: int, topks: tuple[int, ...], target: Target
) -> int:
    """The programs that share a token's rows, of lists of so many entries."""
    params: TritonSparseMlaParams = path.params
    tiles = tokens * row_tiles(params, spec.num_heads)
    slots = target.num_sms * params.programs_per_sm
    return sparse_splits(tiles, blocks_of(topks, params.block_kv), slots, params.overhead)


def blocks_of(topks: tuple[int, ...], block_kv: int) -> int:
    """Blocks of one token's lists, if they are full."""
    return sum(-(-topk // block_kv) for topk in topks)


def record_views(given: NamedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache of records as bytes, bf16 and int64: three views of its memory."""
    raw = given.cache.view(torch.uint8)
    return raw, raw.view(torch.bfloat16), raw.view(torch.int64)


def block_rows_of(params: TritonSparseMlaParams, num_heads: int) -> int:
    """Heads of a program: 16, or as many as the path allows where there are more."""
    return min(params.block_rows, 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64)


def row_tiles(params: TritonSparseMlaParams, num_heads: int) -> int:
    return -(-num_heads // block_rows_of(params, num_heads))


def records_kernel(
    params: TritonSparseMlaParams, spec: SparseMlaSpec, operand: torch.dtype, is_split: bool
) -> KernelLaunch:
    """The kernel over pages of records, as its path launches it."""
    decode = "plain" if operand == torch.float32 else params.decode
    constexprs = (
        ("PAGE_SIZE", spec.page_size),
        ("EXTRA_PAGE_SIZE", max(spec.extra_page_size, 1)),
        *_tile(params, spec),
        ("IS_SPLIT", is_split),
        ("OPERAND", torch.float16 if decode == "fp16" else operand),
        ("DECODE", ("plain", "bf16", "fp16").index(decode)),
    )
    return _kernel("sparse_mla_records_kernel", constexprs, params.num_warps, params.num_stages)


def rows_kernel(
    params: TritonSparseMlaParams, spec: SparseMlaSpec, operand: torch.dtype
) -> KernelLaunch:
    """The kernel over plain rows."""
    constexprs = (*_tile(params, spec), ("OPERAND", operand))
    return _kernel("sparse_mla_rows_kernel", constexprs, params.num_warps, params.num_stages)


def _tile(params: TritonSparseMlaParams, spec: SparseMlaSpec) -> tuple[tuple[str, int], ...]:
    return (
        ("BLOCK_KV", params.block_kv),
        ("BLOCK_ROWS", block_rows_of(params, spec.num_heads)),
        ("ROW_TILES", row_tiles(params, spec.num_heads)),
    )


@functools.cache
def _kernel(
    name: str, constexprs: tuple[tuple[str, object], ...], num_warps: int, num_stages: int
) -> KernelLaunch:
    import triton.language as tl

    from backend_core.launch.triton import KernelLaunch
    from softmax_backend.kernels import sparse_mla as kernels

    types = {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
    }
    values = {
        key: types[value] if isinstance(value, torch.dtype) else value for key, value in constexprs
    }
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return KernelLaunch(getattr(kernels, name), values, options)
