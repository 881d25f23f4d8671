"""What one step of vLLM asks of its KDA layers: decodes, prefills and drafts, from its metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kda_backend.selection import KdaSelection
from kda_backend.step_plan import StepPlan, build_step_plan


@dataclass(frozen=True)
class Segment:
    """The decodes or the prefills of one step; ``begin`` and ``end`` are token offsets."""

    begin: int
    end: int
    state_indices: torch.Tensor
    has_initial_state: torch.Tensor | None
    step_plan: StepPlan | None  # of decodes only where some may start a new sequence


@dataclass(frozen=True)
class Draft:
    """Drafts to verify, of N sequences with at most S tokens each.

    Attributes:
        rows, others: the step's rows of the drafts and of all other tokens, which are prefills;
            ``None`` where every token is a draft's.
        state_indices: ``[N, S]``; num_accepted: ``[N]``; cu_seqlens: ``[N + 1]``.
    """

    rows: torch.Tensor | None
    others: torch.Tensor | None
    state_indices: torch.Tensor
    num_accepted: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One step's batch, derived from the engine's metadata once and shared by all layers."""

    num_tokens: int
    decode: Segment | None
    prefill: Segment | None
    draft: Draft | None = None


def build_step(m: Any, selection: KdaSelection) -> Step:
    """From vLLM's ``GDNAttentionMetadata``; no device value is read."""
    decode = prefill = draft = None
    tables = selection.target.vendor != "cpu"
    begin = m.num_decode_tokens
    if m.spec_sequence_masks is not None:
        # the engine counts single tokens beside drafts as prefills
        assert begin == 0
        n = m.num_spec_decodes
        alone = m.num_prefills == 0
        draft = Draft(
            None if alone else m.spec_token_indx.long(),
            None if alone else m.non_spec_token_indx.long(),
            m.spec_state_indices_tensor[:n].contiguous(),
            m.num_accepted_tokens[:n],
            m.spec_query_start_loc[: n + 1],
        )
    if begin:
        indices = m.non_spec_state_indices_tensor[:begin].contiguous()
        if m.has_initial_state is None:
            decode = Segment(0, begin, indices, None, None)
        else:
            # beside prefills the engine says which rows continue: a prompt may have one token
            bounds = m.non_spec_query_start_loc[: begin + 1]
            table = build_step_plan(bounds, begin, chunk_table=tables)
            decode = Segment(0, begin, indices, m.has_initial_state[:begin], table)
    if m.num_prefills:
        prefill = Segment(
            begin,
            begin + m.num_prefill_tokens,
            _aligned(m.prefill_state_indices),
            _aligned(m.prefill_has_initial_state),
            build_step_plan(m.prefill_query_start_loc, m.num_prefill_tokens, chunk_table=tables),
        )
    tokens = begin + (m.num_prefill_tokens if m.num_prefills else 0)
    return Step(tokens, decode, prefill, draft)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and aligned as kernels expect it: after decodes it may start anywhere."""
    return (
        x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
