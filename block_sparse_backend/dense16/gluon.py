"""Attention over blocks with 16-bit inputs on Hopper in Gluon."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense16 import BlockSparsePath, of_kernel
from block_sparse_backend.kernels.sm90.block_sparse import block_sparse_sm90_kernel
from block_sparse_backend.launches import strides
from block_sparse_backend.spec import BlockSparseSpec

_STAGES = 2
"""Blocks of 128 keys of 128 channels in flight; of smaller ones there are more."""
_REGISTERS = 240
"""Registers of a thread of the computing warpgroups."""
_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
AXES = {"out": "bhm.", "lse": "bh."}


def bind(row: Row, spec: BlockSparseSpec, target: Target) -> BlockSparsePath:
    d, block_n = spec.dims[0], spec.block_n
    constexprs = {
        "GROUP": spec.group,
        "BLOCK_N": block_n,
        "D": d,
        "STAGES": min(4, _STAGES * 128 * 128 // (block_n * d)),
        "REGISTERS": _REGISTERS,
        "mask": spec.mask.kernel,
        "IS_PACKED": spec.is_packed,
    }
    kernel = KernelLaunch(block_sparse_sm90_kernel, constexprs, {"num_warps": 4}, axes=AXES)
    launch = kernel.launch

    def run(x: BlockSparseInputs) -> None:
        plan = x.plan
        launch(
            (len(plan.work), 1, 1),
            q_desc=_descriptor(x.q, (64, d)),
            k_desc=_descriptor(x.k, (block_n, d)),
            v_desc=_descriptor(x.v, (block_n, d)),
            out_ptr=x.out,
            lse_ptr=x.lse,
            rows_ptr=plan.rows,
            cols_ptr=plan.cols,
            work_ptr=plan.work,
            sequences_ptr=plan.sequences,
            mask_aux_ptr=plan.cols if plan.mask_aux is None else plan.mask_aux,
            factor=x.factor,
        )

    return of_kernel(run)


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout = _layout(block, x.dtype)
    return TensorDescriptor(x, list(x.shape), strides(x), [1, 1, *block], layout)


@functools.cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, *block], _DTYPES[dtype])
