"""Chunked prefill: its kernel paths by the names of the path tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kda_backend.prefill.segmented_sm90 import segmented_sm90
from kda_backend.prefill.torch import prefill as torch_prefill
from kda_backend.prefill.two_stage import two_stage
from kda_backend.prefill.two_stage_sm90 import two_stage_sm90
from kda_backend.scratch import Scratch

if TYPE_CHECKING:
    from torch import Tensor

    from kda_backend.contract.values import GateSpec, Kept, StateRef, TokenInputs
    from kda_backend.selection import KdaSelection
    from kda_backend.step_plan import StepPlan

PATHS = {
    "segmented_sm90": segmented_sm90,
    "two_stage_sm90": two_stage_sm90,
    "two_stage": two_stage,
    "torch": torch_prefill,
}


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
) -> None:
    """Run checked inputs on the path for their grid.

    Args:
        tokens: packed.
        chunk_states: ``[chunks, HV, V, K]``, laid out like ``state``: receives the state before
            each chunk.
        scratch: memory to reuse; by default the call allocates its own.
        kept: of the check of this call; without it the path works everything out anew.
    """
    path = selection.prefill.lookup(step_plan.num_chunks * tokens.v.shape[2])
    if scratch is None:
        scratch = Scratch(tokens.q.device)
    kept = {} if kept is None else kept
    PATHS[path.name](path, tokens, gate, step_plan, state, out, chunk_states, scratch, kept)
