"""The operators: prefill, the recurrence, a decode step and the verification of drafts.

Each checks the typed values of a call (`contract`) and runs the path for its grid. They read
nothing on a GPU back to the host, so calls can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from backend_core.launch.streams import is_elsewhere, run_there
from kda_backend.contract.calls import (
    CommitCall,
    DecodeCall,
    PrefillCall,
    RecurrentCall,
    VerifyCall,
)
from kda_backend.contract.records import check_commit
from kda_backend.contract.sequences import (
    check_packed_row,
    check_sequences,
    packed,
    packed_rows,
)
from kda_backend.contract.step import (
    check_draft_offsets,
    check_step,
    check_verification,
    is_aligned,
)
from kda_backend.contract.tensors import check_rows, check_slots, refuse_gradients
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    Records,
    StateRef,
    TokenInputs,
)
from kda_backend.prefill.arguments_sm90 import state_addresses
from kda_backend.prefill.paths import run_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection, selection_for
from kda_backend.step_plan import StepPlan, build_step_plan, check_cu_seqlens, plan_of_rows


class SequencesResult(NamedTuple):
    """Results of a prefill or of the recurrence.

    Attributes:
        out: ``[B, T, HV, V]``.
        final_state: fp32, laid out like the initial one; ``None`` where it was not asked for.
        chunk_states: ``[chunks, HV, V, K]`` in k's dtype, laid out like the initial state; ``None``
            where they were not asked for.
    """

    out: torch.Tensor
    final_state: torch.Tensor | None
    chunk_states: torch.Tensor | None = None


def kda_prefill(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    plan: StepPlan | torch.Tensor | None = None,
    *,
    cu_seqlens_cpu: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    keeps_chunk_states: bool = False,
    scratch: Scratch | None = None,
    selection: KdaSelection | None = None,
) -> SequencesResult:
    """Chunked prefill of sequences of any length.

    16-bit inputs are multiplied in fp16 on a GPU: see `TokenInputs` for the magnitudes that this
    serves, and :func:`kda_recurrent` for a form without that limit.

    Args:
        tokens: ``[B, T, ...]``.
        plan: of sequences that are packed in one row: the step's plan, or ``cu_seqlens [N + 1]``
            int32 or int64, whose values are checked in host memory and trusted on a GPU. Without
            it every row is a sequence.
        cu_seqlens_cpu: ``cu_seqlens`` in host memory, which makes launch sizes exact.
        out: where to write the output, ``[B, T, HV, V]`` in v's dtype; may alias v.
        keeps_chunk_states: also return the state before each chunk, those of all sequences after
            one another. If the host does not know the lengths, there is room for the chunks of any
            lengths, and the unused ones at the end hold arbitrary values.
        scratch: scratch memory to reuse; by default the call allocates its own.
        selection: the paths that were chosen at model load (``kda_backend.select``); by default
            those for this device and shape.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if is_elsewhere(tokens.q):
        return run_there(tokens.q, kda_prefill, locals())
    q, v = tokens.q, tokens.v
    sequences = _num_sequences(q, plan)
    selection, is_packed, out_packed, layout = check_sequences(
        tokens, gate, state, sequences, out, selection
    )
    if scratch is None:
        scratch = Scratch(q.device)
    else:
        scratch.expect_device(q.device)
    step_plan = _step_plan(q, plan, cu_seqlens_cpu, selection)
    tokens, state = _ready(tokens, gate, state, out, is_packed, sequences)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    chunk_states = None
    if keeps_chunk_states:
        chunk_states = tokens.k.new_empty(state.shape(tokens, step_plan.num_chunks))
    written = out if out_packed else packed_rows(out)
    call = tokens, gate, step_plan, state, written, chunk_states, scratch, layout
    rows = [x.data_ptr() for x in (*tokens[:5], written)]
    at_q, at_k, at_v, at_g, _, at_out = rows
    states = state_addresses(state, chunk_states)
    off = (at_q | at_k | at_v | at_g | at_out | states[0] | states[1]) & 15
    seen = layout, keeps_chunk_states, off and tuple([address & 15 for address in (*rows, *states)])
    typed = functools.partial(PrefillCall, *call)
    run_prefill(selection, step_plan, seen, (rows, states, ()), gate, scratch, typed)
    return SequencesResult(out, state.write if state.final else None, chunk_states)


def check_prefill(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    cu_seqlens: torch.Tensor | None = None,
) -> None:
    """Raise what :func:`kda_prefill` raises of shapes, strides, dtypes, devices and gradients.

    Launches nothing. Arguments as there.
    """
    refuse_gradients(tokens, gate, state)
    check_sequences(tokens, gate, state, _num_sequences(tokens.q, cu_seqlens), None, None)
    if cu_seqlens is not None:
        check_packed_row(tokens.q, cu_seqlens)


