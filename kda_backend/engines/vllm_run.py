"""One step of vLLM on one KDA layer: which operator serves which of its tokens.

The tokens of decodes come before those of prefills. Decodes run on the decode kernel, also in a
step with prefills, and prefills on the chunked one; both read and write the engine's pools in
place. Slot 0 is vLLM's null block: padded rows name it, and have no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from kda_backend import layer
from kda_backend.contract.values import DraftInputs, Records, StateRef
from kda_backend.engines.vllm_step import Draft, StepPart, build_step
from kda_backend.layer import LayerWeights, Projections
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.step_plan import StepPlan

_STEP = "_kda_dsv4_step"
Pools = tuple[torch.Tensor, torch.Tensor]
"""An engine's windows ``[slots, 3 H D, W]``, any strides, and states ``[slots, H, D, D]``. The
first three columns hold the window; drafts also use those after them."""


@dataclass(frozen=True)
class Runtime:
    """State that the layers of one model share.

    Attributes:
        scratch: ``None`` where layers run at the same time, so that each call has its own.
        most_chunks: of the prefills of one call.
        max_draft: tokens of a draft; 0 without speculative decoding.
        checkpoints: prefills may be asked for states inside of their sequences.
    """

    selection: KdaSelection
    scratch: Scratch | None
    max_sequences: int
    most_chunks: int
    max_draft: int
    checkpoints: bool = False


def run_step(
    module: Any,
    weights: LayerWeights,
    whole: Projections,
    metadata: Any,
    plans: dict[Any, StepPlan],
) -> None:
    """``plans``: as `build_step` takes them."""
    runtime: Runtime = module.kda_runtime
    step = getattr(metadata, _STEP, None)
    is_first = step is None
    if step is None:
        step = build_step(metadata, runtime.selection, plans, runtime.most_chunks)
        setattr(metadata, _STEP, step)
    pools = pools_of(module)
    if step.draft is not None:
        verify(runtime, weights, whole, pools, step.draft, step.others, records_of(module))
        return
    for part in step.others:
        x = whole
        if part.end - part.begin != whole.out.shape[0]:
            x = Projections(*(tensor[part.begin : part.end] for tensor in whole))
        run_part(runtime, weights, x, pools, part, is_first=is_first)
    if step.num_tokens < whole.out.shape[0]:
        whole.out[step.num_tokens :].zero_()


def pools_of(module: Any) -> Pools:
    """A layer's, in the order of this package's operators."""
    conv_pool, state_pool = module.kv_cache[:2]
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    return conv_pool, state_pool


def records_of(module: Any) -> Records | None:
    """Records of a layer's drafts, which the runner has folded into its states after sampling."""
    kept = module.recoverssm_records
    if kept is None:
        return None
    return Records(kept.correction, kept.key_gate, by_norm=getattr(kept, "by_norm", False))


def run_part(
    runtime: Runtime,
    weights: LayerWeights,
    x: Projections,
    pools: Pools,
    part: StepPart,
    *,
    is_first: bool = False,
) -> None:
    """The decodes or the prefills of a step.

    Args:
        is_first: the step's slots were made just before, and not a projection's launches ago.
    """
    conv_pool, state = _windows(pools), _state_of(pools, part)
    args = (weights, runtime.selection, x, conv_pool, state)
    if part.step_plan is None:
        layer.decode(*args, pdl_prefetch_safe=not (is_first and part.copied))
    else:
        layer.prefill(
            *args,
            part.step_plan,
            runtime.scratch or Scratch(x.out.device),
            checkpoints=part.checkpoints,
        )


def run_any_batch(
    runtime: Runtime,
    weights: LayerWeights,
    x: Projections,
    pools: Pools,
    is_decode: torch.Tensor,
    decodes: StepPart,
    prefills: StepPart,
) -> None:
    """A pass whose requests only the GPU knows; ``is_decode``: of the rows of ``decodes``."""
    assert prefills.step_plan is not None
    layer.decode_and_prefill(
        weights,
        runtime.selection,
        x,
        _windows(pools),
        _state_of(pools, decodes),
        is_decode,
        _state_of(pools, prefills),
        prefills.step_plan,
        runtime.scratch or Scratch(x.out.device),
        checkpoints=prefills.checkpoints,
    )


def _windows(pools: Pools) -> torch.Tensor:
    """Without the columns that drafts use."""
    return pools[0] if pools[0].shape[2] == 3 else pools[0][:, :, :3]


def _state_of(pools: Pools, part: StepPart) -> StateRef:
    indices, initial = part.state_indices, part.has_initial_state
    null_slot = NULL_BLOCK_ID if part.step_plan is None else None
    return StateRef.pool(pools[1], indices, initial, null_slot=null_slot)


def verify(
    runtime: Runtime,
    weights: LayerWeights,
    whole: Projections,
    pools: Pools,
    draft: Draft,
    others: Sequence[StepPart],
    records: Records | None = None,
) -> None:
    """Drafts, and the prefills or decodes beside them, whose tokens may lie between those of
    drafts.

    Args:
        others: by their places among the tokens that are no drafts'.
        records: what is kept of the drafts in the place of states. Their windows begin at column 0.
    """
    whole.out.zero_()  # padded tokens belong to no sequence

    def gathered(rows: torch.Tensor) -> Projections:
        qkv, g, beta, gate, _ = (tensor.index_select(0, rows) for tensor in whole)
        return Projections(qkv, g, beta, gate, torch.zeros_like(gate))

    x = whole if draft.rows is None else gathered(draft.rows)
    conv_pool, state_pool = pools
    slots, given = draft.state_indices, DraftInputs.in_pool(draft.num_accepted, draft.cu_seqlens)
    if records is not None:
        assert draft.requests is not None
        slots = slots[:, 0]
        given = DraftInputs.in_records(records, draft.requests, cu_seqlens=draft.cu_seqlens)
    state = StateRef.pool(state_pool, slots, null_slot=NULL_BLOCK_ID)
    layer.verify(weights, runtime.selection, x, conv_pool, state, given)
    if draft.rows is None or draft.others is None:
        return
    whole.out.index_copy_(0, draft.rows, x.out)
    for part in others:
        rows = draft.others[part.begin : part.end]
        x = gathered(rows)
        run_part(runtime, weights, x, pools, part)
        whole.out.index_copy_(0, rows, x.out)
