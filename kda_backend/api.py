"""The public operators: validate, look the path up, run its pipeline."""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_core.contracts import once
from kda_backend.contract.inputs import (
    GATE_BOUNDED,
    StateInputs,
    TokenKinds,
    check_initial_state,
    check_inputs,
    check_output,
    check_slots,
    check_snapshots,
    check_state_pool,
    state_shape,
    token_inputs,
    wants_grad,
)
from kda_backend.decode import recurrent as decode
from kda_backend.prefill import two_stage as prefill
from kda_backend.scratch import Workspace
from kda_backend.selection import KdaPlan, KdaShape, plan_of_call
from kda_backend.step_plan import (
    CHUNK,
    ChunkMetadata,
    build_metadata,
    check_cu_seqlens,
    equal_length_metadata,
)


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
    state_pool: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    snapshot_chunks: torch.Tensor | None = None,
    snapshots: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    metadata: ChunkMetadata | None = None,
    workspace: Workspace | None = None,
    plan: KdaPlan | None = None,
) -> (
    tuple[torch.Tensor, torch.Tensor | None]
    | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
):
    """Chunked prefill of Kimi Delta Attention. Drop-in for ``fla.ops.kda.chunk_kda`` 0.6.0 in
    inference: same names, shapes, defaults and return values.

    For each token, with ``S`` the state of one value head:
    ``S = S diag(decay); S += beta (v - S k) k^T; o = scale S q``.

    Nothing on a GPU is read back by the host, so the call can be captured in a CUDA graph.

    Args:
        q, k: ``[B, T, H, K]`` bf16, fp16 or fp32; ``K`` up to 256.
        v: ``[B, T, HV, V]``, q's dtype; ``HV`` a multiple of ``H``, ``V`` up to 256.
            16-bit inputs are multiplied in fp16, so values and states beyond 65,504 in magnitude
            overflow.
        g: ``[B, T, HV, K]`` bf16, fp16 or fp32: natural log of the decay (<= 0), or the raw gate
            with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]`` bf16, fp16 or fp32: step size, or its logit with
            ``use_beta_sigmoid_in_kernel``.
        scale: factor of the output, by default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` fp32 (``[N, HV, V, K]`` with ``state_v_first``), or
            ``None`` for zeros. ``N`` is ``B``, or the number of sequences with ``cu_seqlens``.
        output_final_state: return the state behind each sequence, laid out like the initial one.
        use_qk_l2norm_in_kernel: normalise q and k over K first.
        use_gate_in_kernel: decay is ``exp(-exp(A_log) softplus(g + dt_bias))``, or with
            ``lower_bound`` ``exp(lower_bound sigmoid(exp(A_log) (g + dt_bias)))``.
        use_beta_sigmoid_in_kernel: step size is ``sigmoid(beta)``, twice that with
            ``allow_neg_eigval``.
        safe_gate: accepted; asks for ``lower_bound`` together with ``use_gate_in_kernel``. The
            kernels are exact for any gate.
        lower_bound: in ``[-5, 0)``.
        disable_recompute, use_graph: accepted; training memory and graph capture need nothing here.
        return_intermediate_states: return also the state before each chunk,
            ``[B, chunks, HV, K, V]`` in k's dtype (``B = 1`` and all chunks with ``cu_seqlens``).
        state_v_first: states are ``[..., V, K]`` instead of ``[..., K, V]``.
        cu_seqlens: ``[N + 1]`` int32 or int64, offsets of sequences packed in one row (``B = 1``).
            Values in host memory are checked; values on a GPU are trusted.
        cu_seqlens_cpu: the same in host memory: exact launch sizes.
        cp_context: must be ``None``; context parallelism is for training.
        max_num_seqs: with ``use_graph``, the number of sequences ``cu_seqlens`` is padded to.
        A_log: ``HV`` elements; dt_bias: ``HV * K`` elements.
        chunk_size: 64, or 32 where no intermediate states are asked for (the result is the same).
        state_pool: ``[slots, HV, V, K]`` fp32 or bf16, read and written in place at
            ``state_indices`` instead of ``initial_state``; slots may be further apart than
            ``HV * V * K`` elements. No other slot is touched.
        state_indices: ``[N]`` int32; -1 marks a padded row, which starts from zero and writes no
            state. Slots must differ.
        has_initial_state: ``[N]`` bool; where false, a row starts from zero whatever its slot
            holds.
        snapshot_chunks: ``[N, S]`` int32: write the state after so many chunks of the sequence to
            ``snapshots [N, S, HV, V, K]`` fp32; -1, or more than it has, writes nothing.
        out: where to write the output; may alias v.
        metadata: of this step (``build_metadata``), instead of ``cu_seqlens``.
        workspace: scratch memory to reuse; by default the call allocates its own.
        plan: paths chosen at model load (``kda_backend.selection.select``).

    Returns:
        ``(o, final_state)`` with ``o [B, T, HV, V]`` in q's dtype and ``final_state`` fp32 or
        ``None``; with ``return_intermediate_states`` ``(o, final_state, chunk_states)``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if cp_context is not None:
        raise ValueError("cp_context must be None (context parallelism is for training)")
    if chunk_size != CHUNK and (chunk_size != 32 or return_intermediate_states):
        raise ValueError(f"chunk_size must be 64, or 32 without states, got {chunk_size}")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError("lower_bound must be given with safe_gate=True, got None")
    if metadata is not None and cu_seqlens is not None:
        raise ValueError("metadata replaces cu_seqlens: give either")
    sequences = _num_sequences(q, cu_seqlens) if metadata is None else metadata.num_sequences
    tensors = _Tensors(
        q, k, v, g, beta, A_log, dt_bias, out, initial_state, state_pool, state_indices,
        has_initial_state, snapshot_chunks, snapshots,
    )  # fmt: skip
    options = _Options(
        None if scale is None else float(scale),
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        None if lower_bound is None else float(lower_bound),
        output_final_state,
        state_v_first,
        sequences,
        plan,
        wants_grad(q, k, v, g, beta),
    )
    kinds, plan = _check(tensors, options)
    if metadata is None:
        metadata = _metadata(q, plan, cu_seqlens, cu_seqlens_cpu)
    else:
        check_metadata(metadata, q, plan)
    if use_graph and max_num_seqs is not None and max_num_seqs != sequences:
        raise ValueError(f"cu_seqlens must have {max_num_seqs + 1} entries, got {sequences + 1}")
    x = token_inputs(q, k, v, g, beta, A_log, dt_bias, kinds)
    state = _state(tensors, options)

    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    path = plan.prefill.lookup(metadata.num_chunks * v.shape[2])
    chunk_states = None
    if return_intermediate_states:
        tail = (v.shape[2], q.shape[3], v.shape[3])
        if state.v_dim == 2:
            tail = (v.shape[2], v.shape[3], q.shape[3])
        chunk_states = k.new_empty(metadata.num_chunks, *tail)
    if workspace is None:
        workspace = Workspace(q.device)
    prefill.PIPELINES[path.name](path, x, metadata, state, out, chunk_states, workspace)
    final_state = None if state_pool is not None else state.write
    if chunk_states is None:
        return out, final_state
    rows = q.shape[0] if cu_seqlens is None else 1
    chunks = metadata.num_chunks // max(rows, 1)
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
    state_pool: torch.Tensor | None = None,
    state_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: KdaPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention token by token, for decode. Drop-in for
    ``fla.ops.kda.fused_recurrent_kda`` 0.6.0.

    Arguments, shapes and errors as :func:`chunk_kda`. Decode of N sequences is ``B = N, T = 1``,
    or one packed row with ``cu_seqlens``.

    Returns:
        ``(o, final_state)``: ``o [B, T, HV, V]`` in v's dtype, ``final_state`` fp32 or ``None``.
    """
    sequences = _num_sequences(q, cu_seqlens)
    tensors = _Tensors(
        q, k, v, g, beta, A_log, dt_bias, out, initial_state, state_pool, state_indices,
        has_initial_state, None, None,
    )  # fmt: skip
    options = _Options(
        None if scale is None else float(scale),
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        None if lower_bound is None else float(lower_bound),
        output_final_state,
        state_v_first,
        sequences,
        plan,
        wants_grad(q, k, v, g, beta),
    )
    kinds, plan = _check(tensors, options)
    if cu_seqlens is not None:
        _check_packed(q, cu_seqlens)
        if cu_seqlens.device.type == "cpu":
            build_metadata(cu_seqlens, q.shape[1], chunk_table=False)
    x = token_inputs(q, k, v, g, beta, A_log, dt_bias, kinds)
    state = _state(tensors, options)
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    path = plan.recurrent.lookup(sequences * v.shape[2])
    decode.PIPELINES[path.name](path, x, cu_seqlens, state, out)
    return out, None if state_pool is not None else state.write


