"""What one step of vLLM asks of its KDA layers: decodes, prefills and drafts, from its metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from kda_backend.engines.vllm_metadata import prefill_bounds
from kda_backend.layer import KnownLayouts
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.selection import KdaSelection
from kda_backend.step_plan import StepPlan, build_step_plan


@dataclass(frozen=True)
class Segment:
    """The decodes or the prefills of one step; ``begin`` and ``end`` are token offsets.

    Attributes:
        copied: the launch before the first layer's writes ``state_indices``.
        known: layouts of the layers of this step, which have caches and projections of one shape.
    """

    begin: int
    end: int
    state_indices: torch.Tensor
    has_initial_state: torch.Tensor | None
    step_plan: StepPlan | None  # of decodes only where some may start a new sequence
    is_prefill: bool = False
    checkpoints: Checkpoints | None = None
    copied: bool = False
    known: KnownLayouts = field(default_factory=dict)


@dataclass(frozen=True)
class Draft:
    """Drafts to verify, of N sequences with at most S tokens each.

    Attributes:
        rows, others: the step's rows of the drafts and of all other tokens, which are prefills or,
            in Kimi-K3's metadata, decodes; ``None`` where every token is a draft's.
        state_indices: ``[N, S]``; num_accepted: ``[N]``; cu_seqlens: ``[N + 1]``.
    """

    rows: torch.Tensor | None
    others: torch.Tensor | None
    state_indices: torch.Tensor
    num_accepted: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class VllmStep:
    """One step's batch, derived from the engine's metadata once and shared by all layers."""

    num_tokens: int
    decode: Segment | None
    prefill: Segment | None
    draft: Draft | None = None


def build_step(m: Any, selection: KdaSelection, plans: dict[Any, StepPlan]) -> VllmStep:
    """From vLLM's ``GDNAttentionMetadata`` or ``KimiK3KDAMetadata``; no device value is read.

    Args:
        plans: those of this forward pass, to which this one's are added. Each cache group has
            metadata of its own, with other slots: the requests and their lengths are the same.
    """

    def plan(what: str, bounds: torch.Tensor, tokens: int) -> StepPlan:
        key = (what, bounds.shape[0], tokens, m.num_decodes, m.num_spec_decodes)
        if key not in plans:
            host = None
            if what == "prefills":
                host = prefill_bounds(m, bounds.shape[0] - 1, bounds.device)
            plans[key] = build_step_plan(bounds, tokens, cu_seqlens_cpu=host, chunk_table=tables)
        return plans[key]

    decode = prefill = draft = None
    tables = selection.target.vendor != "cpu"
    begin = m.num_decode_tokens
    # Kimi-K3's metadata has no masks
    if m.spec_sequence_masks is not None or m.num_spec_decodes:
        n = m.num_spec_decodes
        alone = m.num_prefills == 0 and begin == 0
        draft = Draft(
            None if alone else m.spec_token_indx.long(),
            None if alone else m.non_spec_token_indx.long(),
            m.spec_state_indices_tensor[:n].contiguous(),
            m.num_accepted_tokens[:n],
            m.spec_query_start_loc[: n + 1],
        )
        # single tokens beside drafts are counted with the prefills, if there are prefills
        assert not (m.num_prefills and begin)
    if begin:
        given = m.non_spec_state_indices_tensor[:begin]
        indices = given.contiguous()
        if m.has_initial_state is None:
            copied = not given.is_contiguous()
            decode = Segment(0, begin, indices, None, None, copied=copied)
        else:
            # beside prefills the engine says which rows continue: a prompt may have one token
            bounds = m.non_spec_query_start_loc[: begin + 1]
            initial = m.has_initial_state[:begin]
            decode = Segment(0, begin, indices, initial, plan("decodes", bounds, begin))
    if m.num_prefills:
        bounds, slots, initial, first = _prefills(m)
        prefill = Segment(
            begin,
            begin + m.num_prefill_tokens,
            _aligned(slots),
            _aligned(initial),
            plan("prefills", bounds, m.num_prefill_tokens),
            True,
            _checkpoints(m, first, slots.shape[0]),
        )
    tokens = begin + (m.num_prefill_tokens if m.num_prefills else 0)
    return VllmStep(tokens, decode, prefill, draft)


def _prefills(m: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int | None]:
    """Offsets, slots and continuations of a step's prefills, and the first one's row among all
    requests that are no drafts; ``None`` where the metadata has the prefills apart."""
    if m.prefill_query_start_loc is not None:
        return (
            m.prefill_query_start_loc,
            m.prefill_state_indices,
            m.prefill_has_initial_state,
            None,
        )
    first, number = m.num_decodes, m.num_prefills
    rows = slice(first, first + number)  # requests of padding come last
    bounds = m.non_spec_query_start_loc[first : first + number + 1]
    if first:
        bounds = bounds - m.num_decode_tokens
    return bounds, m.non_spec_state_indices_tensor[rows], m.has_initial_state[rows], first


def _checkpoints(m: Any, first: int | None, number: int) -> Checkpoints | None:
    """Those of ``number`` prefills, of which metadata of some releases has rows of all requests."""
    found = getattr(m, "checkpoint", None)
    if found is None:
        return None
    offsets, slots = found.checkpoint_offsets, found.state_indices
    if first is None:
        # the rows of prefills alone, or those of all requests, in which prefills come last
        first = max(0, offsets.shape[0] - number)
    offsets, slots = offsets[first : first + number], slots[first : first + number]
    missing = number - offsets.shape[0]  # requests of padding
    if missing:
        offsets = torch.nn.functional.pad(offsets, (0, missing))
        slots = torch.nn.functional.pad(slots, (0, missing), value=NULL_BLOCK_ID)
    return Checkpoints.of(offsets, slots, NULL_BLOCK_ID)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous and aligned as kernels expect it: after decodes it may start anywhere."""
    return (
        x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    )
