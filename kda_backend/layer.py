"""A KDA layer between its projections: short convolution, delta rule, gated norm.

What the engines' adapters call, on the engines' own memory: packed q, k and v of all heads, and
pools of convolution and recurrent states that are read and written in place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from kda_backend import api
from kda_backend.decode_step import kda_decode_step, kda_verify_step
from kda_backend.metadata import CHUNK, ChunkMetadata
from kda_backend.paths import KdaPlan
from kda_backend.workspace import Workspace

if TYPE_CHECKING:
    from backend_core.launch import KernelLaunch


@dataclass(frozen=True)
class LayerWeights:
    """What a layer brings beside its projections; the tensors are the engine's own.

    Attributes:
        conv: ``[3 H D, W]`` contiguous, the filters of q, k and v, newest token last.
        a_log: ``H`` elements; dt_bias: ``H * D`` elements; fp32.
        norm: ``[D]``; norm_eps: of the gated norm.
        lower_bound: of the gate, or ``None`` for the unbounded one.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    lower_bound: float | None


def prefill(
    weights: LayerWeights,
    plan: KdaPlan,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
    workspace: Workspace | None,
) -> None:
    """Sequences of any length: a convolution, the chunked delta rule, the norm.

    Args:
        qkv: ``[T, 3 H D]``, channels adjacent.
        g: ``[T, H, D]`` raw gate; beta: ``[T, H]`` logits; gate: ``[T, H, D]`` logits of the
            output's gate.
        out: ``[T, H, D]``, written.
        conv_pool: ``[slots, 3 H D, W - 1]``, any strides; state_pool: ``[slots, H, D, D]`` fp32
            (``[V, K]``).
        state_indices: ``[N]`` int32 slot of each sequence in both pools; -1 for none.
        has_initial_state: ``[N]`` bool, or ``None`` where every slot is read.
        metadata: of these T tokens.

    Raises:
        ValueError: a tensor is not as described.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    mixed = short_conv(qkv, weights.conv, conv_pool, state_indices, has_initial_state, metadata)
    q, k, v = mixed.view(1, -1, 3, heads, dim).unbind(2)
    api.chunk_kda(
        q,
        k,
        v,
        g.unsqueeze(0),
        beta.unsqueeze(0),
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        state_pool=state_pool,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        out=out.unsqueeze(0),
        metadata=metadata,
        workspace=workspace,
        plan=plan,
    )
    kernels = metadata.chunk_start is not None
    gated_norm(out, gate, weights.norm, weights.norm_eps, out, kernels=kernels)


def decode(
    weights: LayerWeights,
    plan: KdaPlan,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    null_slot: int | None,
) -> None:
    """One token of each sequence, all in one launch; every valid slot is read.

    Called behind the layer's projections: the launch before it must not write the pools or
    ``state_indices``, which may be read while that one still runs.

    Arguments as :func:`prefill`, with ``N = T``; rows at ``null_slot`` are padding too.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    q, k, v = qkv.view(qkv.shape[0], 3, heads, dim).unbind(1)
    kda_decode_step(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        state_indices,
        null_slot=null_slot,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        conv_state=conv_pool,
        conv_weight=weights.conv,
        norm_weight=weights.norm,
        norm_gate=gate,
        norm_eps=weights.norm_eps,
        out=out,
        pools_settled=True,
        plan=plan,
    )


