"""A KDA layer between its projections: short convolution, delta rule, gated norm.

Calls for the engines' adapters, on the engines' own memory: packed q, k and v of all heads, and
pools of convolution and recurrent states that are read and written in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from backend_core.ready import Prepared
from kda_backend.contract.calls import LayerStages, PrefillCall
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
)
from kda_backend.layer_checkpoints import Checkpoints, store_checkpoints
from kda_backend.operators import kda_decode_step, kda_verify_step
from kda_backend.prefill.arguments_sm90 import state_addresses
from kda_backend.prefill.paths import run_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.spec import Beta
from kda_backend.step_plan import StepPlan

_NONE = (0, 0, 0, 0)  # states inside of the sequences


class LayerWeights(NamedTuple):
    """A layer's weights beside its projections; the tensors are the engine's own.

    Attributes:
        conv: ``[3 H D, 4]`` contiguous, the filters of q, k and v, newest token last.
        gate: its parameters in fp32.
        norm: ``[D]``; norm_eps: of the gated norm.
    """

    conv: torch.Tensor
    gate: GateSpec
    norm: torch.Tensor
    norm_eps: float


class Projections(NamedTuple):
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


def prefill(
    weights: LayerWeights,
    selection: KdaSelection,
    x: Projections,
    conv_pool: torch.Tensor,
    state: StateRef,
    step_plan: StepPlan,
    scratch: Scratch,
    *,
    checkpoints: Checkpoints | None = None,
) -> None:
    """Sequences of any length: a convolution, the chunked delta rule, the norm.

    Args:
        conv_pool: ``[slots, 3 H D, 3]``, any strides.
        state: slots of a pool ``[slots, H, D, D]``, which are those of ``conv_pool`` too.
        step_plan: of these T tokens. Its layers are checked once for each layout.
        checkpoints: states inside of the sequences, which go to slots of their own.

    Raises:
        ValueError: a tensor is not as described; nothing has been written then.
    """
    gate, pool, initial, slots = weights.gate, state.read, state.has_initial, state.indices
    assert pool is not None and slots is not None
    if checkpoints is not None:
        state = state.with_snapshots(checkpoints.chunks, pool, checkpoints.state_indices)
    (qkv, g, beta, gate_out, out), (taps, _, norm, eps) = x, weights
    inside: Sequence[int] = _NONE if checkpoints is None else state_addresses(state, None)[4:]
    first = 0 if initial is None else initial.data_ptr()
    at_qkv, at_g, at_beta, at_out = qkv.data_ptr(), g.data_ptr(), beta.data_ptr(), out.data_ptr()
    at_pool, at_slots = pool.data_ptr(), slots.data_ptr()
    at_windows, at_taps = conv_pool.data_ptr(), taps.data_ptr()
    at_gate, at_norm = gate_out.data_ptr(), norm.data_ptr()
    rows = at_qkv, 0, 0, at_g, at_beta, at_out
    states = at_pool, at_pool, at_slots, first, *inside
    stages = at_windows, at_taps, at_gate, at_norm
    off = at_qkv | at_g | at_beta | at_out | at_pool | at_slots | first
    off = (off | at_windows | at_taps | at_gate | at_norm) & 15
    layout = (
        *(selection, gate.kind, gate.lower_bound, eps, checkpoints is None, initial is None),
        off and tuple([address & 15 for address in (*rows, *states, *stages)]),
        *(qkv.shape, g.shape, beta.shape, gate_out.shape, out.shape),
        *(qkv.dtype, g.dtype, beta.dtype, gate_out.dtype, out.dtype),
        *(conv_pool.dtype, taps.dtype, norm.dtype, pool.dtype),
        *(qkv.stride(), g.stride(), beta.stride(), gate_out.stride(), out.stride()),
        *(conv_pool.stride(), taps.stride(), pool.stride()),
    )
    given = weights, selection, x, conv_pool, state, step_plan, scratch, checkpoints
    typed = functools.partial(_typed, *given)
    run_prefill(selection, step_plan, layout, (rows, states, stages), gate, scratch, typed)
    if checkpoints is not None:
        store_checkpoints(x.qkv, conv_pool, checkpoints, step_plan)


def _typed(
    weights: LayerWeights,
    selection: KdaSelection,
    x: Projections,
    conv_pool: torch.Tensor,
    state: StateRef,
    step_plan: StepPlan,
    scratch: Scratch,
    checkpoints: Checkpoints | None,
    layout: Prepared | None = None,
    convolve: Callable[..., torch.Tensor] | None = None,
) -> PrefillCall:
    """One packed row of tokens ``[1, T, H, D]``; ``convolve`` as `layer_stages.short_conv`, without
    which they are from before the convolution."""
    (qkv, g, beta, _, out), norm = x, _norm(weights, x)
    conv = ConvInputs(conv_pool, weights.conv)
    heads, dim = selection.shape.num_value_heads, selection.shape.value_dim
    if qkv.shape[1] != 3 * heads * dim:
        raise ValueError(f"qkv must have shape [T, {3 * heads * dim}], got {list(qkv.shape)}")
    mixed = qkv if convolve is None else convolve(qkv, conv, state, step_plan)
    q, k, v = mixed.view(1, qkv.shape[0], 3, heads, dim).unbind(2)
    rows = q, k, v, g.unsqueeze(0), beta.unsqueeze(0)
    tokens = TokenInputs(*rows, Beta.SIGMOID, True, dim**-0.5)
    stages = LayerStages(qkv, out, conv, norm, checkpoints)
    whole, layout = out.unsqueeze(0), Prepared() if layout is None else layout
    return PrefillCall(tokens, weights.gate, step_plan, state, whole, None, scratch, layout, stages)


def decode(
    weights: LayerWeights,
    selection: KdaSelection,
    x: Projections,
    conv_pool: torch.Tensor,
    state: StateRef,
    *,
    pdl_prefetch_safe: bool = True,
) -> None:
    """One token of each sequence, all in one launch; every valid slot is read.

    Called after the layer's projections: the launch before it must not write the pools or the
    slots, which may be read while that launch still runs, unless ``pdl_prefetch_safe`` is false.

    Arguments as :func:`prefill`, with ``N = T``.
    """
    kda_decode_step(
        _step_inputs(x, selection),
        weights.gate,
        state,
        conv=ConvInputs(conv_pool, weights.conv),
        norm=_norm(weights, x),
        out=x.out,
        selection=selection,
        pdl_prefetch_safe=pdl_prefetch_safe,
    )


def decode_and_prefill(
    weights: LayerWeights,
    selection: KdaSelection,
    x: Projections,
    conv_pool: torch.Tensor,
    decodes: StateRef,
    is_decode: torch.Tensor,
    prefills: StateRef,
    step_plan: StepPlan,
    scratch: Scratch,
    *,
    checkpoints: Checkpoints | None = None,
) -> None:
    """First tokens that decode, then sequences of any length, in numbers that only the GPU knows:
    what a CUDA graph holds for any batch. Rows of ``out`` that belong to no sequence become 0.

    Arguments as :func:`decode` and :func:`prefill`, but for these.

    Args:
        decodes: the slots of the first ``N`` tokens, negative from the first on that does not
            decode.
        is_decode: ``[N, 1, 1]`` bool, which of them do.
        step_plan: of the sequences of ``prefills``, made with ``any_batch``; they begin after the
            tokens that decode.
    """
    rows = slice(0, is_decode.shape[0])
    qkv, g, beta, gate, out = (tensor[rows] for tensor in x)
    decoded = torch.empty_like(out)
    decode(weights, selection, Projections(qkv, g, beta, gate, decoded), conv_pool, decodes)
    x.out.zero_()
    prefill(weights, selection, x, conv_pool, prefills, step_plan, scratch, checkpoints=checkpoints)
    torch.where(is_decode, decoded, out, out=out)  # whose norm the prefill has not made


def verify(
    weights: LayerWeights,
    selection: KdaSelection,
    x: Projections,
    conv_pool: torch.Tensor,
    state: StateRef,
    draft: DraftInputs,
) -> None:
    """The drafted tokens of each sequence in one launch; rows of no sequence are not written.

    Arguments as :func:`prefill`, but for those that `DraftInputs.in_pool` describes.
    """
    kda_verify_step(
        _step_inputs(x, selection),
        weights.gate,
        state,
        draft,
        conv=ConvInputs(conv_pool, weights.conv),
        norm=_norm(weights, x),
        out=x.out,
        selection=selection,
    )


def _step_inputs(x: Projections, selection: KdaSelection) -> TokenInputs:
    """Rows of tokens ``[T, H, D]``, before the convolution."""
    heads, dim = selection.shape.num_value_heads, selection.shape.value_dim
    q, k, v = x.qkv.view(x.qkv.shape[0], 3, heads, dim).unbind(1)
    return TokenInputs(q, k, v, x.g, x.beta, Beta.SIGMOID, True, dim**-0.5)


def _norm(weights: LayerWeights, x: Projections) -> NormInputs:
    return NormInputs(weights.norm, x.gate, weights.norm_eps)
