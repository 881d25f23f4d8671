"""The contract of the one-launch operators: the decode step and the verification of drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import expect_apart, expect_shape, expect_stride, once
from backend_core.ready import Prepared
from kda_backend.contract.calls import DraftShape
from kda_backend.contract.records import check_draft_records
from kda_backend.contract.tensors import (
    FLOATS,
    check_packed_states,
    check_pool,
    check_tokens,
    check_whole_state,
    check_windows,
    expect,
    expect_contiguous,
    expect_vector,
)
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
)
from kda_backend.selection import KdaSelection
from kda_backend.spec import CONV_TAPS, MAX_STEP_DIM


class CheckedStep(NamedTuple):
    """The findings of a check for a right call.

    Attributes:
        selection: the paths that serve it.
        prepared: what runs such calls, by path and promise.
        draft: sizes of the drafts, of a verification.
    """

    selection: KdaSelection
    prepared: Prepared
    draft: DraftShape | None = None


@once
def check_step(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: torch.Tensor | None,
    selection: KdaSelection | None,
) -> CheckedStep:
    """Check all but values of a decode step.

    Raises:
        ValueError: an argument is not as the operator describes it.
        LookupError: no path serves such tokens.
    """
    selection = _check_layer(tokens, gate, state, conv, norm, out, selection)
    indices, rows = state.indices, tokens.q.shape[0]
    assert indices is not None
    if indices.shape != (rows,) or not indices.is_contiguous():
        raise ValueError(
            f"state_indices must have shape [{rows}] and stride 1, got"
            f" {list(indices.shape)} and {list(indices.stride())}"
        )
    return CheckedStep(selection, Prepared())


@once
def check_verification(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    draft: DraftInputs,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: torch.Tensor | None,
    selection: KdaSelection | None,
) -> CheckedStep:
    """Check all but values of a verification.

    Raises:
        ValueError: an argument is not as the operator describes it.
        LookupError: no path serves such tokens.
    """
    selection = _check_layer(tokens, gate, state, conv, norm, out, selection)
    indices = state.indices
    assert indices is not None
    device, num_tokens = tokens.q.device, tokens.q.shape[0]
    sequences = indices.shape[0] if indices.dim() else 0
    if draft.cu_seqlens is not None:
        types = (torch.int32, torch.int64)
        expect_vector("cu_seqlens", draft.cu_seqlens, sequences + 1, device, *types)
    elif num_tokens and (sequences == 0 or num_tokens % sequences):
        raise ValueError(
            f"q must have as many tokens for each of {sequences} sequences, got {num_tokens} tokens"
        )
    if draft.num_accepted is not None and draft.correction is None:
        max_tokens = _check_token_slots(indices, draft.num_accepted, conv, device)
    else:
        expect_shape("state_indices", indices, (sequences,))
        expect_stride("state_indices", indices, 0, 1)
        if draft.correction is not None:
            max_tokens = check_draft_records(tokens, draft, conv, sequences)
        else:
            max_tokens = _check_buffers(state, draft, conv, sequences, device)
    if draft.cu_seqlens is None and sequences and num_tokens // sequences > max_tokens:
        raise ValueError(
            f"a draft must have at most {max_tokens} tokens,"
            f" got {num_tokens // sequences} per sequence"
        )
    return CheckedStep(selection, Prepared(), DraftShape(sequences, max_tokens))


def is_aligned(state: StateRef, conv: ConvInputs | None) -> bool:
    """Whether the pool's states, and the convolution's weight, start at multiples of 16 bytes."""
    pool = state.read
    assert pool is not None
    if pool.data_ptr() % 16 or pool.stride()[0] * pool.element_size() % 16:
        return False
    return conv is None or conv.weight.data_ptr() % 16 == 0


def check_draft_offsets(cu_seqlens: torch.Tensor | None, num_tokens: int) -> None:
    """Offsets in host memory are checked; offsets on a GPU are trusted. Rows after the last one
    belong to no sequence."""
    if cu_seqlens is None or not cu_seqlens.is_cpu:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] < 0 or offsets[-1] > num_tokens or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens must not decrease and lie within 0 to {num_tokens}, got {offsets}"
        )


def _check_layer(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: torch.Tensor | None,
    selection: KdaSelection | None,
) -> KdaSelection:
    """The checks that the decode step and the verification share."""
    selection = check_tokens(tokens, gate, ("N",), MAX_STEP_DIM, selection)
    v, device = tokens.v, tokens.q.device
    rows = {"q": tokens.q, "k": tokens.k, "v": v, "g": tokens.g}
    expect_stride("beta", tokens.beta, 1, 1)
    check_pool(state, tokens)
    check_whole_state(state)
    if conv is not None:
        _check_conv(conv, state, tokens)
    if out is not None:
        expect("out", out, tuple(v.shape), device, v.dtype)
        expect_apart("out", out)
        rows["out"] = out
    if norm is not None:
        if not isinstance(norm.eps, float | int) or not 0 <= norm.eps < float("inf"):
            raise ValueError(f"norm_eps must be finite and not negative, got {norm.eps!r}")
        expect("norm_weight", norm.weight, (v.shape[2],), device, *FLOATS)
        expect_contiguous("norm_weight", norm.weight)
        expect("norm_gate", norm.gate, tuple(v.shape), device, *FLOATS)
        rows["norm_gate"] = norm.gate
    for name, x in rows.items():  # whose heads are adjacent
        expect_stride(name, x, 2, 1)
        expect_stride(name, x, 1, x.shape[2])
    return selection


def _check_conv(conv: ConvInputs, state: StateRef, tokens: TokenInputs) -> None:
    assert state.read is not None
    heads, key_dim = tokens.q.shape[1:]
    value_heads, value_dim = tokens.v.shape[1:]
    device, slots = tokens.q.device, state.read.shape[0]
    if heads != value_heads:
        raise ValueError(
            f"conv_state needs as many value heads as heads, got {value_heads} and {heads}"
        )
    channels = 2 * heads * key_dim + value_heads * value_dim
    window = conv.state
    expect("conv_state", window, ("slots", channels, "W"), device, *FLOATS)
    expect_apart("conv_state", window)
    if window.shape[2] < CONV_TAPS - 1:
        raise ValueError(f"conv_state must have at least 3 columns, got {window.shape[2]}")
    if window.shape[0] < slots:
        raise ValueError(f"conv_state must have state_pool's {slots} slots, got {window.shape[0]}")
    expect("conv_weight", conv.weight, (channels, CONV_TAPS), device, *FLOATS)
    expect_contiguous("conv_weight", conv.weight)
    if conv.bias is not None:
        expect("conv_bias", conv.bias, (channels,), device, *FLOATS)
        expect_contiguous("conv_bias", conv.bias)


def _check_token_slots(
    indices: torch.Tensor,
    num_accepted: torch.Tensor,
    conv: ConvInputs | None,
    device: torch.device,
) -> int:
    """The variant with a slot of the pool for each token; returns the most tokens of a draft."""
    expect_shape("state_indices", indices, ("N", "T"))
    expect_stride("state_indices", indices, 1, 1)
    sequences, max_tokens = indices.shape
    expect_vector("num_accepted_tokens", num_accepted, sequences, device, torch.int32)
    if conv is not None and conv.state.shape[2] < max_tokens + 2:
        raise ValueError(
            f"conv_state must have at least {max_tokens + 2} columns for drafts of"
            f" {max_tokens} tokens, got {conv.state.shape[2]}"
        )
    return max_tokens


def _check_buffers(
    state: StateRef,
    draft: DraftInputs,
    conv: ConvInputs | None,
    sequences: int,
    device: torch.device,
) -> int:
    """The variant with a buffer step for each token; returns the most tokens of a draft."""
    assert state.read is not None
    if draft.states is None or draft.indices is None:
        raise ValueError("draft must have accepted tokens, buffers or records, got none")
    shape = ("rows", "T", *state.read.shape[1:])
    check_packed_states("intermediate_states", draft.states, shape, device)
    max_tokens = draft.states.shape[1]
    expect_vector("intermediate_indices", draft.indices, sequences, device, torch.int32)
    if (conv is None) != (draft.windows is None):
        raise ValueError("intermediate_conv must be given if and only if conv_state is")
    if conv is not None and draft.windows is not None:
        shape = ("rows", max_tokens, conv.state.shape[1], 3)
        check_windows("intermediate_conv", draft.windows, shape, device)
    return max_tokens
