"""The verification of drafts in one Triton launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kda_backend.contract.calls import VerifyCall
from kda_backend.decode_step.fused import NO_CONV, NO_NORM, step_constexprs
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
    q, k, v, g, beta = tokens[:5]
    num_tokens, value_heads = v.shape[:2]
    pool, indices = state.write, state.indices
    assert pool is not None and indices is not None
    conv_state, conv_weight, conv_bias = conv or NO_CONV
    norm_weight, norm_gate, eps = norm or NO_NORM
    if draft.states is None or draft.indices is None:
        # token t of sequence n has slot [n, t] of the pool
        write, write_indices, null_write = pool, indices, state.null_slot
        stride_write_indices_t, stride_write_t = 1, 0
    else:
        write, write_indices, null_write = draft.states, draft.indices, -1
        stride_write_indices_t, stride_write_t = 0, draft.states.stride(1)
    kernel.launch(
        (value_heads * shape.num_sequences, 1, 1),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        a_log_ptr=gate.a_log,
        dt_bias_ptr=gate.dt_bias,
        state_ptr=pool,
        state_indices_ptr=indices,
        num_accepted_ptr=draft.num_accepted,
        write_ptr=write,
        write_indices_ptr=write_indices,
        conv_state_ptr=conv_state,
        conv_weight_ptr=conv_weight,
        conv_bias_ptr=conv_bias,
        windows_ptr=draft.windows,
        norm_weight_ptr=norm_weight,
        norm_gate_ptr=norm_gate,
        out_ptr=out,
        cu_seqlens_ptr=draft.cu_seqlens,
        tokens_per_sequence=num_tokens // max(shape.num_sequences, 1),
        max_tokens=shape.max_tokens,
        null_slot=state.null_slot,
        null_write=null_write,
        lower_bound=gate.lower_bound,
        scale=tokens.scale,
        eps=eps,
        stride_write_indices_t=stride_write_indices_t,
        stride_write_t=stride_write_t,
        HV=value_heads,
    )


def verify_kernel(params: FusedVerifyParams, spec: TokenSpec) -> KernelLaunch:
    """The kernel, as its path launches it."""
    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.verify_step import verify_step_kernel

    constexprs = step_constexprs(params, spec)
    options = {"num_warps": params.num_warps}
    return KernelLaunch(verify_step_kernel, constexprs, options, axes=AXES)
