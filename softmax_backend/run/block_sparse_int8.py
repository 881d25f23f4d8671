"""Block-sparse attention with quantised inputs through the Triton kernel."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor

from backend_core.launch.triton import KernelLaunch
from softmax_backend.kernels import block_sparse_int8 as kernels
from softmax_backend.launch_params_prefill import Int8PrefillParams
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.run.block_sparse import descriptor
from softmax_backend.variants.column_stats import E4M3_MAX
from softmax_backend.variants.sage import Quantised, SageMode


def params_for(plan: BlockPlan, row: Int8PrefillParams | None) -> Int8PrefillParams:
    """The table's parameters where the plan has their tiles, else some that fit the plan's."""
    if row is not None and (plan.block_m, plan.block_n) == (row.block_m, row.block_n):
        return row
    warps, stages = (8, 3) if plan.block_m == 128 else (4, 2)
    return Int8PrefillParams(plan.block_m, plan.block_n, warps, stages)


def run(
    x: Quantised,
    plan: BlockPlan,
    scale: float,
    q_position: int,
    out: Tensor,
    lse: Tensor,
    params: Int8PrefillParams,
) -> None:
    """Fill ``out`` [B, H, M, D] and ``lse`` [B, H, M] (contiguous); the arguments were checked."""
    _, heads, m, d = x.q.shape
    kv_heads, n = x.k.shape[1], x.k.shape[2]
    bm, bn = plan.block_m, plan.block_n
    launch = _launch(
        (heads, heads // kv_heads, d), (bm, bn), plan.has_partial, x.mode, plan.mask.kernel, params
    )
    absent = plan.cols  # for pointers that this call does not read
    tensors = (
        descriptor(x.q, (bm, d)),
        descriptor(x.k, (bn, d)),
        descriptor(x.v, (d, bn) if x.mode.fp8_values else (bn, d)),
        out,
        lse,
        x.q_scale,
        x.k_scale,
        x.v_scale,
        x.v_mean,
        x.v_mean if x.bias is None else x.bias,
        x.shift,
        plan.rows,
        plan.cols,
        plan.work,
        absent if plan.mask_aux is None else plan.mask_aux,
    )
    numbers = (float(scale), m, n, q_position, *out.stride()[:3])
    launch((len(plan.work), 1, 1), *tensors, *numbers)


@functools.lru_cache(maxsize=1024)
def _launch(
    heads: tuple[int, int, int],
    blocks: tuple[int, int],
    has_partial: bool,
    mode: SageMode,
    mask: Any,
    params: Int8PrefillParams,
) -> KernelLaunch:
    per_thread = mode.groups == "per_thread"
    one_scale = not per_thread and not mode.smooth_q
    constexprs = {
        "HEADS": heads[0],
        "GROUP": heads[1],
        "D": heads[2],
        "BLOCK_M": blocks[0],
        "BLOCK_N": blocks[1],
        "STAGES": params.num_stages,
        "HAS_PARTIAL": has_partial,
        "HAS_BIAS": mode.smooth_q,
        "P_LOG2": math.log2(E4M3_MAX) if mode.fp8_values else 0.0,
        "EXPONENT": params.exponent if one_scale else "scaled",
        "query_scales": kernels.per_thread_queries if per_thread else kernels.per_warp_queries,
        "key_scales": kernels.per_thread_keys if per_thread else kernels.per_warp_keys,
        "values": kernels.e4m3_values if mode.fp8_values else kernels.half_values,
        "mask": mask,
    }
    options = {"num_warps": params.num_warps, "num_stages": params.num_stages}
    if params.max_registers:
        options["maxnreg"] = params.max_registers
    return KernelLaunch(kernels.block_sparse_int8_kernel, constexprs, options)
