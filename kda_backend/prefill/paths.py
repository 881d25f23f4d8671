"""The one way of a chunked prefill to its path, and the paths' kernels at model load."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from backend_core.contracts import expect_stride
from backend_core.ready import Prepared
from kda_backend.contract.calls import LayerStages, PrefillAddresses, PrefillCall
from kda_backend.contract.sequences import check_sequences, check_step_plan
from kda_backend.contract.tensors import check_slots
from kda_backend.contract.values import ConvInputs, GateSpec
from kda_backend.layer_checkpoints import check_checkpoints
from kda_backend.layer_stages import (
    check_stages,
    gated_norm,
    prepare_gated_norm,
    prepare_short_conv,
    short_conv,
)
from kda_backend.prefill import conv_sm90, one_launch_sm90
from kda_backend.prefill.arguments_sm90 import HopperPath, variant_of
from kda_backend.scratch import Scratch

if TYPE_CHECKING:
    from backend_core.launch.cuda import CudaKernel
    from backend_core.tables.schema import Row
    from kda_backend.contract.values import StateRef, TokenInputs
    from kda_backend.prefill.arguments_sm90 import PrefillVariant
    from kda_backend.selection import KdaSelection
    from kda_backend.step_plan import StepPlan

Typed: TypeAlias = Callable[..., PrefillCall]
Run: TypeAlias = Callable[[PrefillAddresses, GateSpec, Scratch, Typed], None]
"""Runs the calls of a plan that are laid out as the one for which it was prepared."""


def run_prefill(
    selection: KdaSelection,
    step_plan: StepPlan,
    layout: Hashable,
    at: PrefillAddresses,
    gate: GateSpec,
    scratch: Scratch,
    typed: Typed,
) -> None:
    """Run a prefill of whoever calls it. Of calls that are laid out alike the first is checked, its
    path chosen and its launches packed; the step plan keeps that, and each fills in its addresses.

    Args:
        layout: equal for calls that agree in shapes, strides, dtypes, devices and alignment of
            their tensors, in their options and the selection.
        typed: makes the call, for the first one and where a path takes tensors. One with the
            stages of a layer is checked here, and any other before. Where a path takes tensors, a
            layer's is given `PrefillCall.layout` and `short_conv`, behind which its tokens are.

    Raises:
        ValueError: the call is not as the operator describes it; nothing has been written then.
    """
    run: Run | None = step_plan.prepared.get(layout)
    if run is None:
        run = step_plan.prepared.keep(layout, _prepare(selection, typed(), at))
    run(at, gate, scratch, typed)


def _prepare(selection: KdaSelection, call: PrefillCall, at: PrefillAddresses) -> Run:
    """Check a call and choose its path. On Hopper its launches are packed with all but addresses;
    other paths are given tensors, and so are copies of what does not lie on 16 bytes."""
    tokens, gate, step_plan, state, out, _, _, _, stages = call
    check_step_plan(step_plan, tokens.q, selection)
    if stages is not None:
        if stages.checkpoints is not None:
            check_checkpoints(stages.checkpoints, stages.qkv, step_plan)
        checked = check_sequences(tokens, gate, state, step_plan.num_sequences, out, selection)
        expect_stride("g", tokens.g, 3, 1)
        check_slots(state)
        check_stages(stages)
        call = call._replace(layout=checked.layout)
    row, path = path_of(selection, tokens, step_plan, state)
    fused = stages is not None and _convolves(selection, row, call, stages.conv)
    on_tensors: Run = _on_tensors(path) if stages is None else _layer_on_tensors(path, call.layout)
    if not isinstance(path, HopperPath):
        return on_tensors
    if step_plan.num_sequences == 0:
        return lambda *_: None  # no scan would be launched, and none would reset the counters
    q, k, v, g, _, o = at[0]
    if (q | k | v | g | o) & 15:
        return on_tensors
    launch = _alone(path, call) if stages is None else _in_layer(path, call, stages, fused)
    return launch or on_tensors


def _on_tensors(path: Callable[[PrefillCall], None]) -> Run:
    return lambda at, gate, scratch, typed: path(typed())


def _layer_on_tensors(path: Callable[[PrefillCall], None], layout: Prepared) -> Run:
    def run(at: PrefillAddresses, gate: GateSpec, scratch: Scratch, typed: Typed) -> None:
        call = typed(layout, short_conv)
        path(call)
        assert call.stages is not None
        gated_norm(call.stages.out, call.stages.norm, call.step_plan)

    return run


def _alone(path: HopperPath, call: PrefillCall) -> Run | None:
    """The path's launches."""
    chunked = path.prepare(call)
    if chunked is None:
        return None
    return lambda at, gate, scratch, _: chunked(at[0], gate, at[1], scratch, ())


