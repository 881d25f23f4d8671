"""One step of vLLM on one KDA layer: which operator serves which of its tokens.

The tokens of decodes come before those of prefills. Decodes run on the decode kernel, also in a
step with prefills, and prefills on the chunked one; both read and write the engine's pools in
place. Slot 0 is vLLM's null block: padded rows name it, and have no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from kda_backend import layer
from kda_backend.engines.vllm_step import Draft, Segment, build_step
from kda_backend.layer import LayerWeights, Pools, Tokens
from kda_backend.scratch import Scratch, scratch_of_call
from kda_backend.selection import KdaSelection
from kda_backend.step_plan import StepPlan

_STEP = "_kda_dsv4_step"


@dataclass(frozen=True)
class Runtime:
    """What the layers of one model share.

    Attributes:
        scratch: ``None`` where layers run at the same time, so that each call has its own.
        max_draft: tokens of a draft; 0 without speculative decoding.
        checkpoints: prefills may be asked for states inside of their sequences.
    """

    selection: KdaSelection
    scratch: Scratch | None
    max_sequences: int
    max_draft: int
    checkpoints: bool = False


def run_step(
    runtime: Runtime,
    weights: LayerWeights,
    module: Any,
    whole: Tokens,
    metadata: Any,
    plans: dict[Any, StepPlan],
) -> None:
    """``plans``: as `build_step` takes them."""
    step = getattr(metadata, _STEP, None)
    is_first = step is None
    if step is None:
        step = build_step(metadata, runtime.selection, plans)
        setattr(metadata, _STEP, step)
    conv_pool, state_pool = module.kv_cache[:2]
    if not is_conv_state_dim_first():
        conv_pool = conv_pool.transpose(-1, -2)
    pools = Pools(conv_pool, state_pool)
    if step.draft is not None:
        verify(runtime, weights, whole, pools, step.draft, step.prefill, step.decode)
        return
    window = Pools(window_of(conv_pool), state_pool)
    if step.decode is not None:
        tokens = _rows(whole, step.decode)
        decode(runtime, weights, tokens, window, step.decode, is_first=is_first)
    if step.prefill is not None:
        tokens = _rows(whole, step.prefill)
        prefill(runtime, weights, tokens, window, step.prefill)
    if step.num_tokens < whole.out.shape[0]:
        whole.out[step.num_tokens :].zero_()


def _rows(tokens: Tokens, segment: Segment) -> Tokens:
    if segment.end - segment.begin == tokens.out.shape[0]:
        return tokens
    rows = slice(segment.begin, segment.end)
    return Tokens(*(x[rows] for x in tokens))


def prefill(
    runtime: Runtime,
    weights: LayerWeights,
    tokens: Tokens,
    pools: Pools,
    segment: Segment,
) -> None:
    assert segment.step_plan is not None
    layer.prefill(
        weights,
        runtime.selection,
        tokens,
        pools,
        segment.state_indices,
        segment.has_initial_state,
        segment.step_plan,
        scratch_of_call(runtime.scratch, tokens.out.device),
        checkpoints=segment.checkpoints,
        known=segment.known,
    )


def decode(
    runtime: Runtime,
    weights: LayerWeights,
    tokens: Tokens,
    pools: Pools,
    segment: Segment,
    *,
    is_first: bool = False,
) -> None:
    """``is_first``: the step's slots were made just before, and not a projection's launches ago."""
    args = (weights, runtime.selection, tokens, pools, segment.state_indices)
    if segment.step_plan is None:
        safe = not (is_first and segment.copied)
        layer.decode(*args, null_slot=NULL_BLOCK_ID, pdl_prefetch_safe=safe)
    else:
        layer.decode_or_start(*args, segment.has_initial_state, segment.step_plan)


def verify(
    runtime: Runtime,
    weights: LayerWeights,
    whole: Tokens,
    pools: Pools,
    draft: Draft,
    prefills: Segment | None,
    decodes: Segment | None,
) -> None:
    """Drafts, and the prefills or decodes beside them, whose tokens may lie between those of
    drafts."""
    whole.out.zero_()  # padded tokens belong to no sequence

    def gathered(rows: torch.Tensor) -> Tokens:
        qkv, g, beta, gate, _ = (x.index_select(0, rows) for x in whole)
        return Tokens(qkv, g, beta, gate, torch.zeros_like(gate))

    tokens = whole if draft.rows is None else gathered(draft.rows)
    layer.verify(
        weights,
        runtime.selection,
        tokens,
        pools,
        draft.state_indices,
        draft.num_accepted,
        draft.cu_seqlens,
        NULL_BLOCK_ID,
    )
    if draft.rows is None or draft.others is None:
        return
    whole.out.index_copy_(0, draft.rows, tokens.out)
    window = Pools(window_of(pools.conv), pools.state)
    for segment, operator in ((prefills, prefill), (decodes, decode)):
        if segment is not None:
            tokens = gathered(draft.others)
            operator(runtime, weights, tokens, window, segment)
            whole.out.index_copy_(0, draft.others, tokens.out)


def window_of(conv_pool: torch.Tensor) -> torch.Tensor:
    """The first three columns, which hold the window; drafts also use those after them."""
    return conv_pool if conv_pool.shape[2] == 3 else conv_pool[:, :, :3]
