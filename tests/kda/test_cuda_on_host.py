"""The Hopper prefill on the CPU, from its own sources, against float64.

Threads run in an order that a seed chooses, and so do copies and matrix products complete; races,
missing fences, deadlocks and overruns are errors (tests/cuda_on_host).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.cuda_on_host.driver import GXX
from tests.kda.prefill_on_host import run_prefill

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return functools.partial(run_prefill, monkeypatch)


@pytest.mark.parametrize("split", [False, True], ids=["scan", "scan_split"])
def test_ragged_sequences(run: Run, seed: int, split: bool) -> None:
    """Chunks of 64 and 3 tokens, and more tasks than CTAs of scan.cu."""
    run(seed, (67, 5, 130), split=split)


def test_bounded_gate_and_grouped_heads(run: Run, seed: int) -> None:
    run(seed, (100, 64), sequence_major=True, gate="bounded", heads=1, value_heads=2)


def test_given_decays_without_norm(run: Run, seed: int) -> None:
    run(seed, (70,), gate="log", beta="given", l2norm=False)


def test_collinear_keys(run: Run, seed: int) -> None:
    run(seed, (130,), regime="collinear")


@pytest.mark.parametrize("split", [False, True], ids=["scan", "scan_split"])
def test_segments(run: Run, seed: int, split: bool) -> None:
    """Sequences of four segments (the last one short), of none (empty), of one and of two."""
    run(seed, (450, 0, 30, 200), split=split, segment_chunks=2, in_pool=True)


def test_segments_of_one_chunk(run: Run, seed: int) -> None:
    run(seed, (260,), segment_chunks=1, gate="bounded", heads=1, value_heads=2)


def test_segments_of_collinear_keys(run: Run, seed: int) -> None:
    """Decays near 1: the ends of all segments before count."""
    run(seed, (500,), segment_chunks=2, regime="collinear")
