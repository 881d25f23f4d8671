"""CTAs of the intra-chunk stage that begin one after the other (`intra_stagger_ns`)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kda_backend.prefill.sm_schedule import (
    CostModel,
    PrefillShape,
    choose_schedule,
    long_sequences_concurrent,
)
from tests.cuda_on_host.driver import GXX
from tests.kda.cases import assert_same_bits
from tests.kda.one_launch_on_host import CPU, case_of
from tests.kda.prefill_on_host import ROW, run_prefill, use_two_stages

STAGGERED = replace(ROW.params, intra_stagger_ns=1000)


@pytest.mark.skipif(GXX is None, reason="g++ is not installed")
def test_bits_are_those_without(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Three CTAs of which the model places two on one SM, and one on a reserved SM."""
    case = case_of(seed, (130, 70), heads=1)
    found = []
    for params in (ROW.params, STAGGERED):
        use_two_stages(monkeypatch, seed, params=params)
        found.append(CPU.chunk(case, selection=CPU.selection(case.shape).with_path(ROW)))
    for name, plain, staggered in zip(("output", "state"), *found, strict=True):
        assert_same_bits(name, staggered, plain)


@pytest.mark.skipif(GXX is None, reason="g++ is not installed")
def test_against_float64(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run_prefill(monkeypatch, seed, (67, 5, 130), params=STAGGERED)


def test_the_scan_gets_its_sms_at_once() -> None:
    """32 heads of 8,192 tokens: the first tiles come early, so no reserved SM makes one."""
    shape = PrefillShape(tiles=128 * 32, tasks=32, chunks=128, long_tasks=32)
    plain, staggered = (CostModel.from_table(x, 132) for x in (ROW.params, STAGGERED))
    chosen = choose_schedule(staggered, shape)
    assert chosen.first_scan_sm == 100 and chosen.reserved_sm_tile_cap == 0
    for intra, scan in ((i, s) for i in plain.intra for s in plain.scan if not s.split):
        before = dict(
            (schedule.reserved_sm_tile_cap, ns)
            for ns, schedule in long_sequences_concurrent(plain, shape, intra, scan)
        )
        for ns, schedule in long_sequences_concurrent(staggered, shape, intra, scan):
            assert ns <= before[schedule.reserved_sm_tile_cap]


@pytest.mark.parametrize("ns", [-500, 750])
def test_other_times_are_refused(ns: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of 500, got {ns}"):
        replace(ROW.params, intra_stagger_ns=ns)


def test_the_shipped_row_is_to_be_measured_first() -> None:
    assert ROW.params.intra_stagger_ns == 0
