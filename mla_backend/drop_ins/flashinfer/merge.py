"""Merging the levels of a cascade by their LSEs, which are base 2."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from backend_core.contracts import interprets

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch


def merge_states(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Attention over the union of several sets of keys, from the attention over each.

    Args:
        v: ``[tokens, states, heads, dim]``, contiguous: outputs.
        s: ``[tokens, states, heads]`` float32, contiguous: their LSEs. A state whose LSE is -inf
            adds nothing, whatever its output holds.

    Returns:
        ``[tokens, heads, dim]`` in v's dtype; 0 for a row without keys.
    """
    if not is_available(v.device):
        return _merge_in_torch(v, s)
    length, states, heads, dim = v.shape
    out = torch.empty(length, heads, dim, dtype=v.dtype, device=v.device)
    _kernel(dim).launch(
        (length * heads, 1, 1), v_ptr=v, s_ptr=s, out_ptr=out, num_states=states, heads=heads
    )
    return out


def _merge_in_torch(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    top = s.amax(1, keepdim=True)
    weight = torch.exp2(s - torch.where(top == -math.inf, 0.0, top))
    total = weight.sum(1)
    values = torch.where(weight[..., None] == 0, 0.0, v.float() * weight[..., None]).sum(1)
    return (values / torch.where(total == 0, 1.0, total)[..., None]).to(v.dtype)


@functools.cache
def _kernel(dim: int) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.combine import merge_states_kernel

    block = 1 << (dim - 1).bit_length()
    return KernelLaunch(merge_states_kernel, {"DIM": dim, "BLOCK_DIM": block}, {"num_warps": 2})


def is_available(device: torch.device) -> bool:
    """Whether Triton's kernels run on the device: a GPU, or any under Triton's interpreter."""
    return device.type == "cuda" or interprets()
