"""The decode step in one Triton launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kda_backend.contract.calls import DecodeCall
from kda_backend.launch_params import FusedRecordsParams, FusedStepParams, FusedVerifyParams
from kda_backend.token_spec import TokenSpec, in_one_layout

if TYPE_CHECKING:
    from backend_core.launch.triton import Grid, KernelLaunch
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape

NO_CONV = (None, None, None)
NO_NORM = (None, None, 0.0)
AXES = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "state", "norm_gate", "out"), "n"),
    "conv_state": "ncw",
}


def bind(row: Row, spec: KdaShape, target: Target) -> TritonStep:
    return TritonStep(row.params, batch_invariant=spec.batch_invariant)


class TritonStep:
    """One launch for one token of each row.

    A program has a head's state, or ``block_v`` rows of it where neither convolution nor norm
    needs the head as a whole. ``pdl_prefetch_safe`` is without effect: no PDL here.
    """

    def __init__(self, params: FusedStepParams, *, batch_invariant: bool = False) -> None:
        self._kernel = functools.cache(functools.partial(step_kernel, params))
        self._batch_invariant = batch_invariant

    def prepare(self, call: DecodeCall) -> Callable[[DecodeCall], None]:
        spec, split = TokenSpec.of(call.tokens, call.gate), call.conv is None and call.norm is None
        kernel, value_blocks = self._kernel(spec, split)
        rows, value_heads = call.tokens.v.shape[:2]
        grid = value_blocks * value_heads * rows, 1, 1
        return functools.partial(_run, kernel, grid, self._batch_invariant)


def _run(kernel: KernelLaunch, grid: Grid, batch_invariant: bool, call: DecodeCall) -> None:
    tokens, gate, state, conv, norm, out, _ = call
    if batch_invariant:
        tokens = in_one_layout(tokens)
    q, k, v, g, beta = tokens[:5]
    pool, indices = state.write, state.indices
    assert pool is not None and indices is not None
    conv_state, conv_weight, conv_bias = conv or NO_CONV
    norm_weight, norm_gate, eps = norm or NO_NORM
    kernel.launch(
        grid,
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        a_log_ptr=gate.a_log,
        dt_bias_ptr=gate.dt_bias,
        state_ptr=pool,
        state_indices_ptr=indices,
        conv_state_ptr=conv_state,
        conv_weight_ptr=conv_weight,
        conv_bias_ptr=conv_bias,
        norm_weight_ptr=norm_weight,
        norm_gate_ptr=norm_gate,
        out_ptr=out,
        null_slot=state.null_slot,
        lower_bound=gate.lower_bound,
        scale=tokens.scale,
        eps=eps,
        HV=v.shape[1],
    )


def blocks_axis() -> int:
    """The axis of K's blocks in a head's state, by Triton's release
    (`kda_backend.kernels.functions.delta`)."""
    import triton

    return int(triton.__version__.startswith("3.6."))


def step_constexprs(
    params: FusedStepParams | FusedVerifyParams | FusedRecordsParams, spec: TokenSpec
) -> dict[str, Any]:
    """The constexprs that the decode step and the verifications have in common."""
    import triton

    block_k = triton.next_power_of_2(spec.key_dim)
    return spec.constexprs() | {
        "BLOCK_K": block_k,
        "K_INNER": min(params.k_inner, block_k),
        "KB_AXIS": blocks_axis(),
        "BLOCK_V": triton.next_power_of_2(spec.value_dim),
    }


def step_kernel(params: FusedStepParams, spec: TokenSpec, split: bool) -> tuple[KernelLaunch, int]:
    """The kernel, as its path launches it, and its programs per head."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.decode_step import decode_step_kernel

    constexprs = step_constexprs(params, spec)
    warps = params.num_warps
    if split:
        constexprs["BLOCK_V"] = min(params.block_v, constexprs["BLOCK_V"])
        warps = params.split_num_warps
    constexprs["EVICTION"] = params.eviction
    launch = KernelLaunch(decode_step_kernel, constexprs, {"num_warps": warps}, axes=AXES)
    return launch, triton.cdiv(spec.value_dim, constexprs["BLOCK_V"])
