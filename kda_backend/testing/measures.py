"""The calls of KDA's operators that ``kda-dsv4 tune`` times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backend_core.tables.schema import Row
from backend_core.target import Target
from kda_backend import (
    kda_commit_,
    kda_decode_step,
    kda_prefill,
    kda_recurrent,
    kda_verify_step,
)
from kda_backend.contract.values import DraftInputs, Records, StateRef
from kda_backend.scratch import Scratch
from kda_backend.spec import CHUNK
from kda_backend.step_plan import build_step_plan
from kda_backend.testing.cases import make_case
from kda_backend.testing.checks import forced
from kda_backend.testing.steps import StepPools, make_step

Call = Callable[[], object]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_DIMS: dict[str, Any] = {"key_dim": 128, "value_dim": 128}


def _slots(number: int) -> torch.Tensor:
    return torch.arange(number, dtype=torch.int32, device=DEVICE)


def _prefill(row: Row, target: Target, grid: int, heads: int) -> Call:
    """One sequence of ``grid / heads`` chunks of 64 tokens."""
    tokens = CHUNK * max(1, grid // heads)
    case = make_case(0, (tokens,), heads=heads, device=DEVICE, **_DIMS)
    plan = build_step_plan(case.cu_seqlens, tokens, cu_seqlens_cpu=case.cu_seqlens.cpu())
    state, out = StateRef.pool(case.state, _slots(1)), torch.empty_like(case.v)
    chosen, scratch = forced(row, target, case.shape), Scratch(case.q.device)
    options: dict[str, Any] = {"out": out, "scratch": scratch, "selection": chosen}
    inputs = case.inputs
    return lambda: kda_prefill(*inputs, state, plan, **options)


def _recurrent(row: Row, target: Target, grid: int, heads: int) -> Call:
    rows = max(1, grid // heads)
    case = make_case(0, (1,) * rows, heads=heads, device=DEVICE, **_DIMS)
    inputs = case.inputs_of([x.transpose(0, 1) for x in case.tokens])
    state, out = StateRef.pool(case.state, _slots(rows)), torch.empty_like(inputs[0].v)
    chosen = forced(row, target, case.shape)
    return lambda: kda_recurrent(*inputs, state, out=out, selection=chosen)


def _step(row: Row, target: Target, grid: int, heads: int, *, whole: bool) -> Call:
    rows = max(1, grid // heads)
    flags: dict[str, Any] = {"has_conv": whole, "has_norm": whole, "has_bias": False}
    case = make_step(0, rows, device=DEVICE, heads=heads, **_DIMS, **flags)
    pools = StepPools(case, rows)
    pools.fill(0, list(range(rows)))
    inputs, stages = case.inputs, case.stages(pools.windows)
    state, out = StateRef.pool(pools.states, _slots(rows)), torch.empty_like(case.z)
    chosen = forced(row, target, case.shape)
    return lambda: kda_decode_step(*inputs, state, out=out, selection=chosen, **stages)


def _records(row: Row, target: Target, grid: int, heads: int, *, folds: bool) -> Call:
    """Drafts of 4 tokens, of which 2 of the draft before were accepted; or the fold of these."""
    rows, tokens = max(1, grid // heads), 4
    case = make_step(0, rows * tokens, device=DEVICE, heads=heads, has_bias=False, **_DIMS)
    pools, accepted = StepPools(case, rows, width=tokens + 2), torch.full_like(_slots(rows), 2)
    pools.fill(0, list(range(rows)))
    sizes: dict[str, Any] = {"dtype": case.packed.dtype, "device": DEVICE, **_DIMS}
    records = Records.empty((rows,), tokens, heads=heads, **sizes)
    for x in records[:2]:
        x.zero_()
    state, out = StateRef.pool(pools.states, _slots(rows)), torch.empty_like(case.z)
    chosen, inputs, stages = (
        forced(row, target, case.shape),
        case.inputs,
        case.stages(pools.windows),
    )
    own = _slots(rows)
    if folds:

        def commit() -> torch.Tensor:
            kda_commit_(inputs[1], state, records, own, accepted, selection=chosen)
            return pools.states[:, :, 0]

        return commit
    draft = DraftInputs.in_records(records, own, accepted)
    return lambda: kda_verify_step(*inputs, state, draft, out=out, selection=chosen, **stages)


MEASURES: dict[str, Callable[[Row, Target, int, int], Call]] = {
    "prefill": _prefill,
    "recurrent": _recurrent,
    "whole_step": lambda *args: _step(*args, whole=True),
    "bare_step": lambda *args: _step(*args, whole=False),
    "records": lambda *args: _records(*args, folds=False),
    "commit": lambda *args: _records(*args, folds=True),
}
