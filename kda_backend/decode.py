"""Recurrent paths: decode steps, and sequences short enough to walk token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kda_backend import reference
from kda_backend.prefill import activate, read_states, state_strides, write_states
from kda_backend.validation import KdaInputs, StateInputs

if TYPE_CHECKING:
    from backend_core.path_table import KernelPath


def recurrent(
    path: KernelPath,
    x: KdaInputs,
    cu_seqlens: torch.Tensor | None,
    state: StateInputs,
    out: torch.Tensor,
) -> None:
    """One launch: each program walks the tokens of one sequence for ``block_v`` value rows."""
    import triton

    from kda_backend.kernels.recurrent import recurrent_kernel

    batch, length, heads, key_dim = x.q.shape
    value_heads, value_dim = x.v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    params = path.params
    block_v = params["block_v"]
    assert isinstance(block_v, int)
    block_v = min(block_v, triton.next_power_of_2(value_dim))
    grid = (triton.cdiv(value_dim, block_v) * value_heads * sequences,)
    if grid[0] == 0:
        return
    recurrent_kernel[grid](
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.a_log,
        x.dt_bias,
        out,
        state.read,
        state.write,
        state.indices,
        state.has_initial,
        cu_seqlens,
        length,
        x.lower_bound,
        x.scale,
        *x.q.stride()[1:3],
        *x.k.stride()[1:3],
        *x.v.stride()[1:3],
        *x.g.stride()[1:3],
        *x.beta.stride()[1:3],
        *out.stride()[1:3],
        *state_strides(state.read, state),
        *state_strides(state.write, state),
        value_heads,
        HEADS_PER_KEY=value_heads // heads,
        K=key_dim,
        V=value_dim,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=block_v,
        GATE=x.gate,
        BETA=x.beta_kind,
        L2NORM=x.l2norm,
        FAST_MATH=bool(params["fast_math"]) and x.q.is_cuda,
        num_warps=params["num_warps"],
    )


def torch_reference(
    path: KernelPath,
    x: KdaInputs,
    cu_seqlens: torch.Tensor | None,
    state: StateInputs,
    out: torch.Tensor,
) -> None:
    """The recurrence in torch and fp32: the CPU's path."""
    batch, length = x.q.shape[:2]
    offsets = [n * length for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v, decay, beta = activate(x)
    before = read_states(state, len(offsets) - 1, v.shape[1], v.shape[2], k.shape[2], x.q.device)
    o, after = reference.recurrent_kda(
        q, k, v, decay, beta, scale=x.scale, state=before, cu_seqlens=offsets
    )
    write_states(state, after)
    out.copy_(o.view(out.shape))


PIPELINES = {"recurrent": recurrent, "reference": torch_reference}
