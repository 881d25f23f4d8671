"""A KDA layer between its projections: short convolution, delta rule, gated norm.

Calls for the engines' adapters, on the engines' own memory: packed q, k and v of all heads, and
pools of convolution and recurrent states that are read and written in place.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from backend_core.contracts import expect_stride
from backend_core.ready import Prepared
from kda_backend.contract.calls import PrefillCall, PreparedPrefill
from kda_backend.contract.sequences import check_sequences, check_step_plan
from kda_backend.contract.tensors import check_slots
from kda_backend.contract.values import (
    ConvInputs,
    DraftInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
)
from kda_backend.layer_checkpoints import Checkpoints, check_checkpoints, store_checkpoints
from kda_backend.layer_stages import (
    check_gated_norm,
    check_short_conv,
    gated_norm,
    prepare_gated_norm,
    prepare_short_conv,
    short_conv,
)
from kda_backend.operators import kda_decode_step, kda_verify_step
from kda_backend.prefill.arguments_sm90 import HopperPath, state_addresses
from kda_backend.prefill.paths import convolves, path_of
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.spec import Beta
from kda_backend.step_plan import StepPlan

if TYPE_CHECKING:
    from backend_core.launch.triton import Launch


_NONE = [0, 0, 0, 0]  # states inside of the sequences


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


class LayerAddresses(NamedTuple):
    """Where the tensors of a layer's prefill lie; 0 for one that is not there.

    Attributes:
        windows, taps: of the convolution; norm: its weight; states: the pool.
        slots, continued: the sequences' slots, and which of them have an initial state.
    """

    qkv: int
    g: int
    beta: int
    gate: int
    out: int
    windows: int
    taps: int
    norm: int
    states: int
    slots: int
    continued: int


LayerCall: TypeAlias = "tuple[LayerWeights, Projections, torch.Tensor, StateRef, StepPlan, Scratch]"
"""A layer's prefill as it is called: weights, projections, pool of windows, state, step plan and
scratch memory."""
Prefill: TypeAlias = Callable[[LayerAddresses, LayerCall], object]
"""Runs the prefill of a layer that is laid out as the one which prepared it."""


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
    at = LayerAddresses(
        qkv.data_ptr(),
        g.data_ptr(),
        beta.data_ptr(),
        gate_out.data_ptr(),
        out.data_ptr(),
        conv_pool.data_ptr(),
        taps.data_ptr(),
        norm.data_ptr(),
        pool.data_ptr(),
        slots.data_ptr(),
        0 if initial is None else initial.data_ptr(),
    )
    off = functools.reduce(operator.or_, at) & 15
    layout = (
        *(selection, gate.kind, gate.lower_bound, eps, checkpoints is None, initial is None),
        off and tuple([address & 15 for address in at]),
        *(qkv.shape, g.shape, beta.shape, gate_out.shape, out.shape),
        *(qkv.dtype, g.dtype, beta.dtype, gate_out.dtype, out.dtype),
        *(conv_pool.dtype, taps.dtype, norm.dtype, pool.dtype),
        *(qkv.stride(), g.stride(), beta.stride(), gate_out.stride(), out.stride()),
        *(conv_pool.stride(), taps.stride(), pool.stride()),
    )
    call = weights, x, conv_pool, state, step_plan, scratch
    prepared: Prefill | None = step_plan.prepared.get(layout)
    if prepared is None:
        if checkpoints is not None:
            check_checkpoints(checkpoints, x.qkv, step_plan)
        prepared = step_plan.prepared.keep(layout, _prepare(selection, call))
    prepared(at, call)
    if checkpoints is not None:
        store_checkpoints(x.qkv, conv_pool, checkpoints, step_plan)


def _prepare(selection: KdaSelection, call: LayerCall) -> Prefill:
    """Check a layer's prefill and choose its path. On Hopper its launches are packed with all but
    the layer's addresses; other paths are given its tensors."""
    weights, x, conv_pool, state, step_plan, _ = call
    conv = ConvInputs(conv_pool, weights.conv)
    rows = _check_sequences(weights, selection, x, conv, state, step_plan)
    path, run = path_of(selection, rows, step_plan, state)
    fused = convolves(selection, path, rows, weights.gate, step_plan, state, conv)
    call_of = functools.partial(_call_of, selection, fused, Prepared())

    def on_tensors(at: LayerAddresses, call: LayerCall) -> None:
        weights, x, conv_pool, state, step_plan, _ = call
        of_conv = _convolved(x, ConvInputs(conv_pool, weights.conv), fused)
        run(call_of(call, short_conv(*of_conv, state, step_plan)))
        gated_norm(x.out, _norm(weights, x), step_plan)

    if not isinstance(run, HopperPath):
        return on_tensors
    rows_in, conv_in = _convolved(x, conv, fused)
    mixed = torch.empty(*rows_in.shape, dtype=rows_in.dtype, device=rows_in.device)
    chunked = run.prepare(call_of(call, mixed))
    if chunked is None:
        return on_tensors
    convolve = prepare_short_conv(rows_in, conv_in, state, step_plan)
    norm = prepare_gated_norm(x.out, _norm(weights, x))
    pairs = (rows_in, x.qkv), (conv_in.weight, conv.weight), (conv_in.state, conv.state)
    offsets = [part.data_ptr() - whole.data_ptr() for part, whole in pairs]
    return _on_addresses(convolve, chunked, norm, fused, mixed, offsets)


