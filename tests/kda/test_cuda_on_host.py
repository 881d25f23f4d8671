"""The Hopper prefill on the CPU, from its own sources, against float64.

Threads run in an order that a seed chooses, and so do copies and matrix products complete
(tests/cuda_on_host). Two known kinds of mistake are planted and must show.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.launch_params import TABLES
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.sm_schedule import PrefillShape, Schedule
from kda_backend.spec import Beta, Gate
from tests.cuda_on_host.driver import GXX, HostKernel
from tests.kda.cases import Backend, assert_result

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
ROW = next(
    row for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows if row.name == "two_stage_sm90"
)
Run = Callable[..., None]


def schedule_of(shape: PrefillShape, *, split: bool, sequence_major: bool) -> Schedule:
    """Three intra CTAs, of which the last is on an SM reserved for the scan and makes one tile; as
    many scan CTAs as tasks, or two of scan.cu, which then take tasks as they come."""
    scan_ctas = 4 * shape.tasks if split else min(shape.tasks, 2)
    return Schedule(2, split, scan_ctas, 3, 2, 1, sequence_major)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Makes a case, runs it on the kernels and compares."""

    def run(
        seed: int,
        lengths: tuple[int, ...],
        *,
        split: bool = False,
        sequence_major: bool = False,
        sources: Path = pipeline.KERNELS,
        **model: Any,
    ) -> None:
        gate = Gate[model.get("gate", "softplus").upper()]
        beta = Beta[model.get("beta", "sigmoid").upper()]
        name = "scan_split" if split else "scan"
        intra = HostKernel(
            sources / "intra_chunk.cu",
            "intra_chunk",
            pipeline.INTRA_PARAMS,
            pipeline.intra_defines(gate, beta, model.get("l2norm", True), torch.bfloat16, 2),
        )
        scan = HostKernel(
            sources / f"{name}.cu",
            name,
            pipeline.SCAN_PARAMS,
            pipeline.scan_defines(False, False, False),
            cluster_size=2 if split else 1,
            run_seed=seed,
        )
        kernels = pipeline._Kernels(
            {2: intra},  # type: ignore[dict-item]
            (scan, scan),  # type: ignore[arg-type]
            lambda shape: schedule_of(shape, split=split, sequence_major=sequence_major),
        )
        monkeypatch.setattr(pipeline, "_kernels", lambda *_: kernels)
        cpu = Backend("kernels", torch.device("cpu"))
        case = cpu.case(seed, lengths, key_dim=128, value_dim=128, **model)
        selection = cpu.selection(case.shape).with_path(ROW)
        assert_result(case, *cpu.chunk(case, selection=selection))

    return run


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


PLANTED = {
    "a copy that is too short": (
        "scan.cu",
        "                          TILE_BYTES, s.full[stage]);",
        "                          TILE_BYTES - 1024, s.full[stage]);",
    ),
    "a wrong sign in the scores": (
        "solve.cuh",
        "pack_scores(y, scores.k_cross_block[0], -1.0f);",
        "pack_scores(y, scores.k_cross_block[0], 1.0f);",
    ),
    "a stage that is overwritten before it has been read": (
        "scan_chunk.cuh",
        "if (before >= STAGES) s.empty[stage].wait((before / STAGES - 1) & 1);",
        "",
    ),
    "a product that is not waited for": (
        "scan.cu",
        "            warpgroup_wait<0>();\n            warpgroup_fence_operand(e);",
        "            warpgroup_fence_operand(e);",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_shows(run: Run, seed: int, tmp_path: Path, mistake: str) -> None:
    """The case that passes without it fails, by its result or by a wait that never ends."""
    name, right, wrong = PLANTED[mistake]
    sources = tmp_path / "sources"
    shutil.copytree(pipeline.KERNELS, sources)
    text = (sources / name).read_text()
    assert text.count(right) == 1
    (sources / name).write_text(text.replace(right, wrong))
    with pytest.raises((AssertionError, RuntimeError)) as failure:
        run(seed, (67, 300), sources=sources, regime="weak")
    assert "error:" not in str(failure.value)  # it did compile
    run(seed, (67, 300), regime="weak")
