"""Kimi Delta Attention in torch: the definition, and a chunked form for CPUs.

Both take packed tokens (``T`` tokens of all sequences, one after the other) and activated inputs:
``log_decay`` is the natural logarithm of the per-channel decay and ``beta`` the step size. The
functions ``log_decay`` and ``l2norm`` are the activations. Source: "Kimi Linear: An Expressive,
Efficient Attention Architecture", Moonshot AI, 2025 (arXiv 2510.26692).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64


def l2norm(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def log_decay(
    g: torch.Tensor,
    a_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None,
) -> torch.Tensor:
    """The forget gate: natural log of the decay, in g's dtype.

    Args:
        g: raw gate ``[..., HV, K]``.
        a_log: ``HV`` elements; ``None`` stands for rate 1 and needs ``lower_bound``.
        dt_bias: ``HV * K`` elements or ``None``.
        lower_bound: ``None`` for ``-exp(a_log) softplus(g + dt_bias)``, else
            ``lower_bound * sigmoid(exp(a_log) (g + dt_bias))``.
    """
    heads, channels = g.shape[-2:]
    if dt_bias is not None:
        g = g + dt_bias.reshape(heads, channels).to(g.dtype)
    a_log = g.new_zeros(()) if a_log is None else a_log.reshape(heads, 1).to(g.dtype)
    rate = a_log.exp().clamp(max=torch.finfo(g.dtype).max)  # finite, since 0 times it is 0
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    # above the threshold softplus(x) and x differ by less than e^-40, and below it softplus(x) and
    # e^x; there the product may be a number where its factors are none
    small = torch.exp(g + a_log)
    return -torch.where(g < -40.0, small, rate * F.softplus(g, threshold=40.0))


def recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    state: torch.Tensor,
    cu_seqlens: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence itself, token by token, in the inputs' dtype (float64 for a reference).

        S   = S diag(exp(log_decay_t))
        S   = S + beta_t (v_t - S k_t) k_t^T
        o_t = scale S q_t

    Args:
        q, k: ``[T, H, K]``, already normalised where the model does so.
        v: ``[T, HV, V]``, ``HV`` a multiple of ``H``.
        log_decay: ``[T, HV, K]``.
        beta: ``[T, HV]``.
        state: ``[N, HV, V, K]`` before each sequence.
        cu_seqlens: ``N + 1`` token offsets.

    Returns:
        ``o [T, HV, V]`` and the state ``[N, HV, V, K]`` after each sequence.
    """
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    o = torch.empty_like(v)
    states = []
    for n, s in enumerate(state):
        for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
            s = s * log_decay[t].exp()[:, None, :]
            delta = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
            s = s + delta[:, :, None] * k[t][:, None, :]
            o[t] = scale * torch.einsum("hvk,hk->hv", s, q[t])
        states.append(s)
    return o, torch.stack(states) if states else state.clone()


