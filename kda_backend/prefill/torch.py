"""The torch paths of both phases, in fp32: what serves on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kda_backend import reference
from kda_backend.contract.inputs import (
    BETA_GIVEN,
    BETA_TWICE_SIGMOID,
    GATE_LOG,
    KdaInputs,
    StateInputs,
)
from kda_backend.scratch import Workspace
from kda_backend.step_plan import CHUNK, ChunkMetadata

if TYPE_CHECKING:
    from backend_core.tables.select import KernelPath


def prefill(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """The chunked torch form in fp32: the CPU's path."""
    q, k, v, decay, beta = _activate(x)
    assert meta.cu_seqlens_cpu is not None  # the CPU's metadata always has them
    before = _read_states(state, meta.num_sequences, v, k)
    o, after, chunk = reference.chunk_kda(
        q, k, v, decay, beta, scale=x.scale, state=before, cu_seqlens=list(meta.cu_seqlens_cpu)
    )
    if state.snapshots is not None and state.snapshot_chunks is not None:
        _write_snapshots(state, meta, chunk, after)
    if chunk_states is not None:
        chunk_states.copy_(chunk if state.v_dim == 2 else chunk.mT)
    _write_states(state, after)
    out.copy_(o.view(out.shape))


def decode(
    path: KernelPath,
    x: KdaInputs,
    cu_seqlens: torch.Tensor | None,
    state: StateInputs,
    out: torch.Tensor,
) -> None:
    """The recurrence in torch and fp32: the CPU's path."""
    batch, length = x.q.shape[:2]
    offsets = [n * length for n in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v, decay, beta = _activate(x)
    before = _read_states(state, len(offsets) - 1, v, k)
    o, after = reference.recurrent_kda(
        q, k, v, decay, beta, scale=x.scale, state=before, cu_seqlens=offsets
    )
    _write_states(state, after)
    out.copy_(o.view(out.shape))


def _activate(x: KdaInputs) -> tuple[torch.Tensor, ...]:
    """Packed q, k, v, log decay and step size in fp32."""
    q, k, v, g, beta = (y.float().flatten(0, 1) for y in (x.q, x.k, x.v, x.g, x.beta))
    if x.l2norm:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if x.gate != GATE_LOG:
        g = reference.log_decay(g, x.a_log, x.dt_bias, x.lower_bound or None)
    if x.beta_kind != BETA_GIVEN:
        beta = beta.sigmoid() * (2.0 if x.beta_kind == BETA_TWICE_SIGMOID else 1.0)
    return q, k, v, g, beta


def _read_states(
    state: StateInputs, num_sequences: int, v: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """The states [N, HV, V, K] in fp32."""
    if state.read is None:
        return v.new_zeros(num_sequences, v.shape[1], v.shape[2], k.shape[2])
    rows = state.read if state.v_dim == 2 else state.read.mT
    if state.indices is None:
        return rows.float()
    reads = state.indices >= 0
    if state.has_initial is not None:
        reads = reads & state.has_initial
    rows = rows[state.indices.clamp(min=0).long()].float()
    return torch.where(reads[:, None, None, None], rows, 0.0)


def _write_states(state: StateInputs, after: torch.Tensor) -> None:
    if state.write is None:
        return
    rows = after if state.v_dim == 2 else after.mT
    if state.indices is None:
        state.write.copy_(rows)
    else:
        writes = state.indices >= 0
        state.write[state.indices[writes].long()] = rows[writes].to(state.write.dtype)


def _write_snapshots(
    state: StateInputs, meta: ChunkMetadata, chunk: torch.Tensor, after: torch.Tensor
) -> None:
    assert state.snapshots is not None and state.snapshot_chunks is not None
    assert meta.cu_seqlens_cpu is not None
    first = 0
    offsets = meta.cu_seqlens_cpu
    for n, boundaries in enumerate(state.snapshot_chunks.tolist()):
        count = (offsets[n + 1] - offsets[n] + CHUNK - 1) // CHUNK
        for s, boundary in enumerate(boundaries):
            if 0 <= boundary < count:
                state.snapshots[n, s] = chunk[first + boundary]
            elif boundary == count:
                state.snapshots[n, s] = after[n]
        first += count
