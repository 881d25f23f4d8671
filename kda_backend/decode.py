"""Recurrent paths: decode steps, and sequences short enough to walk token by token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from kda_backend import torch_path
from kda_backend.validation import KdaInputs, StateInputs

if TYPE_CHECKING:
    from backend_core.launch import KernelLaunch
    from backend_core.path_table import KernelPath


def recurrent(
    path: KernelPath,
    x: KdaInputs,
    cu_seqlens: torch.Tensor | None,
    state: StateInputs,
    out: torch.Tensor,
) -> None:
    """One launch: each program walks the tokens of one sequence for ``block_v`` value rows."""
    batch, length, heads, key_dim = x.q.shape
    value_heads, value_dim = x.v.shape[2:]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    kernel, value_blocks = _recurrent_kernel(
        path,
        x.q.is_cuda,
        value_heads // heads,
        key_dim,
        value_dim,
        x.gate,
        x.beta_kind,
        x.l2norm,
    )
    _, stride_q_t, stride_q_h, _ = x.q.stride()
    _, stride_k_t, stride_k_h, _ = x.k.stride()
    _, stride_v_t, stride_v_h, _ = x.v.stride()
    _, stride_g_t, stride_g_h, _ = x.g.stride()
    _, stride_beta_t, stride_beta_h = x.beta.stride()
    _, stride_o_t, stride_o_h, _ = out.stride()
    kernel(
        (value_blocks * value_heads * sequences, 1, 1),
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
        stride_q_t,
        stride_q_h,
        stride_k_t,
        stride_k_h,
        stride_v_t,
        stride_v_h,
        stride_g_t,
        stride_g_h,
        stride_beta_t,
        stride_beta_h,
        stride_o_t,
        stride_o_h,
        *state.strides(state.read),
        *state.strides(state.write),
        value_heads,
    )


@functools.cache
def _recurrent_kernel(
    path: KernelPath,
    is_gpu: bool,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    gate: int,
    beta: int,
    l2norm: bool,
) -> tuple[KernelLaunch, int]:
    """The kernel of one model on one path, and its programs a head; the imports need triton."""
    import triton

    from backend_core.launch import KernelLaunch
    from kda_backend.kernels.recurrent import recurrent_kernel

    params = path.params
    block_v = min(int(params["block_v"]), triton.next_power_of_2(value_dim))
    constexprs = {
        "HEADS_PER_KEY": heads_per_key,
        "K": key_dim,
        "V": value_dim,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": block_v,
        "GATE": gate,
        "BETA": beta,
        "L2NORM": l2norm,
        "FAST_MATH": bool(params["fast_math"]) and is_gpu,
    }
    launch = KernelLaunch(recurrent_kernel, constexprs, {"num_warps": params["num_warps"]})
    return launch, triton.cdiv(value_dim, block_v)


PIPELINES = {"recurrent": recurrent, "reference": torch_path.decode}
