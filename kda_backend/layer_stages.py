"""The stages around the delta rule in a layer's prefill: short convolution and gated norm."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from backend_core.autocast import without_autocast
from backend_core.contracts import expect_device, expect_shape, expect_stride
from kda_backend.contract.tensors import expect_vector
from kda_backend.contract.values import ConvInputs, NormInputs, StateRef
from kda_backend.spec import CHUNK, CONV_TAPS
from kda_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.launch.triton import Again, KernelLaunch


CONV_TENSORS = (
    *("x_ptr", "conv_weight_ptr", "o_ptr", "conv_state_ptr", "state_indices_ptr"),
    "has_initial_state_ptr",
)
NORM_TENSORS = ("x_ptr", "gate_ptr", "weight_ptr", "o_ptr")
"""The tensors of a layer, as `Again` takes their addresses."""


def short_conv(
    x: torch.Tensor, conv: ConvInputs, state: StateRef, step_plan: StepPlan
) -> tuple[torch.Tensor, Again | None]:
    """SiLU of a causal depthwise convolution of packed sequences; their last tokens stay in a pool.

    Args:
        x: ``[T, C]``, channels adjacent.
        conv: of ``C`` channels and three columns, without a bias; read where the state is, and
            written at its slots.
        step_plan: of these tokens; with a chunk table the kernel runs, else torch.

    The arguments are not checked here: :func:`check_short_conv` does that.

    Returns:
        ``[T, C]`` contiguous, x's dtype; and how to launch a kernel again.
    """
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    table = step_plan.chunk_table
    if table is None:
        _short_conv_torch(x, conv, state, step_plan, out)
        return out, None
    kernel, block = _short_conv_kernel(channels, _has_ptx(x))
    again = kernel.launch(
        (step_plan.num_chunks * (-(-channels // block)), 1, 1),
        x_ptr=x,
        conv_weight_ptr=conv.weight,
        o_ptr=out,
        conv_state_ptr=conv.state,
        state_indices_ptr=state.indices,
        has_initial_state_ptr=state.has_initial,
        cu_seqlens_ptr=step_plan.cu_seqlens,
        chunk_start_ptr=table.start,
        chunk_len_ptr=table.length,
        chunk_offsets_ptr=table.offsets,
        num_sequences=step_plan.num_sequences,
        C=channels,
    )
    return out, again


def check_short_conv(
    x: torch.Tensor, conv: ConvInputs, state: StateRef, step_plan: StepPlan
) -> None:
    """Raise ``ValueError`` where an argument of :func:`short_conv` is not as described there."""
    (tokens, channels), taps = x.shape, conv.weight.shape[1]
    expect_stride("qkv", x, 1, 1)
    if taps != CONV_TAPS:
        raise ValueError(f"conv weight must have 4 taps, got {taps}")
    expect_shape("conv weight", conv.weight, (channels, taps))
    expect_stride("conv weight", conv.weight, 0, taps)
    expect_shape("conv_pool", conv.state, ("slots", channels, taps - 1))
    for name, tensor in (("conv weight", conv.weight), ("conv_pool", conv.state)):
        expect_device(name, tensor, x.device)
    assert state.indices is not None
    expect_vector("state_indices", state.indices, step_plan.num_sequences, x.device, torch.int32)
    if step_plan.num_tokens != tokens:
        raise ValueError(f"step_plan is of {step_plan.num_tokens} tokens, qkv has {tokens}")


def gated_norm(x: torch.Tensor, norm: NormInputs, step_plan: StepPlan) -> Again | None:
    """``x = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)`` over the last dimension.

    Args:
        x: ``[T, H, D]``, channels adjacent, as those of the norm's gate are.
        step_plan: with a chunk table the kernel runs, else torch.

    The arguments are not checked here: :func:`check_gated_norm` does that. Returns how to launch a
    kernel again.
    """
    tokens, heads, dim = x.shape
    weight, gate, eps = norm
    if step_plan.chunk_table is None:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        x.copy_(y * weight.float() * gate.float().sigmoid())
        return None
    kernel, block = _gated_norm_kernel(dim, _has_ptx(x))
    return kernel.launch(
        (-(-tokens * heads // block), 1, 1),
        x_ptr=x,
        gate_ptr=gate,
        weight_ptr=weight,
        o_ptr=x,
        eps=float(eps),
        num_rows=tokens * heads,
        HV=heads,
    )


def check_gated_norm(x: torch.Tensor, norm: NormInputs) -> None:
    """Raise ``ValueError`` where an argument of :func:`gated_norm` is not as described there."""
    for name, tensor in (("gate", norm.gate), ("out", x)):
        expect_shape(name, tensor, tuple(x.shape))
        expect_stride(name, tensor, 2, 1)
        expect_device(name, tensor, x.device)
    expect_shape("norm weight", norm.weight, (x.shape[2],))


@without_autocast
def _short_conv_torch(
    x: torch.Tensor, conv: ConvInputs, state: StateRef, step_plan: StepPlan, out: torch.Tensor
) -> None:
    bounds, initial = step_plan.cu_seqlens_cpu, state.has_initial
    assert bounds is not None and state.indices is not None  # the CPU's plan always has them
    pool, weight, slots = conv.state, conv.weight, state.indices.tolist()
    width = weight.shape[1]
    reads = [True] * len(slots) if initial is None else initial.tolist()
    for begin, end, slot, read in zip(bounds, bounds[1:], slots, reads, strict=False):
        if begin == end:
            continue
        before = x.new_zeros(x.shape[1], width - 1)
        if slot >= 0 and read:
            before = pool[slot].to(x.dtype)
        line = torch.cat([before, x[begin:end].T], dim=1)
        y = F.conv1d(line.float()[None], weight.float()[:, None], groups=line.shape[0])[0]
        out[begin:end] = F.silu(y).T
        if slot >= 0:
            pool[slot] = line[:, line.shape[1] - (width - 1) :]


@functools.cache
def _short_conv_kernel(channels: int, fast_math: bool) -> tuple[KernelLaunch, int]:
    """The kernel and its channels per program; the imports need triton."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.short_conv import short_conv_kernel

    block = min(128, triton.next_power_of_2(channels))
    constexprs = {
        "WIDTH": CONV_TAPS,
        "CHUNK": CHUNK,
        "BLOCK_T": 16,
        "BLOCK_C": block,
        "BLOCK_N": 64,
        "FAST_MATH": fast_math,
    }
    axes = {"x": "t", "o": "t", "conv_state": "ncw"}
    launch = KernelLaunch(short_conv_kernel, constexprs, {"num_warps": 4}, axes=axes)
    assert launch.argument_names[: len(CONV_TENSORS)] == CONV_TENSORS
    return launch, block


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
    launch = KernelLaunch(gated_norm_kernel, constexprs, {"num_warps": 4}, axes=axes)
    assert launch.argument_names[: len(NORM_TENSORS)] == NORM_TENSORS
    return launch, block_r


def _has_ptx(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.version.hip is None
