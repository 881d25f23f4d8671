"""Sparse MLA through the Gluon kernels for Hopper, then the merge."""

from __future__ import annotations

import torch

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend.contract.sparse_mla import SparseMlaInputs
from mla_backend.kernels.sm90.sparse_mla import sparse_mla_sm90_kernel
from mla_backend.kernels.sm90.sparse_mla_rows import sparse_mla_rows_sm90_kernel
from mla_backend.launch_params import GluonSparseMlaParams
from mla_backend.plan.sparse_splits import OVERHEAD, blocks_of, sparse_shares, sparse_splits
from mla_backend.scratch import SplitScratch
from mla_backend.sparse import WholeTokens
from mla_backend.sparse.combine import combine, combine_shares
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

BLOCK = 64
REQUESTS = (128, 1024)
"""Requests for which the kernel that shares rows equally is compiled."""
MIN_SHARED = 8
"""Blocks of a token's full lists from which on rows are shared equally."""
AXES = {"q": "..h."}


def bind(row: Row, spec: SparseMlaSpec, target: Target) -> GluonRecords | GluonRows:
    return (GluonRows if spec.cache_format == "bf16_rows" else GluonRecords)(
        row.params, spec, target
    )


class GluonRecords:
    """One launch of at most a CTA per SM, or two where CTAs share a token's rows.

    With 0 splits the CTAs share all tokens' rows equally, whatever the lengths of their lists.
    """

    def __init__(self, params: GluonSparseMlaParams, spec: SparseMlaSpec, target: Target) -> None:
        self._sms, self._num_heads = target.num_sms, spec.num_heads
        self._heads, self._tiles = (
            heads_of(params, spec.num_heads),
            row_tiles(params, spec.num_heads),
        )
        self._kernels = {
            (requests, is_split): records_kernel(params, spec, requests, is_split)
            for requests, is_split in ((0, False), (0, True), *((n, False) for n in REQUESTS))
        }

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        items, blocks = tokens * self._tiles, blocks_of(topks, BLOCK)
        splits = sparse_splits(items, blocks, self._sms)
        # the kernel counts parts of blocks in int32
        countable = items * (blocks + OVERHEAD) * self._sms < 1 << 31
        shares = splits <= 2 and blocks >= MIN_SHARED and countable and requests_of(tokens)
        return 0 if shares else splits

    def scratch_rows(self, tokens: int, splits: int) -> int:
        if not splits:
            return 2 * self._sms * self._heads
        return tokens * splits * self._num_heads if splits > 1 else 0

    def variant(self, tokens: int, splits: int) -> tuple[int, ...]:
        return (-requests_of(tokens),) if not splits else ((splits - 1).bit_length(),)

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        heads = x.spec.num_heads
        rows, extra = x.rows, x.extra or x.rows
        extra_topk = extra.topk if x.extra else 0
        items = x.tokens * max(splits, 1) * self._tiles
        requests, ctas = 0, min(items, self._sms)
        partial_out = partial_lse = None
        if splits > 1:
            partial_out, partial_lse = scratch.reserve(x.tokens * splits, heads, HEAD_DIM)
        elif not splits:
            requests = requests_of(x.tokens // x.query_tokens)
            ctas = sparse_shares(items, blocks_of((rows.topk, extra_topk), BLOCK), self._sms)
            partial_out, partial_lse = scratch.reserve(2 * ctas, self._heads, HEAD_DIM)
        cache = rows.cache.view(torch.uint8).view(torch.int32)
        extra_cache = cache if x.extra is None else extra.cache.view(torch.uint8).view(torch.int32)
        self._kernels[requests, splits > 1].launch(
            (ctas, 1, 1),
            q_ptr=x.q,
            cache_ptr=cache,
            indices_ptr=rows.indices,
            lengths_ptr=rows.lengths,
            extra_cache_ptr=extra_cache,
            extra_indices_ptr=extra.indices,
            extra_lengths_ptr=x.extra and extra.lengths,
            sinks_ptr=None if splits > 1 else x.sinks,
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
            extra_topk=extra_topk,
            rows=rows.num_rows,
            extra_rows=extra.num_rows,
            query_tokens=x.query_tokens,
            heads=heads,
            splits=max(splits, 1),
            items=items,
        )
        if partial_out is None or partial_lse is None:
            return
        if splits:
            combine(x, partial_out, partial_lse, splits)
        else:
            combine_shares(x, partial_out, partial_lse, ctas, requests)


class GluonRows(WholeTokens):
    """One launch over rows of bf16; a prompt has tokens enough for every SM, so none is split."""

    def __init__(self, params: GluonSparseMlaParams, spec: SparseMlaSpec, target: Target) -> None:
        self._sms, self._tiles = target.num_sms, row_tiles(params, spec.num_heads)
        self._kernel = rows_kernel(params, spec)

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        items = x.tokens * self._tiles
        self._kernel.launch((min(items, self._sms), 1, 1), items=items, **x.rows_arguments())


def heads_of(params: GluonSparseMlaParams, num_heads: int) -> int:
    """Heads of a work item: a power of two of at least 8, up to what the path allows."""
    return min(params.max_heads, max(8, 1 << (num_heads - 1).bit_length()))


def row_tiles(params: GluonSparseMlaParams, num_heads: int) -> int:
    return -(-num_heads // heads_of(params, num_heads))


def requests_of(requests: int) -> int:
    """How many the kernels are compiled for that share so many requests; 0 if none does."""
    return next((n for n in REQUESTS if requests <= n), 0)


def records_kernel(
    params: GluonSparseMlaParams, spec: SparseMlaSpec, requests: int, is_split: bool
) -> KernelLaunch:
    """The kernel, as its path launches it.

    Args:
        requests: how many at most have their rows shared equally; 0: tokens are whole, or split.
    """
    constexprs = _work(params, spec) | {
        "PAGE_SIZE": spec.page_size,
        "EXTRA_PAGE_SIZE": spec.extra_page_size or spec.page_size,
        "REQUESTS": requests,
        "IS_SPLIT": is_split,
        "FETCH_WARPS": params.fetch_warps,
        "FETCH_REGISTERS": params.fetch_registers,
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
        "WARPS": 8 if heads == 64 else 4,
    }
