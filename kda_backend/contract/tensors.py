"""The contract of tokens, gate and recurrent states, whatever the operator."""

from __future__ import annotations

import itertools
import math

import torch

from backend_core.contracts import (
    expect_apart,
    expect_device,
    expect_dtype,
    expect_shape,
    expect_stride,
    expect_tensors,
)
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.selection import KdaSelection, KdaShape, selection_of_call
from kda_backend.spec import Beta, Gate

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
STATES = (torch.float32, torch.bfloat16, torch.float16)


def expect(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | str, ...],
    device: torch.device,
    *dtypes: torch.dtype,
) -> None:
    """Require shape, dtype and device."""
    expect_shape(name, x, shape)
    expect_dtype(name, x, *dtypes)
    expect_device(name, x, device)


def expect_contiguous(name: str, x: torch.Tensor) -> None:
    """Require ``x`` to be contiguous."""
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}")


def expect_vector(
    name: str, x: torch.Tensor, size: int, device: torch.device, *dtypes: torch.dtype
) -> None:
    """Require ``size`` adjacent elements."""
    expect(name, x, (size,), device, *dtypes)
    expect_stride(name, x, 0, 1)


def refuse_gradients(*values: tuple[object, ...] | None) -> None:
    """Raise ``ValueError`` where torch would record the call: a tensor of ``values``, which are
    the typed values of a call, requires a gradient."""
    if not torch.is_grad_enabled():
        return
    for x in itertools.chain.from_iterable(value or () for value in values):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise ValueError("kda_backend has no backward pass: call it under torch.no_grad()")


def check_tokens(
    tokens: TokenInputs,
    gate: GateSpec,
    rows: tuple[str, ...],
    max_dim: int,
    selection: KdaSelection | None,
) -> KdaSelection:
    """Tokens and gate parameters, but for strides.

    Args:
        rows: names of the dimensions before the heads: ``("B", "T")`` or ``("N",)``.
        max_dim: the largest K and V.

    Returns:
        The selection, which must be for such tokens, or the device's own for ``None``.
    """
    q, k, v, g, beta = tokens[:5]
    expect_tensors(q=q, v=v)  # the others are compared with these
    if not isinstance(tokens.beta_kind, Beta):
        raise ValueError(f"beta_kind must be one of Beta, got {tokens.beta_kind!r}")
    if not math.isfinite(tokens.scale):
        raise ValueError(f"scale must be finite, got {tokens.scale}")
    rank, device = len(rows), q.device
    if q.dim() != rank + 2:
        raise ValueError(f"q must have shape [{', '.join(rows)}, H, K], got {list(q.shape)}")
    *lead, heads, key_dim = q.shape
    if v.dim() != rank + 2:
        expected = ", ".join(map(str, lead))
        raise ValueError(f"v must have shape [{expected}, HV, V], got {list(v.shape)}")
    value_heads, value_dim = v.shape[rank:]
    expect_dtype("q", q, *FLOATS)
    for name, x, heads_of, dtypes in (
        ("k", k, (heads, key_dim), (q.dtype,)),
        ("v", v, (value_heads, value_dim), (q.dtype,)),
        ("g", g, (value_heads, key_dim), FLOATS),
        ("beta", beta, (value_heads,), FLOATS),
    ):
        expect(name, x, (*lead, *heads_of), device, *dtypes)
    if heads == 0 or value_heads == 0 or value_heads % heads:
        raise ValueError(
            f"v must have a multiple of q's {heads} heads (grouped values), got {value_heads}"
        )
    if not 0 < key_dim <= max_dim or not 0 < value_dim <= max_dim:
        raise ValueError(
            f"head dimensions must be 1 to {max_dim}, got K = {key_dim} and V = {value_dim}"
        )
    check_gate_parameter("A_log", gate.a_log, value_heads, device)
    check_gate_parameter("dt_bias", gate.dt_bias, value_heads * key_dim, device)
    bounded = gate.kind == Gate.BOUNDED
    shape = KdaShape(heads, value_heads, key_dim, value_dim, bounded, q.dtype, g.dtype)
    return selection_of_call(selection, device, shape)


def check_gate_parameter(
    name: str, parameter: torch.Tensor | None, size: int, device: torch.device
) -> None:
    """A parameter of a gate: engines pass A_log as [HV] or [1, 1, HV, 1] and dt_bias as [HV * K] or
    [HV, K]."""
    if parameter is None:
        return
    expect_tensors(**{name: parameter})
    if parameter.numel() != size:
        raise ValueError(f"{name} must have {size} elements, got {list(parameter.shape)}")
    expect_dtype(name, parameter, *FLOATS)
    expect_device(name, parameter, device)
    expect_contiguous(name, parameter)


