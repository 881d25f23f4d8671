"""The public operators on sequences: chunked prefill and the recurrence.

Each turns its arguments into the typed values of `contract.values`, checks them and runs the path
for its grid.
"""

from __future__ import annotations

import warnings

import torch

from backend_core.launch.streams import is_elsewhere, run_there
from kda_backend.contract.sequences import (
    check_packed_row,
    check_sequences,
    check_step_plan,
    packed,
    packed_rows,
)
from kda_backend.contract.states import check_slots
from kda_backend.contract.tokens import refuse_gradients
from kda_backend.contract.values import (
    GateSpec,
    PrefillCall,
    RecurrentCall,
    StateRef,
    TokenInputs,
    beta_kind_of,
)
from kda_backend.prefill.paths import path_of
from kda_backend.scratch import Scratch, scratch_of_call
from kda_backend.selection import KdaSelection
from kda_backend.spec import CHUNK
from kda_backend.step_plan import (
    StepPlan,
    build_step_plan,
    check_cu_seqlens,
    plan_of_rows,
)

Result = tuple[torch.Tensor, torch.Tensor | None]
ResultWithStates = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK,
    transpose_state_layout: bool | None = None,
    state_pool: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    snapshot_chunks: torch.Tensor | None = None,
    snapshots: torch.Tensor | None = None,
    snapshot_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    step_plan: StepPlan | None = None,
    scratch: Scratch | None = None,
    selection: KdaSelection | None = None,
) -> Result | ResultWithStates:
    """Chunked prefill of Kimi Delta Attention. Drop-in for ``fla.ops.kda.chunk_kda`` 0.6.0 in
    inference: same names, shapes, defaults and return values.

    For each token, with ``S`` the state of one value head:
    ``S = S diag(decay); S += beta (v - S k) k^T; o = scale S q``.

    Nothing on a GPU is read back by the host, so the call can be captured in a CUDA graph.
    :func:`fused_recurrent_kda` describes the arguments that both functions have: tokens, gate and
    states. The others are:

    Args:
        safe_gate: accepted; requires ``lower_bound`` together with ``use_gate_in_kernel``. The
            kernels are exact for any gate.
        disable_recompute, use_graph: accepted for compatibility. Training is not supported, and
            graph capture needs no preparation.
        return_intermediate_states: also return the state before each chunk,
            ``[B, chunks, HV, K, V]`` in k's dtype; with ``cu_seqlens`` or a plan ``B`` is 1 and
            the chunks of all sequences follow one another. If the host does not know the lengths,
            the tensor has room for the chunks of any lengths, and the unused ones at its end hold
            arbitrary values; with ``cu_seqlens_cpu`` there are none.
        cu_seqlens_cpu: ``cu_seqlens`` in host memory, which makes launch sizes exact.
        cp_context: must be ``None``; context parallelism is for training.
        max_num_seqs: with ``use_graph``, the number of sequences ``cu_seqlens`` is padded to.
        chunk_size: 64, or 32 without ``return_intermediate_states``; the result is the same.
        snapshot_chunks: ``[N, S]`` int32: numbers of chunks. The state of sequence n after
            ``snapshot_chunks[n, s]`` chunks is written to ``snapshots[n, s]``; for -1, or more
            chunks than the sequence has, nothing is written.
        snapshots: ``[N, S, HV, V, K]`` fp32, for ``snapshot_chunks``. With ``snapshot_indices`` it
            is a pool ``[slots, HV, V, K]`` fp32, which may be ``state_pool``; slots may be further
            apart than ``HV * V * K`` elements.
        snapshot_indices: ``[N, S]`` int32: the slot of the pool for each of these states; -1 writes
            nothing. Slots must differ, and none may be one that another sequence of the call has
            in ``state_indices``. If it is the sequence's own slot, the sequence's final state
            remains there.
        step_plan: the plan of this step (``build_step_plan``), instead of ``cu_seqlens``.
        scratch: scratch memory to reuse; by default the call allocates its own.

    Returns:
        ``(o, final_state)``: ``o [B, T, HV, V]`` in q's dtype, ``final_state`` fp32 or ``None``.
        With ``return_intermediate_states`` these states are the third value.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if is_elsewhere(q):
        return run_there(q, chunk_kda, locals())
    _check_options(cp_context, chunk_size, return_intermediate_states)
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound must be given with safe_gate=True, got None")
    beta_kind = beta_kind_of(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tokens = TokenInputs.of((q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, beta_kind)
    gate = GateSpec.of(use_gate_in_kernel, A_log, dt_bias, lower_bound)
    v_first = _v_first(state_v_first, transpose_state_layout)
    state = StateRef.of(
        functional=(initial_state, output_final_state, v_first),
        pool=(state_pool, state_indices, has_initial_state),
        snapshots=(snapshot_chunks, snapshots, snapshot_indices),
    )
    padded = max_num_seqs if use_graph else None
    sequences = _num_sequences(q, cu_seqlens, step_plan, padded)
    scratch = scratch_of_call(scratch, q.device)
    selection, is_packed, out_packed, kept = check_sequences(
        tokens, gate, state, sequences, out, selection
    )
    rows = q.shape[0] if cu_seqlens is None and step_plan is None else 1
    step_plan = _step_plan(q, cu_seqlens, cu_seqlens_cpu, step_plan, selection)
    tokens, state = _ready(tokens, gate, state, is_packed, sequences, output_final_state)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    chunk_states = None
    if return_intermediate_states:
        chunk_states = k.new_empty(state.shape(tokens, step_plan.num_chunks))
    written = out if out_packed else packed_rows(out)
    run = path_of(selection, tokens, step_plan, state)
    run(PrefillCall(tokens, gate, step_plan, state, written, chunk_states, scratch, kept))
    final_state = state.write if output_final_state else None
    if chunk_states is None:
        return out, final_state
    chunks = step_plan.num_chunks // max(rows, 1)
    return out, final_state, chunk_states.view(rows, chunks, *chunk_states.shape[1:])


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    state_pool: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    selection: KdaSelection | None = None,
) -> Result:
    """Kimi Delta Attention token by token, for decode. Drop-in for
    ``fla.ops.kda.fused_recurrent_kda`` 0.6.0: same names, shapes, defaults and return values.

    Decode of N sequences is ``B = N, T = 1``, or one packed row with ``cu_seqlens``.

    Args:
        q, k: ``[B, T, H, K]`` bf16, fp16 or fp32; ``K`` up to 256.
        v: ``[B, T, HV, V]``, q's dtype; ``HV`` a multiple of ``H``, ``V`` up to 256.
            :func:`chunk_kda` multiplies 16-bit inputs in fp16, so values and states beyond 65,504
            in magnitude overflow there.
        g: ``[B, T, HV, K]`` bf16, fp16 or fp32: natural log of the decay (<= 0), or the raw gate
            with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]`` bf16, fp16 or fp32: step size, or its logit with
            ``use_beta_sigmoid_in_kernel``.
        A_log: ``HV`` elements; dt_bias: ``HV * K`` elements.
        scale: factor of the output, by default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` fp32 (``[N, HV, V, K]`` with ``state_v_first``), or
            ``None`` for zeros. ``N`` is ``B``, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the state after each sequence, laid out like the initial one.
        use_qk_l2norm_in_kernel: normalise q and k over K first.
        use_gate_in_kernel: decay is ``exp(-exp(A_log) softplus(g + dt_bias))``, or with
            ``lower_bound`` (in ``[-5, 0)``) ``exp(lower_bound sigmoid(exp(A_log) (g + dt_bias)))``.
        use_beta_sigmoid_in_kernel: step size is ``sigmoid(beta)``, twice that with
            ``allow_neg_eigval``.
        state_v_first: states are ``[..., V, K]`` instead of ``[..., K, V]``;
            ``transpose_state_layout`` is its deprecated name.
        cu_seqlens: ``[N + 1]`` int32 or int64, offsets of sequences packed in one row (``B = 1``).
            Values in host memory are checked; values on a GPU are trusted.
        state_pool: ``[slots, HV, V, K]`` fp32 or bf16, read and written in place at
            ``state_indices`` instead of ``initial_state``; slots may be further apart than
            ``HV * V * K`` elements. No other slot is touched.
        state_indices: ``[N]`` int32; -1 marks a padded row, which starts from zero and writes no
            state. Slots must differ.
        has_initial_state: ``[N]`` bool; where false, a row starts from zero whatever its slot
            holds.
        out: ``[B, T, HV, V]``, where to write the output; may alias v.
        selection: the paths that were chosen at model load (``kda_backend.select``); by default
            those for this device and shape.

    Returns:
        ``(o, final_state)``: ``o [B, T, HV, V]`` in v's dtype, ``final_state`` fp32 or ``None``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if is_elsewhere(q):
        return run_there(q, fused_recurrent_kda, locals())
    beta_kind = beta_kind_of(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tokens = TokenInputs.of((q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, beta_kind)
    gate = GateSpec.of(use_gate_in_kernel, A_log, dt_bias, lower_bound)
    v_first = _v_first(state_v_first, transpose_state_layout)
    state = StateRef.of(
        functional=(initial_state, output_final_state, v_first),
        pool=(state_pool, state_indices, has_initial_state),
    )
    sequences = _num_sequences(q, cu_seqlens, None)
    selection, is_packed, out_packed, _ = check_sequences(
        tokens, gate, state, sequences, out, selection
    )
    if cu_seqlens is not None:
        check_packed_row(q, cu_seqlens)
        if cu_seqlens.device.type == "cpu":
            build_step_plan(cu_seqlens, q.shape[1], chunk_table=False)  # checks the values
    tokens, state = _ready(tokens, gate, state, is_packed, sequences, output_final_state)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    written = out if out_packed else packed_rows(out)
    run = selection.recurrent.run(sequences * v.shape[2])
    run(RecurrentCall(tokens, gate, cu_seqlens, state, written))
    return out, state.write if output_final_state else None


def _v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """FLA's ``state_v_first``, or the value of its deprecated name, as FLA 0.6.0 takes it."""
    if transpose_state_layout is None:
        return state_v_first
    if state_v_first:
        raise ValueError(
            "Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`."
        )
    warnings.warn(
        "`transpose_state_layout` is deprecated and renamed to `state_v_first`.",
        DeprecationWarning,
        stacklevel=3,
    )
    return transpose_state_layout


