"""Sparse MLA through Triton's kernels: each token's rows shared by programs, then the merge."""

from __future__ import annotations

import torch
import triton.language as tl

from backend_core.contracts import interprets
from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from mla_backend.contract.sparse_mla import NamedRows, SparseMlaInputs
from mla_backend.kernels import sparse_mla as kernels
from mla_backend.launch_params import TritonSparseMlaParams
from mla_backend.plan.sparse_splits import blocks_of, sparse_splits
from mla_backend.scratch import SplitScratch
from mla_backend.sparse import WholeTokens
from mla_backend.sparse.combine import combine
from mla_backend.spec_sparse_mla import HEAD_DIM, SparseMlaSpec

AXES = {"q": "..h."}


def bind(row: Row, spec: SparseMlaSpec, target: Target) -> TritonRecords | TritonRows:
    return (TritonRows if spec.cache_format == "bf16_rows" else TritonRecords)(
        row.params, spec, target
    )


class TritonRecords:
    """One launch over pages of records, or two where several programs share a token's rows."""

    def __init__(self, params: TritonSparseMlaParams, spec: SparseMlaSpec, target: Target) -> None:
        self._params, self._tiles = params, row_tiles(params, spec.num_heads)
        self._sms, self._num_heads = target.num_sms, spec.num_heads
        operand = tl.float32 if interprets() else tl.bfloat16  # it multiplies bf16 by its bits
        self._kernels = [records_kernel(params, spec, operand, split) for split in (False, True)]

    def splits(self, tokens: int, topks: tuple[int, ...]) -> int:
        blocks = blocks_of(topks, self._params.block_kv)
        return sparse_splits(tokens * self._tiles, blocks, self._sms)

    def scratch_rows(self, tokens: int, splits: int) -> int:
        return tokens * splits * self._num_heads if splits > 1 else 0

    def variant(self, tokens: int, splits: int) -> tuple[int, ...]:
        return ((splits - 1).bit_length(),)

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        is_split, heads = splits > 1, x.spec.num_heads
        partial_out = partial_lse = None
        if is_split:
            partial_out, partial_lse = scratch.reserve(x.tokens * splits, heads, HEAD_DIM)
        rows, extra = x.rows, x.extra
        cache, rope, scales = record_views(rows)
        extra_cache, extra_rope, extra_scales = record_views(extra) if extra else (None,) * 3
        self._kernels[is_split].launch(
            (x.tokens * splits * self._tiles, 1, 1),
            q_ptr=x.q,
            cache_ptr=cache,
            rope_ptr=rope,
            scales_ptr=scales,
            indices_ptr=rows.indices,
            lengths_ptr=rows.lengths,
            extra_cache_ptr=extra_cache,
            extra_rope_ptr=extra_rope,
            extra_scales_ptr=extra_scales,
            extra_indices_ptr=extra and extra.indices,
            extra_lengths_ptr=extra and extra.lengths,
            sinks_ptr=None if is_split else x.sinks,
            out_ptr=x.out,
            lse_ptr=x.lse,
            partial_out_ptr=partial_out,
            partial_lse_ptr=partial_lse,
            scale=x.scale,
            stride_q_t=x.stride_q_t,
            stride_page=rows.cache.stride()[0],
            stride_extra_page=extra.cache.stride()[0] if extra else 0,
            stride_indices=x.stride_indices,
            stride_extra_indices=x.stride_extra_indices,
            topk=rows.topk,
            extra_topk=extra.topk if extra else 0,
            rows=rows.num_rows,
            extra_rows=extra.num_rows if extra else 0,
            query_tokens=x.query_tokens,
            heads=heads,
            splits=splits,
        )
        if partial_out is not None and partial_lse is not None:
            combine(x, partial_out, partial_lse, splits)


class TritonRows(WholeTokens):
    """One launch over rows of bf16; a prompt has tokens enough for every SM, so none is split."""

    def __init__(self, params: TritonSparseMlaParams, spec: SparseMlaSpec, target: Target) -> None:
        self._tiles = row_tiles(params, spec.num_heads)
        self._kernel = rows_kernel(params, spec, tl.float32 if interprets() else tl.bfloat16)

    def __call__(self, x: SparseMlaInputs, scratch: SplitScratch, splits: int) -> None:
        self._kernel.launch((x.tokens * self._tiles, 1, 1), **x.rows_arguments())


def record_views(given: NamedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache of records as bytes, bf16 and int64: three views of its memory."""
    cache = given.cache
    raw = cache if cache.dtype == torch.uint8 else cache.view(torch.uint8)
    return raw, raw.view(torch.bfloat16), raw.view(torch.int64)


def block_rows_of(params: TritonSparseMlaParams, num_heads: int) -> int:
    """Heads of a program: 16, or as many as the path allows where there are more."""
    return min(params.block_rows, 16 if num_heads <= 16 else 32 if num_heads <= 32 else 64)


def row_tiles(params: TritonSparseMlaParams, num_heads: int) -> int:
    return -(-num_heads // block_rows_of(params, num_heads))


def records_kernel(
    params: TritonSparseMlaParams, spec: SparseMlaSpec, operand: tl.dtype, is_split: bool
) -> KernelLaunch:
    """The kernel over pages of records, as its path launches it."""
    decode = "plain" if operand == tl.float32 else params.decode
    constexprs = _tile(params, spec) | {
        "PAGE_SIZE": spec.page_size,
        "EXTRA_PAGE_SIZE": max(spec.extra_page_size, 1),
        "IS_SPLIT": is_split,
        "OPERAND": operand,
        "DECODE": ("plain", "bf16").index(decode),
    }
    return KernelLaunch(kernels.sparse_mla_records_kernel, constexprs, _options(params), axes=AXES)


def rows_kernel(
    params: TritonSparseMlaParams, spec: SparseMlaSpec, operand: tl.dtype
) -> KernelLaunch:
    """The kernel over plain rows."""
    constexprs = _tile(params, spec) | {"OPERAND": operand}
    return KernelLaunch(kernels.sparse_mla_rows_kernel, constexprs, _options(params), axes=AXES)


def _tile(params: TritonSparseMlaParams, spec: SparseMlaSpec) -> dict[str, object]:
    return {
        "BLOCK_KV": params.block_kv,
        "BLOCK_ROWS": block_rows_of(params, spec.num_heads),
        "ROW_TILES": row_tiles(params, spec.num_heads),
    }


def _options(params: TritonSparseMlaParams) -> dict[str, object]:
    return {"num_warps": params.num_warps, "num_stages": params.num_stages}
