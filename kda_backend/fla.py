"""Drop-ins for ``fla.ops.kda`` 0.6.0 in inference: its signatures on the typed operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from backend_core.contracts import expect_tensors
from kda_backend.contract.values import LOG_DECAY, GateSpec, StateRef, TokenInputs
from kda_backend.operators import kda_prefill, kda_recurrent
from kda_backend.spec import CHUNK, Beta

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
) -> Result | ResultWithStates:
    """Chunked prefill of Kimi Delta Attention: FLA's names, shapes, defaults and return values.

    For each token, with ``S`` the state of one value head:
    ``S = S diag(decay); S += beta (v - S k) k^T; o = scale S q``.

    :func:`fused_recurrent_kda` describes the arguments that both functions have: tokens, gate and
    states. The others are:

    Args:
        safe_gate: accepted; requires ``lower_bound`` together with ``use_gate_in_kernel``. The
            kernels are exact for any gate.
        disable_recompute, use_graph: accepted for compatibility. Training is not supported. A
            capture needs what every CUDA graph needs, a call before it, in which kernels are
            compiled; no call inside waits for the GPU.
        return_intermediate_states: also return the state before each chunk,
            ``[B, chunks, HV, K, V]`` in k's dtype; with ``cu_seqlens`` ``B`` is 1 and the chunks
            of all sequences follow one another (see ``keeps_chunk_states`` of `kda_prefill`).
        cu_seqlens_cpu: ``cu_seqlens`` in host memory, which makes launch sizes exact.
        cp_context: must be ``None``; context parallelism is for training.
        max_num_seqs: with ``use_graph``, the number of sequences ``cu_seqlens`` is padded to.
        chunk_size: 64, or 32 without ``return_intermediate_states``; the result is the same.

    Returns:
        ``(o, final_state)``: ``o [B, T, HV, V]`` in q's dtype, ``final_state`` fp32 or ``None``.
        With ``return_intermediate_states`` these states are the third value.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if torch.compiler.is_compiling():
        return _untraced(chunk_kda, locals())  # type: ignore[no-any-return]
    v_first = _v_first(state_v_first, transpose_state_layout)
    tokens, gate, state = typed_values(locals(), v_first)
    o, final_state, chunk_states = kda_prefill(
        tokens,
        gate,
        state,
        cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        keeps_chunk_states=return_intermediate_states,
    )
    if chunk_states is None:
        return o, final_state
    rows = q.shape[0] if cu_seqlens is None else 1
    chunks = chunk_states.shape[0] // max(rows, 1)
    return o, final_state, chunk_states.view(rows, chunks, *chunk_states.shape[1:])


