"""Block-sparse attention with 16-bit inputs through the Triton kernel."""

from __future__ import annotations

import functools
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from backend_core.launch.triton import KernelLaunch
from softmax_backend.kernels.block_sparse import (
    block_sparse_kernel,
    contiguous_rows,
    paged_rows,
)
from softmax_backend.launch_params_prefill import TritonPrefillParams
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.variants.variant import Variant


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    variant: Variant,
    scale: float,
    out: Tensor,
    lse: Tensor,
    params: TritonPrefillParams,
) -> None:
    """Fill ``out`` and ``lse``; the arguments were checked."""
    d, dv = q.shape[3], v.shape[3]
    block_d = triton.next_power_of_2(d)
    pages = plan.pages
    launch = _launch(
        plan.num_heads // k.shape[1 if pages is None else 2],
        (d, dv, block_d),
        (plan.block_m, plan.block_n),
        plan.has_partial,
        pages is not None,
        (variant.key, variant.logits, variant.update, variant.output, plan.mask.kernel),
        params,
    )
    if pages is None:
        k_source = descriptor(k, (plan.block_n, block_d))
        v_source = descriptor(v, (plan.block_n, dv))
        page_strides: tuple[int, ...] = (0,) * 6
        page_indices, page_size = plan.cols, 1
    else:
        k_source, v_source = k, v
        page_strides = (*k.stride()[:3], *v.stride()[:3])
        page_indices, page_size = pages.indices, pages.size
    absent = plan.cols  # for pointers that no hook of this call reads
    tensors = (
        descriptor(q, (plan.block_m, block_d)),
        k_source,
        v_source,
        out,
        lse,
        plan.rows,
        plan.cols,
        plan.work,
        plan.sequences,
        page_indices,
        absent if plan.mask_aux is None else plan.mask_aux,
        absent if variant.aux is None else variant.aux,
    )
    numbers = (float(variant.value), float(scale), float(variant.factor(scale)))
    strides = (*out.stride()[:3], *lse.stride()[:2], *page_strides)
    launch((len(plan.work), 1, 1), *tensors, *numbers, *strides, page_size)


def params_for(plan: BlockPlan, d: int, row: TritonPrefillParams | None) -> TritonPrefillParams:
    """The table's parameters where the plan has their tiles, else some that fit the plan's."""
    if row is not None and d <= 128 and (plan.block_m, plan.block_n) == (row.block_m, row.block_n):
        return row
    warps = 8 if plan.block_m == 128 else 4
    stages = 3 if plan.block_n * d <= 64 * 128 else 2
    return TritonPrefillParams(plan.block_m, plan.block_n, warps, stages)


def descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A descriptor of a [B, H, L, D] view: any strides, so both engines' layouts without a copy."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, *block])


@functools.lru_cache(maxsize=1024)
def _launch(
    group: int,
    dims: tuple[int, int, int],
    blocks: tuple[int, int],
    has_partial: bool,
    is_paged: bool,
    hooks: tuple[Any, Any, Any, Any, Any],
    params: TritonPrefillParams,
) -> KernelLaunch:
    key, logits, update, output, mask = hooks
    constexprs = {
        "GROUP": group,
        "D": dims[0],
        "DV": dims[1],
        "BLOCK_D": dims[2],
        "BLOCK_M": blocks[0],
        "BLOCK_N": blocks[1],
        "STAGES": params.num_stages,
        "HAS_PARTIAL": has_partial,
        "load": paged_rows if is_paged else contiguous_rows,
        "key": key,
        "logits": logits,
        "update": update,
        "output": output,
        "mask": mask,
    }
    options = {"num_warps": params.num_warps, "num_stages": params.num_stages}
    if params.max_registers:
        options["maxnreg"] = params.max_registers
    return KernelLaunch(block_sparse_kernel, constexprs, options)
