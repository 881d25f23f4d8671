"""The merge of a token's splits, where every token has the same number."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch


def combine(
    out: torch.Tensor,
    lse: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    splits: int,
) -> None:
    """One launch.

    Args:
        out: ``[..., heads, 512]``; lse: ``[..., heads]``, of so many tokens, natural.
        partial_out: ``[tokens * splits, heads, 512]``; partial_lse: ``[tokens * splits, heads]``,
            base 2, float32.
    """
    slots, heads = partial_lse.shape
    block = max(2, 1 << (splits - 1).bit_length())
    dim = min(512, max(64, 4096 // block))
    pdl = out.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability()[0] >= 9
    kernel = combine_kernel(block, dim, pdl)
    kernel.launch(
        (slots // splits * heads * (512 // dim), 1, 1),
        out_ptr=out,
        lse_ptr=lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        sinks_ptr=sinks,
        heads=heads,
        splits=splits,
    )


@functools.cache
def combine_kernel(block_splits: int, block_dim: int, pdl: bool) -> KernelLaunch:
    """The kernel for up to so many splits and so many channels of a program."""
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.sparse_mla_combine import sparse_mla_combine_kernel

    options: dict[str, object] = {"num_warps": 4}
    if pdl:
        options["launch_pdl"] = True
    constexprs = {
        "BLOCK_SPLITS": block_splits,
        "BLOCK_DIM": block_dim,
        "PDL": "wait" if pdl else "off",
    }
    return KernelLaunch(sparse_mla_combine_kernel, constexprs, options)
