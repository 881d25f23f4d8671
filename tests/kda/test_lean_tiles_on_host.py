"""Tiles in fewer instructions (`PrefillCostModel.lean_tiles`), on the CPU from their own sources:
against float64, beside the tiles in use, in one launch, and with mistakes planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.testing.numerics import relative_error
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.testing.cases import Case
from kda_backend.testing.regimes import REGIMES
from tests.cuda_on_host.driver import GXX
from tests.cuda_on_host.planted import plant
from tests.kda.cases import assert_causal, assert_result, assert_same_bits
from tests.kda.one_launch_on_host import CPU, ON, case_of, use_one_launch
from tests.kda.prefill_on_host import LEAN, ROW, run_prefill, use_two_stages

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
LEAN_ROW = dataclasses.replace(ROW, params=LEAN)
GATES = ("log", "softplus", "bounded")


def run_case(case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
    return CPU.chunk(case, selection=CPU.selection(case.shape).with_path(LEAN_ROW), **overrides)


@pytest.mark.interpreter
@pytest.mark.parametrize("gate", GATES)
def test_against_float64(monkeypatch: pytest.MonkeyPatch, seed: int, gate: str) -> None:
    """Whole chunks and parts of one, tiles one after the other in a CTA, a tile after the last."""
    run_prefill(monkeypatch, seed, (67, 5, 130), params=LEAN, gate=gate)


@pytest.mark.interpreter
def test_grouped_heads_and_the_split_scan(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    heads = {"heads": 1, "value_heads": 2}
    run_prefill(monkeypatch, seed, (100, 64), params=LEAN, split=True, gate="bounded", **heads)


@pytest.mark.interpreter
@pytest.mark.parametrize("gate", GATES)
def test_keys_and_queries_that_are_not_normalised(
    monkeypatch: pytest.MonkeyPatch, seed: int, gate: str
) -> None:
    run_prefill(monkeypatch, seed, (70,), params=LEAN, gate=gate, l2norm=False)


@pytest.mark.interpreter
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_errors_beside_those_of_the_tiles_in_use(
    monkeypatch: pytest.MonkeyPatch, seed: int, regime: str, gate: str
) -> None:
    """At most a tenth larger, and within the tolerance of every path."""
    case = case_of(seed, (150,), gate=gate, heads=1, regime=regime)
    want_o, want_state = case.expected()
    errors = []
    for params in (ROW.params, LEAN):
        use_two_stages(monkeypatch, seed, gate=gate, params=params)
        o, state = run_case(case)
        assert_result(case, o, state)
        errors.append((relative_error(o[0], want_o), relative_error(state, want_state)))
    print(regime, gate, errors)
    for name, in_use, lean in zip(("output", "state"), *errors, strict=True):
        assert lean <= 1.1 * in_use + 1e-5, name


@pytest.mark.interpreter
def test_a_bounded_gate_at_its_bound(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every token of half the channels decays by e^-5, the others by nearly 1."""
    case = case_of(seed, (67, 16), gate="bounded", heads=1, regime="random")
    g = torch.full_like(case.g, 40.0)
    g[..., ::2] = -40.0
    case = dataclasses.replace(case, g=g)
    use_two_stages(monkeypatch, seed, gate="bounded", params=LEAN)
    assert_result(case, *run_case(case))


@pytest.mark.interpreter
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_no_row_looks_ahead(monkeypatch: pytest.MonkeyPatch, seed: int, gate: str) -> None:
    use_two_stages(monkeypatch, seed, gate=gate, params=LEAN)
    case = case_of(seed, (64,), gate=gate, heads=1)
    assert_causal(case, run_case, (4, 27, 46))


@pytest.mark.interpreter
@pytest.mark.parametrize("lengths", [(9, 3), (27, 3), (64,)], ids=["16 rows", "32", "64"])
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_one_launch_has_the_bits_of_the_two_stages(
    monkeypatch: pytest.MonkeyPatch, seed: int, lengths: tuple[int, ...], gate: str
) -> None:
    case = case_of(seed, lengths, gate=gate, heads=1, regime="long")
    use_two_stages(monkeypatch, seed, gate=gate, params=LEAN)
    want = run_case(case)
    assert_result(case, *want)
    use_one_launch(monkeypatch, seed)
    row = dataclasses.replace(ON, params=dataclasses.replace(ON.params, lean_tiles=True))
    got = CPU.chunk(case, selection=CPU.selection(case.shape).with_path(row))
    for name, two_stages, one in zip(("output", "state"), want, got, strict=True):
        assert_same_bits(name, one, two_stages)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("write(D12, d12)", "write(D12, 20.0f * d12)"),
        ("write(D123, d[1] * d23)", "write(D123, 0.5f * d[1] * d23)"),
        ("] = d01 * d23;", "] = 0.5f * d01 * d23;"),
        ("unpack(before, s.decays[BEFORE + at.warp]", "unpack(before, s.decays[ONE]"),
        ("k_after[0][0] * second[0]", "k_after[0][0] * 0.0f"),
        ("x[i] = at_least_2_to_minus_22(x[i])", "x[i] = x[0]"),
    ],
)
def test_mistakes_are_seen(
    monkeypatch: pytest.MonkeyPatch, seed: int, tmp_path: Path, right: str, wrong: str
) -> None:
    sources = plant(pipeline.KERNELS, tmp_path, "lean_rows.cuh", right, wrong)
    with pytest.raises(AssertionError, match=r"(output|state).* is off by"):
        run_prefill(monkeypatch, seed, (64,), sources=sources, params=LEAN, heads=1, regime="long")


@pytest.mark.interpreter
@pytest.mark.parametrize("barrier", [0, 1], ids=["sums", "decays"])
def test_missing_barriers_are_races(
    monkeypatch: pytest.MonkeyPatch, seed: int, tmp_path: Path, barrier: int
) -> None:
    """Other warps read sums of decays and then their products."""
    calls = [
        "take_log_decays(p, s, at, matrix, rate, inside);\n    meet();",
        "multiply_block_decays(chunk_decays, s, at);\n    meet();\n}\n// Rows and scores",
    ]
    right = calls[barrier]
    wrong = right.replace("\n    meet();", "")
    sources = plant(pipeline.KERNELS, tmp_path, "lean_rows.cuh", right, wrong)
    with pytest.raises(RuntimeError, match="race"):
        run_prefill(monkeypatch, seed, (64,), sources=sources, params=LEAN, heads=1)


def test_the_shipped_row_is_to_be_measured_first() -> None:
    assert not ROW.params.lean_tiles
