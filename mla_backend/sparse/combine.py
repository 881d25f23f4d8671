"""The merge of what several programs have of one token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.contract.sparse_mla import SparseMlaInputs


def combine(
    x: SparseMlaInputs, partial_out: torch.Tensor, partial_lse: torch.Tensor, splits: int
) -> None:
    """One launch, where every token has the same number of splits.

    Args:
        x: the call.
        partial_out: ``[tokens * splits, heads, 512]``; partial_lse: ``[tokens * splits, heads]``,
            base 2, float32.
    """
    block = max(2, 1 << (splits - 1).bit_length())
    dim = min(512, max(64, 4096 // block))
    combine_kernel(block, dim, _pdl(x.out)).launch(
        (x.tokens * x.spec.num_heads * (512 // dim), 1, 1),
        out_ptr=x.out,
        lse_ptr=x.lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        sinks_ptr=x.sinks,
        heads=x.spec.num_heads,
        splits=splits,
    )


def combine_shares(
    x: SparseMlaInputs,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    shares: int,
    requests: int,
) -> None:
    """One launch, where the shares of all tokens' rows are equal.

    Args:
        x: the call.
        partial_out: ``[2 * shares, heads of an item, 512]``; partial_lse: ``[2 * shares, heads of
            an item]``, base 2, float32.
        requests: how many the kernel is compiled for.
    """
    heads, extra = x.spec.num_heads, x.extra
    tile = partial_lse.shape[1]
    combine_shares_kernel(tile, -(-heads // tile), requests, _pdl(x.out)).launch(
        (x.tokens * heads, 1, 1),
        out_ptr=x.out,
        lse_ptr=x.lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        sinks_ptr=x.sinks,
        lengths_ptr=x.rows.lengths,
        extra_lengths_ptr=None if extra is None else extra.lengths,
        heads=heads,
        topk=x.rows.topk,
        extra_topk=0 if extra is None else extra.topk,
        query_tokens=x.query_tokens,
        requests=x.tokens // x.query_tokens,
        shares=shares,
    )


@functools.cache
def combine_kernel(block_splits: int, block_dim: int, pdl: bool) -> KernelLaunch:
    """The kernel for equal numbers of splits."""
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.sparse_mla_combine import sparse_mla_combine_kernel

    constexprs = {"BLOCK_SPLITS": block_splits, "BLOCK_DIM": block_dim, "PDL": _wait(pdl)}
    return KernelLaunch(sparse_mla_combine_kernel, constexprs, _options(pdl))


@functools.cache
def combine_shares_kernel(heads: int, row_tiles: int, requests: int, pdl: bool) -> KernelLaunch:
    """The kernel for equal shares of all tokens' rows."""
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.sm90.sparse_mla_compute import BLOCK, OVERHEAD
    from mla_backend.kernels.sparse_mla_combine import sparse_mla_combine_shares_kernel

    constexprs = {
        "HEADS": heads,
        "ROW_TILES": row_tiles,
        "REQUESTS": requests,
        "BLOCK": BLOCK.value,
        "OVERHEAD": OVERHEAD.value,
        "BLOCK_SPLITS": 4,
        "PDL": _wait(pdl),
    }
    return KernelLaunch(sparse_mla_combine_shares_kernel, constexprs, _options(pdl))


def _pdl(out: torch.Tensor) -> bool:
    """Whether a kernel may be launched before the one before it has ended."""
    return out.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9


def _wait(pdl: bool) -> str:
    return "wait" if pdl else "off"


def _options(pdl: bool) -> dict[str, object]:
    return {"num_warps": 4, "launch_pdl": True} if pdl else {"num_warps": 4}
