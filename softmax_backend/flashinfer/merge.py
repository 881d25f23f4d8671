"""FlashInfer's merge_state(s): combine for states that a user holds. LSEs are base 2."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, interprets
from backend_core.launch.streams import is_elsewhere, run_there

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of several sets of keys, from the attention over each.

    Args:
        v: ``[seq_len, num_states, num_heads, head_dim]``: outputs.
        s: ``[seq_len, num_states, num_heads]``: their LSEs, base 2. A state whose LSE is -inf adds
            nothing, whatever its output holds.

    Returns:
        (V ``[seq_len, num_heads, head_dim]`` in v's dtype, S ``[seq_len, num_heads]`` float32, base
        2); a row without keys is 0 and -inf.

    Raises:
        ValueError: an input is not as described.
    """
    if is_elsewhere(v):
        return run_there(v, merge_states, locals())
    expect_shape("v", v, ("seq_len", "num_states", "num_heads", "head_dim"))
    expect_dtype("v", v, *_DTYPES)
    expect_shape("s", s, tuple(v.shape[:3]))
    expect_device("s", s, v.device)
    length, states, heads, dim = v.shape
    v, s = v.contiguous(), s.float().contiguous()
    if not is_available(v.device):
        return _merge_in_torch(v, s)
    out = torch.empty(length, heads, dim, dtype=v.dtype, device=v.device)
    lse = torch.empty(length, heads, dtype=torch.float32, device=v.device)
    _kernel(dim)((length * heads, 1, 1), v, s, out, lse, states, heads)
    return out, lse


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_states` of two: ``[seq_len, num_heads, head_dim]`` and ``[seq_len, num_heads]`` each.

    Raises:
        ValueError: the states do not have the same shapes, or are on different devices.
    """
    for name, x in (("s_a", s_a), ("v_b", v_b), ("s_b", s_b)):
        expect_device(name, x, v_a.device)
    expect_shape("v_b", v_b, tuple(v_a.shape))
    expect_shape("s_b", s_b, tuple(s_a.shape))
    return merge_states(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """`merge_state` into ``v`` and ``s`` (float32), for the rows where ``mask [seq_len]`` is true.

    Raises:
        ValueError: the states do not have the same shapes, or s is not float32, or the tensors are
            on different devices; nothing has been written then.
    """
    expect_dtype("s", s, torch.float32)
    if mask is not None:
        expect_shape("mask", mask, (v.shape[0],))
        expect_device("mask", mask, v.device)
    out, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        out = torch.where(mask[:, None, None], out, v)
        lse = torch.where(mask[:, None], lse, s)
    v.copy_(out)
    s.copy_(lse)


def _merge_in_torch(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not s.shape[1]:  # no state, hence no key
        return torch.zeros_like(v[:, :0].sum(1)), torch.full_like(s[:, :0].sum(1), -math.inf)
    top = s.amax(1, keepdim=True)
    shift = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp2(s - shift)
    total = weight.sum(1)
    values = torch.where(weight[..., None] == 0, 0.0, v.float() * weight[..., None]).sum(1)
    out = values / torch.where(total == 0, 1.0, total)[..., None]
    return out.to(v.dtype), torch.log2(total) + shift[:, 0]


@functools.cache
def _kernel(dim: int) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from softmax_backend.kernels.combine import merge_states_kernel

    block = 1 << (dim - 1).bit_length()
    return KernelLaunch(merge_states_kernel, {"DIM": dim, "BLOCK_DIM": block}, {"num_warps": 2})


def is_available(device: torch.device) -> bool:
    """Whether Triton's kernels run on the device: a GPU, or any under Triton's interpreter."""
    return device.type == "cuda" or interprets()