def _check_options(cp_context: None, chunk_size: int, return_intermediate_states: bool) -> None:
    """FLA's options of which not every value is served."""
    if cp_context is not None:
        raise ValueError("cp_context must be None (context parallelism is for training)")
    if chunk_size not in (32, CHUNK):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}.")
    if chunk_size != CHUNK and return_intermediate_states:
        raise ValueError(
            f"`chunk_size` must be 64 with return_intermediate_states=True, got {chunk_size}"
        )


def _num_sequences(
    q: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    step_plan: StepPlan | None,
    padded: int | None = None,
) -> int:
    """Of a call; ``padded`` is what FLA's caller says that ``cu_seqlens`` is padded to."""
    if step_plan is not None:
        if cu_seqlens is not None:
            raise ValueError("step_plan replaces cu_seqlens: give either")
        return step_plan.num_sequences
    if cu_seqlens is None:
        return q.shape[0] if q.dim() else 0
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    sequences = cu_seqlens.shape[0] - 1
    if padded not in (None, sequences):
        raise ValueError(f"cu_seqlens must have {padded + 1} entries, got {sequences + 1}")
    return sequences


def _step_plan(
    q: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
    given: StepPlan | None,
    selection: KdaSelection,
) -> StepPlan:
    """The plan that a call brings, or a new one."""
    if given is not None:
        check_step_plan(given, q, selection)
        return given
    tables = selection.target.vendor != "cpu"
    if cu_seqlens is None:
        return plan_of_rows(q, tables)
    check_packed_row(q, cu_seqlens)
    return build_step_plan(
        cu_seqlens, q.shape[1], cu_seqlens_cpu=cu_seqlens_cpu, chunk_table=tables
    )


def _ready(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    is_packed: bool,
    sequences: int,
    final: bool,
) -> tuple[TokenInputs, StateRef]:
    """Packs the tokens and allocates the final state."""
    refuse_gradients(tokens, gate, state)
    check_slots(state)
    if not is_packed:
        tokens = packed(tokens)
    return tokens, state.with_final(tokens, sequences) if final else state
