"""The verification of drafts in one Triton launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kda_backend.contract.calls import VerifyCall
from kda_backend.decode_step.fused import draft_arguments, step_arguments, step_constexprs
from kda_backend.launch_params import FusedVerifyParams
from kda_backend.token_spec import TokenSpec, in_one_layout

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape

AXES = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "norm_gate", "out"), "t"),
    **dict.fromkeys(("state", "state_indices", "write", "write_indices"), "n"),
    "conv_state": "ncw",
    "windows": "ntcw",
}


def bind(row: Row, spec: KdaShape, target: Target) -> TritonVerification:
    return TritonVerification(row.params, batch_invariant=spec.batch_invariant)


class TritonVerification:
    """One launch for a draft of each sequence; a program has the state of a head."""

    def __init__(self, params: FusedVerifyParams, *, batch_invariant: bool = False) -> None:
        self._kernel = functools.cache(functools.partial(verify_kernel, params))
        self._batch_invariant = batch_invariant

    def prepare(self, call: VerifyCall) -> Callable[[VerifyCall], None]:
        kernel = self._kernel(TokenSpec.of(call.tokens, call.gate))
        return functools.partial(_run, kernel, self._batch_invariant)


def _run(kernel: KernelLaunch, batch_invariant: bool, call: VerifyCall) -> None:
    tokens, gate, state, draft, shape, conv, norm, out = call
    if batch_invariant:
        tokens = in_one_layout(tokens)
    if draft.states is None or draft.indices is None:
        # token t of sequence n has slot [n, t] of the pool
        write, write_indices, null_write = state.write, state.indices, state.null_slot
        stride_write_indices_t, stride_write_t = 1, 0
    else:
        write, write_indices, null_write = draft.states, draft.indices, -1
        stride_write_indices_t, stride_write_t = 0, draft.states.stride(1)
    kernel.launch(
        (tokens.v.shape[1] * shape.num_sequences, 1, 1),
        **step_arguments(tokens, gate, state, conv, norm, out),
        **draft_arguments(call),
        write_ptr=write,
        write_indices_ptr=write_indices,
        null_write=null_write,
        stride_write_indices_t=stride_write_indices_t,
        stride_write_t=stride_write_t,
    )


def verify_kernel(params: FusedVerifyParams, spec: TokenSpec) -> KernelLaunch:
    """The kernel, as its path launches it."""
    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.verify_step import verify_step_kernel

    constexprs = step_constexprs(params, spec)
    options = {"num_warps": params.num_warps}
    return KernelLaunch(verify_step_kernel, constexprs, options, axes=AXES)
