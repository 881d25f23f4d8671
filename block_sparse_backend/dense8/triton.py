"""Attention over blocks with quantised inputs through the Triton kernel."""

from __future__ import annotations

import math

from torch import Tensor

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from backend_core.target import Target
from block_sparse_backend.contract import readable
from block_sparse_backend.dense8 import Attend
from block_sparse_backend.kernels import block_sparse_int8 as kernels
from block_sparse_backend.launch_params import TritonParams
from block_sparse_backend.launches import descriptor, options
from block_sparse_backend.masks import everything
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.quantise import E4M3_MAX, Quantised
from block_sparse_backend.spec import QuantisedSpec


def bind(row: Row, spec: QuantisedSpec, target: Target) -> Attend:
    launch = attention_kernel(params_for(row, spec), spec).launch
    d, bm, bn = spec.dim, spec.block_m, spec.block_n
    block_v = (d, bn) if spec.mode.fp8_values else (bn, d)

    def attend(
        x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor | None
    ) -> None:
        launch(
            (len(plan.work), 1, 1),
            q_desc=descriptor(x.q, (bm, d)),
            k_desc=descriptor(x.k, (bn, d)),
            v_desc=descriptor(x.v if x.v_scale is not None else readable(x.v), block_v),
            out_ptr=out,
            lse_ptr=lse,
            q_scale_ptr=x.q_scale,
            k_scale_ptr=x.k_scale,
            q_top_ptr=x.q_top,
            k_top_ptr=x.k_top,
            order_ptr=x.order,
            v_scale_ptr=x.v_scale,
            v_offset_ptr=x.v_offset,
            shift_ptr=x.shift,
            rows_ptr=plan.rows,
            cols_ptr=plan.cols,
            work_ptr=plan.work,
            sequences_ptr=plan.sequences if plan.is_packed else None,
            first_blocks_ptr=plan.first_blocks,
            # a hook that reads nothing gets what is there
            mask_aux_ptr=plan.cols if plan.mask_aux is None else plan.mask_aux,
            softmax_scale=float(scale),
            q_len=x.q.shape[2],
            kv_len=x.length,
            key_blocks=x.k_scale.shape[2],
        )

    return attend


def params_for(row: Row, spec: QuantisedSpec) -> TritonParams:
    """The row's parameters where it has the plan's tiles, else some that fit the plan's."""
    params, blocks = row.params, (spec.block_m, spec.block_n)
    if isinstance(params, TritonParams) and params.blocks == blocks:
        return params
    warps, stages = (8, 3) if spec.block_m == 128 else (4, 2)
    return TritonParams(*blocks, warps, stages)


def attention_kernel(params: TritonParams, spec: QuantisedSpec) -> KernelLaunch:
    """The kernel, as its path launches it."""
    mode = spec.mode
    constexprs = {
        "HEADS": spec.heads,
        "GROUP": spec.group,
        "D": spec.dim,
        "BLOCK_M": spec.block_m,
        "BLOCK_N": spec.block_n,
        "SPAN": mode.span(spec.block_n),
        "STAGES": params.num_stages,
        "P_LOG2": math.log2(E4M3_MAX) if mode.fp8_values else 0.0,
        "values": kernels.e4m3_values if mode.fp8_values else kernels.half_values,
        "mask": spec.mask.kernel,
    }
    compiler = options(params, max_registers(params, spec))
    kernel, axes = kernels.block_sparse_int8_kernel, {"out": "bhm."}
    return KernelLaunch(kernel, constexprs, compiler, axes=axes)


def max_registers(params: TritonParams, spec: QuantisedSpec) -> int:
    """The most registers of a thread, 0 for no limit."""
    is_narrow = spec.dim == 64 and spec.mode.fp8_values and spec.mask is everything
    return (is_narrow and params.max_registers_64) or params.max_registers
