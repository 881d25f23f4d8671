"""Which steps the Hopper prefill makes in one launch, and how: from the lengths that the host
knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from kda_backend.contract.values import StateRef, TokenInputs
from kda_backend.prefill import one_launch_sm90 as in_one
from kda_backend.prefill import paths
from kda_backend.prefill.arguments_sm90 import PrefillVariant, Track
from kda_backend.prefill.one_launch_sm90 import CTAS_PER_SM, choose_launch
from kda_backend.selection import select
from kda_backend.step_plan import StepPlan, build_step_plan
from kda_backend.testing.cases import offsets_of
from tests.kda.one_launch_on_host import case_of

SMS = 132
STATE = StateRef.pool(torch.zeros(3, 4, 128, 128), torch.zeros(2, dtype=torch.int32))


def plan_of(lengths: Iterable[int], *, on_host: bool = True) -> StepPlan:
    cu_seqlens = torch.tensor(offsets_of(tuple(lengths)), dtype=torch.int32)
    plan = build_step_plan(cu_seqlens, int(cu_seqlens[-1]), chunk_table=False)
    return plan if on_host else dataclasses.replace(plan, cu_seqlens_cpu=None, max_tokens=None)


def path_of(lengths: Iterable[int], state: StateRef = STATE, *, on_host: bool = True) -> str:
    case = case_of(0, tuple(lengths), heads=4)
    chosen = select(KNOWN_TARGETS["H200"], case.shape)
    tokens = TokenInputs.of(*case.tokens, scale=1.0)
    plan = plan_of(lengths, on_host=on_host)
    return paths.path_of(chosen, tokens, plan, state)[0].name


def test_lengths_choose() -> None:
    assert path_of([64, 1, 0]) == "one_launch_sm90"
    assert path_of([65, 1, 0]) == "two_stage_sm90"
    assert path_of([64], on_host=False) == "two_stage_sm90", "as in a graph's capture"


@pytest.mark.parametrize("longest", [None, 65])
def test_a_row_of_longer_sequences_is_refused(longest: int | None) -> None:
    chosen = select(KNOWN_TARGETS["H200"], case_of(0, (3,), heads=4).shape)
    (row,) = (row for row in chosen.prefill.rows if row.name == "one_launch_sm90")
    longer = dataclasses.replace(row, max_longest=longest)
    with pytest.raises(ValueError, match=f"max_longest of at most 64 .*got {longest}"):
        chosen.with_path(longer).prefill.bind_all()


@pytest.mark.parametrize(
    ("state", "does"),
    [
        (STATE, True),
        (StateRef.functional(None, v_first=True), True),
        (StateRef.functional(torch.zeros(2, 4, 128, 128), v_first=False), False),
        (StateRef.functional(torch.zeros(2, 4, 128 * 128 + 1)[..., 1:].unflatten(2, (128, 128)),
                             v_first=True), False),
    ],
    ids=["pool", "none", "K first", "odd strides"],
)  # fmt: skip
def test_states_without_pairs_keep_the_two_stages(state: StateRef, does: bool) -> None:
    assert (path_of([9, 1], state) == "one_launch_sm90") is does


@pytest.mark.parametrize("longest", [0, 1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("tasks", [1, 66, 67, 132, 133, 500, 5000])
def test_every_launch_can_be_made(longest: int, tasks: int) -> None:
    launch = choose_launch(longest, tasks, SMS)
    assert longest <= launch.rows
    assert launch.ctas_per_sm in (1, CTAS_PER_SM[launch.rows])
    assert 1 <= launch.ctas <= tasks * (1 + launch.split)
    assert launch.ctas <= launch.ctas_per_sm * SMS


def test_all_kernels_that_a_step_can_choose_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Loaded:
        def __init__(self, *args: Any) -> None:
            self.defines = args[3]

        def load(self) -> None:
            loaded.append((self.defines["ROWS"], self.defines["MIN_BLOCKS"]))

    monkeypatch.setattr(in_one, "CudaKernel", Loaded)
    variant = PrefillVariant(3, 1, True, torch.bfloat16, False, torch.float32, Track.NONE)
    kernels = in_one.OneLaunchSm90(KNOWN_TARGETS["H200"]).kernels(variant)
    assert sorted(kernels) == sorted(loaded)
    assert sorted(kernels) == sorted((r, c) for r, many in CTAS_PER_SM.items() for c in (1, many))
