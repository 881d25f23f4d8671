"""A KDA layer between its projections: short convolution, delta rule, gated norm.

Calls for the engines' adapters, on the engines' own memory: packed q, k and v of all heads, and
pools of convolution and recurrent states that are read and written in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from backend_core.contracts import expect_stride
from kda_backend.api_step import decode_step, verify_step
from kda_backend.contract.sequences import check_sequences, check_step_plan
from kda_backend.contract.states import check_slots
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    Kept,
    NormInputs,
    PrefillCall,
    RecurrentCall,
    StateRef,
    TokenInputs,
)
from kda_backend.layer_checkpoints import (
    Checkpoints,
    check_checkpoints,
    store_checkpoints,
    with_checkpoints,
)
from kda_backend.layer_stages import check_gated_norm, check_short_conv, gated_norm, short_conv
from kda_backend.prefill.paths import convolves, path_of
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.spec import Beta
from kda_backend.step_plan import StepPlan


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights beside its projections; the tensors are the engine's own.

    Attributes:
        conv: ``[3 H D, W]`` contiguous, the filters of q, k and v, newest token last.
        a_log: ``H`` elements; dt_bias: ``H * D`` elements; fp32.
        norm: ``[D]``; norm_eps: of the gated norm.
        lower_bound: of the gate, or ``None`` for the unbounded one.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    lower_bound: float | None

    @functools.cached_property
    def gate(self) -> GateSpec:
        return GateSpec.of(True, self.a_log, self.dt_bias, self.lower_bound)


class Tokens(NamedTuple):
    """The projections of T tokens, all before activation; channels adjacent.

    Attributes:
        qkv: ``[T, 3 H D]``.
        g: ``[T, H, D]`` raw gate; beta: ``[T, H]`` logits; gate: ``[T, H, D]`` logits of the
            output's gate.
        out: ``[T, H, D]``, written.
    """

    qkv: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    gate: torch.Tensor
    out: torch.Tensor


class Pools(NamedTuple):
    """An engine's states, read and written in place.

    Attributes:
        conv: ``[slots, 3 H D, W - 1]``, any strides.
        state: ``[slots, H, D, D]`` fp32 or bf16 (``[V, K]``).
    """

    conv: torch.Tensor
    state: torch.Tensor


class ReadyPrefill(NamedTuple):
    """The path of a step's prefills, for layers whose tensors are laid out alike.

    Attributes:
        run: as `path_of` returns it.
        convolves: it makes the short convolution of q and k.
        kept: the path's own.
    """

    run: Callable[[PrefillCall], None]
    convolves: bool
    kept: Kept


KnownLayouts = dict[Hashable, ReadyPrefill]


def prefill(
    weights: LayerWeights,
    selection: KdaSelection,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    step_plan: StepPlan,
    scratch: Scratch,
    *,
    checkpoints: Checkpoints | None = None,
    known: KnownLayouts | None = None,
) -> None:
    """Sequences of any length: a convolution, the chunked delta rule, the norm.

    Args:
        state_indices: ``[N]`` int32 slot of each sequence in both pools; -1 for none.
        has_initial_state: ``[N]`` bool, or ``None`` where every slot is read.
        step_plan: of these T tokens.
        checkpoints: states inside of the sequences, which go to slots of their own. Recurrent
            states of 16 bits take memory in fp32 on their way, one for each sequence.
        known: of this step, and of no other: its layers, whose tensors have the same shapes and
            dtypes, are checked once for each layout.

    Raises:
        ValueError: a tensor is not as described; nothing has been written then.
    """
    gate = weights.gate
    state = StateRef.pool(pools.state, state_indices, has_initial_state)
    if checkpoints is not None:
        state = with_checkpoints(state, checkpoints)
    layout = (
        selection,
        gate.kind,
        *[x.stride() for x in (*tokens, *pools)],
        pools.state.data_ptr() & 15,
        weights.conv.data_ptr() & 15,
        checkpoints is None,
    )
    ready = None if known is None else known.get(layout)
    if ready is None:
        if checkpoints is not None:
            check_checkpoints(checkpoints, tokens.qkv, step_plan)
        _check_sequences(weights, selection, tokens, pools, state, step_plan)
        ready = _ready_prefill(weights, selection, tokens, pools, state, step_plan)
        if known is not None:
            known[layout] = ready
    conv = None
    if ready.convolves:
        conv = ConvInputs(pools.conv, weights.conv)
        rows = _token_inputs(tokens, tokens.qkv, selection)
        first = rows.q.shape[2] * rows.q.shape[3] * 2  # of v's channels
        values = _convolved(weights, tokens, pools, state, step_plan, first)
        rows = rows._replace(v=values.view(rows.v.shape))
    else:
        mixed = _convolved(weights, tokens, pools, state, step_plan)
        rows = _token_inputs(tokens, mixed, selection)
    out, kept = tokens.out.unsqueeze(0), ready.kept
    ready.run(PrefillCall(rows, gate, step_plan, state, out, None, scratch, kept, conv))
    _normalise(weights, tokens, step_plan)
    if checkpoints is not None:
        store_checkpoints(tokens.qkv, state, pools.conv, checkpoints, step_plan)


def _ready_prefill(
    weights: LayerWeights,
    selection: KdaSelection,
    tokens: Tokens,
    pools: Pools,
    state: StateRef,
    step_plan: StepPlan,
) -> ReadyPrefill:
    rows, conv = _token_inputs(tokens, tokens.qkv, selection), ConvInputs(pools.conv, weights.conv)
    return ReadyPrefill(
        path_of(selection, rows, step_plan, state),
        convolves(selection, rows, weights.gate, step_plan, state, conv),
        {},
    )


def decode(
    weights: LayerWeights,
    selection: KdaSelection,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    null_slot: int | None,
    *,
    pdl_prefetch_safe: bool = True,
) -> None:
    """One token of each sequence, all in one launch; every valid slot is read.

    Called after the layer's projections: the launch before it must not write the pools or
    ``state_indices``, which may be read while that launch still runs, unless
    ``pdl_prefetch_safe`` is false.

    Arguments as :func:`prefill`, with ``N = T``; rows at ``null_slot`` are padding too.
    """
    decode_step(
        _step_inputs(tokens, selection),
        weights.gate,
        StateRef.pool(pools.state, state_indices, null_slot=null_slot),
        ConvInputs(pools.conv, weights.conv),
        NormInputs(weights.norm, tokens.gate, weights.norm_eps),
        tokens.out,
        selection,
        pdl_prefetch_safe=pdl_prefetch_safe,
    )


def verify(
    weights: LayerWeights,
    selection: KdaSelection,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    null_slot: int | None,
) -> None:
    """The drafted tokens of each sequence in one launch; rows of no sequence are not written.

    Arguments as :func:`prefill`, but ``pools.conv`` has at least ``S + 2`` columns.

    Args:
        state_indices: ``[N, S]`` int32, a slot for each token of a draft.
        num_accepted_tokens: ``[N]`` int32, of the draft before; cu_seqlens: ``[N + 1]``.
    """
    verify_step(
        _step_inputs(tokens, selection),
        weights.gate,
        StateRef.pool(pools.state, state_indices, null_slot=null_slot),
        DraftInputs(cu_seqlens, num_accepted_tokens),
        ConvInputs(pools.conv, weights.conv),
        NormInputs(weights.norm, tokens.gate, weights.norm_eps),
        tokens.out,
        selection,
    )


def decode_or_start(
    weights: LayerWeights,
    selection: KdaSelection,
    tokens: Tokens,
    pools: Pools,
    state_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None,
    step_plan: StepPlan,
) -> None:
    """Sequences of one token, or none for padding, some of which may start with it.

    Arguments as :func:`prefill`; the recurrent kernel between its convolution and its norm.
    """
    state = StateRef.pool(pools.state, state_indices, has_initial_state)
    _check_sequences(weights, selection, tokens, pools, state, step_plan)
    mixed = _convolved(weights, tokens, pools, state, step_plan)
    rows = _token_inputs(tokens, mixed, selection)
    out = tokens.out.unsqueeze(0)
    run = selection.recurrent.run(step_plan.num_sequences * rows.v.shape[2])
    run(RecurrentCall(rows, weights.gate, step_plan.cu_seqlens, state, out))
    _normalise(weights, tokens, step_plan)


def _check_sequences(
    weights: LayerWeights,
    selection: KdaSelection,
    tokens: Tokens,
    pools: Pools,
    state: StateRef,
    step_plan: StepPlan,
) -> None:
    """Everything that `prefill` and `decode_or_start` read or write, before anything is written."""
    assert state.indices is not None
    check_short_conv(tokens.qkv, weights.conv, pools.conv, state.indices, step_plan)
    expect_stride("g", tokens.g, 2, 1)
    rows = _token_inputs(tokens, tokens.qkv, selection)
    out = tokens.out.unsqueeze(0)
    check_sequences(rows, weights.gate, state, step_plan.num_sequences, out, selection)
    check_step_plan(step_plan, rows.q, selection)
    check_slots(state)
    check_gated_norm(tokens.out, tokens.gate, weights.norm, tokens.out)


def _token_inputs(tokens: Tokens, qkv: torch.Tensor, selection: KdaSelection) -> TokenInputs:
    """One packed row of tokens ``[1, T, H, D]``; ``qkv [T, 3 H D]`` before or after convolution."""
    heads, dim = selection.shape.num_value_heads, selection.shape.value_dim
    q, k, v = qkv.view(1, qkv.shape[0], 3, heads, dim).unbind(2)
    g, beta = tokens.g.unsqueeze(0), tokens.beta.unsqueeze(0)
    return TokenInputs(q, k, v, g, beta, Beta.SIGMOID, True, dim**-0.5)


def _step_inputs(tokens: Tokens, selection: KdaSelection) -> TokenInputs:
    """Rows of tokens ``[T, H, D]``, before the convolution."""
    heads, dim = selection.shape.num_value_heads, selection.shape.value_dim
    q, k, v = tokens.qkv.view(tokens.qkv.shape[0], 3, heads, dim).unbind(1)
    return TokenInputs(q, k, v, tokens.g, tokens.beta, Beta.SIGMOID, True, dim**-0.5)


def _convolved(
    weights: LayerWeights,
    tokens: Tokens,
    pools: Pools,
    state: StateRef,
    step_plan: StepPlan,
    first: int = 0,
) -> torch.Tensor:
    """Of the channels from ``first`` on."""
    assert state.indices is not None
    x, weight, pool = tokens.qkv[:, first:], weights.conv[first:], pools.conv[:, first:]
    return short_conv(x, weight, pool, state.indices, state.has_initial, step_plan)


def _normalise(weights: LayerWeights, tokens: Tokens, step_plan: StepPlan) -> None:
    kernels = step_plan.chunk_table is not None
    out = tokens.out
    gated_norm(out, tokens.gate, weights.norm, weights.norm_eps, out, kernels=kernels)