def verify(
    weights: LayerWeights,
    plan: KdaPlan,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    null_slot: int | None,
) -> None:
    """The drafted tokens of each sequence in one launch; rows of no sequence are not written.

    Arguments as :func:`prefill`, but ``conv_pool`` has at least ``S + 2`` columns.

    Args:
        state_indices: ``[N, S]`` int32, a slot for each token of a draft.
        num_accepted_tokens: ``[N]`` int32, of the draft before; cu_seqlens: ``[N + 1]``.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    q, k, v = qkv.view(qkv.shape[0], 3, heads, dim).unbind(1)
    kda_verify_step(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        state_indices,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
        null_slot=null_slot,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        conv_state=conv_pool,
        conv_weight=weights.conv,
        norm_weight=weights.norm,
        norm_gate=gate,
        norm_eps=weights.norm_eps,
        out=out,
        plan=plan,
    )


def decode_or_start(
    weights: LayerWeights,
    plan: KdaPlan,
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    gate: torch.Tensor,
    out: torch.Tensor,
    conv_pool: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
) -> None:
    """Sequences of one token, or none for padding, some of which may start with it.

    Arguments as :func:`prefill`; the recurrent kernel between its convolution and its norm.
    """
    heads, dim = plan.shape.num_value_heads, plan.shape.value_dim
    mixed = short_conv(qkv, weights.conv, conv_pool, state_indices, has_initial_state, metadata)
    q, k, v = mixed.view(1, -1, 3, heads, dim).unbind(2)
    api.fused_recurrent_kda(
        q,
        k,
        v,
        g.unsqueeze(0),
        beta.unsqueeze(0),
        A_log=weights.a_log,
        dt_bias=weights.dt_bias,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        lower_bound=weights.lower_bound,
        cu_seqlens=metadata.cu_seqlens,
        state_pool=state_pool,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        out=out.unsqueeze(0),
        plan=plan,
    )
    kernels = metadata.chunk_start is not None
    gated_norm(out, gate, weights.norm, weights.norm_eps, out, kernels=kernels)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
) -> torch.Tensor:
    """SiLU of a causal depthwise convolution of packed sequences; their last tokens stay in a pool.

    Args:
        x: ``[T, C]``, channels adjacent; weight: ``[C, W]`` contiguous, W = 4.
        pool: ``[slots, C, W - 1]``, any strides, oldest token first; read where
            ``has_initial_state`` and written at ``state_indices`` ``[N]`` int32 (-1: neither).
            No other slot is touched.
        metadata: of these tokens; with a chunk table the kernel runs, else torch.

    Returns:
        ``[T, C]`` contiguous, x's dtype.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    expect_stride("qkv", x, 1, 1)
    if width != 4:
        raise ValueError(f"conv weight must have 4 taps, got {width}")
    expect_shape("conv weight", weight, (channels, width))
    expect_stride("conv weight", weight, 0, width)
    expect_shape("conv_pool", pool, ("slots", channels, width - 1))
    expect_shape("state_indices", state_indices, (metadata.num_sequences,))
    expect_dtype("state_indices", state_indices, torch.int32)
    expect_stride("state_indices", state_indices, 0, 1)
    for name, tensor in (("conv weight", weight), ("conv_pool", pool)):
        expect_device(name, tensor, x.device)
    if metadata.num_tokens != tokens:
        raise ValueError(f"metadata is of {metadata.num_tokens} tokens, qkv has {tokens}")
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if metadata.chunk_start is None:
        _short_conv_torch(x, weight, pool, state_indices, has_initial_state, metadata, out)
        return out
    launch, block = _short_conv_kernel(width, channels, _has_ptx(x))
    launch(
        (metadata.num_chunks * (-(-channels // block)), 1, 1),
        x,
        weight,
        out,
        pool,
        state_indices,
        has_initial_state,
        metadata.cu_seqlens,
        metadata.chunk_start,
        metadata.chunk_len,
        metadata.chunk_offsets,
        metadata.num_sequences,
        channels,
        x.stride(0),
        channels,
        *pool.stride(),
    )
    return out


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    kernels: bool,
) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)`` over the last dimension.

    Args:
        x, gate, out: ``[T, H, D]``, channels adjacent; ``out`` may be x. weight: ``[D]``.
        kernels: run the Triton kernel; else torch.
    """
    tokens, heads, dim = x.shape
    for name, tensor in (("gate", gate), ("out", out)):
        expect_shape(name, tensor, (tokens, heads, dim))
        expect_stride(name, tensor, 2, 1)
        expect_device(name, tensor, x.device)
    expect_shape("norm weight", weight, (dim,))
    if not kernels:
        norm = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        out.copy_(norm * weight.float() * gate.float().sigmoid())
        return
    launch, block = _gated_norm_kernel(dim, _has_ptx(x))
    launch(
        (-(-tokens * heads // block), 1, 1),
        x,
        gate,
        weight,
        out,
        float(eps),
        tokens * heads,
        heads,
        *x.stride()[:2],
        *gate.stride()[:2],
        *out.stride()[:2],
    )


def _short_conv_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    metadata: ChunkMetadata,
    out: torch.Tensor,
) -> None:
    assert metadata.cu_seqlens_cpu is not None  # the CPU's metadata always has them
    width = weight.shape[1]
    slots = state_indices.tolist()
    reads = [True] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    bounds = metadata.cu_seqlens_cpu
    for begin, end, slot, initial in zip(bounds, bounds[1:], slots, reads, strict=False):
        if begin == end:
            continue
        before = x.new_zeros(x.shape[1], width - 1)
        if slot >= 0 and initial:
            before = pool[slot].to(x.dtype)
        line = torch.cat([before, x[begin:end].T], dim=1)
        y = F.conv1d(line.float()[None], weight.float()[:, None], groups=line.shape[0])[0]
        out[begin:end] = F.silu(y).T
        if slot >= 0:
            pool[slot] = line[:, line.shape[1] - (width - 1) :]


@functools.cache
def _short_conv_kernel(width: int, channels: int, fast_math: bool) -> tuple[KernelLaunch, int]:
    """The kernel and its channels a program; the imports need triton."""
    import triton

    from backend_core.launch import KernelLaunch
    from kda_backend.kernels.short_conv import short_conv_kernel

    block = min(128, triton.next_power_of_2(channels))
    constexprs = {
        "WIDTH": width,
        "CHUNK": CHUNK,
        "BLOCK_T": 16,
        "BLOCK_C": block,
        "BLOCK_N": 64,
        "FAST_MATH": fast_math,
    }
    return KernelLaunch(short_conv_kernel, constexprs, {"num_warps": 4}), block


@functools.cache
def _gated_norm_kernel(dim: int, fast_math: bool) -> tuple[KernelLaunch, int]:
    """The kernel and its rows a program; the imports need triton."""
    import triton

    from backend_core.launch import KernelLaunch
    from kda_backend.kernels.gated_norm import gated_norm_kernel

    block_v = triton.next_power_of_2(dim)
    block_r = max(1, 2048 // block_v)
    constexprs = {
        "V": dim,
        "BLOCK_V": block_v,
        "BLOCK_R": block_r,
        "FAST_MATH": fast_math,
    }
    return KernelLaunch(gated_norm_kernel, constexprs, {"num_warps": 4}), block_r


def _has_ptx(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None
