"""Merging the levels of a cascade by their LSEs, which are base 2."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch


def merge_states(v: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Attention over the union of several sets of keys, from the attention over each.

    Args:
        v: ``[tokens, states, heads, dim]``, contiguous: outputs, on a GPU or where Triton's
            interpreter runs.
        s: ``[tokens, states, heads]`` float32, contiguous: their LSEs. A state whose LSE is -inf
            adds nothing, whatever its output holds.

    Returns:
        ``[tokens, heads, dim]`` in v's dtype; 0 for a row without keys.
    """
    length, states, heads, dim = v.shape
    out = torch.empty(length, heads, dim, dtype=v.dtype, device=v.device)
    _kernel(dim).launch(
        (length * heads, 1, 1), v_ptr=v, s_ptr=s, out_ptr=out, num_states=states, heads=heads
    )
    return out


@functools.cache
def _kernel(dim: int) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from mla_backend.kernels.combine import merge_states_kernel

    block = 1 << (dim - 1).bit_length()
    return KernelLaunch(merge_states_kernel, {"DIM": dim, "BLOCK_DIM": block}, {"num_warps": 2})
