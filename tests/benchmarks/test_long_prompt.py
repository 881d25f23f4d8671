"""The long-prompt benchmark without an engine: what it follows, and that it notices errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from benchmarks import long_prompt_vllm
from benchmarks.long_prompt_vllm import HEADS, Follower
from kda_backend import layer
from kda_backend.contract.values import GateSpec, PrefillCall, StateRef, TokenInputs
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape, select
from kda_backend.step_plan import build_step_plan

COUNTS = (130, 64, 7)


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    monkeypatch.setattr(layer, "path_of", layer.path_of)  # put back afterwards
    monkeypatch.setattr(long_prompt_vllm, "PIECE", 64)
    yield Follower()


def steps(pool: torch.Tensor, after: Any = None) -> None:
    """Three steps of one sequence in slot 1, as the engine's layer makes them."""
    torch.manual_seed(0)
    heads, dim = max(HEADS) + 1, pool.shape[-1]
    selection = select(KNOWN_TARGETS["cpu"], KdaShape(heads, heads, dim, dim))
    gate = GateSpec.of(torch.linspace(-5, 4, heads), torch.randn(heads * dim), None)
    slot = torch.tensor([1], dtype=torch.int32)
    for number, count in enumerate(COUNTS):
        q, k, v, g = (torch.randn(1, count, heads, dim).bfloat16() for _ in range(4))
        beta = torch.randn(1, count, heads).bfloat16()
        tokens = TokenInputs.of(q, k, v, g, beta)
        offsets = torch.tensor([0, count], dtype=torch.int32)
        plan = build_step_plan(offsets, count, chunk_table=False)
        state = StateRef.pool(pool, slot, torch.tensor([number > 0]))
        run = layer.path_of(selection, tokens, plan, state)
        scratch = Scratch(torch.device("cpu"))
        run(PrefillCall(tokens, gate, plan, state, torch.empty_like(v), None, scratch, {}))
        if after is not None:
            after(pool)


def test_every_step_is_compared_with_the_recurrence_from_the_start(follower: Follower) -> None:
    steps(torch.full((2, max(HEADS) + 1, 16, 16), torch.nan))
    assert [row["end"] for row in follower.rows] == [130, 194, 201] and follower.end == 201
    for row in follower.rows:
        assert row["finite"] and row["output_error"] < 5e-3 and row["state_error"] < 5e-3


def test_a_state_that_is_lost_between_steps_is_noticed(follower: Follower) -> None:
    steps(torch.zeros(2, max(HEADS) + 1, 16, 16), after=lambda pool: pool.mul_(0.5))
    assert follower.rows[0]["state_error"] < 5e-3 < 0.02 < follower.rows[1]["state_error"]
