"""Snapshots in slots of a pool, by the Hopper kernels' own sources on the CPU (cuda_on_host)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backend_core.testing.numerics import relative_error
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import Track
from kda_backend.testing.cases import Case
from tests.kda.cases import Pool, assert_same_bits
from tests.kda.one_launch_on_host import CPU, ON, case_of, use_one_launch
from tests.kda.prefill_on_host import ROW, segmented_row, use_two_stages
from tools.cuda_on_host.driver import GXX
from tools.cuda_on_host.planted import plant

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(GXX is None, reason="needs g++"),
]
FORMS = ("scan", "scan_split", "one_launch", "segments", "segments, split")
SLOTS = 9
OWN = (8, 1, -1, 3)  # of the states; the third sequence is padding
LENGTHS = (130, 64, 20, 0)
CHUNKS = ((1, 3, 0), (0, 1, 2), (1, -1, 0), (0, 0, -1))
PLACES = ((5, 0, -1), (-1, 2, 7), (6, 4, -1), (-1, -1, 4))
WRITTEN = {(0, 0): 5, (0, 1): 0, (1, 1): 2, (2, 0): 6}


def i32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def case_of_four(seed: int, form: str, heads: int = 1) -> Case:
    """``one_launch`` takes no sequence of more than a chunk."""
    lengths = [
        min(length, ON.max_longest) if form == "one_launch" else length for length in LENGTHS
    ]
    found: Case = case_of(seed, lengths, heads=heads, regime="weak")
    return found


def chunks_of(form: str) -> torch.Tensor:
    """After which chunks of each sequence a snapshot is taken."""
    chunks = i32(CHUNKS)
    if form == "one_launch":
        chunks[0].clamp_(max=1)
    return chunks


def run(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    form: str,
    case: Case,
    states: Pool,
    snapshots: torch.Tensor,
    places: torch.Tensor | None,
    sources: Path = pipeline.KERNELS,
) -> torch.Tensor:
    """The output; of one form of the kernels, which take several tasks each."""
    track = Track.IN_ORDER if places is None else Track.POOL
    with monkeypatch.context() as patch:
        if form == "one_launch":
            use_one_launch(patch, seed, sources=sources, ctas=3)
        else:
            split = form in ("scan_split", "segments, split")
            chunks = 1 if form.startswith("segments") else 0
            use_two_stages(
                *(patch, seed),
                sources=sources,
                split=split,
                track=track,
                segment_chunks=chunks,
                state_dtype=states.view.dtype,
            )
        row = {"one_launch": ON, "scan": ROW, "scan_split": ROW}.get(form) or segmented_row(1)
        o, _ = CPU.chunk(
            case,
            selection=CPU.selection(case.shape).with_path(row),
            state_pool=states.view,
            state_indices=i32(OWN),
            snapshot_chunks=chunks_of(form),
            snapshots=snapshots,
            snapshot_indices=places,
        )
    return o


def filled(case: Case, dtype: torch.dtype = torch.float32) -> Pool:
    pool = Pool(SLOTS, case, dtype)
    pool.fill([slot for slot in OWN if slot >= 0], case.state[[0, 1, 3]])
    return pool


def assert_as_in_order(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    form: str,
    gap: int | None,
    sources: Path = pipeline.KERNELS,
    dtype: torch.dtype = torch.float32,
    heads: int = 1,
) -> None:
    """Output, states and snapshots have the bits of snapshots one after another, rounded to the
    pool's dtype, and nothing else of the pools has changed.

    Args:
        gap: elements between slots of the pool of snapshots; ``None`` for the states' own pool.
    """
    case = case_of_four(seed, form, heads)
    want, mine = filled(case, dtype), filled(case, dtype)
    in_order = torch.full((4, 3, *case.state.shape[1:]), torch.nan)
    want_o = run(monkeypatch, seed, form, case, want, in_order, None)
    pool = mine if gap is None else Pool(SLOTS, case, dtype, gap)
    states_before, before = mine.copy(), pool.copy()
    o = run(monkeypatch, seed, form, case, mine, pool.view, i32(PLACES), sources)
    assert_same_bits("output", o, want_o)
    own = [slot for slot in OWN if slot >= 0]
    assert_same_bits("states", mine.states(own), want.states(own))
    for (n, s), slot in WRITTEN.items():
        assert not in_order[n, s].isnan().any()
        assert_same_bits(f"snapshot {n}, {s}", pool.view[slot], in_order[n, s].to(dtype))
    pool.assert_only_changed(before, [*WRITTEN.values(), *(own if gap is None else ())])
    if gap is not None:
        mine.assert_only_changed(states_before, own)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("gap", "dtype", "heads"),
    [(None, torch.float32, 2), (1, torch.float16, 1)],
    ids=["state pool", "fp16 slots that no vector store takes"],
)
def test_bits_are_those_of_snapshots_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    form: str,
    gap: int | None,
    dtype: torch.dtype,
    heads: int,
) -> None:
    assert_as_in_order(monkeypatch, seed, form, gap, dtype=dtype, heads=heads)


@pytest.mark.parametrize("form", FORMS)
def test_in_its_own_slot_the_state_after_a_sequence_stays(
    monkeypatch: pytest.MonkeyPatch, seed: int, form: str
) -> None:
    case = case_of_four(seed, form)
    want, mine = filled(case), filled(case)
    nowhere = i32([[-1] * 3] * 4)
    want_o = run(monkeypatch, seed, form, case, want, want.view, nowhere)
    own = i32([[slot] * 3 for slot in OWN])
    o = run(monkeypatch, seed, form, case, mine, mine.view, own)
    assert_same_bits("output", o, want_o)
    assert_same_bits("pool", mine._memory, want._memory)


@pytest.mark.parametrize("split", [False, True])
def test_segments_leave_the_states_of_the_whole_scan(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: bool
) -> None:
    """Inside of segments, between two and at the sequence's end, to rounding."""
    assert_states_of_the_whole_scan(monkeypatch, seed, split)


