"""The direct rows of a bounded gate (`PrefillCostModel.bounded_rows`) on the CPU, from their own
sources: against float64, beside the centred rows, and with mistakes planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.testing.numerics import relative_error
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import tile_defines
from kda_backend.spec import Gate
from kda_backend.testing.cases import Case
from tests.cuda_on_host.driver import GXX
from tests.cuda_on_host.planted import plant
from tests.kda.cases import assert_causal, assert_result, assert_same_bits
from tests.kda.one_launch_on_host import CPU, ON, case_of, use_one_launch
from tests.kda.prefill_on_host import ROW, bounded_rows, run_prefill, use_two_stages
from tests.kda.test_cuda_compile import variant_of

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
LENGTHS = (67, 16)
OUTPUT_ERROR = 1.8e-3  # of the output's own rounding to bf16: 1.66e-3


def run_case(case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
    return CPU.chunk(case, selection=CPU.selection(case.shape).with_path(ROW), **overrides)


def bounded_case(seed: int, regime: str) -> Case:
    """``saturated``: every token of half the channels decays by e^-5, the others by nearly 1."""
    if regime != "saturated":
        return case_of(seed, LENGTHS, gate="bounded", heads=1, regime=regime)
    case = case_of(seed, LENGTHS, gate="bounded", heads=1, regime="random")
    g = torch.full_like(case.g, 40.0)
    g[..., ::2] = -40.0
    return dataclasses.replace(case, g=g)


@pytest.mark.parametrize("regime", ["init", "collinear", "saturated"])
def test_errors_are_no_larger_than_those_of_centred_rows(
    monkeypatch: pytest.MonkeyPatch, seed: int, regime: str
) -> None:
    case = bounded_case(seed, regime)
    want_o, want_state = case.expected()
    errors = []
    for direct in (False, True):
        use_two_stages(monkeypatch, seed, gate="bounded", params=bounded_rows(direct))
        o, state = run_case(case)
        assert_result(case, o, state)
        errors.append((relative_error(o[0], want_o), relative_error(state, want_state)))
    centred, direct_rows = errors
    assert direct_rows[0] <= OUTPUT_ERROR
    assert all(new <= 1.05 * old for new, old in zip(direct_rows, centred, strict=True)), errors


def test_no_row_looks_ahead(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Later gates are pushed to the bound and to none."""
    use_two_stages(monkeypatch, seed, gate="bounded", params=bounded_rows(True))
    case = case_of(seed, (64,), gate="bounded", heads=1)
    assert_causal(case, run_case, (4, 27, 46))


def test_one_launch_has_the_bits_of_the_two_stages(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    case = case_of(seed, (27, 3), gate="bounded", heads=1, regime="long")
    use_two_stages(monkeypatch, seed, gate="bounded", params=bounded_rows(True))
    want = run_case(case)
    use_one_launch(monkeypatch, seed)
    row = dataclasses.replace(ON, params=dataclasses.replace(ON.params, bounded_rows="direct"))
    got = CPU.chunk(case, selection=CPU.selection(case.shape).with_path(row))
    for name, x, same in zip(("output", "state"), got, want, strict=True):
        assert_same_bits(name, x, same)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("const float up = ex2(sums[2 * i + c]);", "const float up = ex2(-sums[2 * i + c]);"),
        ("__shfl_sync(~0u, up, 28 + t);", "__shfl_sync(~0u, up, 24 + t);"),
        (
            "s.block_decays + 3 + at.warp;  // the warp's own",
            "s.block_decays + 2 + at.warp;  // the warp's own",
        ),
    ],
    ids=["a wrong sign", "a wrong end of the block", "a block too early"],
)
def test_mistakes_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, right: str, wrong: str
) -> None:
    sources = plant(pipeline.KERNELS, tmp_path, "scores.cuh", right, wrong)
    with pytest.raises(AssertionError, match=r"(output|state).* is off by"):
        run_prefill(
            monkeypatch,
            seed,
            (40,),
            sources=sources,
            gate="bounded",
            heads=1,
            params=bounded_rows(True),
        )


def test_only_normalised_rows_of_a_bounded_gate_are_direct() -> None:
    def direct(gate: Gate, l2norm: bool, params: Any) -> int:
        variant = variant_of(gate)._replace(l2norm=l2norm)
        return tile_defines(variant, params)["BOUNDED_ROWS"]

    on, off = bounded_rows(True), bounded_rows(False)
    assert direct(Gate.BOUNDED, True, on) == 1
    assert direct(Gate.BOUNDED, False, on) == direct(Gate.SOFTPLUS, True, on) == 0
    assert direct(Gate.BOUNDED, True, off) == 0
    assert ROW.params.bounded_rows == "centred", "the shipped row is to be measured first"