def kda_recurrent(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    cu_seqlens: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    selection: KdaSelection | None = None,
) -> SequencesResult:
    """The recurrence token by token. Arguments, result and errors as :func:`kda_prefill`."""
    if is_elsewhere(tokens.q):
        return run_there(tokens.q, kda_recurrent, locals())
    q, v = tokens.q, tokens.v
    if state.snapshot_chunks is not None:
        raise ValueError("snapshots must be those of a prefill, got some of the recurrence")
    sequences = _num_sequences(q, cu_seqlens)
    selection, is_packed, out_packed, _ = check_sequences(
        tokens, gate, state, sequences, out, selection
    )
    if cu_seqlens is not None:
        check_packed_row(q, cu_seqlens)
        if cu_seqlens.device.type == "cpu":
            build_step_plan(cu_seqlens, q.shape[1], chunk_table=False)  # checks the values
    tokens, state = _ready(tokens, gate, state, out, is_packed, sequences)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    run = selection.recurrent.run(sequences * v.shape[2])
    run(RecurrentCall(tokens, gate, cu_seqlens, state, out if out_packed else packed_rows(out)))
    return SequencesResult(out, state.write if state.final else None)


def kda_decode_step(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    *,
    conv: ConvInputs | None = None,
    norm: NormInputs | None = None,
    out: torch.Tensor | None = None,
    selection: KdaSelection | None = None,
    pdl_prefetch_safe: bool = False,
) -> torch.Tensor:
    """One token of each sequence through a KDA layer, from its projections to its output.

    For each row, with x the row's q, k and v and ``S`` the state of one head::

        x   = silu(conv4([window, x]) + bias); the window shifts by one   (with conv)
        q, k = l2norm(q), l2norm(k)                                        (if asked for)
        S   = S diag(decay); S += beta (v - S k) k^T
        o   = scale S q
        out = o / sqrt(mean(o^2) + eps) * weight * sigmoid(gate)          (with norm)

    All of it is one kernel launch in fp32 arithmetic; nothing is rounded between its stages.

    Args:
        tokens: ``[N, ...]``; with ``conv`` as many value heads as heads.
        state: a pool.
        conv: without it q, k and v are convolved already.
        out: where to write the output, ``[N, HV, V]`` in q's dtype; may alias v.
        pdl_prefetch_safe: a promise that no kernel which is still running writes the pools at
            these slots, the slots or a weight, so that they may be read before the previous launch
            has ended. It holds after a projection, and never after another step of the same
            sequences. On Hopper each step lets the next kernel start early, so several steps in a
            row may run at the same time.
        selection: the paths that were chosen at model load (``kda_backend.select``). Unless it was
            made for ``aligned_state=False``, the slots of the pool and the convolution's weight
            must start at multiples of 16 bytes on Hopper.

    Returns:
        ``out``; padded rows get zeros.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if is_elsewhere(tokens.q):
        return run_there(tokens.q, kda_decode_step, locals())
    chosen, prepared, _ = check_step(tokens, gate, state, conv, norm, out, selection)
    refuse_gradients(tokens, gate, state, conv, norm, (out,))
    assert state.indices is not None and state.read is not None
    check_rows("state_indices", state.indices, "slot", state.read)
    v = tokens.v
    if selection is None and not is_aligned(state, conv):
        chosen = selection_for(v.device, replace(chosen.shape, aligned_state=False))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    call = DecodeCall(tokens, gate, state, conv, norm, out, pdl_prefetch_safe)
    run = prepared.get((chosen, pdl_prefetch_safe))
    if run is None:
        path = chosen.decode_step.run(v.shape[0] * v.shape[1])
        run = prepared.keep((chosen, pdl_prefetch_safe), path.prepare(call))
    run(call)
    return out


def kda_verify_step(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    draft: DraftInputs,
    *,
    conv: ConvInputs | None = None,
    norm: NormInputs | None = None,
    out: torch.Tensor | None = None,
    selection: KdaSelection | None = None,
) -> torch.Tensor:
    """Compute the drafted tokens of each sequence one after another and keep the state after each,
    or from `DraftInputs.in_records` a record of each token, which costs a sixtieth of the memory.

    The outputs are those of :func:`kda_decode_step` on every token, one after another. But the last
    accepted state is kept until the engine knows how many tokens of the draft it accepts. A draft
    is a chain of tokens. A sequence without tokens keeps its states, its window and its records.

    With records and a convolution, k is rounded to q's dtype behind it, as a prefill rounds it: so
    its record is exact. Nothing else is rounded that is not without records.

    Arguments and errors as :func:`kda_decode_step`, with a row per token; the tokens of a sequence
    are consecutive.

    Returns:
        ``out [tokens, HV, V]``; zeros for a padded sequence.
    """
    if is_elsewhere(tokens.q):
        return run_there(tokens.q, kda_verify_step, locals())
    chosen, prepared, shape = check_verification(
        tokens, gate, state, draft, conv, norm, out, selection
    )
    assert shape is not None
    refuse_gradients(tokens, gate, state, draft, conv, norm, (out,))
    check_draft_offsets(draft.cu_seqlens, tokens.q.shape[0])
    assert state.indices is not None and state.read is not None
    check_rows("state_indices", state.indices, "slot", state.read)
    if draft.states is not None and draft.indices is not None:
        check_rows("intermediate_indices", draft.indices, "row", draft.states)
    if draft.correction is not None and draft.indices is not None:
        check_rows("record_indices", draft.indices, "row", draft.correction)
    if draft.correction is not None and selection is None and not is_aligned(state, conv):
        chosen = selection_for(tokens.q.device, replace(chosen.shape, aligned_state=False))
    if out is None:
        # the kernel does not write rows that belong to no sequence
        out = torch.zeros(tokens.v.shape, dtype=tokens.v.dtype, device=tokens.v.device)
    call = VerifyCall(tokens, gate, state, draft, shape, conv, norm, out)
    run = prepared.get(chosen)
    if run is None:
        grid = shape.num_sequences * tokens.v.shape[1]
        if draft.correction is None:
            run = prepared.keep(chosen, chosen.verify.run(grid).prepare(call))
        else:
            run = prepared.keep(chosen, chosen.verify_records.run(grid).prepare(call))
    run(call)
    return out


def kda_commit_(
    gate: GateSpec,
    state: StateRef,
    records: Records,
    indices: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    selection: KdaSelection | None = None,
) -> None:
    """Bring states up to date by the accepted records of their drafts, of all layers at once.

    For each sequence the state becomes that after the first ``num_accepted`` tokens of its draft,
    with the bits that the next :func:`kda_verify_step` would give it. From then on nothing is held:
    the next verification goes without ``num_accepted``, or has 0 there. Windows of the convolution
    are left as they are.

    Args:
        gate: of the layer; of L layers ``a_log`` has ``L * HV`` elements and ``dt_bias`` ``L * HV *
            K``.
        state: a pool ``[slots, HV, V, K]``, or ``[L, slots, HV, V, K]``, whose slots are those of
            every layer.
        records: what the verification has left, of as many layers.
        indices: ``[N]`` int32, their rows; a sequence with a negative one is passed over.
        num_accepted: ``[N]`` int32, clamped to 0 to T, and no more than the draft had, which
            nothing here knows.
        kept: (slots ``[N]`` int32, counts ``[N]`` int32): the state after the first so many tokens
            also goes to that slot, for instance of a prefix cache. A count that is not 1 to
            ``num_accepted`` and a padded slot keep nothing. Slots must differ from all others.
        selection: as of :func:`kda_verify_step`.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if is_elsewhere(records.correction):
        return run_there(records.correction, kda_commit_, locals())
    if kept is not None and len(kept) != 2:
        raise ValueError(f"kept must be a pair of slots and counts, got {len(kept)} values")
    slots, counts = (None, None) if kept is None else kept
    paths, num_layers = check_commit(
        gate, state, records, indices, num_accepted, slots, counts, selection
    )
    refuse_gradients(gate, state, records)
    pool, own = state.read, state.indices
    assert pool is not None and own is not None
    layers, first = max(num_layers, 1), pool[0] if num_layers else pool
    check_rows("state_indices", own, "slot", first)
    of_layer = records.of_layer(0) if num_layers else records
    check_rows("record_indices", indices, "row", of_layer.correction)
    if slots is not None:
        check_rows("kept_slots", slots, "slot", first)
    if not num_layers:
        pool, records = pool[None], Records(records.correction[None], records.key_gate[None])
    a_log, dt_bias = (None if x is None else x.view(layers, -1) for x in gate[1:3])
    call = CommitCall(
        gate._replace(a_log=a_log, dt_bias=dt_bias),
        pool,
        records,
        indices,
        own,
        num_accepted,
        slots,
        counts,
        state.null_slot,
    )
    paths.verify_records.run(own.shape[0] * pool.shape[2]).commit(call)


