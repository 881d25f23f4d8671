"""The token-by-token operators in torch and fp32, which serve on a CPU."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from backend_core.autocast import without_autocast
from kda_backend import reference
from kda_backend.contract.calls import DecodeCall, InTorch, RecurrentCall, VerifyCall
from kda_backend.contract.values import ConvInputs, DraftInputs, GateSpec, NormInputs, TokenInputs
from kda_backend.prefill.torch import (
    activated,
    as_stored,
    in_parts,
    log_decay,
    read_states,
    step_size,
    write_states,
)

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape


def bind(row: Row, spec: KdaShape, target: Target) -> Any:
    """The path of the row's operator, which takes that operator's call."""
    if spec.batch_invariant:
        apart = functools.partial(recurrent, token_by_token=True)
        of_rows = functools.partial(step, row_by_row=True)
        found = {"recurrent": apart, "decode_step": InTorch(of_rows)}
        return found.get(row.operator) or InTorch(verification)
    found = {"recurrent": recurrent, "decode_step": InTorch(step), "verify": InTorch(verification)}
    return found[row.operator]


@without_autocast
def recurrent(call: RecurrentCall, *, token_by_token: bool = False) -> None:
    """The definition.

    Args:
        token_by_token: also what is done to tokens before, whose rounding depends on their place.
    """
    tokens, gate, cu_seqlens, state, out = call
    batch, length = tokens.q.shape[:2]
    offsets = [n * length for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    before = read_states(state, len(offsets) - 1, tokens)
    if token_by_token:
        o, after, _ = in_parts(reference.recurrent_kda, 1, tokens, gate, before, offsets)
    else:
        o, after = reference.recurrent_kda(
            *activated(tokens, gate), scale=tokens.scale, state=before, cu_seqlens=offsets
        )
    write_states(state, after)
    out.copy_(o.view(out.shape))


@without_autocast
def step(call: DecodeCall, *, row_by_row: bool = False) -> None:
    """One token of each row.

    Args:
        row_by_row: one after the other, so that products have the same shapes in any call.
    """
    tokens, gate, state, conv, norm, out, _ = call
    pool, indices = state.write, state.indices
    assert pool is not None and indices is not None
    live = (indices >= 0) & (indices != state.null_slot)
    rows = live.nonzero().squeeze(1)
    slots = indices[rows].long()
    window = None if conv is None else conv.state[slots][:, :, :3].float()
    layer = Layer(tokens, gate, conv, norm)
    advance = layer.advance_each if row_by_row else layer.advance
    o, states, window, *_ = advance(rows, pool[slots].float(), window)
    pool[slots] = as_stored(states, pool.dtype)
    if conv is not None and window is not None:
        conv.state[slots, :, :3] = window.to(conv.state.dtype)
    result = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    result[rows] = o
    out.copy_(result)


@without_autocast
def verification(call: VerifyCall) -> None:
    """A draft of each sequence, sequence by sequence."""
    tokens, gate, state, draft, shape, conv, norm, out = call
    pool, indices = state.write, state.indices
    assert pool is not None and indices is not None
    layer = Layer(tokens, gate, conv, norm)
    each = tokens.q.shape[0] // max(shape.num_sequences, 1)
    offsets = [n * each for n in range(shape.num_sequences + 1)]
    if draft.cu_seqlens is not None:
        offsets = draft.cu_seqlens.tolist()
    for n in range(shape.num_sequences):
        own = range(offsets[n], offsets[n + 1])[: shape.max_tokens]
        if not own:
            continue
        accepted = 0 if draft.num_accepted is None else int(draft.num_accepted[n]) - 1
        accepted = max(0, min(accepted, shape.max_tokens - 1))
        table = indices[n].reshape(-1).tolist()
        slot, conv_slot = table[accepted if len(table) > 1 else 0], table[0]
        if min(slot, conv_slot) < 0 or state.null_slot in (slot, conv_slot):
            out[own.start : own.stop] = 0.0
            continue
        states = pool[slot].float()[None]
        window = None
        if conv is not None:
            window = conv.state[conv_slot, :, accepted : accepted + 3].float().clone()[None]
            if draft.windows is None:
                conv.state[conv_slot, :, :2] = window[0, :, 1:].to(conv.state.dtype)
        for t, token in enumerate(own):
            o, states, window, *_ = layer.advance(
                torch.tensor([token], device=out.device), states, window
            )
            out[token] = o[0].to(out.dtype)
            if draft.states is None:
                row = table[t]
                if row >= 0 and row != state.null_slot:
                    pool[row] = as_stored(states[0], pool.dtype)
                if conv is not None and window is not None:
                    conv.state[conv_slot, :, 2 + t] = window[0, :, 2].to(conv.state.dtype)
            else:
                _keep(draft, n, t, states[0], window)


def _keep(
    draft: DraftInputs, n: int, t: int, state: torch.Tensor, window: torch.Tensor | None
) -> None:
    """The state and the window after token t of sequence n, to the buffers of drafts."""
    assert draft.states is not None and draft.indices is not None
    row = int(draft.indices[n])
    if row < 0:
        return
    draft.states[row, t] = as_stored(state, draft.states.dtype)
    if draft.windows is not None and window is not None:
        draft.windows[row, t] = window[0].to(draft.windows.dtype)


class Advanced(NamedTuple):
    """A layer after a token of each of n rows.

    Attributes:
        out: ``[n, HV, V]``; states: ``[n, HV, V, K]``; window: ``[n, C, 3]`` or ``None``.
        correction: ``[n, HV, V]``; key: ``[n, HV, K]`` before its norm; gate: ``[n, HV, K]``.
    """

    out: torch.Tensor
    states: torch.Tensor
    window: torch.Tensor | None
    correction: torch.Tensor
    key: torch.Tensor
    gate: torch.Tensor


class Layer:
    """A layer between its projections, one token of some rows at a time."""

    def __init__(
        self,
        tokens: TokenInputs,
        gate: GateSpec,
        conv: ConvInputs | None,
        norm: NormInputs | None,
        *,
        key_dtype: torch.dtype = torch.float32,
    ) -> None:
        """``key_dtype``: k is rounded to it behind the convolution."""
        self._tokens, self._gate, self._conv, self._norm = tokens, gate, conv, norm
        self._key_dtype = key_dtype

    def advance_each(
        self, rows: torch.Tensor, states: torch.Tensor, window: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`advance`, of one row after the other."""
        outputs = torch.empty(0, *self._tokens.v.shape[1:])
        parts = [(outputs, states[:0], None if window is None else window[:0])]
        for i in range(len(rows)):
            row = slice(i, i + 1)
            own = None if window is None else window[row]
            parts.append(self.advance(rows[row], states[row], own)[:3])
        o, after, windows = zip(*parts, strict=True)
        return torch.cat(o), torch.cat(after), None if window is None else torch.cat(windows)

    def advance(
        self, rows: torch.Tensor, states: torch.Tensor, window: torch.Tensor | None
    ) -> Advanced:
        """A token of each row.

        Args:
            rows: ``[n]``, the tokens; states, window: before them.
        """
        x, conv, norm = self._tokens, self._conv, self._norm
        q, k, v, g, beta = (y[rows].float() for y in x[:5])
        if conv is not None and window is not None:
            inputs = torch.cat([y.flatten(1) for y in (q, k, v)], 1)
            columns = torch.cat([window, inputs.unsqueeze(2)], 2)
            y = (columns * conv.weight.float()).sum(2)
            if conv.bias is not None:
                y = y + conv.bias.float()
            keys = q.shape[1] * q.shape[2]
            y = F.silu(y)
            q, k = y[:, :keys].reshape(q.shape), y[:, keys : 2 * keys].reshape(k.shape)
            v = y[:, 2 * keys :].reshape(v.shape)
            k = k.to(self._key_dtype).float()
            window = columns[:, :, 1:].to(conv.state.dtype).float()  # as the next token reads it
        group, key = v.shape[1] // q.shape[1], k
        if x.l2norm:
            q, k = reference.l2norm(q), reference.l2norm(k)
        decay, beta = log_decay(g, self._gate).exp(), step_size(beta, x.beta_kind)
        q, k, key = (y.repeat_interleave(group, dim=1) for y in (q, k, key))
        states = states * decay.unsqueeze(2)
        delta = beta.unsqueeze(2) * (v - (states @ k.unsqueeze(3)).squeeze(3))
        if x.l2norm:
            delta = delta * torch.rsqrt((key * key).sum(2, keepdim=True) + 1e-6)
        states = states + delta.unsqueeze(3) * key.unsqueeze(2)
        o = x.scale * (states @ q.unsqueeze(3)).squeeze(3)
        if norm is not None:
            o = o * torch.rsqrt((o * o).mean(2, keepdim=True) + norm.eps) * norm.weight.float()
            o = o * norm.gate[rows].float().sigmoid()
        return Advanced(o, states, window, delta, key, g)
