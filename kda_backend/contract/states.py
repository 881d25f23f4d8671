"""The contract of recurrent states: pools and their slots, functional states, snapshots."""

from __future__ import annotations

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from kda_backend.contract.tokens import expect_contiguous
from kda_backend.contract.values import StateRef, TokenInputs


def check_state(state: StateRef, tokens: TokenInputs, num_sequences: int) -> None:
    """The states of ``num_sequences`` sequences, in a pool or functional."""
    device = tokens.q.device
    if state.indices is not None:
        check_pool(state, tokens)
        expect_shape("state_indices", state.indices, (num_sequences,))
        expect_stride("state_indices", state.indices, 0, 1)
        if state.has_initial is not None:
            expect_shape("has_initial_state", state.has_initial, (num_sequences,))
            expect_dtype("has_initial_state", state.has_initial, torch.bool)
            expect_device("has_initial_state", state.has_initial, device)
            expect_stride("has_initial_state", state.has_initial, 0, 1)
    elif state.read is not None:
        expect_shape("initial_state", state.read, state.shape(tokens, num_sequences))
        expect_dtype("initial_state", state.read, torch.float32)
        expect_device("initial_state", state.read, device)
    _check_snapshots(state, tokens, num_sequences)


def check_pool(state: StateRef, tokens: TokenInputs) -> None:
    """A pool ``[slots, HV, V, K]``, and dtype and device of the slots."""
    assert state.read is not None and state.indices is not None
    device = tokens.q.device
    shape = ("slots", tokens.v.shape[-2], tokens.v.shape[-1], tokens.q.shape[-1])
    check_packed_states("state_pool", state.read, shape)
    expect_device("state_pool", state.read, device)
    expect_dtype("state_indices", state.indices, torch.int32)
    expect_device("state_indices", state.indices, device)


def check_packed_states(
    name: str,
    states: torch.Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
) -> None:
    """``[..., HV, V, K]`` whose last three dimensions are packed; no two states overlap."""
    expect_shape(name, states, shape)
    expect_dtype(name, states, *dtypes)
    size = 1
    for dim in range(states.dim() - 1, states.dim() - 4, -1):
        expect_stride(name, states, dim, size)
        size *= states.shape[dim]
    for dim in range(states.dim() - 3):
        if states.shape[dim] > 1 and states.stride(dim) < size:
            raise ValueError(
                f"{name} must have states at least {size} elements apart, got a stride of"
                f" {states.stride(dim)}"
            )


def check_slots(state: StateRef) -> None:
    """Slots in host memory are checked; slots on a GPU are trusted."""
    indices, pool = state.indices, state.read
    if indices is not None and indices.is_cpu and pool is not None and indices.shape[0]:
        low, high = int(indices.min()), int(indices.max())
        if low < -1 or high >= pool.shape[0]:
            raise ValueError(
                f"state_indices must be -1 or a slot below {pool.shape[0]},"
                f" got values from {low} to {high}"
            )
    if state.snapshot_indices is not None and state.snapshots is not None:
        check_rows("snapshot_indices", state.snapshot_indices, "slot", state.snapshots)


def check_rows(name: str, indices: torch.Tensor, what: str, of: torch.Tensor) -> None:
    """As `check_slots`, where every negative value marks padding."""
    if indices.is_cpu and indices.numel() and int(indices.max()) >= of.shape[0]:
        raise ValueError(
            f"{name} must be negative or a {what} below {of.shape[0]}, got {int(indices.max())}"
        )


def _check_snapshots(state: StateRef, tokens: TokenInputs, num_sequences: int) -> None:
    """``snapshots [N, S, HV, V, K]`` fp32 receives the state after ``snapshot_chunks [N, S]``, or
    with ``snapshot_indices [N, S]`` a slot of ``snapshots [slots, HV, V, K]``."""
    chunks, snapshots = state.snapshot_chunks, state.snapshots
    if chunks is None or snapshots is None:
        return
    q, v = tokens.q, tokens.v
    expect_shape("snapshot_chunks", chunks, (num_sequences, "S"))
    expect_dtype("snapshot_chunks", chunks, torch.int32)
    expect_device("snapshot_chunks", chunks, q.device)
    expect_contiguous("snapshot_chunks", chunks)
    one, indices = (v.shape[2], v.shape[3], q.shape[3]), state.snapshot_indices
    if indices is None:
        expect_shape("snapshots", snapshots, (*chunks.shape, *one))
        expect_dtype("snapshots", snapshots, torch.float32)
        expect_contiguous("snapshots", snapshots)
    else:
        expect_shape("snapshot_indices", indices, tuple(chunks.shape))
        expect_dtype("snapshot_indices", indices, torch.int32)
        expect_device("snapshot_indices", indices, q.device)
        expect_contiguous("snapshot_indices", indices)
        check_packed_states("snapshots", snapshots, ("slots", *one), (torch.float32,))
    expect_device("snapshots", snapshots, q.device)
