"""Launches of the Triton paths: small kernels once per shape, options and descriptors."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from backend_core.launch.triton import KernelLaunch
from block_sparse_backend.launch_params import TritonParams


@functools.lru_cache(maxsize=1024)
def prepared(kernel: Any, num_warps: int, tokens: str = "", **constexprs: Any) -> KernelLaunch:
    """A kernel with its constexprs.

    Args:
        tokens: the tensor [B, H, L, D] whose strides the kernel takes, if there is one.
    """
    axes = {tokens: "bhn."} if tokens else {}
    return KernelLaunch(kernel, constexprs, {"num_warps": num_warps}, axes=axes)


def options(params: TritonParams, max_registers: int) -> dict[str, object]:
    """The compiler's options; ``max_registers`` of a thread, 0 for no limit."""
    limit = {"maxnreg": max_registers} if max_registers else {}
    return {"num_warps": params.num_warps, "num_stages": params.num_stages, **limit}


def descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A descriptor of a [B, H, L, D] view: any strides, so both engines' layouts without a copy."""
    return TensorDescriptor(x, list(x.shape), strides(x), [1, 1, *block])


def strides(x: Tensor) -> list[int]:
    """The strides of a readable view (``contract.is_readable``). A dimension of one element has
    none to speak of, yet a descriptor wants a multiple of 16 bytes there."""
    return [-(-stride // 8) * 8 for stride in x.stride()[:3]] + [1]
