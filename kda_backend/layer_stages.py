"""The stages around the delta rule in a layer's prefill: short convolution and gated norm."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from backend_core.autocast import without_autocast
from backend_core.contracts import expect_device, expect_shape, expect_stride
from kda_backend.contract.calls import LayerStages
from kda_backend.contract.values import ConvInputs, NormInputs, StateRef
from kda_backend.spec import CHUNK, CONV_TAPS
from kda_backend.step_plan import StepPlan
from kda_backend.token_spec import has_ptx

if TYPE_CHECKING:
    from backend_core.launch.triton import Argument, Grid, KernelLaunch, Launch


CONV_TAKES = (
    *("x_ptr", "conv_weight_ptr", "o_ptr", "conv_state_ptr", "state_indices_ptr"),
    "has_initial_state_ptr",
)
NORM_TAKES = ("x_ptr", "o_ptr", "gate_ptr", "weight_ptr")
"""The arguments whose addresses the prepared launches of these stages take."""


def check_stages(stages: LayerStages) -> None:
    """Raise ``ValueError`` where an argument of :func:`short_conv` or :func:`gated_norm` is not as
    described there; those of the delta rule have been checked."""
    qkv, out, conv, norm, _ = stages
    channels, taps = qkv.shape[1], conv.weight.shape[1]
    expect_stride("qkv", qkv, 1, 1)
    if taps != CONV_TAPS:
        raise ValueError(f"conv weight must have 4 taps, got {taps}")
    expect_shape("conv weight", conv.weight, (channels, taps))
    expect_stride("conv weight", conv.weight, 0, taps)
    expect_shape("conv_pool", conv.state, ("slots", channels, taps - 1))
    for name, tensor in (("conv weight", conv.weight), ("conv_pool", conv.state)):
        expect_device(name, tensor, qkv.device)
    for name, tensor in (("gate", norm.gate), ("out", out)):
        expect_shape(name, tensor, tuple(out.shape))
        expect_stride(name, tensor, 2, 1)
        expect_device(name, tensor, qkv.device)
    expect_shape("norm weight", norm.weight, (out.shape[2],))


def short_conv(
    x: torch.Tensor, conv: ConvInputs, state: StateRef, step_plan: StepPlan
) -> torch.Tensor:
    """SiLU of a causal depthwise convolution of packed sequences; their last tokens stay in a pool.

    Args:
        x: ``[T, C]``, channels adjacent.
        conv: of ``C`` channels and three columns, without a bias; read where the state is, and
            written at its slots.
        step_plan: of these tokens; with a chunk table the kernel runs, else torch.

    The arguments are not checked here: :func:`check_stages` does that.

    Returns:
        ``[T, C]`` contiguous, x's dtype.
    """
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if step_plan.chunk_table is None:
        _short_conv_torch(x, conv, state, step_plan, out)
    else:
        kernel, grid, given = _conv_launch(x, conv, state, step_plan, out)
        kernel.launch(grid, **given)
    return out


def prepare_short_conv(
    x: torch.Tensor, conv: ConvInputs, state: StateRef, step_plan: StepPlan
) -> Launch:
    """The kernel's launch of :func:`short_conv`, by the addresses of ``CONV_TAKES``."""
    kernel, grid, given = _conv_launch(x, conv, state, step_plan, torch.empty_like(x))
    return kernel.prepare(CONV_TAKES, grid, **given)


def _conv_launch(
    x: torch.Tensor, conv: ConvInputs, state: StateRef, step_plan: StepPlan, out: torch.Tensor
) -> tuple[KernelLaunch, Grid, dict[str, Argument]]:
    channels, table = x.shape[1], step_plan.chunk_table
    assert table is not None
    kernel, block = _short_conv_kernel(channels, has_ptx(x))
    grid = step_plan.num_chunks * (-(-channels // block)), 1, 1
    return (
        kernel,
        grid,
        {
            "x_ptr": x,
            "conv_weight_ptr": conv.weight,
            "o_ptr": out,
            "conv_state_ptr": conv.state,
            "state_indices_ptr": state.indices,
            "has_initial_state_ptr": state.has_initial,
            "cu_seqlens_ptr": step_plan.cu_seqlens,
            "chunk_start_ptr": table.start,
            "chunk_len_ptr": table.length,
            "chunk_offsets_ptr": table.offsets,
            "num_sequences": step_plan.num_sequences,
            "C": channels,
        },
    )


def gated_norm(x: torch.Tensor, norm: NormInputs, step_plan: StepPlan) -> None:
    """``x = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)`` over the last dimension.

    Args:
        x: ``[T, H, D]``, channels adjacent, as those of the norm's gate are.
        step_plan: with a chunk table the kernel runs, else torch.

    The arguments are not checked here: :func:`check_stages` does that.
    """
    if step_plan.chunk_table is None:
        # in float64: torch's last bits of an element depend on its place in a tensor
        y = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + norm.eps)
        x.copy_(y * norm.weight.double() * norm.gate.double().sigmoid())
        return
    kernel, grid, given = _norm_launch(x, norm)
    kernel.launch(grid, **given)


def prepare_gated_norm(x: torch.Tensor, norm: NormInputs) -> Launch:
    """The kernel's launch of :func:`gated_norm`, by the addresses of ``NORM_TAKES``."""
    kernel, grid, given = _norm_launch(x, norm)
    return kernel.prepare(NORM_TAKES, grid, **given)


def _norm_launch(
    x: torch.Tensor, norm: NormInputs
) -> tuple[KernelLaunch, Grid, dict[str, Argument]]:
    tokens, heads, dim = x.shape
    kernel, block = _gated_norm_kernel(dim, has_ptx(x))
    given = {"x_ptr": x, "gate_ptr": norm.gate, "weight_ptr": norm.weight, "o_ptr": x}
    numbers = {"eps": float(norm.eps), "num_rows": tokens * heads, "HV": heads}
    return kernel, (-(-tokens * heads // block), 1, 1), given | numbers


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
        # in float64, as the norm
        y = F.conv1d(line.double()[None], weight.double()[:, None], groups=line.shape[0])[0]
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
    return launch, block_r
