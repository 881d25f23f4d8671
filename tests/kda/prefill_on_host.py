"""KDA's Hopper prefill from its own sources on the CPU (tools/cuda_on_host)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.launch.cuda_params import CudaParams
from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import KNOWN_TARGETS
from kda_backend.launch_params import TABLES, SegmentedParams
from kda_backend.prefill import segmented_sm90 as segmented
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import PrefillVariant, Track
from kda_backend.prefill.sm_schedule import CostModel, PrefillShape, Schedule
from kda_backend.scratch import Scratch
from kda_backend.spec import Beta, Gate
from tests.kda.cases import Backend, assert_result
from tools.cuda_on_host.driver import HostKernel

ROWS = {row.name: row for row in load_table(TABLES, KNOWN_TARGETS["H200"]).rows}
ROW = ROWS["two_stage_sm90"]
"""The two stages, for every step here."""


def schedule_of(shape: PrefillShape, *, split: bool, sequence_major: bool) -> Schedule:
    """Three intra CTAs, of which the last is on an SM reserved for the scan and makes one tile; as
    many scan CTAs as tasks, or two of scan.cu, which then take tasks as they come."""
    scan_ctas = 4 * shape.tasks if split else min(shape.tasks, 2)
    return Schedule(2, split, scan_ctas, 3, 2, 1, sequence_major)


def segmented_row(segment_chunks: int) -> Row:
    """The table's row, for every step here."""
    params = SegmentedParams(ROW.params.fused_conv_tiles, segment_chunks)
    return replace(ROWS["segmented_sm90"], params=params, min_longest=None, max_width=None)


def use_two_stages(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    *,
    split: bool = False,
    sequence_major: bool = False,
    sources: Path = pipeline.KERNELS,
    scan_params: CudaParams | None = None,
    max_polls: int = 1 << 26,
    gate: str = "softplus",
    beta: str = "sigmoid",
    l2norm: bool = True,
    segment_chunks: int = 0,
    track: Track = Track.NONE,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """The path's next calls run its kernels on the CPU; the arguments are `run_prefill`'s.

    Args:
        scan_params: by which the scan finds its arguments, by default its variant's.
        track: for calls that ask for states inside of their sequences.
        state_dtype: of the pool.
    """
    variant = PrefillVariant(
        *(Gate[gate.upper()], Beta[beta.upper()], l2norm, torch.bfloat16, False),
        state_dtype,
        track,
    )
    polls = {"MAX_POLLS": max_polls}
    name = "scan_split" if split else "scan"
    defines = pipeline.scan_defines(variant) | polls
    if segment_chunks:
        scan_params = segmented.segment_params(track)
        defines = segmented.segment_defines(False, state_dtype, track) | polls
    intra = HostKernel(
        sources / "intra_chunk.cu",
        "intra_chunk",
        pipeline.INTRA_PARAMS,
        pipeline.intra_defines(variant, 2) | polls,
    )
    scan = HostKernel(
        sources / f"{name}.cu",
        name,
        scan_params or pipeline.scan_params_of(variant),
        defines,
        cluster_size=2 if split else 1,
        run_seed=seed,
    )
    kernels = pipeline.StageKernels(
        {2: intra},  # type: ignore[dict-item]
        (scan, scan),  # type: ignore[arg-type]
        lambda shape: schedule_of(shape, split=split, sequence_major=sequence_major),
        4,
    )
    monkeypatch.setattr(pipeline.TwoStageSm90, "kernels", lambda *_: kernels)
    if not segment_chunks:
        return
    assert scan_params is not None
    of_passes = segmented.segment_defines(False, state_dtype) | polls
    passes = (
        HostKernel(sources / f"{name}.cu", name, scan_params, of_passes)
        for name in ("segment_ends", "merge_segments")
    )
    # few SMs: CTAs take several tasks
    few_sms, scan_of = CostModel(num_sms=5), segmented._scan_of
    monkeypatch.setattr(
        segmented, "_scan_of", lambda kernels, model, *call: scan_of(kernels, few_sms, *call)
    )
    of_segments = segmented.SegmentKernels(*passes, (scan, scan))  # type: ignore[arg-type]
    monkeypatch.setattr(segmented.SegmentedSm90, "kernels", lambda *_: of_segments)
    monkeypatch.setattr(
        segmented,
        "choose_segment_schedule",
        lambda model, tiles, tasks, chunks: schedule_of(
            PrefillShape(tiles, tasks, chunks, tasks), split=split, sequence_major=False
        ),
    )


def run_prefill(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    lengths: tuple[int, ...],
    *,
    split: bool = False,
    sequence_major: bool = False,
    sources: Path = pipeline.KERNELS,
    scan_params: CudaParams | None = None,
    max_polls: int = 1 << 26,
    scratch: Scratch | None = None,
    segment_chunks: int = 0,
    in_pool: bool = False,
    **model: Any,
) -> None:
    """Makes a case, runs it on the kernels and compares.

    Args:
        segment_chunks: of the segments that sequences are scanned by; 0 scans them whole.
        in_pool: states are overwritten in a pool.
        sources: of the kernels.
        scan_params: by which the scan finds its arguments, by default its variant's.
        max_polls: looks before a kernel gives up.
    """
    of_kernels = {name: model[name] for name in ("gate", "beta", "l2norm") if name in model}
    use_two_stages(
        monkeypatch,
        seed,
        split=split,
        sequence_major=sequence_major,
        sources=sources,
        scan_params=scan_params,
        max_polls=max_polls,
        segment_chunks=segment_chunks,
        **of_kernels,
    )
    cpu = Backend("kernels", torch.device("cpu"))
    case = cpu.case(seed, lengths, key_dim=128, value_dim=128, **model)
    row = segmented_row(segment_chunks) if segment_chunks else ROW
    selection = cpu.selection(case.shape).with_path(row)
    keep = {} if scratch is None else {"scratch": scratch}
    if not in_pool:
        assert_result(case, *cpu.chunk(case, selection=selection, **keep))
        return
    pool = case.state.flip(0).clone()
    slots = torch.arange(len(lengths), dtype=torch.int32).flip(0)
    o, _ = cpu.chunk(case, selection=selection, state_pool=pool, state_indices=slots, **keep)
    assert_result(case, o, pool.flip(0))