def _in_layer(path: HopperPath, call: PrefillCall, stages: LayerStages, fused: bool) -> Run | None:
    """The convolution's launch, the path's and the norm's."""
    rows, own = stages.qkv, stages.conv
    if fused:  # the path makes that of q and k
        first = rows.shape[1] // 3 * 2
        rows, own = rows[:, first:], ConvInputs(own.state[:, first:], own.weight[first:])
    mixed = torch.empty(*rows.shape, dtype=rows.dtype, device=rows.device)
    tokens, kept = call.tokens, ("in a layer", fused)  # whose strides are not the call's
    if (layout := call.layout.get(kept)) is None:
        layout = call.layout.keep(kept, Prepared())
    call = call._replace(layout=layout)
    if fused:
        call = call._replace(tokens=tokens._replace(v=mixed.view(tokens.v.shape)))
    else:
        q, k, v = mixed.view(*tokens.v.shape[:2], 3, *tokens.v.shape[2:]).unbind(2)
        call = call._replace(tokens=tokens._replace(q=q, k=k, v=v), stages=None)
    chunked = path.prepare(call)
    if chunked is None:
        return None
    convolve = prepare_short_conv(rows, own, call.state, call.step_plan)
    norm = prepare_gated_norm(stages.out, stages.norm)
    (length, width), dtype, device = mixed.shape, mixed.dtype, mixed.device
    key_bytes = width // (1 if fused else 3) * dtype.itemsize  # of a token's q, and of its k
    conv = stages.conv
    pairs = (rows, stages.qkv), (own.weight, conv.weight), (own.state, conv.state)
    row_at, tap_at, window_at = [part.data_ptr() - whole.data_ptr() for part, whole in pairs]

    def launch(at: PrefillAddresses, gate: GateSpec, scratch: Scratch, typed: Typed) -> None:
        (qkv, _, _, g, beta, o), states, (windows, taps, norm_gate, weight) = at
        memory = torch.empty(length, width, dtype=dtype, device=device)
        mixed = memory.data_ptr()
        slots, continued = states[2:4]
        convolve((qkv + row_at, taps + tap_at, mixed, windows + window_at, slots, continued))
        q, v = (qkv, mixed) if fused else (mixed, mixed + 2 * key_bytes)
        rows = q, q + key_bytes, v, g, beta, o
        chunked(rows, gate, states, scratch, (windows, taps) if fused else ())
        norm((o, o, norm_gate, weight))

    return launch


def path_of(
    selection: KdaSelection, tokens: TokenInputs, step_plan: StepPlan, state: StateRef
) -> tuple[Row, Callable[[PrefillCall], None] | HopperPath]:
    """The row for the grid and the lengths of a call with these packed tokens, and its bound path.

    Rows that are limited by lengths read states whose channels lie in pairs, as those of all
    engines do: of others no length is said.
    """
    paths, grid = selection.prefill, step_plan.num_chunks * tokens.v.shape[2]
    row, path = paths.choose(grid, step_plan.max_tokens)
    if row.is_limited and not one_launch_sm90.has_pairs(state):
        return paths.choose(grid)
    return row, path


def _convolves(selection: KdaSelection, row: Row, call: PrefillCall, conv: ConvInputs) -> bool:
    """Whether the step's path makes the short convolution of q and k itself, by a kernel which is
    compiled at the model's first step of any kind.

    It rounds otherwise than a launch of its own, so where bits may not depend on the size of the
    call there is that launch in each.

    Args:
        call: q and k are from before the convolution.
        conv: of all channels.
    """
    least = getattr(row.params, "fused_conv_tiles", 0)
    if selection.shape.keeps_prefixes or not least:
        return False
    tokens, gate, step_plan, state, *_ = call
    variant = variant_of(tokens, gate, step_plan, state, None)
    conv_sm90.load_kernels(tokens.q.device, variant, conv.weight.dtype)
    return conv_sm90.serves(least, conv, tokens, step_plan)


def begin_to_compile(
    selection: KdaSelection, variants: Sequence[PrefillVariant]
) -> list[CudaKernel]:
    """The CUDA kernels that a model's prefills may choose, which compile in threads meanwhile.

    Args:
        variants: of the calls that will come (`arguments_sm90.variant_of`).
    """
    kernels: list[CudaKernel] = []
    heads, paths = selection.shape.num_value_heads, selection.prefill
    for row, path in zip(paths.rows, paths.bind_all(), strict=True):
        if row.max_width is not None and heads > row.max_width:
            continue  # one sequence has as many times its own share
        if isinstance(path, HopperPath):
            kernels += [kernel for x in variants for kernel in path.begin_to_compile(x)]
    return kernels
