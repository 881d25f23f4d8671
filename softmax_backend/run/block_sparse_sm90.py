"""Block-sparse attention with 16-bit inputs through the Gluon kernel for Hopper."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backend_core.launch.triton import KernelLaunch
from softmax_backend.kernels.sm90.block_sparse import block_sparse_sm90_kernel
from softmax_backend.launch_params_prefill import GluonPrefillParams
from softmax_backend.plan.block_plan import BlockPlan
from softmax_backend.variants.variant import SOFTMAX

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    out: Tensor,
    lse: Tensor,
    params: GluonPrefillParams,
) -> None:
    """Fill ``out`` and ``lse``; the arguments were checked and need nothing that the path lacks."""
    d = q.shape[3]
    # a stage holds the bytes that it has at D 128 and 128 keys: smaller ones make room for more
    stages = min(4, params.num_stages * 128 * 128 // (plan.block_n * d))
    params = dataclasses.replace(params, num_stages=stages)
    launch = _launch(plan.num_heads // k.shape[1], d, plan.block_n, plan.mask.kernel, params)
    tensors = (
        _descriptor(q, (64, d)),
        _descriptor(k, (plan.block_n, d)),
        _descriptor(v, (plan.block_n, d)),
        out,
        lse,
        plan.rows,
        plan.cols,
        plan.work,
        plan.sequences,
        plan.cols if plan.mask_aux is None else plan.mask_aux,
    )
    strides = (*out.stride()[:3], *lse.stride()[:2])
    launch((len(plan.work), 1, 1), *tensors, SOFTMAX.factor(scale), *strides)


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout = _layout(block, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, *block], layout)


@functools.cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, *block], _DTYPES[dtype])


@functools.lru_cache(maxsize=1024)
def _launch(
    group: int, d: int, block_n: int, mask: Any, params: GluonPrefillParams
) -> KernelLaunch:
    constexprs = {
        "GROUP": group,
        "BLOCK_N": block_n,
        "D": d,
        "STAGES": params.num_stages,
        "REGISTERS": params.registers,
        "PING_PONG": params.ping_pong,
        "update": SOFTMAX.update,
        "mask": mask,
    }
    return KernelLaunch(block_sparse_sm90_kernel, constexprs, {"num_warps": 4})
