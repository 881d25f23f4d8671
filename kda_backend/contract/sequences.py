"""The contract of the operators on sequences: chunked prefill and the recurrence."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import expect_stride, once
from backend_core.ready import Prepared
from kda_backend.contract.tensors import check_state, check_tokens, expect
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.selection import KdaSelection
from kda_backend.spec import MAX_HEAD_DIM
from kda_backend.step_plan import StepPlan


class Checked(NamedTuple):
    """The findings of `check_sequences` for a right call.

    Attributes:
        selection: the paths that serve it.
        packed: q, k, v, g and beta are read as they are, not as packed copies.
        out_packed: so is ``out`` written; true where the call brings none.
        layout: of such calls, for the path that runs them.
    """

    selection: KdaSelection
    packed: bool
    out_packed: bool
    layout: Prepared


@once
def check_sequences(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    num_sequences: int,
    out: torch.Tensor | None,
    selection: KdaSelection | None,
) -> Checked:
    """Check all but values: shapes, strides, dtypes, devices, and that there is a path.

    Raises:
        ValueError: an argument is not as the operator describes it.
        LookupError: no path serves such tokens.
    """
    selection = check_tokens(tokens, gate, ("B", "T"), MAX_HEAD_DIM, selection)
    if out is not None:
        _check_output(out, tokens.v)
    check_state(state, tokens, num_sequences)
    q, k, v, g, beta = tokens[:5]
    is_packed = all(map(_is_packed, (q, k, v, g, beta.unsqueeze(3))))
    return Checked(selection, is_packed, out is None or _is_packed(out), Prepared())


def packed(tokens: TokenInputs) -> TokenInputs:
    """The tokens as `packed_rows` of each tensor."""
    q, k, v, g = map(packed_rows, tokens[:4])
    beta = packed_rows(tokens.beta.unsqueeze(3)).squeeze(3)
    return TokenInputs(q, k, v, g, beta, *tokens[5:])


def packed_rows(x: torch.Tensor) -> torch.Tensor:
    """``[B, T, heads, D]`` whose tokens follow one another by the stride of T: ``x`` itself, a view
    of it where T = 1, whose stride says nothing, or a copy."""
    if _is_packed(x):
        return x
    if x.shape[1] == 1 and (x.stride(3) == 1 or x.shape[3] == 1):
        return x.as_strided(x.shape, (x.stride(0), x.stride(0), *x.stride()[2:]))
    return x.contiguous()


def check_step_plan(step_plan: StepPlan, q: torch.Tensor, selection: KdaSelection) -> None:
    """It must be of these tokens, on their device, with the table that the path's kernels read."""
    batch, length, _, _ = q.shape
    if step_plan.num_tokens != batch * length:
        raise ValueError(f"step_plan is of {step_plan.num_tokens} tokens, q has {batch * length}")
    if step_plan.cu_seqlens.device != q.device:
        raise ValueError(f"step_plan must be on {q.device}, got {step_plan.cu_seqlens.device}")
    if step_plan.chunk_table is None and selection.target.vendor != "cpu":
        raise ValueError("step_plan must have a chunk table for the kernels, got none")


def check_packed_row(q: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """``cu_seqlens`` describes sequences that are packed in one row."""
    if q.shape[0] != 1:
        raise ValueError(f"q must have batch size 1 with cu_seqlens, got {q.shape[0]}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on {q.device}, got {cu_seqlens.device}")


def _check_output(out: torch.Tensor, v: torch.Tensor) -> None:
    """``out`` must be shaped as v, with v's dtype, and packed like the inputs. It may alias v."""
    expect("out", out, tuple(v.shape), v.device, v.dtype)
    expect_stride("out", out, 3, 1)
    batch, tokens, _, _ = out.shape
    if tokens == 1:
        _check_apart(out, batch, out.stride(0))  # rows may lie anywhere, but not over one another
    elif tokens > 1:
        expect_stride("out", out, 0, tokens * out.stride(1))
        _check_apart(out, batch * tokens, out.stride(1))


def _check_apart(out: torch.Tensor, rows: int, row: int) -> None:
    """No two of so many rows ``[HV, :]``, each ``row`` elements from the next, share an element."""
    _, _, heads, dim = out.shape
    span = dim
    for stride, count in sorted([(row, rows), (out.stride(2), heads)]):
        if count <= 1:
            continue
        if stride < span:
            raise ValueError(f"out must have rows apart, got strides {list(out.stride())}")
        span = stride * (count - 1) + span


def _is_packed(x: torch.Tensor) -> bool:
    """Whether its rows follow one another and channels are adjacent."""
    return (x.stride(3) == 1 or x.shape[3] == 1) and (
        x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)
    )
