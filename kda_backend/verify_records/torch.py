"""Records of drafts in torch and fp32, which serves on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from backend_core.autocast import without_autocast
from kda_backend import reference
from kda_backend.contract.calls import CommitCall, VerifyCall
from kda_backend.contract.values import GateSpec, Records
from kda_backend.prefill.torch import as_stored, log_decay
from kda_backend.torch_steps import Layer

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape


def bind(row: Row, spec: KdaShape, target: Target) -> RecordsInTorch:
    return RecordsInTorch()


class RecordsInTorch:
    """Sequence by sequence, which prepares nothing."""

    def prepare(self, call: VerifyCall) -> Callable[[VerifyCall], None]:
        return verification

    def commit(self, call: CommitCall) -> None:
        commit(call)


@without_autocast
def verification(call: VerifyCall) -> None:
    """A draft of each sequence."""
    tokens, gate, state, draft, shape, conv, norm, out = call
    pool, slots = state.write, state.indices
    assert pool is not None and slots is not None and draft.indices is not None
    assert draft.correction is not None and draft.key_gate is not None
    records = Records(draft.correction, draft.key_gate)
    layer = Layer(tokens, gate, conv, norm, key_dtype=tokens.q.dtype)
    each = tokens.q.shape[0] // max(shape.num_sequences, 1)
    offsets = [n * each for n in range(shape.num_sequences + 1)]
    if draft.cu_seqlens is not None:
        offsets = draft.cu_seqlens.tolist()
    for n, (slot, row) in enumerate(zip(slots.tolist(), draft.indices.tolist(), strict=True)):
        own = range(offsets[n], offsets[n + 1])[: shape.max_tokens]
        if not own:
            continue
        if slot < 0 or slot == state.null_slot:
            out[own.start : own.stop] = 0.0
            continue
        accepted = 0 if draft.num_accepted is None else int(draft.num_accepted[n])
        accepted = max(0, min(accepted, shape.max_tokens))
        if accepted and row >= 0:
            folded = fold(pool[slot].float(), records, row, accepted, gate)
            pool[slot] = as_stored(folded, pool.dtype)
        states, window = pool[slot].float()[None], None
        if conv is not None:
            column = 0 if draft.windows is not None else max(accepted - 1, 0)
            window = conv.state[slot, :, column : column + 3].float().clone()[None]
            if draft.windows is None:
                conv.state[slot, :, :2] = window[0, :, 1:].to(conv.state.dtype)
        for t, token in enumerate(own):
            at = torch.tensor([token], device=out.device)
            o, states, window, correction, key, g = layer.advance(at, states, window)
            out[token] = o[0].to(out.dtype)
            if row >= 0:
                if tokens.l2norm and not draft.by_norm:
                    correction = correction * (key * key).sum(2, keepdim=True).add(1e-6).sqrt()
                records.correction[row, :, t] = correction[0]
                records.key_gate[row, :, t] = torch.cat([key[0], g[0]], 1).to(tokens.q.dtype)
            if conv is None or window is None:
                continue
            if draft.windows is None:
                conv.state[slot, :, 2 + t] = window[0, :, 2].to(conv.state.dtype)
            elif row >= 0:
                draft.windows[row, t] = window[0].to(draft.windows.dtype)


@without_autocast
def commit(call: CommitCall) -> None:
    """The fold of every layer and sequence."""
    pools, written = tuple(call.states), call.written_slots
    of_layers = tuple(call.records.of_layer(layer) for layer in range(len(pools)))
    if call.apart is not None:
        pools, of_layers = call.apart.pools, call.apart.records
    sequences = zip(
        call.slots.tolist(), call.indices.tolist(), call.num_accepted.tolist(), strict=True
    )
    for n, (slot, row, accepted) in enumerate(sequences):
        count = max(0, min(accepted, call.records.correction.shape[3]))
        to_slot = slot if written is None else int(written[n])
        nowhere = min(slot, to_slot) < 0 or call.null_slot in (slot, to_slot)
        if nowhere or row < 0 or not count:
            continue
        kept_slot, kept_count = -1, 0
        if call.kept_slots is not None and call.kept_counts is not None:
            kept_slot, kept_count = int(call.kept_slots[n]), int(call.kept_counts[n])
        for layer, (states, records) in enumerate(zip(pools, of_layers, strict=True)):
            a_log, dt_bias = (None if x is None else x[layer] for x in call.gate[1:3])
            gate = call.gate._replace(a_log=a_log, dt_bias=dt_bias)
            before = states[slot].float()
            if kept_slot >= 0 and kept_slot != call.null_slot and 0 < kept_count <= count:
                kept = fold(before, records, row, kept_count, gate)
                states[kept_slot] = as_stored(kept, states.dtype)
            states[to_slot] = as_stored(fold(before, records, row, count, gate), states.dtype)


def fold(
    state: torch.Tensor, records: Records, row: int, count: int, gate: GateSpec
) -> torch.Tensor:
    """The state ``[HV, V, K]`` in fp32 after the first records of a row."""
    key, g = records.key_gate[row, :, :count].float().transpose(0, 1).chunk(2, -1)
    correction = records.correction[row, :, :count].transpose(0, 1)
    return reference.fold_records(state, correction, key, log_decay(g, gate))