def typed_values(call: Mapping[str, Any], v_first: bool) -> tuple[TokenInputs, GateSpec, StateRef]:
    """The arguments of a call of :func:`chunk_kda`, by name, as the operator takes them.

    Args:
        v_first: how its states are laid out.

    Raises:
        ValueError: options that are not served, or that contradict one another.
    """
    _expect_tensors(call)
    chunk_size, uses_gate = call["chunk_size"], call["use_gate_in_kernel"]
    if call["cp_context"] is not None:
        raise ValueError("cp_context must be None (context parallelism is for training)")
    if chunk_size not in (32, CHUNK):
        raise ValueError(f"`chunk_size` must be either 32 or 64 for KDA, got {chunk_size}.")
    if chunk_size != CHUNK and call["return_intermediate_states"]:
        raise ValueError(
            f"`chunk_size` must be 64 with return_intermediate_states=True, got {chunk_size}"
        )
    if call["cu_seqlens"] is None and call["cu_seqlens_cpu"] is not None:
        raise ValueError("cu_seqlens_cpu must be None without cu_seqlens, got a tensor")
    if call["safe_gate"] and uses_gate and call["lower_bound"] is None:
        raise ValueError("lower_bound must be given with safe_gate=True, got None")
    if call["use_graph"] and call["cu_seqlens"] is not None and call["max_num_seqs"] is not None:
        entries, most = call["cu_seqlens"].numel(), call["max_num_seqs"]
        if entries != most + 1:
            raise ValueError(f"cu_seqlens must have {most + 1} entries, got {entries}")
    beta_kind = _beta_kind(call["use_beta_sigmoid_in_kernel"], call["allow_neg_eigval"])
    tokens = TokenInputs.of(
        *(call[name] for name in ("q", "k", "v", "g", "beta")),
        beta_kind=beta_kind,
        l2norm=call["use_qk_l2norm_in_kernel"],
        scale=call["scale"],
    )
    gate = LOG_DECAY
    if uses_gate:
        gate = GateSpec.of(call["A_log"], call["dt_bias"], call["lower_bound"])
    final = call["output_final_state"]
    return tokens, gate, StateRef.functional(call["initial_state"], v_first=v_first, final=final)


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
) -> Result:
    """Kimi Delta Attention token by token, for decode: FLA's names, shapes, defaults and return
    values.

    Decode of N sequences is ``B = N, T = 1``, or one packed row with ``cu_seqlens``.

    Args:
        q, k: ``[B, T, H, K]`` bf16, fp16 or fp32; ``K`` up to 256.
        v: ``[B, T, HV, V]``, q's dtype; ``HV`` a multiple of ``H``, ``V`` up to 256.
            On a GPU :func:`chunk_kda` multiplies 16-bit inputs in fp16: there values and states
            beyond 65,504 in magnitude overflow, below 6e-5 they lose bits and below 3e-8 they
            count as 0, and so do q and k without normalisation.
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
            ``allow_neg_eigval``. Step sizes near 2 with nearly parallel keys magnify roundings,
            which :func:`chunk_kda` has more of: docs/families/kda.md.
        state_v_first: states are ``[..., V, K]`` instead of ``[..., K, V]``;
            ``transpose_state_layout`` is its deprecated name.
        cu_seqlens: ``[N + 1]`` int32 or int64, offsets of sequences packed in one row (``B = 1``).
            Values in host memory are checked; values on a GPU are trusted.

    Returns:
        ``(o, final_state)``: ``o [B, T, HV, V]`` in v's dtype, ``final_state`` fp32 or ``None``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    if torch.compiler.is_compiling():
        return _untraced(fused_recurrent_kda, locals())  # type: ignore[no-any-return]
    _expect_tensors(locals())
    beta_kind = _beta_kind(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    v_first = _v_first(state_v_first, transpose_state_layout)
    o, final_state, _ = kda_recurrent(
        TokenInputs.of(
            q, k, v, g, beta, beta_kind=beta_kind, l2norm=use_qk_l2norm_in_kernel, scale=scale
        ),
        GateSpec.of(A_log, dt_bias, lower_bound) if use_gate_in_kernel else LOG_DECAY,
        StateRef.functional(initial_state, v_first=v_first, final=output_final_state),
        cu_seqlens,
    )
    return o, final_state


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _untraced(operator: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Call an operator as compiled code does: its graph breaks there once, as at FLA's. torch would
    trace checks and launches piece by piece, and make anew what is kept between calls."""
    return operator(**call)


def _expect_tensors(call: Mapping[str, Any]) -> None:
    """Refuse lists and arrays in place of tensors, which other checks would call shapeless."""
    optional = ("A_log", "dt_bias", "initial_state", "cu_seqlens", "cu_seqlens_cpu")
    given = [name for name in optional if call.get(name) is not None]
    expect_tensors(**{name: call[name] for name in ("q", "k", "v", "g", "beta", *given)})


def _beta_kind(use_beta_sigmoid: bool, allow_neg_eigval: bool) -> Beta:
    if use_beta_sigmoid:
        return Beta.TWICE_SIGMOID if allow_neg_eigval else Beta.SIGMOID
    if allow_neg_eigval:
        raise ValueError("allow_neg_eigval=True requires use_beta_sigmoid_in_kernel=True")
    return Beta.GIVEN


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
