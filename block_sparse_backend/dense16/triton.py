"""Attention over blocks with 16-bit inputs through the Triton kernel."""

from __future__ import annotations

import triton

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.contract import BlockSparseInputs
from block_sparse_backend.dense16 import BlockSparsePath, of_kernel
from block_sparse_backend.kernels.block_sparse import block_sparse_kernel
from block_sparse_backend.launch_params import TritonParams
from block_sparse_backend.launches import descriptor, options
from block_sparse_backend.spec import BlockSparseSpec


def bind(row: Row, spec: BlockSparseSpec, target: Target) -> BlockSparsePath:
    launch = attention_kernel(params_for(row, spec), spec).launch
    (d, dv), block_m, block_n = spec.dims, spec.block_m, spec.block_n
    block_d = triton.next_power_of_2(d)

    def run(x: BlockSparseInputs) -> None:
        plan = x.plan
        launch(
            (len(plan.work), 1, 1),
            q_desc=descriptor(x.q, (block_m, block_d)),
            k_desc=descriptor(x.k, (block_n, block_d)),
            v_desc=descriptor(x.v, (block_n, dv)),
            out_ptr=x.out,
            lse_ptr=x.lse,
            rows_ptr=plan.rows,
            cols_ptr=plan.cols,
            work_ptr=plan.work,
            sequences_ptr=plan.sequences,
            # a hook that reads nothing gets what is there
            mask_aux_ptr=plan.cols if plan.mask_aux is None else plan.mask_aux,
            factor=float(x.factor),
        )

    return of_kernel(run)


def params_for(row: Row, spec: BlockSparseSpec) -> TritonParams:
    """The row's parameters where it has the plan's tiles, else some that fit the plan's."""
    params, d, blocks = row.params, spec.dims[0], (spec.block_m, spec.block_n)
    if d <= 128 and isinstance(params, TritonParams) and params.blocks == blocks:
        return params
    stages = 3 if spec.block_n * d <= 64 * 128 else 2
    return TritonParams(*blocks, 8 if spec.block_m == 128 else 4, stages)


def attention_kernel(params: TritonParams, spec: BlockSparseSpec) -> KernelLaunch:
    """The kernel, as its path launches it."""
    constexprs = {
        "GROUP": spec.group,
        "DV": spec.dims[1],
        "BLOCK_D": triton.next_power_of_2(spec.dims[0]),
        "BLOCK_M": spec.block_m,
        "BLOCK_N": spec.block_n,
        "STAGES": params.num_stages,
        "HAS_PARTIAL": spec.has_partial,
        "mask": spec.mask.kernel,
    }
    axes = {"out": "bhm.", "lse": "bh."}
    compiler = options(params, params.max_registers)
    return KernelLaunch(block_sparse_kernel, constexprs, compiler, axes=axes)