def assert_states_of_the_whole_scan(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: bool, sources: Path = pipeline.KERNELS
) -> None:
    case = case_of(seed, (4 * 64 + 9,), heads=1, regime="weak")
    asked = i32([[0, 1, 2, 3, 4, 5]])
    snapshots = []
    for chunks in (0, 2):
        found = torch.full((1, 6, *case.state.shape[1:]), torch.nan)
        with monkeypatch.context() as patch:
            use_two_stages(
                patch,
                seed,
                sources=sources if chunks else pipeline.KERNELS,
                split=split,
                track=Track.IN_ORDER,
                segment_chunks=chunks,
            )
            row = segmented_row(chunks) if chunks else ROW
            selection = CPU.selection(case.shape).with_path(row)
            CPU.chunk(case, selection=selection, snapshot_chunks=asked, snapshots=found)
        snapshots.append(found)
    whole, segments = snapshots
    for place in range(6):
        assert relative_error(segments[0, place], whole[0, place]) < 2e-3, place


def test_segments_that_count_their_own_chunks_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """Planted: a segment's chunks are numbered from its own start."""
    right = "return segment.index * p.segment_chunks;"
    sources = plant(pipeline.KERNELS, tmp_path, "task.cuh", right, "return 0;")
    with pytest.raises((AssertionError, RuntimeError)):
        assert_states_of_the_whole_scan(monkeypatch, seed, False, sources)
    pipeline.fault_record().words.zero_()


PLANTED = {
    "slots as if they were packed": (
        "slot * p.snapshot_stride +",
        "slot * (p.num_value_heads * D * D) +",
        "snapshot 0, 0 differs|overrun",
    ),
    "-1 is taken for a slot": (
        "        if (slot < 0) continue;\n",
        "",
        "outside the written slots differs|overrun|race: scan_state",
    ),
    "the slots of another sequence": (
        "p.snapshot_indices[number];",
        "p.snapshot_indices[i];",
        "snapshot 1, 1 differs|race: scan_state",
    ),
    "one half of the value rows": (
        "p.snapshot_stride +\n                       (task.head * D + 64 * task.half) * D",
        "p.snapshot_stride + task.head * D * D",
        "snapshot 0, 0 differs|race: scan_state",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    """The source is of all forms; each mistake is planted for one of them."""
    right, wrong, report = PLANTED[mistake]
    form = FORMS[list(PLANTED).index(mistake) % len(FORMS)]
    sources = plant(pipeline.KERNELS, tmp_path, "scan_state.cuh", right, wrong)
    with pytest.raises((AssertionError, RuntimeError), match=report):
        assert_as_in_order(monkeypatch, seed, form, 48, sources)
    pipeline.fault_record().words.zero_()