class _Tensors(NamedTuple):
    """A call's tensors, but those that say where sequences begin."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    out: torch.Tensor | None
    initial_state: torch.Tensor | None
    state_pool: torch.Tensor | None
    state_indices: torch.Tensor | None
    has_initial_state: torch.Tensor | None
    snapshot_chunks: torch.Tensor | None
    snapshots: torch.Tensor | None


class _Options(NamedTuple):
    """The rest of what is checked with them."""

    scale: float | None
    l2norm: bool
    use_gate: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    lower_bound: float | None
    output_final_state: bool
    state_v_first: bool
    num_sequences: int
    plan: KdaPlan | None
    wants_grad: bool


@once
def _check(t: _Tensors, options: _Options) -> tuple[TokenKinds, KdaPlan]:
    """All but values: (what the inputs are, the plan that serves them)."""
    kinds = check_inputs(
        t.q,
        t.k,
        t.v,
        t.g,
        t.beta,
        scale=options.scale,
        a_log=t.a_log,
        dt_bias=t.dt_bias,
        use_gate=options.use_gate,
        lower_bound=options.lower_bound,
        use_beta_sigmoid=options.use_beta_sigmoid,
        allow_neg_eigval=options.allow_neg_eigval,
        l2norm=options.l2norm,
        wants_grad=options.wants_grad,
    )
    plan = check_plan(t.q, t.v, t.g, kinds.gate, options.plan)
    if t.out is not None:
        check_output(t.out, t.v)
    if (t.snapshot_chunks is None) != (t.snapshots is None):
        raise ValueError("snapshot_chunks and snapshots must be given together")
    if t.snapshot_chunks is not None and t.snapshots is not None:
        check_snapshots(t.snapshot_chunks, t.snapshots, t.q, t.v, options.num_sequences)
    sequences = options.num_sequences
    if t.state_pool is not None:
        if t.initial_state is not None or options.output_final_state:
            raise ValueError(
                "state_pool replaces initial_state and output_final_state: give either"
            )
        check_state_pool(t.state_pool, t.state_indices, t.has_initial_state, t.q, t.v, sequences)
    elif t.state_indices is not None or t.has_initial_state is not None:
        raise ValueError("state_indices and has_initial_state need a state_pool")
    elif t.initial_state is not None:
        check_initial_state(t.initial_state, t.q, t.v, sequences, options.state_v_first)
    return kinds, plan


def check_plan(
    q: torch.Tensor, v: torch.Tensor, g: torch.Tensor, gate: int, plan: KdaPlan | None
) -> KdaPlan:
    """The plan, which must be for such inputs, or the device's own for ``None``."""
    heads, key_dim = q.shape[2:]
    value_heads, value_dim = v.shape[2:]
    bounded = gate == GATE_BOUNDED
    shape = KdaShape(heads, value_heads, key_dim, value_dim, bounded, q.dtype, g.dtype)
    return plan_of_call(plan, q.device, shape)


