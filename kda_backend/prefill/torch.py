"""The chunked prefill in torch and fp32, which serves on a CPU."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from backend_core.autocast import without_autocast
from kda_backend import reference
from kda_backend.contract.calls import PrefillCall
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.spec import CHUNK, Beta, Gate

if TYPE_CHECKING:
    from backend_core.tables.schema import Row
    from backend_core.target import Target
    from kda_backend.selection import KdaShape


def bind(row: Row, spec: KdaShape, target: Target) -> Callable[[PrefillCall], None]:
    return functools.partial(prefill, at_once=CHUNK) if spec.batch_invariant else prefill


@without_autocast
def prefill(call: PrefillCall, *, at_once: int | None = None) -> None:
    """The chunked form of the definition.

    Args:
        at_once: tokens that are computed by themselves; ``None`` for all of a call. torch rounds by
            the shape of a tensor and by an element's place in it.
    """
    tokens, gate, step_plan, state, out, chunk_states, *_ = call
    offsets = step_plan.cu_seqlens_cpu
    assert offsets is not None  # the CPU's plan always has them
    before = read_states(state, step_plan.num_sequences, tokens)
    if at_once is None:
        o, after, chunk = reference.chunk_kda(
            *activated(tokens, gate), scale=tokens.scale, state=before, cu_seqlens=list(offsets)
        )
    else:
        o, after, chunk = in_parts(reference.chunk_kda, at_once, tokens, gate, before, offsets)
    if state.snapshots is not None and state.snapshot_chunks is not None:
        write_snapshots(state, offsets, chunk, after)
    if chunk_states is not None:
        chunk_states.copy_(chunk if state.v_first else chunk.mT)
    write_states(state, after)
    out.copy_(o.view(out.shape))


def in_parts(
    definition: Callable[..., tuple[torch.Tensor, ...]],
    at_once: int,
    tokens: TokenInputs,
    gate: GateSpec,
    before: torch.Tensor,
    offsets: Sequence[int],
) -> tuple[torch.Tensor, ...]:
    """Output, states after the sequences and states before the parts of ``at_once`` tokens, each of
    which ``definition`` computes as a sequence."""
    rows = [x.flatten(0, 1)[None] for x in tokens[:5]]
    outputs, after, starts = [rows[2][0, :0].float()], [before[:0]], [before[:0]]
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        state = before[n : n + 1]
        for first in range(begin, end, at_once):
            last = min(first + at_once, end)
            q, k, v, g, beta = (x[:, first:last] for x in rows)
            part = TokenInputs(q, k, v, g, beta, *tokens[5:])
            starts.append(state)
            o, state, *_ = definition(
                *activated(part, gate),
                scale=tokens.scale,
                state=state.contiguous(),
                cu_seqlens=[0, last - first],
            )
            outputs.append(o)
        after.append(state)
    return torch.cat(outputs), torch.cat(after), torch.cat(starts)


def activated(tokens: TokenInputs, gate: GateSpec) -> tuple[torch.Tensor, ...]:
    """q, k, v, log decay and step size in fp32, of all rows one after another."""
    q, k, v, g, beta = (x.float().flatten(0, 1) for x in tokens[:5])
    if tokens.l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    return q, k, v, log_decay(g, gate), step_size(beta, tokens.beta_kind)


def log_decay(g: torch.Tensor, gate: GateSpec) -> torch.Tensor:
    """The natural logarithm of the decay from ``g [T, HV, K]``."""
    if gate.kind == Gate.LOG:
        return g
    bound = gate.lower_bound if gate.kind == Gate.BOUNDED else None
    return reference.log_decay(g, gate.a_log, gate.dt_bias, bound)


def step_size(beta: torch.Tensor, kind: Beta) -> torch.Tensor:
    """The step size from ``beta``."""
    if kind == Beta.GIVEN:
        return beta
    return beta.sigmoid() * (2.0 if kind == Beta.TWICE_SIGMOID else 1.0)


def read_states(state: StateRef, num_sequences: int, tokens: TokenInputs) -> torch.Tensor:
    """The states [N, HV, V, K] in fp32."""
    if state.read is None:
        shape = (num_sequences, *tokens.v.shape[2:], tokens.k.shape[3])
        return tokens.v.new_zeros(shape, dtype=torch.float32)
    rows = state.read if state.v_first else state.read.mT
    if state.indices is None:
        return rows.float()
    reads = state.indices >= 0
    if state.has_initial is not None:
        reads = reads & state.has_initial
    rows = rows[state.indices.clamp(min=0).long()].float()
    return torch.where(reads[:, None, None, None], rows, 0.0)


def write_states(state: StateRef, after: torch.Tensor) -> None:
    """The states after the sequences, to where they belong."""
    if state.write is None:
        return
    rows = after if state.v_first else after.mT
    if state.indices is None:
        state.write.copy_(rows)
    else:
        writes = state.indices >= 0
        state.write[state.indices[writes].long()] = as_stored(rows[writes], state.write.dtype)


def as_stored(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States in a dtype of memory; fp16's largest number in place of what lies beyond it."""
    if dtype == torch.float16:
        states = states.clamp(-65504.0, 65504.0)
    return states.to(dtype)


def write_snapshots(
    state: StateRef, offsets: tuple[int, ...], chunk: torch.Tensor, after: torch.Tensor
) -> None:
    """Store the snapshots that a call asks for.

    Args:
        chunk: the state before each chunk; after: behind each sequence.
    """
    snapshots, chunks = state.snapshots, state.snapshot_chunks
    assert snapshots is not None and chunks is not None
    slots = None if state.snapshot_indices is None else state.snapshot_indices.tolist()
    first = 0
    for n, boundaries in enumerate(chunks.tolist()):
        count = (offsets[n + 1] - offsets[n] + CHUNK - 1) // CHUNK
        for s, boundary in enumerate(boundaries):
            if not 0 <= boundary <= count or (slots is not None and slots[n][s] < 0):
                continue
            place = (n, s) if slots is None else slots[n][s]
            kept = after[n] if boundary == count else chunk[first + boundary]
            snapshots[place] = as_stored(kept, snapshots.dtype)
        first += count
