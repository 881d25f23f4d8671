"""Sparse MLA through the Gluon kernels for Hopper, then the merge."""

from __future__ import annotations

import functools

import torch

from backend_core.contracts import expect_near
from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import KernelPath
from backend_core.target import Target, detect_target
from softmax_backend.contract.sparse_mla import SparseMlaInputs, token_stride
from softmax_backend.launch_params_sparse import GluonSparseMlaParams
from softmax_backend.plan.sparse_splits import sparse_splits
from softmax_backend.run.sparse_mla_combine import combine
from softmax_backend.run.sparse_mla_triton import blocks_of
from softmax_backend.scratch import Scratch
from softmax_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

BLOCK = 64


def run(path: KernelPath, x: SparseMlaInputs, scratch: Scratch, splits: int | None) -> None:
    """One launch of at most a CTA per SM, or two where CTAs share a token's rows."""
    expect_near("q", x.q, 2)
    params: GluonSparseMlaParams = path.params
    sms = detect_target(x.q.device).num_sms
    tiles = row_tiles(params, x.spec.num_heads)
    if x.spec.cache_format == "bf16_rows":
        _run_rows(params, x, min(x.tokens * tiles, sms))
        return
    if splits is None:
        splits = splits_of(path, x.spec, x.tokens, x.topks, detect_target(x.q.device))
    items = x.tokens * splits * tiles
    partial_out, partial_lse = (
        scratch.reserve(x.tokens * splits, x.spec.num_heads, HEAD_DIM)
        if splits > 1
        else (None, None)
    )
    extra = x.rows if x.extra is None else x.extra
    cache = x.rows.cache.view(torch.uint8).view(torch.int32)
    extra_cache = extra.cache.view(torch.uint8).view(torch.int32)
    kernel = records_kernel(params, x.spec, splits > 1)
    kernel.launch(
        (min(items, sms), 1, 1),
        q_ptr=x.q,
        cache_ptr=cache,
        indices_ptr=x.rows.indices,
        lengths_ptr=x.rows.lengths,
        extra_cache_ptr=extra_cache,
        extra_indices_ptr=extra.indices,
        extra_lengths_ptr=None if x.extra is None else extra.lengths,
        sinks_ptr=None if splits > 1 else x.sinks,
        out_ptr=x.out,
        lse_ptr=x.lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        scale=x.scale,
        stride_q_t=token_stride(x.q),
        stride_q_h=x.q.stride(2),
        stride_page=cache.stride(0),
        stride_extra_page=extra_cache.stride(0),
        stride_indices=token_stride(x.rows.indices),
        stride_extra_indices=token_stride(extra.indices),
        topk=x.rows.topk,
        extra_topk=0 if x.extra is None else extra.topk,
        rows=x.rows.num_rows,
        extra_rows=extra.num_rows,
        query_tokens=x.q.shape[1],
        heads=x.spec.num_heads,
        splits=splits,
        items=items,
    )
    if partial_out is not None and partial_lse is not None:
        combine(x.out, x.lse, partial_out, partial_lse, x.sinks, splits)


def _run_rows(params: GluonSparseMlaParams, x: SparseMlaInputs, ctas: int) -> None:
    """One launch; a prompt has tokens enough for every SM, so none is split."""
    rows_kernel(params, x.spec).launch(
        (ctas, 1, 1),
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
        items=x.tokens * row_tiles(params, x.spec.num_heads),
    )


def splits_of(
    path: KernelPath, spec: SparseMlaSpec, tokens: int, topks: tuple[int, ...], target: Target
) -> int:
    """The CTAs that share a token's rows, of lists of so many entries."""
    params: GluonSparseMlaParams = path.params
    tiles = tokens * row_tiles(params, spec.num_heads)
    return sparse_splits(tiles, blocks_of(topks, BLOCK), target.num_sms, params.overhead)


def heads_of(params: GluonSparseMlaParams, num_heads: int) -> int:
    """Heads of a work item: a power of two of at least 8, up to what the path allows."""
    return min(params.max_heads, max(8, 1 << (num_heads - 1).bit_length()))


def row_tiles(params: GluonSparseMlaParams, num_heads: int) -> int:
    return -(-num_heads // heads_of(params, num_heads))


def records_kernel(
    params: GluonSparseMlaParams, spec: SparseMlaSpec, is_split: bool
) -> KernelLaunch:
    """The kernel, as its path launches it."""
    return _kernel(
        heads_of(params, spec.num_heads),
        row_tiles(params, spec.num_heads),
        spec.page_size,
        spec.extra_page_size or spec.page_size,
        is_split,
        params,
    )


def rows_kernel(params: GluonSparseMlaParams, spec: SparseMlaSpec) -> KernelLaunch:
    """The kernel over rows of bf16."""
    heads = heads_of(params, spec.num_heads)
    return _rows_kernel(heads, row_tiles(params, spec.num_heads), params)


@functools.lru_cache(maxsize=256)
def _rows_kernel(heads: int, tiles: int, params: GluonSparseMlaParams) -> KernelLaunch:
    from softmax_backend.kernels.sm90.sparse_mla_rows import sparse_mla_rows_sm90_kernel

    warps = 8 if heads == 64 else 4
    constexprs = {
        "HEADS": heads,
        "ROW_TILES": tiles,
        "STAGES": params.num_stages if heads <= 16 else 2,
        "WARPS": warps,
        "FETCH_WARPS": 4,
    }
    return KernelLaunch(sparse_mla_rows_sm90_kernel, constexprs, {"num_warps": warps})


@functools.lru_cache(maxsize=256)
def _kernel(
    heads: int,
    tiles: int,
    page_size: int,
    extra_page_size: int,
    is_split: bool,
    params: GluonSparseMlaParams,
) -> KernelLaunch:
    from softmax_backend.kernels.sm90.sparse_mla import sparse_mla_sm90_kernel

    warps = 8 if heads == 64 else 4
    constexprs = {
        "PAGE_SIZE": page_size,
        "EXTRA_PAGE_SIZE": extra_page_size,
        "HEADS": heads,
        "ROW_TILES": tiles,
        "IS_SPLIT": is_split,
        "STAGES": params.num_stages if heads <= 16 else 2,
        "WARPS": warps,
        "FETCH_WARPS": params.fetch_warps,
        "FETCH_REGISTERS": params.fetch_registers,
        "FETCH_ROWS": params.fetch_rows,
    }
    return KernelLaunch(sparse_mla_sm90_kernel, constexprs, {"num_warps": warps})
