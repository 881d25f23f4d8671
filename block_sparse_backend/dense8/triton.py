"""Attention over blocks with quantised inputs through the Triton kernel."""

from __future__ import annotations

import math

from torch import Tensor

from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import KernelPath
from backend_core.target import Target
from block_sparse_backend.dense16.triton import descriptor, options
from block_sparse_backend.kernels import block_sparse_int8 as kernels
from block_sparse_backend.launch_params import TritonParams
from block_sparse_backend.plan import predicted
from block_sparse_backend.plan.block_plan import BlockPlan
from block_sparse_backend.plan.choice import Choice
from block_sparse_backend.spec import QuantisedSpec
from block_sparse_backend.variants.column_stats import E4M3_MAX
from block_sparse_backend.variants.pooled import Pooled
from block_sparse_backend.variants.sage import Quantised, quantise


def bind(row: KernelPath, spec: QuantisedSpec, target: Target) -> QuantisedInTriton:
    return QuantisedInTriton(spec, attention_kernel(params_for(row, spec), spec))


class QuantisedInTriton:
    """INT8 products of queries and keys, e4m3 or 16-bit ones with values."""

    def __init__(self, spec: QuantisedSpec, kernel: KernelLaunch) -> None:
        self._spec, self._launch = spec, kernel.launch

    def quantise(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Quantised:
        return quantise(q, k, v, self._spec.mode, scale, self._spec.block_n)

    def predict(
        self, q: Tensor, k: Tensor, v: Tensor, choice: Choice, scale: float
    ) -> tuple[Quantised, BlockPlan]:
        spec = self._spec
        pooled = Pooled.empty(q, k, spec.block_m, spec.block_n, choice.has_likeness)
        x = quantise(q, k, v, spec.mode, scale, spec.block_n, pooled)
        return x, predicted.select_blocks(pooled, choice, scale)

    def packed(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, out: Tensor
    ) -> None:
        x = quantise(q, k, v, self._spec.mode, scale, self._spec.block_n, packed=plan)
        self.attend(x, plan, scale, out, None)

    def attend(
        self, x: Quantised, plan: BlockPlan, scale: float, out: Tensor, lse: Tensor | None
    ) -> None:
        d, bm, bn = self._spec.dim, self._spec.block_m, self._spec.block_n
        self._launch(
            (len(plan.work), 1, 1),
            q_desc=descriptor(x.q, (bm, d)),
            k_desc=descriptor(x.k, (bn, d)),
            v_desc=descriptor(x.v, (d, bn) if self._spec.mode.fp8_values else (bn, d)),
            out_ptr=out,
            lse_ptr=lse,
            q_scale_ptr=x.q_scale,
            k_scale_ptr=x.k_scale,
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
            kv_len=x.k.shape[2],
            key_blocks=x.k_scale.shape[2],
        )


def params_for(row: KernelPath, spec: QuantisedSpec) -> TritonParams:
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
        "HAS_PARTIAL": spec.has_partial,
        "P_LOG2": math.log2(E4M3_MAX) if mode.fp8_values else 0.0,
        "values": kernels.e4m3_values if mode.fp8_values else kernels.half_values,
        "mask": spec.mask.kernel,
    }
    axes = {"out": "bhm."}
    return KernelLaunch(kernels.block_sparse_int8_kernel, constexprs, options(params), axes=axes)