def record_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over the draft of one sequence, with a record of each token in place of the
    states. In the inputs' dtype.

    With the key k_t as it came and its norm n_t = sqrt(sum k_t^2 + 1e-6):

        u_t = beta_t (v_t - S diag(exp(log_decay_t)) k_t / n_t) / n_t
        S   = S diag(exp(log_decay_t)) + u_t k_t^T

    Args:
        q: ``[T, H, K]``, normalised; k: ``[T, H, K]``, not normalised.
        v, log_decay, beta: as of `recurrent_kda`; state: ``[HV, V, K]`` before the draft.

    Returns:
        ``o [T, HV, V]`` and the corrections u ``[T, HV, V]``.
    """
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    outputs, corrections = [], []
    for t in range(len(v)):
        decayed = state * log_decay[t].exp()[:, None, :]
        delta = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", decayed, l2norm(k[t])))
        corrections.append(delta * torch.rsqrt((k[t] * k[t]).sum(-1, keepdim=True) + 1e-6))
        state = fold_records(state, corrections[-1][None], k[t : t + 1], log_decay[t : t + 1])
        outputs.append(scale * torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(outputs), torch.stack(corrections)


def fold_records(
    state: torch.Tensor, correction: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor
) -> torch.Tensor:
    """The state ``[HV, V, K]`` after records ``u [T, HV, V]``, ``k [T, HV, K]`` before its norm and
    ``log_decay [T, HV, K]``, one after another."""
    for u_t, k_t, decay_t in zip(correction, k, log_decay.exp(), strict=True):
        state = state * decay_t[:, None, :] + u_t[:, :, None] * k_t[:, None, :]
    return state


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    state: torch.Tensor,
    cu_seqlens: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same function over chunks of 64 tokens, in the inputs' dtype; fast enough for a CPU.

    Arguments as :func:`recurrent_kda`. No exponent is ever positive, so any gate is exact.

    Returns:
        ``o [T, HV, V]``, the state ``[N, HV, V, K]`` after each sequence, and the state
        ``[chunks, HV, V, K]`` before each chunk (chunks numbered sequence by sequence).
    """
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    rows, offsets = _chunk_rows(cu_seqlens, q.device)
    # [chunks, HV, 64, ...]; rows past a sequence's end hold zeros, which leave the state alone
    b_q, b_k, b_v, b_g = (_gather(x, rows).transpose(1, 2) for x in (q, k, v, log_decay))
    b_beta = _gather(beta, rows).transpose(1, 2).unsqueeze(-1)

    prefix = b_g.cumsum(-2)
    a_qk, a_kk = _scores(b_q, b_k, b_g)
    low = (b_beta * a_kk).tril(-1) + torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    rhs = b_beta * torch.cat([b_k * prefix.exp(), b_v], dim=-1)
    solved = torch.linalg.solve_triangular(low, rhs, upper=False, unitriangular=True)
    w, u = solved.split([k.shape[-1], v.shape[-1]], dim=-1)
    q_in = b_q * prefix.exp()
    k_out = b_k * _sum_after(b_g).exp()
    total = prefix[..., -1, :].exp()

    b_o = torch.empty_like(b_v)
    chunk_states = state.new_empty(len(rows), *state.shape[1:])
    state = state.clone()
    counts = offsets.diff()
    for i in range(int(counts.max()) if len(counts) else 0):
        live = (counts > i).nonzero().squeeze(1)
        c = offsets[live] + i
        s = state[live]
        chunk_states[c] = s
        v_new = u[c] - w[c] @ s.mT
        b_o[c] = scale * (q_in[c] @ s.mT + a_qk[c] @ v_new)
        state[live] = s * total[c].unsqueeze(-2) + v_new.mT @ k_out[c]

    o = torch.empty_like(v)
    filled = rows >= 0
    o[rows[filled]] = b_o.transpose(1, 2)[filled]
    return o, state, chunk_states


def _chunk_rows(cu_seqlens: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token of each chunk row ``[chunks, 64]``, -1 where there is none, and chunk offsets [N+1]."""
    cu = torch.tensor(cu_seqlens, device=device)
    counts = (cu.diff() + CHUNK - 1) // CHUNK
    offsets = F.pad(counts.cumsum(0), (1, 0))
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=device), counts)
    chunk = torch.arange(len(sequence), device=device) - offsets[sequence]
    rows = cu[sequence][:, None] + chunk[:, None] * CHUNK + torch.arange(CHUNK, device=device)
    return torch.where(rows < cu[sequence + 1][:, None], rows, -1), offsets


def _gather(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [T, ...] at rows [chunks, 64], zero where the row is -1."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, 1))[rows]


def _sum_after(g: torch.Tensor) -> torch.Tensor:
    """Sum of the rows after each row of g [..., C, K], formed without subtracting the row."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _scores(
    q: torch.Tensor, k: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal decayed scores [..., 64, 64] of q with k (diagonal included) and of k with k.

    A binary tree: upper halves of each block meet lower halves, both relative to the token
    between them.
    """
    lead, (size, channels) = q.shape[:-2], q.shape[-2:]
    q, k, g = (x.reshape(-1, size, channels) for x in (q, k, log_decay))
    a_qk, a_kk = (q.new_zeros(len(q), size, size) for _ in range(2))
    half = size // 2
    while half:
        shape = (len(q), size // (2 * half), 2, half, channels)
        b_q, b_k, b_g = (x.reshape(shape) for x in (q, k, g))
        g_low, g_up = b_g[:, :, 0], b_g[:, :, 1]
        k_low = b_k[:, :, 0] * _sum_after(g_low).exp()
        decay = g_up.cumsum(-2).exp()
        for a, x in ((a_qk, b_q), (a_kk, b_k)):
            blocks = a.view(len(q), size // (2 * half), 2 * half, size // (2 * half), 2 * half)
            blocks = blocks.diagonal(dim1=1, dim2=3)  # [chunks, 2h, 2h, blocks]
            score = (x[:, :, 1] * decay) @ k_low.mT
            blocks[:, half:, :half] = score.movedim(1, -1)
        half //= 2
    a_qk += torch.diag_embed((q * k).sum(-1))
    return a_qk.view(*lead, size, size), a_kk.view(*lead, size, size)
