"""The decode step and its verification in torch and fp32: what serves on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kda_backend import reference
from kda_backend.contract.draft import DraftInputs
from kda_backend.contract.inputs import BETA_GIVEN, BETA_TWICE_SIGMOID, GATE_LOG
from kda_backend.contract.step import StepInputs

if TYPE_CHECKING:
    from backend_core.tables.select import KernelPath


def step(path: KernelPath, x: StepInputs, out: torch.Tensor) -> None:
    """One token of each row."""
    live = (x.indices >= 0) & (x.indices != x.null_slot)
    rows = live.nonzero().squeeze(1)
    slots = x.indices[rows].long()
    window = None if x.conv is None else x.conv.state[slots][:, :, :3].float()
    o, states, window = _advance(x, rows, x.pool[slots].float(), window)
    x.pool[slots] = states.to(x.pool.dtype)
    if x.conv is not None and window is not None:
        x.conv.state[slots, :, :3] = window.to(x.conv.state.dtype)
    result = torch.zeros(out.shape, dtype=torch.float32)
    result[rows] = o
    out.copy_(result)


def verification(path: KernelPath, x: StepInputs, draft: DraftInputs, out: torch.Tensor) -> None:
    """A draft of each sequence, sequence by sequence."""
    each = x.q.shape[0] // max(draft.num_sequences, 1)
    offsets = [n * each for n in range(draft.num_sequences + 1)]
    if draft.cu_seqlens is not None:
        offsets = draft.cu_seqlens.tolist()
    for n in range(draft.num_sequences):
        tokens = range(offsets[n], offsets[n + 1])[: draft.max_tokens]
        accepted = 0 if draft.num_accepted is None else int(draft.num_accepted[n]) - 1
        accepted = max(0, min(accepted, draft.max_tokens - 1))
        table = x.indices[n].reshape(-1).tolist()
        slot, conv_slot = table[accepted if len(table) > 1 else 0], table[0]
        if min(slot, conv_slot) < 0 or x.null_slot in (slot, conv_slot):
            out[tokens.start : tokens.stop] = 0.0
            continue
        states = x.pool[slot].float()[None]
        window = None
        if x.conv is not None:
            window = x.conv.state[conv_slot, :, accepted : accepted + 3].float()[None]
            if draft.windows is None:
                x.conv.state[conv_slot, :, :2] = window[0, :, 1:].to(x.conv.state.dtype)
        for t, token in enumerate(tokens):
            o, states, window = _advance(x, torch.tensor([token]), states, window)
            out[token] = o[0].to(out.dtype)
            _keep(x, draft, n, t, conv_slot, states[0], window)


def _keep(
    x: StepInputs,
    draft: DraftInputs,
    n: int,
    t: int,
    conv_slot: int,
    state: torch.Tensor,
    window: torch.Tensor | None,
) -> None:
    """The state and the window after token t of sequence n, to where the form puts them."""
    if draft.write is x.pool:
        row = int(draft.write_indices[n, t])
        if row >= 0 and row != x.null_slot:
            x.pool[row] = state.to(x.pool.dtype)
        if x.conv is not None and window is not None:
            x.conv.state[conv_slot, :, 2 + t] = window[0, :, 2].to(x.conv.state.dtype)
        return
    row = int(draft.write_indices[n])
    if row < 0:
        return
    draft.write[row, t] = state.to(draft.write.dtype)
    if draft.windows is not None and window is not None:
        draft.windows[row, t] = window[0].to(draft.windows.dtype)


def _advance(
    x: StepInputs, rows: torch.Tensor, states: torch.Tensor, window: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Output [n, HV, V], states [n, HV, V, K] and window [n, C, 3] behind one token of each row."""
    q, k, v, g, beta = (y[rows].float() for y in (x.q, x.k, x.v, x.g, x.beta))
    if x.conv is not None and window is not None:
        inputs = torch.cat([y.flatten(1) for y in (q, k, v)], 1)
        columns = torch.cat([window, inputs.unsqueeze(2)], 2)
        y = (columns * x.conv.weight.float()).sum(2)
        if x.conv.bias is not None:
            y = y + x.conv.bias.float()
        keys = q.shape[1] * q.shape[2]
        y = F.silu(y)
        q, k = y[:, :keys].reshape(q.shape), y[:, keys : 2 * keys].reshape(k.shape)
        v = y[:, 2 * keys :].reshape(v.shape)
        window = columns[:, :, 1:]
    if x.l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if x.gate != GATE_LOG:
        g = reference.log_decay(g, x.a_log, x.dt_bias, x.lower_bound or None)
    if x.beta_kind != BETA_GIVEN:
        beta = beta.sigmoid() * (2.0 if x.beta_kind == BETA_TWICE_SIGMOID else 1.0)
    group = v.shape[1] // q.shape[1]
    q, k = (y.repeat_interleave(group, dim=1) for y in (q, k))
    states = states * g.exp().unsqueeze(2)
    delta = beta.unsqueeze(2) * (v - (states @ k.unsqueeze(3)).squeeze(3))
    states = states + delta.unsqueeze(3) * k.unsqueeze(2)
    o = x.scale * (states @ q.unsqueeze(3)).squeeze(3)
    if x.norm is not None:
        o = o * torch.rsqrt((o * o).mean(2, keepdim=True) + x.norm.eps) * x.norm.weight.float()
        o = o * x.norm.gate[rows].float().sigmoid()
    return o, states, window
