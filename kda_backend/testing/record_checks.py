"""The calls of ``kda-dsv4 check`` for a path that keeps records of drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from backend_core.tables.schema import Row
from backend_core.target import Target
from backend_core.testing.numerics import relative_error
from kda_backend import kda_commit_, kda_verify_step
from kda_backend.selection import KdaSelection, select
from kda_backend.testing.records import KEY_ERROR, RecordedDrafts
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.testing.steps import make_step
from kda_backend.testing.tolerances import ONE_HEAD, STEP_TOLERANCES

_SEED = 17
LENGTHS = (3, 1, 0, 3)
ACCEPTED = ((2, 1, 0, 3), (1, 1, 0, 2))
"""Tokens of each sequence, after each of two steps; those after the last are committed."""


def run_records(
    row: Row,
    target: Target,
    device: torch.device,
    state_dtype: torch.dtype = torch.float32,
    **flags: Any,
) -> tuple[float, float]:
    """Two steps of ragged drafts through ``kda_verify_step``, the second with records to fold, and
    ``kda_commit_`` behind them; ``flags`` as `StepCase` has.

    Returns:
        (error, allowed): relative L2 against float64 of an output, or of the states of one regime's
        heads, whichever uses most of its bound.

    Raises:
        RuntimeError: a recorded key is not that of the definition, or another slot was written.
    """
    model: dict[str, Any] = {"heads": 8, "key_dim": 128, "value_dim": 128}
    steps = len(ACCEPTED)
    case = make_step(
        _SEED, steps * sum(LENGTHS), device=device, regime=HARD_REGIMES, **model, **flags
    )
    drafts = RecordedDrafts(case, LENGTHS, seed=_SEED, state_dtype=state_dtype)
    selection = select(target, case.shape).with_path(row)
    bound_o, bound_s = STEP_TOLERANCES[state_dtype]
    errors, key_error = [], 0.0
    for step, accepted in enumerate(ACCEPTED):
        out = run_step(drafts, step, selection)
        drafts.expect(step)
        errors.append((relative_error(out.cpu(), drafts.expected_out()), bound_o))
        key_error = max(key_error, *(draft.key_error for draft in drafts.drafts))
        drafts.accept(accepted)
    kda_commit_(
        case.inputs[1],
        drafts.state(),
        drafts.records,
        drafts.ints(drafts.rows),
        drafts.ints(drafts.held),
        selection=selection,
    )
    states = [drafts.pools.states[slot].cpu() for slot in drafts.slots]
    for got, want in zip(states, drafts.states, strict=True):
        for i, _ in enumerate(HARD_REGIMES):
            own = slice(i, None, len(HARD_REGIMES))
            errors.append((relative_error(got[own], want[own]), ONE_HEAD * steps * bound_s))
    if key_error > KEY_ERROR[case.packed.dtype]:
        raise RuntimeError(f"a recorded key is off by {key_error:.1e} of its size")
    expect_own_slots(drafts.pools.states, drafts.slots)
    return max(errors, key=lambda pair: pair[0] / pair[1])


def run_step(drafts: RecordedDrafts, step: int, selection: KdaSelection) -> torch.Tensor:
    """The verification of a step, which is told what is held."""
    tokens = drafts.tokens(step)
    part = drafts.case.part(slice(tokens.start, tokens.stop))
    return kda_verify_step(
        *part.inputs,
        drafts.state(),
        drafts.draft(drafts.ints(drafts.held)),
        selection=selection,
        **part.stages(drafts.pools.windows),
    )


def expect_own_slots(states: torch.Tensor, own: Sequence[int]) -> None:
    """Raise ``RuntimeError`` where a slot of NaN has a number, but for those of the call."""
    others = itertools.filterfalse(set(own).__contains__, range(len(states)))
    if not bool(states[list(others)].isnan().all()):
        raise RuntimeError("a state slot outside the call was written")
