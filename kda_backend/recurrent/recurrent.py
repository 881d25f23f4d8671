"""The recurrence in Triton: sequences short enough to walk token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kda_backend.contract.calls import RecurrentCall
from kda_backend.launch_params import RecurrentParams
from kda_backend.token_spec import TokenSpec

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape


def bind(row: Row, spec: KdaShape, target: Target) -> Callable[[RecurrentCall], None]:
    return functools.partial(recurrent, row)


def recurrent(
    row: Row,
    call: RecurrentCall,
) -> None:
    """One launch: each program walks the tokens of one sequence for ``block_v`` value rows."""
    tokens, gate, cu_seqlens, state, out = call
    q, k, v, g, beta = tokens[:5]
    batch, length = q.shape[:2]
    value_heads = v.shape[2]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    spec = TokenSpec.of(tokens, gate)
    kernel, value_blocks = _recurrent_kernel(row, spec, state.v_first)
    kernel.launch(
        (value_blocks * value_heads * sequences, 1, 1),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        a_log_ptr=gate.a_log,
        dt_bias_ptr=gate.dt_bias,
        o_ptr=out,
        state_in_ptr=state.read,
        state_out_ptr=state.write,
        state_indices_ptr=state.indices,
        has_initial_state_ptr=state.has_initial,
        cu_seqlens_ptr=cu_seqlens,
        tokens_per_sequence=length,
        lower_bound=gate.lower_bound,
        scale=tokens.scale,
        HV=value_heads,
    )


@functools.cache
def _recurrent_kernel(
    row: Row,
    spec: TokenSpec,
    v_first: bool,
) -> tuple[KernelLaunch, int]:
    """The kernel of one model on one path, and its programs per head; the imports need triton."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels.recurrent import recurrent_kernel

    params: RecurrentParams = row.params
    block_v = min(params.block_v, triton.next_power_of_2(spec.value_dim))
    constexprs = spec.constexprs()
    constexprs |= {"BLOCK_K": triton.next_power_of_2(spec.key_dim), "BLOCK_V": block_v}
    options = {"num_warps": params.num_warps}
    axes = dict.fromkeys(("q", "k", "v", "g", "beta", "o"), ".th")
    axes |= dict.fromkeys(("state_in", "state_out"), "nhvk" if v_first else "nhkv")
    launch = KernelLaunch(recurrent_kernel, constexprs, options, axes=axes)
    return launch, triton.cdiv(spec.value_dim, block_v)
