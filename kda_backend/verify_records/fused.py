"""The verification of drafts from records in one Triton launch, and their fold in another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from kda_backend.contract.calls import CommitCall, VerifyCall
from kda_backend.decode_step.fused import NO_CONV, NO_NORM, blocks_axis, step_constexprs
from kda_backend.launch_params import FusedRecordsParams, FusedRecordsSm90Params
from kda_backend.spec import Gate
from kda_backend.token_spec import TokenSpec, has_ptx, in_one_layout

if TYPE_CHECKING:
    from backend_core.launch.triton import KernelLaunch
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape

AXES = {
    **dict.fromkeys(("q", "k", "v", "g", "beta", "norm_gate", "out"), "t"),
    **dict.fromkeys(("state", "correction", "key_gate"), "n"),
    "conv_state": "ncw",
    "windows": "ntcw",
}
COMMIT_AXES = dict.fromkeys(("state", "correction", "key_gate"), "ln")


def bind(row: Row, spec: KdaShape, target: Target) -> TritonDraftRecords:
    return TritonDraftRecords(row.params, batch_invariant=spec.batch_invariant)


class RecordsFold:
    """One launch for the fold of all layers, where a program has some value rows of a head."""

    def __init__(self, params: FusedRecordsParams | FusedRecordsSm90Params) -> None:
        self._commit = functools.cache(functools.partial(commit_records_kernel, params))

    def commit(self, call: CommitCall) -> None:
        layers, _, heads, value_dim, key_dim = call.states.shape
        offsets = None
        if call.apart is not None:
            layers, offsets = len(call.apart.pools), call.apart.offsets
        fast_math = has_ptx(call.states)
        kernel, blocks = self._commit(key_dim, value_dim, call.gate.kind, fast_math)
        kernel.launch(
            (blocks * heads * call.slots.shape[0], layers, 1),
            state_ptr=call.states,
            state_indices_ptr=call.slots,
            correction_ptr=call.records.correction,
            key_gate_ptr=call.records.key_gate,
            record_indices_ptr=call.indices,
            num_accepted_ptr=call.num_accepted,
            written_slots_ptr=call.written_slots,
            kept_slots_ptr=call.kept_slots,
            kept_counts_ptr=call.kept_counts,
            a_log_ptr=call.gate.a_log,
            dt_bias_ptr=call.gate.dt_bias,
            layer_offsets_ptr=offsets,
            max_tokens=call.records.correction.shape[3],
            null_slot=call.null_slot,
            lower_bound=call.gate.lower_bound,
            HV=heads,
        )


class TritonDraftRecords(RecordsFold):
    """One launch for a draft of each sequence, where a program has the state of a head."""

    def __init__(self, params: FusedRecordsParams, *, batch_invariant: bool = False) -> None:
        super().__init__(params)
        self._batch_invariant = batch_invariant
        self._verify = functools.cache(functools.partial(verify_records_kernel, params))

    def prepare(self, call: VerifyCall) -> Callable[[VerifyCall], None]:
        kernel = self._verify(TokenSpec.of(call.tokens, call.gate), call.draft.by_norm)
        return functools.partial(_run, kernel, self._batch_invariant)


def _run(kernel: KernelLaunch, batch_invariant: bool, call: VerifyCall) -> None:
    tokens, gate, state, draft, shape, conv, norm, out = call
    if batch_invariant:
        tokens = in_one_layout(tokens)
    q, k, v, g, beta = tokens[:5]
    num_tokens, value_heads = v.shape[:2]
    conv_state, conv_weight, conv_bias = conv or NO_CONV
    norm_weight, norm_gate, eps = norm or NO_NORM
    kernel.launch(
        (value_heads * shape.num_sequences, 1, 1),
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        g_ptr=g,
        beta_ptr=beta,
        a_log_ptr=gate.a_log,
        dt_bias_ptr=gate.dt_bias,
        state_ptr=state.write,
        state_indices_ptr=state.indices,
        correction_ptr=draft.correction,
        key_gate_ptr=draft.key_gate,
        record_indices_ptr=draft.indices,
        num_accepted_ptr=draft.num_accepted,
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
        lower_bound=gate.lower_bound,
        scale=tokens.scale,
        eps=eps,
        HV=value_heads,
    )


def verify_records_kernel(
    params: FusedRecordsParams, spec: TokenSpec, by_norm: bool
) -> KernelLaunch:
    """The kernel of the verification, as its path launches it; ``by_norm``: of `Records`."""
    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels import verify_records

    constexprs = step_constexprs(params, spec) | {"BY_NORM": by_norm}
    options = {"num_warps": params.num_warps}
    return KernelLaunch(verify_records.verify_records_kernel, constexprs, options, axes=AXES)


def commit_records_kernel(
    params: FusedRecordsParams | FusedRecordsSm90Params,
    key_dim: int,
    value_dim: int,
    gate: Gate,
    fast_math: bool,
) -> tuple[KernelLaunch, int]:
    """The kernel of the fold, as its path launches it, and its programs per head."""
    import triton

    from backend_core.launch.triton import KernelLaunch
    from kda_backend.kernels import commit_records

    block_k = triton.next_power_of_2(key_dim)
    block_v = min(params.fold_block_v, triton.next_power_of_2(value_dim))
    constexprs = {
        "K": key_dim,
        "V": value_dim,
        "BLOCK_K": block_k,
        "K_INNER": min(params.k_inner, block_k),
        "KB_AXIS": blocks_axis(),
        "BLOCK_V": block_v,
        "GATE": int(gate),
        "FAST_MATH": fast_math,
    }
    options = {"num_warps": params.fold_num_warps}
    kernel = commit_records.commit_records_kernel
    launch = KernelLaunch(kernel, constexprs, options, axes=COMMIT_AXES)
    return launch, triton.cdiv(value_dim, block_v)
