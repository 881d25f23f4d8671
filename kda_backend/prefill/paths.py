"""Chunked prefill: its kernel paths by the names of the path tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_backend.prefill import conv_sm90
from kda_backend.prefill.arguments_sm90 import variant_of
from kda_backend.prefill.segmented_sm90 import segmented_sm90
from kda_backend.prefill.torch import prefill as torch_prefill
from kda_backend.prefill.two_stage import two_stage
from kda_backend.prefill.two_stage_sm90 import two_stage_sm90
from kda_backend.scratch import Scratch

if TYPE_CHECKING:
    from torch import Tensor

    from backend_core.tables.schema import KernelPath
    from kda_backend.contract.values import ConvInputs, GateSpec, Kept, StateRef, TokenInputs
    from kda_backend.selection import KdaSelection
    from kda_backend.step_plan import StepPlan

PATHS = {
    "segmented_sm90": segmented_sm90,
    "two_stage_sm90": two_stage_sm90,
    "two_stage": two_stage,
    "torch": torch_prefill,
}
CONVOLVING = {"segmented_sm90": segmented_sm90, "two_stage_sm90": two_stage_sm90}
"""Those that can make the short convolution of q and k."""


def run_prefill(
    selection: KdaSelection,
    tokens: TokenInputs,
    gate: GateSpec,
    step_plan: StepPlan,
    state: StateRef,
    out: Tensor,
    chunk_states: Tensor | None = None,
    scratch: Scratch | None = None,
    kept: Kept | None = None,
    conv: ConvInputs | None = None,
) -> None:
    """Run checked inputs on the path for their grid.

    Args:
        tokens: packed.
        chunk_states: ``[chunks, HV, V, K]``, laid out like ``state``: receives the state before
            each chunk.
        scratch: memory to reuse; by default the call allocates its own.
        kept: of the check of this call; without it the path works everything out anew.
        conv: of q and k, which are from before it: where `convolves` has said so.
    """
    path = _path_of(selection, tokens, step_plan)
    if scratch is None:
        scratch = Scratch(tokens.q.device)
    kept = {} if kept is None else kept
    call = (path, tokens, gate, step_plan, state, out, chunk_states, scratch, kept)
    if conv is None:
        PATHS[path.name](*call)
    else:
        CONVOLVING[path.name](*call, conv=conv)


def convolves(
    selection: KdaSelection,
    tokens: TokenInputs,
    gate: GateSpec,
    step_plan: StepPlan,
    state: StateRef,
    conv: ConvInputs,
) -> bool:
    """Whether the step's path makes the short convolution of q and k itself, by a kernel which is
    compiled at the model's first step of any kind.

    Args:
        tokens: q and k from before the convolution.
        conv: of all channels.
    """
    path = _path_of(selection, tokens, step_plan)
    if path.name not in CONVOLVING:
        return False
    params = getattr(path.params, "cost_model", path.params)
    if not params.fused_conv_tiles:
        return False
    variant = variant_of(tokens, gate, step_plan, state, None)
    conv_sm90.load_kernels(tokens.q.device, variant, conv.weight.dtype)
    return conv_sm90.serves(params, conv, tokens, step_plan)


def _path_of(selection: KdaSelection, tokens: TokenInputs, step_plan: StepPlan) -> KernelPath:
    return selection.prefill.lookup(step_plan.num_chunks * tokens.v.shape[2])
