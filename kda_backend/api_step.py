"""The public operators of a decode step: one launch from the projections to the gated norm."""

from __future__ import annotations

from dataclasses import replace

import torch

from backend_core.launch.streams import is_elsewhere, run_there
from kda_backend.contract.states import check_rows
from kda_backend.contract.step import (
    check_draft_offsets,
    check_step,
    check_verification,
    is_aligned,
)
from kda_backend.contract.tokens import refuse_gradients
from kda_backend.contract.values import (
    ConvInputs,
    DecodeCall,
    DraftInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
    VerifyCall,
    beta_kind_of,
)
from kda_backend.selection import KdaSelection, selection_for


def kda_decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    null_slot: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
    conv_weight: torch.Tensor | None = None,
    conv_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_gate: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    out: torch.Tensor | None = None,
    pdl_prefetch_safe: bool = False,
    selection: KdaSelection | None = None,
) -> torch.Tensor:
    """One token of each sequence through a KDA layer, from its projections to its output.

    For each row, with x the row's q, k and v and ``S`` the state of one head::

        x   = silu(conv4([window, x]) + bias); the window shifts by one   (with conv_state)
        q, k = l2norm(q), l2norm(k)                                        (if asked for)
        S   = S diag(decay); S += beta (v - S k) k^T
        o   = scale S q
        out = o / sqrt(mean(o^2) + norm_eps) * norm_weight * sigmoid(norm_gate)  (with norm_weight)

    All of it is one kernel launch in fp32 arithmetic; nothing is rounded between its stages.
    Nothing on a GPU is read back by the host, so the call can be captured in a CUDA graph.

    Args:
        q, k: ``[N, H, K]`` bf16, fp16 or fp32; ``K`` up to 128. Heads of a row are adjacent, rows
            may be further apart: views of one packed projection will do.
        v: ``[N, HV, V]``, q's dtype; ``HV`` a multiple of ``H`` (``H`` itself with conv_state),
            ``V`` up to 128.
        g: ``[N, HV, K]``: natural log of the decay (<= 0), or the raw gate with
            ``use_gate_in_kernel``.
        beta: ``[N, HV]``: step size, or its logit with ``use_beta_sigmoid_in_kernel``.
        state_pool: ``[slots, HV, V, K]`` fp32 or bf16, updated in place at ``state_indices``; slots
            may be further apart than ``HV * V * K`` elements. No other slot is touched.
        state_indices: ``[N]`` int32. A negative one marks a padded row, which gets zeros in the
            output and touches no state. Slots of the other rows must differ.
        null_slot: a slot that marks a padded row too (vLLM: 0).
        scale: factor of the output, by default ``K ** -0.5``. On a normed output it has an effect
            only through ``norm_eps``.
        use_qk_l2norm_in_kernel: normalise q and k over K first.
        use_gate_in_kernel: decay is ``exp(-exp(A_log) softplus(g + dt_bias))``, or with
            ``lower_bound`` ``exp(lower_bound sigmoid(exp(A_log) (g + dt_bias)))``.
        use_beta_sigmoid_in_kernel: step size is ``sigmoid(beta)``, twice that with
            ``allow_neg_eigval``.
        lower_bound: in ``[-5, 0)``.
        A_log: ``HV`` elements; dt_bias: ``HV * K`` elements.
        conv_state: ``[slots, C, W]``, any strides: the last inputs of the ``C = 2 H K + HV V``
            channels of q, k and v, oldest first in columns 0 to 2; shifted in place at
            ``state_indices``. A pool that is laid out ``[slots, W, C]`` (vLLM's SD, sglang's) is
            passed as ``pool.transpose(1, 2)``. Without it q, k and v are convolved already.
        conv_weight: ``[C, 4]``; the last tap is for the new token. conv_bias: ``[C]``.
        norm_weight: ``[V]``; norm_gate: ``[N, HV, V]``, the raw gate.
        out: where to write the output, ``[N, HV, V]`` in q's dtype; may alias v.
        pdl_prefetch_safe: a promise that no kernel which is still running writes the pools at
            these slots, ``state_indices`` or a weight, so that they may be read before the previous
            launch has ended. It holds after a projection, and never after another step of the same
            sequences. On Hopper each step lets the next kernel start early, so several steps in a
            row may run at the same time.
        selection: the paths that were chosen at model load (``kda_backend.select``). Unless it was
            made for ``aligned_state=False``, the slots of the pool and ``conv_weight`` must start
            at multiples of 16 bytes on Hopper.

    Returns:
        ``out``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    beta_kind = beta_kind_of(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tokens = TokenInputs.of((q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, beta_kind)
    gate = GateSpec.of(use_gate_in_kernel, A_log, dt_bias, lower_bound)
    state = StateRef.pool(state_pool, state_indices, null_slot=null_slot)
    conv = ConvInputs.of(conv_state, conv_weight, conv_bias)
    norm = NormInputs.of(norm_weight, norm_gate, norm_eps)
    return decode_step(tokens, gate, state, conv, norm, out, selection, pdl_prefetch_safe)


def decode_step(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: torch.Tensor | None,
    selection: KdaSelection | None,
    pdl_prefetch_safe: bool,
) -> torch.Tensor:
    """:func:`kda_decode_step` on the typed values of its arguments: check them and run them."""
    if is_elsewhere(tokens.q):
        return run_there(tokens.q, decode_step, locals())
    chosen, kept = check_step(tokens, gate, state, conv, norm, out, selection)
    refuse_gradients(tokens, gate, state, conv, norm)
    assert state.indices is not None and state.read is not None
    check_rows("state_indices", state.indices, "slot", state.read)
    v = tokens.v
    if selection is None and not is_aligned(state, conv):
        chosen = selection_for(v.device, replace(chosen.shape, aligned_state=False))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device) if out is None else out
    run = kept.get(chosen)
    if run is None:
        run = kept[chosen] = chosen.decode_step.run(v.shape[0] * v.shape[1])
    run(DecodeCall(tokens, gate, state, conv, norm, out, pdl_prefetch_safe, kept))
    return out


def kda_verify_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state_pool: torch.Tensor,
    state_indices: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    intermediate_states: torch.Tensor | None = None,
    intermediate_indices: torch.Tensor | None = None,
    intermediate_conv: torch.Tensor | None = None,
    null_slot: int | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    conv_state: torch.Tensor | None = None,
    conv_weight: torch.Tensor | None = None,
    conv_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_gate: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    out: torch.Tensor | None = None,
    selection: KdaSelection | None = None,
) -> torch.Tensor:
    """Compute the drafted tokens of each sequence one after another and keep the state after each.

    The outputs are those of :func:`kda_decode_step` on every token, one after another. But the last
    accepted state is kept until the engine knows how many tokens of the draft it accepts. A draft
    is a chain of tokens. States are kept in one of two ways:

    With ``intermediate_states`` (sglang) the state is read at ``state_indices [N]`` and neither
    pool is written: the state after token t of sequence n goes to
    ``intermediate_states[intermediate_indices[n], t]``, its convolution window to
    ``intermediate_conv[intermediate_indices[n], t]``.

    With ``num_accepted_tokens`` (vLLM) each token has a slot, ``state_indices [N, T]``: the state
    is read from slot ``[n, num_accepted_tokens[n] - 1]``, what the previous draft left there, and
    the state after token t goes to slot ``[n, t]``. The window is read from column
    ``num_accepted_tokens[n] - 1`` on of ``conv_state`` at slot ``[n, 0]``, whose columns become
    the last two inputs before the draft, then the draft.

    Args:
        q, k, v, g, beta, norm_gate, out: as for :func:`kda_decode_step`, with a row per token;
            the tokens of a sequence are consecutive.
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets; by default all sequences are equally
            long. A sequence has at most ``T`` tokens; later tokens are not computed. A sequence
            without tokens keeps its states and its window. Values in host memory are checked;
            values on a GPU are trusted.
        num_accepted_tokens: ``[N]`` int32; values outside of 1 to ``T`` are clamped.
        intermediate_states: ``[rows, T, HV, V, K]`` fp32 or bf16; intermediate_indices: ``[N]``
            int32, where a negative index keeps nothing; intermediate_conv: ``[rows, T, C, 3]``, any
            strides.
        state_indices: a padded sequence (a negative slot, or ``null_slot``) gets zeros in the
            output and touches no state. If the slot of a single token is negative or null, the
            state after that token is not kept.
        conv_state: has at least ``T + 2`` columns with ``num_accepted_tokens``.

    Returns:
        ``out [tokens, HV, V]``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    beta_kind = beta_kind_of(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    tokens = TokenInputs.of((q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, beta_kind)
    gate = GateSpec.of(use_gate_in_kernel, A_log, dt_bias, lower_bound)
    state = StateRef.pool(state_pool, state_indices, null_slot=null_slot)
    conv = ConvInputs.of(conv_state, conv_weight, conv_bias)
    norm = NormInputs.of(norm_weight, norm_gate, norm_eps)
    draft = DraftInputs.of(
        cu_seqlens,
        num_accepted_tokens,
        (intermediate_states, intermediate_indices, intermediate_conv),
        has_conv=conv is not None,
    )
    return verify_step(tokens, gate, state, draft, conv, norm, out, selection)


def verify_step(
    tokens: TokenInputs,
    gate: GateSpec,
    state: StateRef,
    draft: DraftInputs,
    conv: ConvInputs | None,
    norm: NormInputs | None,
    out: torch.Tensor | None,
    selection: KdaSelection | None,
) -> torch.Tensor:
    """:func:`kda_verify_step` on the typed values of its arguments: check them and run them."""
    if is_elsewhere(tokens.q):
        return run_there(tokens.q, verify_step, locals())
    selection, shape = check_verification(tokens, gate, state, draft, conv, norm, out, selection)
    refuse_gradients(tokens, gate, state, draft, conv, norm)
    check_draft_offsets(draft.cu_seqlens, tokens.q.shape[0])
    assert state.indices is not None and state.read is not None
    check_rows("state_indices", state.indices, "slot", state.read)
    if draft.states is not None and draft.indices is not None:
        check_rows("intermediate_indices", draft.indices, "row", draft.states)
    if out is None:
        # the kernel does not write rows that belong to no sequence
        out = torch.zeros(tokens.v.shape, dtype=tokens.v.dtype, device=tokens.v.device)
    run = selection.verify.run(shape.num_sequences * tokens.v.shape[1])
    run(VerifyCall(tokens, gate, state, draft, shape, conv, norm, out))
    return out