def _num_sequences(q: torch.Tensor, plan: StepPlan | torch.Tensor | None) -> int:
    if plan is None:
        shape = getattr(q, "shape", ())  # what is no tensor is refused by the check that follows
        return shape[0] if shape else 0
    if isinstance(plan, StepPlan):
        return plan.num_sequences
    check_cu_seqlens("cu_seqlens", plan)
    return plan.shape[0] - 1


def _step_plan(
    q: torch.Tensor,
    given: StepPlan | torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    selection: KdaSelection,
) -> StepPlan:
    """The plan that a call brings, or a new one."""
    if cu_seqlens_cpu is not None and not isinstance(given, torch.Tensor):
        raise ValueError("cu_seqlens_cpu must be None without cu_seqlens, got a tensor")
    if isinstance(given, StepPlan):
        return given
    tables = selection.target.vendor != "cpu"
    if given is None:
        return plan_of_rows(q, tables)
    check_packed_row(q, given)
    return build_step_plan(given, q.shape[1], cu_seqlens_cpu=cu_seqlens_cpu, chunk_table=tables)


def _ready(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    out: torch.Tensor | None,
    is_packed: bool,
    sequences: int,
) -> tuple[TokenInputs, StateRef]:
    """Packs the tokens and allocates the final state."""
    refuse_gradients(tokens, gate, state, (out,))
    check_slots(state)
    if not is_packed:
        tokens = packed(tokens)
    if state.final:
        shape = state.shape(tokens, sequences)
        final = tokens.q.new_empty(shape, dtype=torch.float32)
        state = StateRef(state.read, final, *state[2:])
    return tokens, state