def _call_of(
    selection: KdaSelection, fused: bool, layout: Prepared, call: LayerCall, mixed: torch.Tensor
) -> PrefillCall:
    """The path's call, with q, k and v, or v alone, from after the convolution."""
    weights, x, conv_pool, state, step_plan, scratch = call
    rows, inside = _token_inputs(x, x.qkv if fused else mixed, selection), None
    if fused:
        rows = rows._replace(v=mixed.view(rows.v.shape))
        inside = ConvInputs(conv_pool, weights.conv)
    out = x.out.unsqueeze(0)
    return PrefillCall(rows, weights.gate, step_plan, state, out, None, scratch, layout, inside)


def _convolved(x: Projections, conv: ConvInputs, fused: bool) -> tuple[torch.Tensor, ConvInputs]:
    """The rows of the convolution's own launch, and its parameters: those of v alone where the path
    makes that of q and k."""
    if not fused:
        return x.qkv, conv
    first = x.qkv.shape[1] // 3 * 2
    return x.qkv[:, first:], ConvInputs(conv.state[:, first:], conv.weight[first:])


def _on_addresses(
    convolve: Launch,
    chunked: PreparedPrefill,
    norm: Launch,
    fused: bool,
    mixed: torch.Tensor,
    offsets: list[int],
) -> Prefill:
    """A layer's prefill of launches that are ready but for addresses.

    Args:
        mixed: like the convolution's output.
        offsets: bytes before what the convolution's launch takes of qkv, taps and windows.
    """
    (tokens, width), dtype, device = mixed.shape, mixed.dtype, mixed.device
    key_bytes = width // (1 if fused else 3) * dtype.itemsize  # of a token's q, and of its k
    row_at, tap_at, window_at = offsets

    def launch(at: LayerAddresses, call: LayerCall) -> None:
        weights, _, _, state, _, scratch = call
        qkv, g, beta, gate, o, windows, taps, norm_weight, states, slots, continued = at
        memory = torch.empty(tokens, width, dtype=dtype, device=device)
        mixed = memory.data_ptr()
        convolve((qkv + row_at, taps + tap_at, mixed, windows + window_at, slots, continued))
        q, v = (qkv, mixed) if fused else (mixed, mixed + 2 * key_bytes)
        rows = q, q + key_bytes, v, g, beta, o
        inside = _NONE if state.snapshots is None else state_addresses(state, None)[4:]
        pools = states, states, slots, continued, *inside
        chunked(rows, weights.gate, pools, scratch, (windows, taps) if fused else ())
        norm((o, o, gate, norm_weight))

    return launch


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


def _check_sequences(
    weights: LayerWeights,
    selection: KdaSelection,
    x: Projections,
    conv: ConvInputs,
    state: StateRef,
    step_plan: StepPlan,
) -> TokenInputs:
    """Check everything that `prefill` reads or writes, before anything is written; returns the
    tokens before the convolution."""
    check_short_conv(x.qkv, conv, state, step_plan)
    expect_stride("g", x.g, 2, 1)
    rows = _token_inputs(x, x.qkv, selection)
    out, sequences = x.out.unsqueeze(0), step_plan.num_sequences
    check_sequences(rows, weights.gate, state, sequences, out, selection)
    check_step_plan(step_plan, rows.q, selection)
    check_slots(state)
    check_gated_norm(x.out, _norm(weights, x))
    return rows


def _token_inputs(x: Projections, qkv: torch.Tensor, selection: KdaSelection) -> TokenInputs:
    """One packed row of tokens ``[1, T, H, D]``; ``qkv [T, 3 H D]`` before or after convolution."""
    heads, dim = selection.shape.num_value_heads, selection.shape.value_dim
    q, k, v = qkv.view(1, qkv.shape[0], 3, heads, dim).unbind(2)
    g, beta = x.g.unsqueeze(0), x.beta.unsqueeze(0)
    return TokenInputs(q, k, v, g, beta, Beta.SIGMOID, True, dim**-0.5)


def _step_inputs(x: Projections, selection: KdaSelection) -> TokenInputs:
    """Rows of tokens ``[T, H, D]``, before the convolution."""
    heads, dim = selection.shape.num_value_heads, selection.shape.value_dim
    q, k, v = x.qkv.view(x.qkv.shape[0], 3, heads, dim).unbind(1)
    return TokenInputs(q, k, v, x.g, x.beta, Beta.SIGMOID, True, dim**-0.5)


def _norm(weights: LayerWeights, x: Projections) -> NormInputs:
    return NormInputs(weights.norm, x.gate, weights.norm_eps)
