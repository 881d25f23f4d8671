"""Work of one step of vLLM for its KDA layers: decodes, prefills and drafts, from its metadata."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from kda_backend.engines.prefill_calls import divided
from kda_backend.engines.vllm_metadata import prefill_bounds
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.selection import KdaSelection
from kda_backend.step_plan import StepPlan, build_step_plan


@dataclass(frozen=True)
class StepPart:
    """The decodes or prefills of one call; ``begin`` and ``end`` are token offsets of the step.

    Attributes:
        copied: the launch before the first layer's writes ``state_indices``.
    """

    begin: int
    end: int
    state_indices: torch.Tensor
    has_initial_state: torch.Tensor | None
    step_plan: StepPlan | None  # of prefills
    checkpoints: Checkpoints | None = None
    copied: bool = False


@dataclass(frozen=True)
class Draft:
    """Drafts to verify, of N sequences with at most S tokens each.

    Attributes:
        rows, others: the step's rows of the drafts and of all other tokens, which are prefills or,
            in Kimi-K3's metadata, decodes; ``None`` where every token is a draft's.
        state_indices: ``[N, S]``, or ``[N, 1]`` for drafts of which records are kept;
            num_accepted: ``[N]``; cu_seqlens: ``[N + 1]``.
        requests: ``[N]``, the numbers of the drafts, by which records are kept; else ``None``.
    """

    rows: torch.Tensor | None
    others: torch.Tensor | None
    state_indices: torch.Tensor
    num_accepted: torch.Tensor
    cu_seqlens: torch.Tensor
    requests: torch.Tensor | None = None


@dataclass(frozen=True)
class VllmStep:
    """One step's batch, derived from the engine's metadata once and shared by all layers."""

    num_tokens: int
    decode: StepPart | None
    prefills: Sequence[StepPart]  # more than one where the step has too many chunks for one call
    draft: Draft | None = None

    @property
    def others(self) -> list[StepPart]:
        """All that are no drafts, by their places among the tokens of these."""
        return [*([] if self.decode is None else [self.decode]), *self.prefills]


def build_step(
    m: Any, selection: KdaSelection, plans: dict[Any, StepPlan], most_chunks: int
) -> VllmStep:
    """From vLLM's ``GDNAttentionMetadata`` or ``KimiK3KDAMetadata``; no device value is read.

    Args:
        most_chunks: of the prefills of one call, where the host knows their lengths.
        plans: those of this forward pass, to which this one's are added. Each cache group has
            metadata of its own, with other slots: the requests and their lengths are the same.
    """

    def plan(first: int, bounds: torch.Tensor, tokens: int, host: torch.Tensor | None) -> StepPlan:
        key = (first, bounds.shape[0], tokens, m.num_decodes, m.num_spec_decodes)
        if key not in plans:
            plans[key] = build_step_plan(bounds, tokens, cu_seqlens_cpu=host, chunk_table=tables)
        return plans[key]

    decode = draft = None
    prefills: list[StepPart] = []
    tables = selection.target.vendor != "cpu"
    begin = m.num_decode_tokens
    # Kimi-K3's metadata has no masks
    if m.spec_sequence_masks is not None or m.num_spec_decodes:
        n = m.num_spec_decodes
        alone = m.num_prefills == 0 and begin == 0
        slots, bounds = m.spec_state_indices_tensor[:n].contiguous(), m.spec_query_start_loc
        requests = None
        if slots.shape[1] == 1:  # no slots for states of drafted tokens
            requests = torch.arange(n, dtype=torch.int32, device=slots.device)
        draft = Draft(
            None if alone else m.spec_token_indx.long(),
            None if alone else m.non_spec_token_indx.long(),
            slots,
            m.num_accepted_tokens[:n],
            bounds[: n + 1],
            requests,
        )
        # single tokens beside drafts are counted with the prefills, if there are prefills
        assert not (m.num_prefills and begin)
    if begin:
        given = m.non_spec_state_indices_tensor[:begin]
        indices = given.contiguous()
        # beside prefills too these all go on: vLLM counts first tokens with the prefills
        decode = StepPart(0, begin, indices, None, None, copied=not given.is_contiguous())
    if m.num_prefills:
        for part in _calls(_prefills(m), most_chunks):
            prefills.append(
                StepPart(
                    begin + part.begin,
                    begin + part.end,
                    _aligned(part.slots),
                    _aligned(part.initial),
                    plan(part.first, part.bounds, part.end - part.begin, part.host),
                    part.checkpoints,
                )
            )
    tokens = begin + (m.num_prefill_tokens if m.num_prefills else 0)
    return VllmStep(tokens, decode, prefills, draft)


class _Prefills(NamedTuple):
    """The prefills of a step or of one call.

    Attributes:
        first: the number of the first request among the step's prefills.
        begin, end: tokens, counted from the step's first prefill.
        bounds, host: their token offsets, on the GPU and, where it knows them, on the host.
        slots, initial, checkpoints: a row for each request.
    """

    first: int
    begin: int
    end: int
    bounds: torch.Tensor
    host: torch.Tensor | None
    slots: torch.Tensor
    initial: torch.Tensor
    checkpoints: Checkpoints | None


def _calls(p: _Prefills, most_chunks: int) -> Iterator[_Prefills]:
    """Prefills of each call. A step is one call where the host does not know the lengths."""
    if p.host is None:
        yield p
        return
    offsets = p.host.tolist()
    parts = list(divided([b - a for a, b in itertools.pairwise(offsets)], most_chunks))
    if len(parts) == 1:
        yield p
        return
    c = p.checkpoints
    for rows in parts:
        begin, end = offsets[rows.start], offsets[rows.stop]
        bounds = slice(rows.start, rows.stop + 1)
        yield _Prefills(
            rows.start,
            begin,
            end,
            p.bounds[bounds] - begin,
            p.host[bounds] - begin,
            p.slots[rows],
            p.initial[rows],
            None if c is None else Checkpoints(*(_aligned(x[rows]) for x in c)),
        )


def _prefills(m: Any) -> _Prefills:
    """All of a step."""
    number, row = m.num_prefills, None
    if m.prefill_query_start_loc is not None:
        bounds, slots = m.prefill_query_start_loc, m.prefill_state_indices
        initial = m.prefill_has_initial_state
    else:
        row = m.num_decodes  # the first prefill's, among all requests that are no drafts
        rows = slice(row, row + number)  # requests of padding come last
        bounds = m.non_spec_query_start_loc[row : row + number + 1]
        if row:
            bounds = bounds - m.num_decode_tokens
        slots, initial = m.non_spec_state_indices_tensor[rows], m.has_initial_state[rows]
    number = slots.shape[0]
    host = prefill_bounds(m, number, bounds.device)
    checkpoints = _checkpoints(m, row, number)
    return _Prefills(0, 0, m.num_prefill_tokens, bounds, host, slots, initial, checkpoints)


def _checkpoints(m: Any, first: int | None, number: int) -> Checkpoints | None:
    """Checkpoints of ``number`` prefills; metadata of some releases has rows of all requests."""
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
