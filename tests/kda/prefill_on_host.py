"""KDA's Hopper prefill from its own sources on the CPU (tests/cuda_on_host)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.launch.cuda import CudaParams
from backend_core.tables.select import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.launch_params import TABLES
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.sm_schedule import PrefillShape, Schedule
from kda_backend.scratch import Scratch
from kda_backend.spec import Beta, Gate
from tests.cuda_on_host.driver import HostKernel
from tests.kda.cases import Backend, assert_result

ROW = next(
    row for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows if row.name == "two_stage_sm90"
)


def schedule_of(shape: PrefillShape, *, split: bool, sequence_major: bool) -> Schedule:
    """Three intra CTAs, of which the last is on an SM reserved for the scan and makes one tile; as
    many scan CTAs as tasks, or two of scan.cu, which then take tasks as they come."""
    scan_ctas = 4 * shape.tasks if split else min(shape.tasks, 2)
    return Schedule(2, split, scan_ctas, 3, 2, 1, sequence_major)


def run_prefill(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    lengths: tuple[int, ...],
    *,
    split: bool = False,
    sequence_major: bool = False,
    sources: Path = pipeline.KERNELS,
    scan_params: CudaParams = pipeline.SCAN_PARAMS,
    max_polls: int = 1 << 26,
    scratch: Scratch | None = None,
    **model: Any,
) -> None:
    """Makes a case, runs it on the kernels and compares.

    Args:
        sources: of the kernels.
        scan_params: by which the scan finds its arguments.
        max_polls: looks before a kernel gives up.
    """
    gate = Gate[model.get("gate", "softplus").upper()]
    beta = Beta[model.get("beta", "sigmoid").upper()]
    polls = {"MAX_POLLS": max_polls}
    name = "scan_split" if split else "scan"
    intra = HostKernel(
        sources / "intra_chunk.cu",
        "intra_chunk",
        pipeline.INTRA_PARAMS,
        pipeline.intra_defines(gate, beta, model.get("l2norm", True), torch.bfloat16, 2) | polls,
    )
    scan = HostKernel(
        sources / f"{name}.cu",
        name,
        scan_params,
        pipeline.scan_defines(False, False, False) | polls,
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
    keep = {} if scratch is None else {"scratch": scratch}
    assert_result(case, *cpu.chunk(case, selection=selection, **keep))
