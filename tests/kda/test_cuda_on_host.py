"""The Hopper prefill on the CPU, from its own sources, against float64.

Threads run in an order that a seed chooses, and so do copies and matrix products complete; races,
missing fences, deadlocks and overruns are errors (tools/cuda_on_host).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_backend.testing.cases import Case
from tests.kda.cases import assert_causal, assert_result
from tests.kda.one_launch_on_host import CPU, case_of
from tests.kda.prefill_on_host import ROW, run_prefill, use_two_stages
from tools.cuda_on_host.driver import GXX

pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]
Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return functools.partial(run_prefill, monkeypatch)


def run_case(case: Case, **overrides: Any) -> tuple[torch.Tensor, ...]:
    return CPU.chunk(case, selection=CPU.selection(case.shape).with_path(ROW), **overrides)


@pytest.mark.parametrize("split", [False, True], ids=["scan", "scan_split"])
def test_ragged_sequences(run: Run, seed: int, split: bool) -> None:
    """Chunks of 64 and 3 tokens, and more tasks than CTAs of scan.cu."""
    run(seed, (67, 5, 130), split=split)


def test_bounded_gate_and_grouped_heads(run: Run, seed: int) -> None:
    run(seed, (100, 64), sequence_major=True, gate="bounded", heads=1, value_heads=2)


def test_a_bounded_gate_at_its_bound(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every token of half the channels decays by e^-5, the others by nearly 1."""
    case = case_of(seed, (67, 16), gate="bounded", heads=1, regime="random")
    g = torch.full_like(case.g, 40.0)
    g[..., ::2] = -40.0
    case = dataclasses.replace(case, g=g)
    use_two_stages(monkeypatch, seed, gate="bounded")
    assert_result(case, *run_case(case))


def test_no_row_of_a_bounded_gate_looks_ahead(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Later gates are pushed to the bound and to none."""
    use_two_stages(monkeypatch, seed, gate="bounded")
    case = case_of(seed, (64,), gate="bounded", heads=1)
    assert_causal(case, run_case, (4, 27, 46))


def test_given_decays_without_norm(run: Run, seed: int) -> None:
    run(seed, (70,), gate="log", beta="given", l2norm=False)


def test_collinear_keys(run: Run, seed: int) -> None:
    run(seed, (130,), regime="collinear")


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_a_rate_beyond_fp32(run: Run, seed: int, gate: str) -> None:
    """Where the other factor of the gate is 0, or so small that their product is a number."""
    run(seed, (70, 3), regime="steep", gate=gate)


@pytest.mark.parametrize("split", [False, True], ids=["scan", "scan_split"])
def test_segments(run: Run, seed: int, split: bool) -> None:
    """Sequences of four segments (the last one short), of none (empty), of one and of two."""
    run(seed, (450, 0, 30, 200), split=split, segment_chunks=2, in_pool=True)


def test_segments_of_one_chunk(run: Run, seed: int) -> None:
    run(seed, (260,), segment_chunks=1, gate="bounded", heads=1, value_heads=2)


def test_segments_of_collinear_keys(run: Run, seed: int) -> None:
    """Decays near 1: the ends of all segments before count."""
    run(seed, (500,), segment_chunks=2, regime="collinear")
