"""The short convolution of q and k inside the intra-chunk kernel (kernels/sm90/conv_rows.cuh)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from backend_core.launch.cuda import CudaKernel
from backend_core.launch.cuda_params import CudaParams
from kda_backend.contract.values import ConvInputs, TokenInputs
from kda_backend.prefill.arguments_sm90 import (
    DIM,
    INTRA_FIELDS,
    KERNELS,
    STRUCTS,
    PrefillVariant,
    intra_defines,
)
from kda_backend.step_plan import StepPlan

_STRUCTS = {
    # first of their channels in the pool of windows, and their taps [H * 128, 4]
    "Conv": (
        ("window", "void*"),
        ("taps", "const void*"),
        *((f"stride_{axis}", "i64") for axis in "ncw"),
    ),
}
_FIELDS = (
    ("q_conv", "Conv"),
    ("k_conv", "Conv"),
    ("state_indices", "const int*"),  # [N]: slots, negative for none
    ("has_initial_state", "const unsigned char*"),  # [N], or null: all have
    ("cu_seqlens", "const void*"),  # [N + 1]
    ("chunk_begins", "const int*"),  # [chunks]: the sequence that begins with a chunk, else -1
)
_PARAMS = CudaParams(_FIELDS, _STRUCTS, ("q_conv", "k_conv", "state_indices", "has_initial_state"))
CONV_PARAMS = CudaParams((*INTRA_FIELDS, *_FIELDS), STRUCTS | _STRUCTS)
"""Parameters of the kernel: those without the convolution, then its own."""


def serves(least: int, conv: ConvInputs, tokens: TokenInputs, step_plan: StepPlan) -> bool:
    """Whether a step's q and k are convolved in the kernel: it has at least so many tiles, and the
    types are the kernel's."""
    heads = tokens.v.shape[2]
    return (
        least <= (step_plan.as_one(heads) or step_plan.num_chunks) * heads
        and tokens.q.dtype == conv.state.dtype == torch.bfloat16
        and conv.weight.dtype in (torch.bfloat16, torch.float32)
        and conv.weight.data_ptr() % 16 == 0
        and conv.bias is None
    )


@functools.cache
def load_kernels(
    device: torch.device, variant: PrefillVariant, taps: torch.dtype
) -> Mapping[int, CudaKernel]:
    """The kernels by CTAs per SM, loaded."""
    source, kernels = KERNELS / "intra_chunk.cu", {}
    for ctas in (2, 4):
        defines = conv_defines(variant, ctas, taps)
        kernels[ctas] = CudaKernel(source, "intra_chunk", CONV_PARAMS, defines)
    for kernel in kernels.values():
        kernel.load()
    return kernels


def conv_defines(variant: PrefillVariant, ctas_per_sm: int, taps: torch.dtype) -> dict[str, int]:
    """Preprocessor constants of one variant of intra_chunk.cu that convolves."""
    return {
        **intra_defines(variant, ctas_per_sm),
        "CONV": 1,
        "TAPS_FP32": int(taps == torch.float32),
        "CU_INT64": int(variant.int64_offsets),
    }


def params_of(conv: ConvInputs, step_plan: StepPlan, heads: int) -> Callable[..., bytes]:
    """A function of the addresses of windows, taps, slots and continuations: the convolution's
    parameters, which follow those of the kernel without it."""
    strides, channels = conv.state.stride(), heads * DIM
    window_bytes = channels * strides[1] * conv.state.element_size()
    tap_bytes = channels * conv.weight.stride(0) * conv.weight.element_size()
    fill = _PARAMS.at(
        {"q_conv": strides, "k_conv": strides},
        cu_seqlens=step_plan.cu_seqlens.data_ptr(),
        chunk_begins=step_plan.chunk_begins.data_ptr(),
    )

    def pack(windows: int, taps: int, slots: int, initial: int) -> bytes:
        return fill(windows, taps, windows + window_bytes, taps + tap_bytes, slots, initial)

    return pack
