"""The scan's buffers, each handed on by barriers of its own, on the CPU from their own sources:
against float64, with the bits of the split scan, and with mistakes planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import Track
from tests.kda.cases import assert_close, assert_result, assert_same_bits
from tests.kda.one_launch_on_host import CPU, case_of
from tests.kda.prefill_on_host import ROW, run_prefill, use_two_stages
from tools.cuda_on_host.driver import GXX
from tools.cuda_on_host.planted import plant

pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]


@pytest.mark.parametrize(
    ("lengths", "model"),
    [
        ((0, 300, 64), {"regime": "weak"}),
        ((130,), {"regime": "extreme"}),
    ],
    ids=["long and empty", "extreme"],
)
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    lengths: tuple[int, ...],
    model: dict[str, Any],
) -> None:
    run_prefill(monkeypatch, seed, lengths, **model)


def test_bits_are_those_of_the_split_scan(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """More chunks than any buffer has places, and tasks one after the other in a CTA."""
    case = case_of(seed, (330, 70, 1), heads=1, regime="long")
    found = []
    for split in (False, True):
        use_two_stages(monkeypatch, seed, split=split)
        found.append(CPU.chunk(case, selection=CPU.selection(case.shape).with_path(ROW)))
    for name, whole, split_over_ctas in zip(("output", "state"), *found, strict=True):
        assert_same_bits(name, whole, split_over_ctas)


@pytest.mark.parametrize("split", [False, True])
def test_rows_of_a_table_without_a_request(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: bool
) -> None:
    """They end a CTA's tasks; an empty sequence with a slot, and one whose state before its first
    chunk is asked for, are served as ever."""
    case = case_of(seed, (70, 0, 0, 65, 0, 0, 0), heads=1)
    slots = torch.tensor([6, 2, -1, 5, -1, -1, -1], dtype=torch.int32)
    kept = (slots >= 0).nonzero().flatten()
    use_two_stages(monkeypatch, seed, split=split, track=Track.IN_ORDER)
    pool = torch.randn(8, *case.state.shape[1:])
    pool[slots[kept].long()] = case.state[kept]
    before = pool.clone()
    snapshots = torch.full((len(slots), 1, *case.state.shape[1:]), 7.0)
    chunks = torch.tensor([[-1], [-1], [0], [1], [-1], [-1], [-1]], dtype=torch.int32)
    o, _ = CPU.chunk(
        case,
        selection=CPU.selection(case.shape).with_path(ROW),
        state_pool=pool,
        state_indices=slots,
        snapshots=snapshots,
        snapshot_chunks=chunks,
    )
    after = case.state.clone()
    after[kept] = pool[slots[kept].long()]
    assert_result(case, o, after)
    others = [slot for slot in range(8) if slot not in slots]
    assert torch.equal(pool[others], before[others])
    assert not snapshots[2].any() and not torch.equal(snapshots[3], before[:1])
    assert (snapshots[[0, 1, 4, 5, 6]] == 7.0).all()


def test_states_inside_of_sequences(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    case = case_of(seed, (200,), heads=1)
    use_two_stages(monkeypatch, seed, track=Track.IN_ORDER)
    snapshots = torch.zeros(1, 2, 1, 128, 128)
    CPU.chunk(
        case,
        selection=CPU.selection(case.shape).with_path(ROW),
        snapshot_chunks=torch.tensor([[1, 3]], dtype=torch.int32),
        snapshots=snapshots,
    )
    for place, chunks in enumerate((1, 3)):
        _, want = case.only(0).part(0, 64 * chunks, case.state).expected()
        assert_close("snapshot", snapshots[0, place], want[0], 4e-3)


class Mistake(NamedTuple):
    """``right`` becomes ``wrong`` in ``file``; ``report`` is a pattern of what is said."""

    right: str
    wrong: str
    report: str
    file: str = "scan_buffers.cuh"


PLANTED = {
    "values freed before they have been read": Mistake(
        """        load_values(e, cast_smem_ptr_to_uint(v[i]) + 128 * half, at);
        __syncwarp();
        if (at.lane == 0) values_empty[i].arrive();
""",
        """        if (at.lane == 0) values_empty[i].arrive();
        load_values(e, cast_smem_ptr_to_uint(v[i]) + 128 * half, at);
""",
        r"race: .*cp\.async.*nothing orders",
    ),
    "an output over the one before": Mistake(
        "        if (step > 0) stored[half].wait((step - 1) & 1);\n",
        "",
        r"race: scan_chunk\.cuh:\d+ `stmatrix_trans\(.*nothing orders|race: .*load_shared",
    ),
    "a stage freed by one half of the value rows": Mistake(
        "            empty[i].init(CONSUMERS);\n        }\n#pragma unroll\n"
        "        for (int i = 0; i < VALUE_STAGES; ++i) {",
        "            empty[i].init(CONSUMERS / 2);\n        }\n#pragma unroll\n"
        "        for (int i = 0; i < VALUE_STAGES; ++i) {",
        r"race: scan\.cu:\d+ .* copy writes byte|deadlock|barrier: ",
    ),
    "a tile freed while its products read it": Mistake(
        "            warpgroup_wait<0>();\n            warpgroup_fence_operand(state);\n"
        "            s.free_tile(step, at);",
        "            s.free_tile(step, at);\n"
        "            warpgroup_wait<0>();\n            warpgroup_fence_operand(state);",
        r"race: scan\.cu:\d+ .* copy writes byte .*wgmma reads",
        "scan.cu",
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    right, wrong, report, file = PLANTED[mistake]
    sources = plant(pipeline.KERNELS, tmp_path, file, right, wrong)
    with pytest.raises((AssertionError, RuntimeError), match=report) as failure:
        run_prefill(
            monkeypatch,
            seed,
            (330,),
            sources=sources,
            regime="weak",
            heads=1,
            max_polls=3000,
        )
    print(failure.value)
    pipeline.fault_record().words.zero_()


def test_what_mistakes_are_planted_in_is_right(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    run_prefill(monkeypatch, seed, (330,), regime="weak", heads=1)
