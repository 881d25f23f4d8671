"""The small Triton kernels of 8-bit attention and of predictions, prepared once per shape."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from backend_core.contracts import interprets
from backend_core.launch.triton import KernelLaunch


@functools.lru_cache(maxsize=1024)
def prepared(kernel: Any, num_warps: int, tokens: str = "", **constexprs: Any) -> KernelLaunch:
    """A kernel with its constexprs.

    Args:
        tokens: the tensor [B, H, L, D] whose strides the kernel takes, if there is one.
    """
    axes = {tokens: "bhn."} if tokens else {}
    return KernelLaunch(kernel, constexprs, {"num_warps": num_warps}, axes=axes)


def has_kernels(x: Tensor) -> bool:
    """Whether Triton runs here: on a GPU, or on a CPU under its interpreter."""
    return x.device.type != "cpu" or interprets()
