"""Block-sparse attention with 16-bit inputs through the Gluon kernels for Hopper."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backend_core.launch.triton import KernelLaunch
from softmax_backend.kernels.sm90.block_load import packed_keys, paged_keys
from softmax_backend.kernels.sm90.block_sparse import (
    block_sparse_packed_sm90_kernel,
    block_sparse_sm90_kernel,
)
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
    """Fill ``out`` and ``lse`` for sequences that end where the tensors do; the arguments were
    checked and need nothing that the path lacks."""
    launch = _launch(*_shape_of(q, k.shape[1], plan), _fitting(params, plan, q.shape[3]), None)
    tensors = (*_descriptors(q, k, v, plan), out, lse, *_plan_tensors(plan), _aux(plan))
    strides = (*out.stride()[:3], *lse.stride()[:2])
    launch((len(plan.work), 1, 1), *tensors, SOFTMAX.factor(scale), *strides)


def run_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: BlockPlan,
    scale: float,
    out: Tensor,
    lse: Tensor,
    params: GluonPrefillParams,
) -> None:
    """The same for any sequences, packed ones and keys in pages of whole blocks among them."""
    pages = plan.pages
    if pages is None:
        at_keys, indices, page_size = packed_keys, plan.cols, 1
    else:  # [pages, page_size, Hkv, D], of which a descriptor takes the head before the token
        k, v = (x.transpose(1, 2) for x in (k, v))
        at_keys, indices, page_size = paged_keys, pages.indices, pages.size
    launch = _launch(*_shape_of(q, k.shape[1], plan), _fitting(params, plan, q.shape[3]), at_keys)
    tensors = (*_descriptors(q, k, v, plan), out, lse, *_plan_tensors(plan), indices, _aux(plan))
    strides = (*out.stride()[:3], *lse.stride()[:2])
    launch((len(plan.work), 1, 1), *tensors, SOFTMAX.factor(scale), page_size, *strides)


def _shape_of(q: Tensor, kv_heads: int, plan: BlockPlan) -> tuple[int, int, int, Any]:
    return plan.num_heads // kv_heads, q.shape[3], plan.block_n, plan.mask.kernel


def _fitting(params: GluonPrefillParams, plan: BlockPlan, d: int) -> GluonPrefillParams:
    """A stage holds the bytes that it has at D 128 and 128 keys: smaller ones leave room."""
    stages = min(4, params.num_stages * 128 * 128 // (plan.block_n * d))
    return dataclasses.replace(params, num_stages=stages)


def _descriptors(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    d = q.shape[3]
    keys = (plan.block_n, d)
    return _descriptor(q, (64, d)), _descriptor(k, keys), _descriptor(v, keys)


def _plan_tensors(plan: BlockPlan) -> tuple[Tensor, ...]:
    return plan.rows, plan.cols, plan.work, plan.sequences


def _aux(plan: BlockPlan) -> Tensor:
    return plan.cols if plan.mask_aux is None else plan.mask_aux


def _descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    layout = _layout(block, x.dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, *block], layout)


@functools.cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, *block], _DTYPES[dtype])


@functools.lru_cache(maxsize=1024)
def _launch(
    group: int, d: int, block_n: int, mask: Any, params: GluonPrefillParams, at_keys: Any
) -> KernelLaunch:
    """The packed kernel where ``at_keys`` says how to find a block of keys, else the other."""
    constexprs = {
        "GROUP": group,
        "BLOCK_N": block_n,
        "D": d,
        "STAGES": params.num_stages,
        "REGISTERS": params.registers,
        "FORM": params.form,
        "update": SOFTMAX.update,
        "mask": mask,
    }
    if at_keys is None:
        return KernelLaunch(block_sparse_sm90_kernel, constexprs, {"num_warps": 4})
    constexprs["at_keys"] = at_keys
    return KernelLaunch(block_sparse_packed_sm90_kernel, constexprs, {"num_warps": 4})
