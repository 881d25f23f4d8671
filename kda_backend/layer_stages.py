"""The stages around the delta rule in a layer's prefill: short convolution and gated norm."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from backend_core.autocast import without_autocast
from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from kda_backend.spec import CHUNK
from kda_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    step_plan: StepPlan,
) -> torch.Tensor:
    """SiLU of a causal depthwise convolution of packed sequences; their last tokens stay in a pool.

    Args:
        x: ``[T, C]``, channels adjacent; weight: ``[C, W]`` contiguous, W = 4.
        pool: ``[slots, C, W - 1]``, any strides, oldest token first; read where
            ``has_initial_state`` and written at ``state_indices`` ``[N]`` int32 (-1: neither).
            No other slot is touched.
        step_plan: of these tokens; with a chunk table the kernel runs, else torch.

    The arguments are not checked here: :func:`check_short_conv` does that.

    Returns:
        ``[T, C]`` contiguous, x's dtype.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if step_plan.chunk_table is None:
        _short_conv_torch(x, weight, pool, state_indices, has_initial_state, step_plan, out)
        return out
    kernel, block = _short_conv_kernel(width, channels, _has_ptx(x))
    kernel.launch(
        (step_plan.num_chunks * (-(-channels // block)), 1, 1),
        x_ptr=x,
        conv_weight_ptr=weight,
        o_ptr=out,
        conv_state_ptr=pool,
        state_indices_ptr=state_indices,
        has_initial_state_ptr=has_initial_state,
        cu_seqlens_ptr=step_plan.cu_seqlens,
        chunk_start_ptr=step_plan.chunk_table.start,
        chunk_len_ptr=step_plan.chunk_table.length,
        chunk_offsets_ptr=step_plan.chunk_table.offsets,
        num_sequences=step_plan.num_sequences,
        C=channels,
    )
    return out


def check_short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    step_plan: StepPlan,
) -> None:
    """Raise ``ValueError`` where an argument of :func:`short_conv` is not as described there."""
    tokens, channels = x.shape
    width = weight.shape[1]
    expect_stride("qkv", x, 1, 1)
    if width != 4:
        raise ValueError(f"conv weight must have 4 taps, got {width}")
    expect_shape("conv weight", weight, (channels, width))
    expect_stride("conv weight", weight, 0, width)
    expect_shape("conv_pool", pool, ("slots", channels, width - 1))
    expect_shape("state_indices", state_indices, (step_plan.num_sequences,))
    expect_dtype("state_indices", state_indices, torch.int32)
    expect_stride("state_indices", state_indices, 0, 1)
    for name, tensor in (("conv weight", weight), ("conv_pool", pool)):
        expect_device(name, tensor, x.device)
    if step_plan.num_tokens != tokens:
        raise ValueError(f"step_plan is of {step_plan.num_tokens} tokens, qkv has {tokens}")


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

    The arguments are not checked here: :func:`check_gated_norm` does that.
    """
    tokens, heads, dim = x.shape
    if not kernels:
        norm = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        out.copy_(norm * weight.float() * gate.float().sigmoid())
        return
    kernel, block = _gated_norm_kernel(dim, _has_ptx(x))
    kernel.launch(
        (-(-tokens * heads // block), 1, 1),
        x_ptr=x,
        gate_ptr=gate,
        weight_ptr=weight,
        o_ptr=out,
        eps=float(eps),
        num_rows=tokens * heads,
        HV=heads,
    )


def check_gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise ``ValueError`` where an argument of :func:`gated_norm` is not as described there."""
    tokens, heads, dim = x.shape
    for name, tensor in (("gate", gate), ("out", out)):
        expect_shape(name, tensor, (tokens, heads, dim))
        expect_stride(name, tensor, 2, 1)
        expect_device(name, tensor, x.device)
    expect_shape("norm weight", weight, (dim,))


@without_autocast
def _short_conv_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    pool: torch.Tensor,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    step_plan: StepPlan,
    out: torch.Tensor,
) -> None:
    assert step_plan.cu_seqlens_cpu is not None  # the CPU's plan always has them
    width = weight.shape[1]
    slots = state_indices.tolist()
    reads = [True] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    bounds = step_plan.cu_seqlens_cpu
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
    """The kernel and its channels per program; the imports need triton."""
    import triton

    from backend_core.launch.triton import KernelLaunch
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
    axes = {"x": "t", "o": "t", "conv_state": "ncw"}
    return KernelLaunch(short_conv_kernel, constexprs, {"num_warps": 4}, axes=axes), block


@functools.cache
def _gated_norm_kernel(dim: int, fast_math: bool) -> tuple[KernelLaunch, int]:
    """The kernel and its rows per program; the imports need triton."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.gated_norm import gated_norm_kernel

    block_v = triton.next_power_of_2(dim)
    block_r = max(1, 2048 // block_v)
    constexprs = {
        "V": dim,
        "BLOCK_V": block_v,
        "BLOCK_R": block_r,
        "FAST_MATH": fast_math,
    }
    axes = {"x": "th", "gate": "th", "o": "th"}
    return KernelLaunch(gated_norm_kernel, constexprs, {"num_warps": 4}, axes=axes), block_r


def _has_ptx(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None
