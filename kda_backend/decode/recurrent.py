"""Recurrent paths: decode steps, and sequences short enough to walk token by token."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from kda_backend.contract.draft import DraftInputs
from kda_backend.contract.inputs import KdaInputs, StateInputs
from kda_backend.contract.step import ConvInputs, NormInputs, StepInputs
from kda_backend.decode import step_sm90, torch_step
from kda_backend.launch_params import FusedStepParams, FusedVerifyParams, RecurrentParams
from kda_backend.prefill import torch as torch_path

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from backend_core.tables.select import KernelPath


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

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.recurrent import recurrent_kernel

    params: RecurrentParams = path.params
    block_v = min(params.block_v, triton.next_power_of_2(value_dim))
    constexprs = {
        "HEADS_PER_KEY": heads_per_key,
        "K": key_dim,
        "V": value_dim,
        "BLOCK_K": triton.next_power_of_2(key_dim),
        "BLOCK_V": block_v,
        "GATE": gate,
        "BETA": beta,
        "L2NORM": l2norm,
        "FAST_MATH": params.fast_math and is_gpu,
    }
    launch = KernelLaunch(recurrent_kernel, constexprs, {"num_warps": params.num_warps})
    return launch, triton.cdiv(value_dim, block_v)


def fused_step(path: KernelPath, x: StepInputs, out: torch.Tensor) -> None:
    """One launch for one token of each row; a program has a head's state, or ``step_block_v`` rows
    of it where neither convolution nor norm concerns the head as a whole."""
    conv, norm = x.conv, x.norm
    kernel, value_blocks = _step_kernel(
        path, x.q.is_cuda, *_dimensions(x), x.gate, x.beta_kind, x.l2norm, not (conv or norm)
    )
    rows, value_heads = x.v.shape[:2]
    kernel(
        (value_blocks * value_heads * rows, 1, 1),
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.a_log,
        x.dt_bias,
        x.pool,
        x.indices,
        *_conv_pointers(conv),
        *_norm_pointers(norm),
        out,
        x.null_slot,
        x.lower_bound,
        x.scale,
        norm.eps if norm else 0.0,
        x.q.stride(0),
        x.k.stride(0),
        x.v.stride(0),
        x.g.stride(0),
        x.beta.stride(0),
        x.pool.stride(0),
        *(conv.state.stride() if conv else (0, 0, 0)),
        norm.gate.stride(0) if norm else 0,
        out.stride(0),
        value_heads,
    )


def fused_verification(
    path: KernelPath, x: StepInputs, draft: DraftInputs, out: torch.Tensor
) -> None:
    """One launch for a draft of each sequence; a program has the state of a head."""
    conv, norm, windows = x.conv, x.norm, draft.windows
    kernel = _verify_kernel(path, x.q.is_cuda, *_dimensions(x), x.gate, x.beta_kind, x.l2norm)
    tokens, value_heads = x.v.shape[:2]
    in_pool = draft.write is x.pool
    stride_write_n, stride_write_t = draft.write.stride()[:2]
    kernel(
        (value_heads * draft.num_sequences, 1, 1),
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.a_log,
        x.dt_bias,
        x.pool,
        x.indices,
        draft.num_accepted,
        draft.write,
        draft.write_indices,
        *_conv_pointers(conv),
        windows,
        *_norm_pointers(norm),
        out,
        draft.cu_seqlens,
        tokens // max(draft.num_sequences, 1),
        draft.max_tokens,
        x.null_slot,
        x.null_slot if in_pool else -1,
        x.lower_bound,
        x.scale,
        norm.eps if norm else 0.0,
        x.q.stride(0),
        x.k.stride(0),
        x.v.stride(0),
        x.g.stride(0),
        x.beta.stride(0),
        x.indices.stride(0),
        x.pool.stride(0),
        draft.write_indices.stride(0),
        1 if in_pool else 0,
        stride_write_n,
        0 if in_pool else stride_write_t,
        *(conv.state.stride() if conv else (0, 0, 0)),
        *(windows.stride() if windows is not None else (0, 0, 0, 0)),
        norm.gate.stride(0) if norm else 0,
        out.stride(0),
        value_heads,
    )


def _conv_pointers(conv: ConvInputs | None) -> tuple[torch.Tensor | None, ...]:
    return (conv.state, conv.weight, conv.bias) if conv else (None, None, None)


def _norm_pointers(norm: NormInputs | None) -> tuple[torch.Tensor | None, ...]:
    return (norm.weight, norm.gate) if norm else (None, None)


def _dimensions(x: StepInputs) -> tuple[int, int, int]:
    """Value heads a key head, K and V."""
    return x.v.shape[1] // x.q.shape[1], x.q.shape[2], x.v.shape[2]


@functools.cache
def _step_kernel(
    path: KernelPath,
    is_gpu: bool,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    gate: int,
    beta: int,
    l2norm: bool,
    split: bool,
) -> tuple[KernelLaunch, int]:
    """The kernel of one model on one path, and its programs a head."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.decode_step import decode_step_kernel

    params: FusedStepParams = path.params
    constexprs = _step_constexprs(
        params, is_gpu, heads_per_key, key_dim, value_dim, gate, beta, l2norm
    )
    warps = params.num_warps
    if split:
        constexprs["BLOCK_V"] = min(params.block_v, constexprs["BLOCK_V"])
        warps = params.split_num_warps
    constexprs["EVICTION"] = params.eviction
    launch = KernelLaunch(decode_step_kernel, constexprs, {"num_warps": warps})
    return launch, triton.cdiv(value_dim, constexprs["BLOCK_V"])


@functools.cache
def _verify_kernel(
    path: KernelPath,
    is_gpu: bool,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    gate: int,
    beta: int,
    l2norm: bool,
) -> KernelLaunch:
    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.verify_step import verify_step_kernel

    params: FusedVerifyParams = path.params
    constexprs = _step_constexprs(
        params, is_gpu, heads_per_key, key_dim, value_dim, gate, beta, l2norm
    )
    options = {"num_warps": params.num_warps}
    return KernelLaunch(verify_step_kernel, constexprs, options)


def _step_constexprs(
    params: FusedStepParams | FusedVerifyParams,
    is_gpu: bool,
    heads_per_key: int,
    key_dim: int,
    value_dim: int,
    gate: int,
    beta: int,
    l2norm: bool,
) -> dict[str, Any]:
    import triton

    block_k = triton.next_power_of_2(key_dim)
    return {
        "HEADS_PER_KEY": heads_per_key,
        "K": key_dim,
        "V": value_dim,
        "BLOCK_K": block_k,
        "K_INNER": min(params.k_inner, block_k),
        "BLOCK_V": triton.next_power_of_2(value_dim),
        "GATE": gate,
        "BETA": beta,
        "L2NORM": l2norm,
        "FAST_MATH": params.fast_math and is_gpu,
    }


PIPELINES = {"recurrent": recurrent, "torch": torch_path.decode}
STEPS = {"fused": fused_step, "fused_sm90": step_sm90.step_sm90, "torch": torch_step.step}
VERIFICATIONS = {"fused": fused_verification, "torch": torch_step.verification}
