"""The public operators of a decode step: one launch from the projections to the gated norm."""

from __future__ import annotations

from dataclasses import replace

import torch

from kda_backend.contract.draft import check_draft
from kda_backend.contract.step import check_step, is_aligned
from kda_backend.decode import recurrent as decode
from kda_backend.selection import KdaPlan, plan_for


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
    pools_settled: bool = False,
    plan: KdaPlan | None = None,
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
        scale: factor of the output, by default ``K ** -0.5``; without effect on a normed output
            but for ``norm_eps``.
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
        conv_weight: ``[C, 4]``; the last tap meets the new token. conv_bias: ``[C]``.
        norm_weight: ``[V]``; norm_gate: ``[N, HV, V]``, the raw gate.
        out: where to write the output, ``[N, HV, V]`` in q's dtype; may alias v.
        pools_settled: a promise that no kernel that may still run writes the pools at these slots,
            ``state_indices`` or a weight: they are then fetched before it is over. True behind a
            projection, never behind another step of the same sequences. On Hopper a step lets the
            kernel behind it start at once, so in a row of steps the promise is about all of them.
        plan: paths chosen at model load (``kda_backend.selection.select``).

    Returns:
        ``out``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    x = check_step(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        state_indices,
        null_slot=null_slot,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        a_log=A_log,
        dt_bias=dt_bias,
        conv_state=conv_state,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        norm_weight=norm_weight,
        norm_gate=norm_gate,
        norm_eps=norm_eps,
        out=out,
        settled=pools_settled,
        plan=plan,
    )
    if state_indices.shape != q.shape[:1] or not state_indices.is_contiguous():
        raise ValueError(
            f"state_indices must have shape [{q.shape[0]}] and stride 1, got"
            f" {list(state_indices.shape)} and {list(state_indices.stride())}"
        )
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    chosen = x.plan
    if plan is None and not is_aligned(x):
        chosen = plan_for(q.device, replace(chosen.shape, aligned_state=False))
    path = chosen.decode_step.lookup(v.shape[0] * v.shape[1])
    decode.STEPS[path.name](path, x, out)
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
    plan: KdaPlan | None = None,
) -> torch.Tensor:
    """The drafted tokens of each sequence, one behind the other, keeping the state after each.

    As :func:`kda_decode_step` on every token in turn, but no accepted state is lost before the
    engine knows how many tokens it accepts. Drafts are chains; there are two ways to keep states:

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
        q, k, v, g, beta, norm_gate, out: as for :func:`kda_decode_step`, a row for each token; the
            tokens of a sequence follow one another.
        cu_seqlens: ``[N + 1]`` int32 or int64 token offsets; by default all sequences are equally
            long. A sequence has at most ``T`` tokens; later ones are left out.
        num_accepted_tokens: ``[N]`` int32; values are brought into 1 to ``T``.
        intermediate_states: ``[rows, T, HV, V, K]`` fp32 or bf16; intermediate_indices: ``[N]``
            int32, a negative one keeps nothing; intermediate_conv: ``[rows, T, C, 3]``, any
            strides.
        state_indices: a padded sequence (negative, or ``null_slot``) gets zeros in the output and
            touches no state; a negative or null slot of a token alone keeps nothing for it.
        conv_state: has at least ``T + 2`` columns with ``num_accepted_tokens``.

    Returns:
        ``out [tokens, HV, V]``.

    Raises:
        ValueError: an input is not as described; nothing has been written then.
        LookupError: no path serves this shape on this device.
    """
    x = check_step(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        state_indices,
        null_slot=null_slot,
        scale=scale,
        l2norm=use_qk_l2norm_in_kernel,
        use_gate=use_gate_in_kernel,
        use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        a_log=A_log,
        dt_bias=dt_bias,
        conv_state=conv_state,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        norm_weight=norm_weight,
        norm_gate=norm_gate,
        norm_eps=norm_eps,
        out=out,
        plan=plan,
    )
    draft = check_draft(
        x,
        cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens,
        intermediate_states=intermediate_states,
        intermediate_indices=intermediate_indices,
        intermediate_conv=intermediate_conv,
    )
    if out is None:
        # rows that belong to no sequence are not written by the kernel
        out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    path = x.plan.verify.lookup(draft.num_sequences * v.shape[1])
    decode.VERIFICATIONS[path.name](path, x, draft, out)
    return out
