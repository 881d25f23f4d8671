"""Combine: merging the splits of output rows by their log-sum-exp, after a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from backend_core.launch.cuda import CudaKernel, CudaLaunch
from backend_core.launch.cuda_params import CudaParams
from mla_backend.contract.mla_decode import MlaInputs
from mla_backend.spec import LATENT_DIM, MAX_SPLITS

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

SM90_SOURCE = Path(__file__).parent / "kernels" / "sm90" / "mla_combine.cu"
PARAMS = CudaParams(
    (
        ("out", "u16*"),  # [requests, rows, 512] bf16
        ("lse", "float*"),  # [requests, rows], natural logarithm
        ("partial_out", "const float*"),  # [slots, partial_rows, 512]; a prefix's slots: 64 rows
        ("partial_lse", "const float*"),  # [slots, partial_rows], base 2; as partial_out
        ("num_splits", "const int*"),  # [tiles + 1]; the first tiles are the requests' own
        ("merges", "const int*"),  # [1 + requests]: how many to merge, and which; or null: all
        ("prefix_tile", "const int*"),  # [requests] or null: the tile of a shared prefix, or -1
        ("prefix_row", "const int*"),  # [requests]: the request's first row in that tile
        ("sinks", "const float*"),  # [heads] or null, natural logarithm
        ("requests", "int"),
        ("rows", "int"),  # of a request
        ("partial_rows", "int"),
        ("heads", "int"),
    ),
    addresses=("out", "lse", "partial_out", "partial_lse", "sinks"),
)
_FILLS = 264  # two CTAs per SM


def combine_triton(x: MlaInputs, partial_out: torch.Tensor, partial_lse: torch.Tensor) -> None:
    """One launch of the Triton kernel; a program per output row."""
    prefix = x.plan.prefix
    rows = x.spec.query_rows
    # those of the request's own tile, and of its prefix's
    splits = x.plan.num_ctas + (prefix is not None)
    _triton_kernel(LATENT_DIM, max(256, 1 << (splits - 1).bit_length())).launch(
        (x.plan.requests * rows, 1, 1),
        out_ptr=x.out,
        lse_ptr=x.lse,
        partial_out_ptr=partial_out,
        partial_lse_ptr=partial_lse,
        num_splits_ptr=x.plan.num_splits,
        prefix_tile_ptr=None if prefix is None else prefix.prefix_tile,
        prefix_row_ptr=None if prefix is None else prefix.prefix_row,
        sinks_ptr=x.sinks,
        num_rows=rows,
        partial_rows=partial_out.shape[1],
        heads=x.spec.num_heads,
    )


def slot_rows(rows: int) -> int:
    """Rows of a slot of partial results on Hopper, for a tile of ``rows`` query rows.

    One more than those, where a prefix's slot of 64 leaves room. With slots of 16 and 32 rows,
    which are a power of two of bytes apart, a decode of one request was slower on an H200.
    """
    return rows + 1 if rows < 64 else rows


def launch_sm90(x: MlaInputs) -> CudaLaunch:
    """The launch of the CUDA kernel for a plan, placed while the main kernel runs."""
    prefix = x.plan.prefix
    rows = x.plan.requests * x.spec.query_rows
    # one CTA per 64 channels of a row where that is not too many, else enough to fill the GPU
    ctas = rows * 8 if rows * 8 <= _FILLS else min(max(-(-rows // 8), _FILLS), 4 * _FILLS)
    return CudaLaunch(
        _sm90_kernel(),
        ctas,
        256,
        PARAMS,
        pdl=True,
        num_splits=x.plan.num_splits.data_ptr(),
        merges=0 if x.plan.merges is None else x.plan.merges.data_ptr(),
        prefix_tile=0 if prefix is None else prefix.prefix_tile.data_ptr(),
        prefix_row=0 if prefix is None else prefix.prefix_row.data_ptr(),
        requests=x.plan.requests,
        rows=x.spec.query_rows,
        partial_rows=slot_rows(x.spec.query_rows),
        heads=x.spec.num_heads,
    )


@functools.cache
def _triton_kernel(dim: int, max_splits: int = 256) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.combine import combine_kernel

    assert max_splits >= MAX_SPLITS
    constexprs = {"DIM": dim, "MAX_SPLITS": max_splits, "BLOCK_SPLITS": 8}
    return KernelLaunch(combine_kernel, constexprs, {"num_warps": 4})


@functools.cache
def _sm90_kernel() -> CudaKernel:
    return CudaKernel(SM90_SOURCE, "mla_combine", PARAMS, {})