def _num_sequences(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> int:
    if cu_seqlens is None:
        return q.shape[0] if q.dim() else 0
    check_cu_seqlens("cu_seqlens", cu_seqlens)
    return cu_seqlens.shape[0] - 1


def _check_packed(q: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    if q.shape[0] != 1:
        raise ValueError(f"q must have batch size 1 with cu_seqlens, got {q.shape[0]}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on {q.device}, got {cu_seqlens.device}")


def check_metadata(metadata: ChunkMetadata, q: torch.Tensor, plan: KdaPlan) -> None:
    """It must be of these tokens, on their device, with the tables that the plan's kernels read."""
    batch, length, _, _ = q.shape
    if metadata.num_tokens != batch * length:
        raise ValueError(f"metadata is of {metadata.num_tokens} tokens, q has {batch * length}")
    if metadata.cu_seqlens.device != q.device:
        got = metadata.cu_seqlens.device
        raise ValueError(f"metadata must be on {q.device}, got {got}")
    if metadata.chunk_table is None and plan.target.vendor != "cpu":
        raise ValueError("metadata must have a chunk table for the kernels, got none")


def _metadata(
    q: torch.Tensor,
    plan: KdaPlan,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_cpu: torch.Tensor | None,
) -> ChunkMetadata:
    tables = plan.target.vendor != "cpu"
    if cu_seqlens is None:
        return equal_length_metadata(q.shape[0], q.shape[1], q.device, tables)
    _check_packed(q, cu_seqlens)
    return build_metadata(cu_seqlens, q.shape[1], cu_seqlens_cpu=cu_seqlens_cpu, chunk_table=tables)


def _state(t: _Tensors, options: _Options) -> StateInputs:
    """Where checked states are read and written."""
    if t.state_pool is not None and t.state_indices is not None:
        check_slots(t.state_indices, t.state_pool)
        return StateInputs(
            t.state_pool,
            t.state_pool,
            2,
            3,
            t.state_indices,
            t.has_initial_state,
            t.snapshot_chunks,
            t.snapshots,
        )
    v_first, write = options.state_v_first, None
    if options.output_final_state:
        shape = state_shape(t.q, t.v, options.num_sequences, v_first)
        write = torch.empty(shape, dtype=torch.float32, device=t.q.device)
    return StateInputs(
        t.initial_state,
        write,
        2 if v_first else 3,
        3 if v_first else 2,
        snapshot_chunks=t.snapshot_chunks,
        snapshots=t.snapshots,
    )
