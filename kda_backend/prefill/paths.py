"""The path of a chunked prefill, and its kernels at model load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_backend.prefill import conv_sm90, one_launch_sm90
from kda_backend.prefill.arguments_sm90 import HopperPath, variant_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backend_core.launch.cuda import CudaKernel
    from backend_core.tables.schema import Row
    from kda_backend.contract.calls import PrefillCall
    from kda_backend.contract.values import ConvInputs, GateSpec, StateRef, TokenInputs
    from kda_backend.prefill.arguments_sm90 import PrefillVariant
    from kda_backend.selection import KdaSelection
    from kda_backend.step_plan import StepPlan


def path_of(
    selection: KdaSelection, tokens: TokenInputs, step_plan: StepPlan, state: StateRef
) -> tuple[Row, Callable[[PrefillCall], None]]:
    """The row for the grid and the lengths of a call with these packed tokens, and its bound path.

    Rows that are limited by lengths read states whose channels lie in pairs, as those of all
    engines do: of others no length is said.
    """
    paths, grid = selection.prefill, step_plan.num_chunks * tokens.v.shape[2]
    longest = step_plan.max_tokens
    row = paths.row(grid, longest)
    if row.is_limited and not one_launch_sm90.has_pairs(state):
        row, longest = paths.row(grid), None
    return row, paths.run(grid, longest)


def convolves(
    selection: KdaSelection,
    row: Row,
    tokens: TokenInputs,
    gate: GateSpec,
    step_plan: StepPlan,
    state: StateRef,
    conv: ConvInputs,
) -> bool:
    """Whether the step's path makes the short convolution of q and k itself, by a kernel which is
    compiled at the model's first step of any kind.

    It rounds otherwise than a launch of its own, so where bits may not depend on the size of the
    call there is that launch in each.

    Args:
        tokens: q and k from before the convolution.
        conv: of all channels.
    """
    least = getattr(row.params, "fused_conv_tiles", 0)
    if selection.shape.keeps_prefixes or not least:
        return False
    variant = variant_of(tokens, gate, step_plan, state, None)
    conv_sm90.load_kernels(tokens.q.device, variant, conv.weight.dtype)
    return conv_sm90.serves(least, conv, tokens, step_plan)


def begin_to_compile(
    selection: KdaSelection, variants: Sequence[PrefillVariant]
) -> list[CudaKernel]:
    """The CUDA kernels that a model's prefills may choose, which compile in threads meanwhile.

    Args:
        variants: of the calls that will come (`arguments_sm90.variant_of`).
    """
    kernels: list[CudaKernel] = []
    heads, paths = selection.shape.num_value_heads, selection.prefill
    for row, path in zip(paths.rows, paths.bind_all(), strict=True):
        if row.max_width is not None and heads > row.max_width:
            continue  # one sequence has as many times its own share
        if isinstance(path, HopperPath):
            kernels += [kernel for x in variants for kernel in path.begin_to_compile(x)]
    return kernels
