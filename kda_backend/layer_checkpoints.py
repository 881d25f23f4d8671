"""States inside of a prefill that a prefix cache keeps, beside those of the prefill's end."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from kda_backend.spec import CHUNK
from kda_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch


class Checkpoints(NamedTuple):
    """At most one state for each of N sequences; made by `of`.

    Attributes:
        offsets: ``[N]`` int32, tokens of the sequence before the state, a multiple of 64 and less
            than it has.
        chunks: ``[N, 1]`` int32, the same in chunks; -1 for none.
        state_indices: ``[N, 1]`` int32, the slot of both pools where the state goes, which is no
            sequence's own; -1 for none.
    """

    offsets: torch.Tensor
    chunks: torch.Tensor
    state_indices: torch.Tensor

    @classmethod
    def of(cls, offsets: torch.Tensor, state_indices: torch.Tensor, null_slot: int) -> Checkpoints:
        """From an engine's metadata, without reading it on the host.

        Args:
            offsets: ``[N]``, 0 for none; state_indices: ``[N]``, ``null_slot`` for none.

        Raises:
            ValueError: an offset in host memory is no multiple of 64.
        """
        if offsets.device.type == "cpu" and bool((offsets % CHUNK).any()):
            raise ValueError(
                f"checkpoint offsets must be multiples of {CHUNK}, got {offsets.tolist()}"
            )
        asked = (offsets > 0) & (state_indices != null_slot)
        offsets = offsets.to(torch.int32)
        chunks = torch.where(asked, offsets // CHUNK, -1)[:, None].contiguous()
        slots = torch.where(asked, state_indices.to(torch.int32), -1)[:, None].contiguous()
        return cls(offsets.contiguous(), chunks, slots)


def store_checkpoints(
    x: torch.Tensor,
    conv_pool: torch.Tensor,
    checkpoints: Checkpoints,
    step_plan: StepPlan,
) -> None:
    """The window of each checkpoint into its slot, beside the recurrent state that the scan writes
    there; no other slot is touched.

    Args:
        x: ``[T, C]`` before the convolution, channels adjacent.
        conv_pool: ``[slots, C, 3]``, any strides.
        step_plan: of these tokens; with a chunk table the kernel runs, else torch.

    The arguments are not checked here: :func:`check_checkpoints` does that.
    """
    if step_plan.chunk_table is None:
        _store_torch(x, conv_pool, checkpoints, step_plan)
        return
    channels = x.shape[1]
    kernel, block = _kernel(conv_pool.shape[2] + 1)
    kernel.launch(
        (step_plan.num_sequences * -(-channels // block), 1, 1),
        x_ptr=x,
        conv_state_ptr=conv_pool,
        offsets_ptr=checkpoints.offsets,
        state_indices_ptr=checkpoints.state_indices,
        cu_seqlens_ptr=step_plan.cu_seqlens,
        C=channels,
    )


def check_checkpoints(checkpoints: Checkpoints, x: torch.Tensor, step_plan: StepPlan) -> None:
    """Raise ``ValueError`` where checkpoints are not as described, or not of this step."""
    sequences = step_plan.num_sequences
    for name, tensor, shape in (
        ("checkpoint offsets", checkpoints.offsets, (sequences,)),
        ("checkpoint chunks", checkpoints.chunks, (sequences, 1)),
        ("checkpoint slots", checkpoints.state_indices, (sequences, 1)),
    ):
        expect_shape(name, tensor, shape)
        expect_dtype(name, tensor, torch.int32)
        expect_device(name, tensor, x.device)
        expect_stride(name, tensor, 0, 1)
    bounds = step_plan.cu_seqlens_cpu
    if bounds is None or checkpoints.offsets.device.type != "cpu":
        return
    slots = checkpoints.state_indices[:, 0].tolist()
    for n, (offset, slot) in enumerate(zip(checkpoints.offsets.tolist(), slots, strict=True)):
        length = bounds[n + 1] - bounds[n]
        if slot >= 0 and offset > length:
            raise ValueError(
                f"a checkpoint must lie within its sequence of {length} tokens, got one after"
                f" {offset}"
            )


def _store_torch(
    x: torch.Tensor, conv_pool: torch.Tensor, checkpoints: Checkpoints, step_plan: StepPlan
) -> None:
    bounds, width = step_plan.cu_seqlens_cpu, conv_pool.shape[2]
    assert bounds is not None  # the CPU's plan always has them
    offsets, slots = checkpoints.offsets.tolist(), checkpoints.state_indices[:, 0].tolist()
    for n, (offset, slot) in enumerate(zip(offsets, slots, strict=True)):
        if slot >= 0:
            end = bounds[n] + offset
            conv_pool[slot] = x[end - width : end].T


@functools.cache
def _kernel(width: int) -> tuple[KernelLaunch, int]:
    """The kernel and its elements per program; the imports need triton."""
    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.store_checkpoints import store_checkpoints_kernel

    constexprs = {"WIDTH": width, "BLOCK": 1024}
    axes = {"x": "t", "conv_state": "ncw"}
    return KernelLaunch(store_checkpoints_kernel, constexprs, {"num_warps": 4}, axes=axes), 1024
