"""The contract of a draft's verification beside that of its tokens, stated once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import expect_device, expect_dtype, expect_shape, expect_stride
from kda_backend.contract.inputs import FLOATS
from kda_backend.contract.step import StepInputs, check_rows, check_states


class DraftInputs(NamedTuple):
    """Where verification reads and keeps states.

    Attributes:
        num_sequences, max_tokens: ``N``, and the most tokens a sequence can have.
        cu_seqlens: ``[N + 1]``, or ``None`` for ``tokens / N`` tokens each.
        num_accepted: ``[N]`` int32, or ``None`` where every sequence reads its first slot.
        write: ``[rows, HV, V, K]`` (the pool) or ``[rows, max_tokens, HV, V, K]``.
        write_indices: ``[N, max_tokens]`` or ``[N]`` int32 rows of ``write``.
        windows: ``[rows, max_tokens, C, 3]``, any strides, or ``None`` for the rolling pool.
    """

    num_sequences: int
    max_tokens: int
    cu_seqlens: torch.Tensor | None
    num_accepted: torch.Tensor | None
    write: torch.Tensor
    write_indices: torch.Tensor
    windows: torch.Tensor | None


def check_draft(
    x: StepInputs,
    *,
    cu_seqlens: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    intermediate_states: torch.Tensor | None,
    intermediate_indices: torch.Tensor | None,
    intermediate_conv: torch.Tensor | None,
) -> DraftInputs:
    """Check the two forms of verification: a slot for each token, or a buffer of steps."""
    device, tokens = x.q.device, x.q.shape[0]
    sequences = x.indices.shape[0] if x.indices.dim() else 0
    if cu_seqlens is not None:
        expect_shape("cu_seqlens", cu_seqlens, (sequences + 1,))
        expect_dtype("cu_seqlens", cu_seqlens, torch.int32, torch.int64)
        expect_device("cu_seqlens", cu_seqlens, device)
        expect_stride("cu_seqlens", cu_seqlens, 0, 1)
    elif tokens and (sequences == 0 or tokens % sequences):
        raise ValueError(
            f"q must have as many tokens for each of {sequences} sequences, got {tokens} tokens"
        )
    if intermediate_states is None:
        if intermediate_indices is not None or intermediate_conv is not None:
            raise ValueError(
                "intermediate_indices and intermediate_conv need intermediate_states, got None"
            )
        if num_accepted_tokens is None:
            raise ValueError(
                "num_accepted_tokens or intermediate_states must be given: without either there is"
                " nowhere to keep the states of a draft"
            )
        expect_shape("state_indices", x.indices, ("N", "T"))
        expect_stride("state_indices", x.indices, 1, 1)
        max_tokens = x.indices.shape[1]
        expect_shape("num_accepted_tokens", num_accepted_tokens, (sequences,))
        expect_dtype("num_accepted_tokens", num_accepted_tokens, torch.int32)
        expect_device("num_accepted_tokens", num_accepted_tokens, device)
        expect_stride("num_accepted_tokens", num_accepted_tokens, 0, 1)
        if x.conv is not None and x.conv.state.shape[2] < max_tokens + 2:
            raise ValueError(
                f"conv_state must have at least {max_tokens + 2} columns for drafts of"
                f" {max_tokens} tokens, got {x.conv.state.shape[2]}"
            )
        write, write_indices, windows = x.pool, x.indices, None
    else:
        if num_accepted_tokens is not None:
            raise ValueError("num_accepted_tokens and intermediate_states are two forms: give one")
        if intermediate_indices is None:
            raise ValueError("intermediate_indices must be given with intermediate_states")
        if (x.conv is None) != (intermediate_conv is None):
            raise ValueError("intermediate_conv must be given if and only if conv_state is")
        expect_shape("state_indices", x.indices, (sequences,))
        expect_stride("state_indices", x.indices, 0, 1)
        check_states("intermediate_states", intermediate_states, ("rows", "T", *x.pool.shape[1:]))
        expect_device("intermediate_states", intermediate_states, device)
        max_tokens = intermediate_states.shape[1]
        expect_shape("intermediate_indices", intermediate_indices, (sequences,))
        expect_dtype("intermediate_indices", intermediate_indices, torch.int32)
        expect_device("intermediate_indices", intermediate_indices, device)
        expect_stride("intermediate_indices", intermediate_indices, 0, 1)
        check_rows("intermediate_indices", intermediate_indices, "row", intermediate_states)
        if x.conv is not None and intermediate_conv is not None:
            channels = x.conv.state.shape[1]
            expect_shape("intermediate_conv", intermediate_conv, ("rows", max_tokens, channels, 3))
            expect_dtype("intermediate_conv", intermediate_conv, *FLOATS)
            expect_device("intermediate_conv", intermediate_conv, device)
        write, write_indices, windows = intermediate_states, intermediate_indices, intermediate_conv
    if cu_seqlens is None and sequences and tokens // sequences > max_tokens:
        raise ValueError(
            f"a draft must have at most {max_tokens} tokens, got {tokens // sequences} a sequence"
        )
    return DraftInputs(
        sequences, max_tokens, cu_seqlens, num_accepted_tokens, write, write_indices, windows
    )
