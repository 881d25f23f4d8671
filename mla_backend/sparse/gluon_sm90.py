"""Sparse MLA through the Gluon kernels for Hopper, then the merge."""

from __future__ import annotations

import torch

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from mla_backend.contract.sparse_mla import SparseMlaInputs
from mla_backend.kernels.sm90.sparse_mla import sparse_mla_sm90_kernel
from mla_backend.kernels.sm90.sparse_mla_rows import sparse_mla_rows_sm90_kernel
from mla_backend.launch_params_sparse import GluonSparseMlaParams
from mla_backend.plan.sparse_splits import blocks_of, sparse_splits
from mla_backend.scratch import SplitScratch
from mla_backend.sparse.combine import combine
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

BLOCK = 64
AXES = {"q": "..h."}


def bind(row: KernelPath, spec: SparseMlaSpec, target: Target) -> GluonRecords | GluonRows:
    return (GluonRows if spec.cache_format == "bf16_rows" else GluonRecords)(
        row.params, spec, target
    )


class GluonRecords:
    """One launch of at most a CTA per SM, or two where CTAs share a token's rows."""

    def __init__(self, params: GluonSparseMlaParams, spec: SparseMlaSpec, target: Target) -> None:
        self._sms = target.num_sms
        self._tiles = row_tiles(params, spec.num_heads)
        self._kernels = [records_kernel(params, spec, split) for split in (False, True)]

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        blocks = blocks_of(topks, BLOCK)
        return sparse_splits(tokens * self._tiles, blocks, self._sms)

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        is_split, heads = splits > 1, x.spec.num_heads
        items = x.tokens * splits * self._tiles
        partial_out = partial_lse = None
        if is_split:
            partial_out, partial_lse = scratch.reserve(x.tokens * splits, heads, HEAD_DIM)
        rows, extra = x.rows, x.extra or x.rows
        cache = rows.cache.view(torch.uint8).view(torch.int32)
        extra_cache = cache if x.extra is None else extra.cache.view(torch.uint8).view(torch.int32)
        self._kernels[is_split].launch(
            (min(items, self._sms), 1, 1),
            q_ptr=x.q,
            cache_ptr=cache,
            indices_ptr=rows.indices,
            lengths_ptr=rows.lengths,
            extra_cache_ptr=extra_cache,
            extra_indices_ptr=extra.indices,
            extra_lengths_ptr=x.extra and extra.lengths,
            sinks_ptr=None if is_split else x.sinks,
            out_ptr=x.out,
            lse_ptr=x.lse,
            partial_out_ptr=partial_out,
            partial_lse_ptr=partial_lse,
            scale=x.scale,
            stride_q_t=x.stride_q_t,
            stride_page=cache.stride()[0],
            stride_extra_page=extra_cache.stride()[0],
            stride_indices=x.stride_indices,
            stride_extra_indices=x.stride_extra_indices if x.extra else x.stride_indices,
            topk=rows.topk,
            extra_topk=extra.topk if x.extra else 0,
            rows=rows.num_rows,
            extra_rows=extra.num_rows,
            query_tokens=x.query_tokens,
            heads=heads,
            splits=splits,
            items=items,
        )
        if partial_out is not None and partial_lse is not None:
            combine(x.out, x.lse, partial_out, partial_lse, x.sinks, splits)


class GluonRows:
    """One launch over rows of bf16; a prompt has tokens enough for every SM, so none is split."""

    def __init__(self, params: GluonSparseMlaParams, spec: SparseMlaSpec, target: Target) -> None:
        self._sms, self._tiles = target.num_sms, row_tiles(params, spec.num_heads)
        self._kernel = rows_kernel(params, spec)

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        return 1

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        items = x.tokens * self._tiles
        self._kernel.launch((min(items, self._sms), 1, 1), items=items, **x.rows_arguments())


def heads_of(params: GluonSparseMlaParams, num_heads: int) -> int:
    """Heads of a work item: a power of two of at least 8, up to what the path allows."""
    return min(params.max_heads, max(8, 1 << (num_heads - 1).bit_length()))


def row_tiles(params: GluonSparseMlaParams, num_heads: int) -> int:
    return -(-num_heads // heads_of(params, num_heads))


def records_kernel(
    params: GluonSparseMlaParams, spec: SparseMlaSpec, is_split: bool
) -> KernelLaunch:
    """The kernel, as its path launches it."""
    constexprs = _work(params, spec) | {
        "PAGE_SIZE": spec.page_size,
        "EXTRA_PAGE_SIZE": spec.extra_page_size or spec.page_size,
        "IS_SPLIT": is_split,
        "FETCH_WARPS": params.fetch_warps,
        "FETCH_REGISTERS": params.fetch_registers,
        "FETCH_ROWS": params.fetch_rows,
    }
    options = {"num_warps": constexprs["WARPS"]}
    return KernelLaunch(sparse_mla_sm90_kernel, constexprs, options, axes=AXES)


def rows_kernel(params: GluonSparseMlaParams, spec: SparseMlaSpec) -> KernelLaunch:
    """The kernel over rows of bf16."""
    constexprs = _work(params, spec) | {"FETCH_WARPS": 4}
    options = {"num_warps": constexprs["WARPS"]}
    return KernelLaunch(sparse_mla_rows_sm90_kernel, constexprs, options, axes=AXES)


def _work(params: GluonSparseMlaParams, spec: SparseMlaSpec) -> dict[str, int]:
    heads = heads_of(params, spec.num_heads)
    return {
        "HEADS": heads,
        "ROW_TILES": row_tiles(params, spec.num_heads),
        "STAGES": params.num_stages if heads <= 16 else 2,
        "WARPS": 8 if heads == 64 else 4,
    }