def check_state(state: StateRef, tokens: TokenInputs, num_sequences: int) -> None:
    """The states of ``num_sequences`` sequences, in a pool or functional."""
    device = tokens.q.device
    if state.null_slot != -1:
        raise ValueError(
            "null_slot must be None for sequences, whose padding has slot -1, got"
            f" {state.null_slot}"
        )
    if state.indices is not None:
        check_pool(state, tokens)
        expect_vector("state_indices", state.indices, num_sequences, device, torch.int32)
        if state.has_initial is not None:
            initial = state.has_initial
            expect_vector("has_initial_state", initial, num_sequences, device, torch.bool)
    elif state.read is not None:
        shape = state.shape(tokens, num_sequences)
        expect("initial_state", state.read, shape, device, torch.float32)
    _check_snapshots(state, tokens, num_sequences)


def check_pool(state: StateRef, tokens: TokenInputs) -> None:
    """A pool ``[slots, HV, V, K]``, and dtype and device of the slots."""
    if state.indices is None:
        raise ValueError("state must be a pool, got states of sequences")
    expect_tensors(state_pool=state.read)
    assert state.read is not None
    device = tokens.q.device
    check_packed_states("state_pool", state.read, ("slots", *state.shape(tokens, 0)[1:]), device)
    expect_dtype("state_indices", state.indices, torch.int32)
    expect_device("state_indices", state.indices, device)


def check_whole_state(state: StateRef) -> None:
    """The state of a step or of a fold, which reads every slot and keeps nothing inside."""
    if state.has_initial is not None:
        raise ValueError("has_initial must be None where every slot is read, got a tensor")
    if state.snapshot_chunks is not None or state.snapshots is not None:
        raise ValueError("snapshots must be those of a prefill, got some of another operator")


def check_packed_states(
    name: str,
    states: torch.Tensor,
    shape: tuple[int | str, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = STATES,
) -> None:
    """``[..., HV, V, K]`` whose last three dimensions are packed; no two states overlap."""
    expect(name, states, shape, device, *dtypes)
    if not states.numel():
        return
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
    expect_apart(name, states)


def check_windows(
    name: str, windows: torch.Tensor, shape: tuple[int | str, ...], device: torch.device
) -> None:
    """``[rows, T, C, 3]``, which tokens after one another may share where they are the same inputs;
    no others overlap."""
    expect(name, windows, shape, device, *FLOATS)
    of_row, of_token, of_channel, of_input = windows.stride()
    if windows.numel() and of_token == of_input:  # each input is stored once
        rows, tokens, channels, taps = windows.shape
        size, stride = (rows, tokens + taps - 1, channels), (of_row, of_token, of_channel)
        windows = windows.as_strided(size, stride)
    expect_apart(name, windows)


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
    """Check as `check_slots` does, where every negative value marks padding."""
    if indices.is_cpu and indices.numel() and int(indices.max()) >= of.shape[0]:
        raise ValueError(
            f"{name} must be negative or a {what} below {of.shape[0]}, got {int(indices.max())}"
        )


def _check_snapshots(state: StateRef, tokens: TokenInputs, num_sequences: int) -> None:
    """``snapshots [N, S, HV, V, K]`` fp32 receives the state after ``snapshot_chunks [N, S]``, or
    with ``snapshot_indices [N, S]`` a slot of ``snapshots [slots, HV, V, K]`` in the states'
    dtype."""
    chunks, snapshots, indices = state.snapshot_chunks, state.snapshots, state.snapshot_indices
    if chunks is None and snapshots is None:
        return
    if chunks is None or snapshots is None:
        raise ValueError("snapshots must be given with snapshot_chunks, got one of the two")
    device = tokens.q.device
    one = (*tokens.v.shape[2:], tokens.q.shape[3])
    expect("snapshot_chunks", chunks, (num_sequences, "S"), device, torch.int32)
    expect_contiguous("snapshot_chunks", chunks)
    if indices is None:
        expect("snapshots", snapshots, (*chunks.shape, *one), device, torch.float32)
        expect_contiguous("snapshots", snapshots)
        return
    expect("snapshot_indices", indices, tuple(chunks.shape), device, torch.int32)
    expect_contiguous("snapshot_indices", indices)
    check_packed_states("snapshots", snapshots, ("slots", *one), device, (state.dtype,))
