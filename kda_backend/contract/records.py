"""The contract of records of drafts: those of a verification, and their fold into states."""

from __future__ import annotations

import torch

from backend_core.contracts import expect_dtype, expect_tensors, once
from kda_backend.contract.tensors import (
    FLOATS,
    STATES,
    check_gate_parameter,
    check_packed_states,
    check_whole_state,
    check_windows,
    expect_vector,
)
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    Records,
    StateRef,
    TokenInputs,
)
from kda_backend.selection import KdaSelection, KdaShape, selection_of_call
from kda_backend.spec import MAX_STEP_DIM, Gate


def check_draft_records(
    tokens: TokenInputs, draft: DraftInputs, conv: ConvInputs | None, sequences: int
) -> int:
    """The variant with a record for each token; returns the most tokens of a draft."""
    q, v, g = tokens.q, tokens.v, tokens.g
    device, heads = q.device, v.shape[1]
    correction, key_gate = draft.correction, draft.key_gate
    if correction is None or key_gate is None or draft.indices is None:
        raise ValueError("records must have correction, key_gate and a row of each draft")
    if g.dtype != q.dtype:
        raise ValueError(
            f"g must have dtype {_name(q)}, that of q, in which records keep both, got {_name(g)}"
        )
    shape: tuple[int | str, ...] = ("rows", heads, "T", v.shape[2])
    check_packed_states("correction", correction, shape, device, (torch.float32,))
    rows, _, max_tokens, _ = correction.shape
    shape = (rows, heads, max_tokens, 2 * q.shape[2])
    check_packed_states("key_gate", key_gate, shape, device, (q.dtype,))
    expect_vector("record_indices", draft.indices, sequences, device, torch.int32)
    if draft.num_accepted is not None and not draft.by_norm:
        raise ValueError("num_accepted_tokens must be None for records that vLLM commits")
    if draft.num_accepted is not None:
        expect_vector("num_accepted_tokens", draft.num_accepted, sequences, device, torch.int32)
    if conv is None and draft.windows is not None:
        raise ValueError("windows must be given only with conv_state")
    if conv is not None and draft.windows is not None:
        shape = ("rows", max_tokens, conv.state.shape[1], 3)
        check_windows("windows", draft.windows, shape, device)
        if draft.windows.shape[0] < rows:
            raise ValueError(
                f"windows must have correction's {rows} rows, got {draft.windows.shape[0]}"
            )
    elif conv is not None and conv.state.shape[2] < max_tokens + 2:
        raise ValueError(
            f"conv_state must have at least {max_tokens + 2} columns for drafts of"
            f" {max_tokens} tokens, got {conv.state.shape[2]}"
        )
    return max_tokens


@once
def check_commit(
    gate: GateSpec,
    state: StateRef,
    records: Records,
    indices: torch.Tensor,
    num_accepted: torch.Tensor,
    kept_slots: torch.Tensor | None,
    kept_counts: torch.Tensor | None,
    selection: KdaSelection | None,
) -> tuple[KdaSelection, int]:
    """Check all but values of a fold.

    Returns:
        The paths that serve it, and the layers of the call; 0 where its tensors have no such
        dimension.

    Raises:
        ValueError: an argument is not as `kda_commit_` describes it.
        LookupError: no path serves such records.
    """
    pool, slots, correction = state.read, state.indices, records.correction
    if not records.by_norm:
        raise ValueError("records must have their correction divided by |k|; vLLM commits others")
    if pool is None or slots is None:
        raise ValueError("state must be a pool, got states of sequences")
    check_whole_state(state)
    expect_tensors(state_pool=pool, state_indices=slots, correction=correction)
    expect_tensors(record_indices=indices, num_accepted_tokens=num_accepted)
    if (kept_slots is None) != (kept_counts is None):
        raise ValueError("kept must be a pair of slots and counts, got one of the two")
    device, lead = pool.device, pool.shape[:-4]
    if pool.dim() not in (4, 5):
        raise ValueError(
            f"state_pool must have shape [slots, HV, V, K] or [L, slots, HV, V, K], got"
            f" {list(pool.shape)}"
        )
    heads, value_dim, key_dim = pool.shape[-3:]
    if heads == 0 or not 0 < key_dim <= MAX_STEP_DIM or not 0 < value_dim <= MAX_STEP_DIM:
        raise ValueError(
            f"state_pool must have heads of dimensions 1 to {MAX_STEP_DIM}, got {list(pool.shape)}"
        )
    check_packed_states("state_pool", pool, tuple(pool.shape), device, STATES)
    shape: tuple[int | str, ...] = (*lead, "rows", heads, "T", value_dim)
    check_packed_states("correction", correction, shape, device, (torch.float32,))
    shape = (*correction.shape[:-1], 2 * key_dim)
    check_packed_states("key_gate", records.key_gate, shape, device, FLOATS)
    sequences = slots.shape[0] if slots.dim() else 0
    expect_dtype("state_indices", slots, torch.int32)
    vectors = {
        "state_indices": slots,
        "record_indices": indices,
        "num_accepted_tokens": num_accepted,
        "kept_slots": kept_slots,
        "kept_counts": kept_counts,
    }
    for name, x in vectors.items():
        if x is not None:
            expect_vector(name, x, sequences, device, torch.int32)
    layers = lead[0] if lead else 1
    check_gate_parameter("A_log", gate.a_log, layers * heads, device)
    check_gate_parameter("dt_bias", gate.dt_bias, layers * heads * key_dim, device)
    dtype, bounded = records.key_gate.dtype, gate.kind == Gate.BOUNDED
    key_heads = heads if selection is None else selection.shape.num_heads
    of_call = KdaShape(key_heads, heads, key_dim, value_dim, bounded, dtype, dtype)
    return selection_of_call(selection, device, of_call), lead[0] if lead else 0


def _name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
