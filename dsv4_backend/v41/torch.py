"""A step of ratio 1 or 2 by the definition, in float64: the path of a CPU."""

from __future__ import annotations

import torch

from backend_core.tables.schema import Row
from backend_core.target import Target
from dsv4_backend import reference
from dsv4_backend.step import TorchPath
from dsv4_backend.v41_step import V41Call, V41Step, V41StepSpec


def bind(row: Row, spec: V41StepSpec, target: Target) -> TorchPath:
    return TorchPath(step)


def step(call: V41Call, plan: V41Step) -> None:
    """Make and store the records of every group that ends, then write the state rows."""
    layer, state, kv_score = call.layer, call.state, call.kv_score
    if call.score is not None:
        kv_score = torch.cat((kv_score, call.score), 1)
    spec, ring_rows = layer.spec, 1 if state is None else state.shape[1]
    ends = list(plan.group_ends(ring_rows))
    if ends:
        groups = []
        for end in ends:
            rows = [kv_score[end.token]]
            if state is not None:
                old = kv_score[end.token - 1]
                if end.before >= 0:
                    old = state[end.before // ring_rows, end.before % ring_rows]
                rows.insert(0, old)
            groups += rows
        latent = reference.latents(torch.stack(groups), layer)
        positions = torch.tensor([end.position + 1 - spec.compress_ratio for end in ends])
        found = reference.v41_rows(latent, positions.to(latent.device), layer)
        caches = (call.cache, spec.main), (call.index_cache, spec.index)
        for which, (rows_of, (cache, records)) in enumerate(zip(found, caches, strict=True)):
            slots = torch.tensor([end.slots[which] for end in ends])
            reference.store([cache], slots, records, *reference.quantise(rows_of, records))
    if state is not None:
        for token, row in plan.state_writes(ring_rows):
            state[row // ring_rows, row % ring_rows] = kv_score[token]
