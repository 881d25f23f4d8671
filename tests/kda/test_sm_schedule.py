"""How a call of the Hopper prefill shares the SMs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from backend_core.target import KNOWN_TARGETS
from benchmarks.sweep_kda_prefill import (
    Timed,
    mean_regret,
    regrets,
    timed,
)
from kda_backend.contract.values import GateSpec, StateRef, TokenInputs
from kda_backend.operators import kda_prefill
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.sm_schedule import CostModel, PrefillShape, choose_schedule
from kda_backend.selection import KdaShape, select
from kda_backend.spec import Gate
from kda_backend.step_plan import build_step_plan
from tests.kda.prefill_on_host import ROW

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
FITTED = "kda_prefill_sweep_h200.json"  # what the shipped constants were fitted to


@pytest.mark.parametrize("num_sms", [132, 114, 78])
def test_every_tile_has_a_maker_and_every_scan_cta_a_place(num_sms: int) -> None:
    model = CostModel(num_sms)
    for heads, sequences, chunks in itertools.product(
        (1, 2, 4, 8, 16, 32, 96), (1, 3, 8, 64), (0, 1, 2, 8, 31, 128, 2048)
    ):
        tasks, tiles = heads * sequences, heads * sequences * chunks
        schedule = choose_schedule(model, PrefillShape(tiles, tasks, chunks, tasks))
        assert schedule.scan_ctas == (4 * tasks if schedule.split else min(tasks, num_sms))
        assert 0 < schedule.first_scan_sm <= num_sms
        assert num_sms - schedule.first_scan_sm <= schedule.scan_ctas
        assert schedule.reserved_sm_tile_cap >= 0
        # one wave: hardware spreads it evenly, and every CTA is there before the scan may start
        assert schedule.intra_ctas in (num_sms, num_sms * schedule.intra_ctas_per_sm)


def sweep(name: str = FITTED) -> list[Timed]:
    return [timed(row) for row in json.loads((RESULTS / name).read_text())["rows"]]


@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [(FITTED, 0.005, 1.05), ("kda_prefill_sweep_torch214_h200.json", 0.01, 1.08)],
)
def test_the_chosen_schedules_are_nearly_the_best_that_were_measured(
    name: str, mean: float, worst: float
) -> None:
    """On the sweep of the fit the model's choices take 0.3 % longer than the best on geometric mean
    and the worst 4.3 %; on one of another machine and torch release 0.8 % and 7.3 %."""
    rows = sweep(name)
    ratios = regrets(CostModel(132), rows)
    assert len(rows) >= 26
    assert all(len(times) > 1 and min(times.values()) > 0 for _, times in rows)
    assert mean_regret(ratios) <= mean
    assert max(ratios) <= worst


@pytest.mark.interpreter
def test_no_sequences_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intra CTAs count themselves in the scratch, and only the scan takes that back."""
    monkeypatch.setattr(pipeline.TwoStageSm90, "prepare", None)
    nothing = build_step_plan(torch.zeros(1, dtype=torch.int32), 0)
    x = torch.zeros(1, 0, 2, 128, dtype=torch.bfloat16)
    tokens = TokenInputs.of(x, x, x, x, x[..., 0])
    shape = KdaShape(2, 2, 128, 128, False, torch.bfloat16, torch.bfloat16)
    selection = select(KNOWN_TARGETS["H200"], shape).with_path(ROW)
    state = StateRef.functional(None, v_first=True)
    kda_prefill(tokens, GateSpec(Gate.LOG), state, nothing, selection=selection)
