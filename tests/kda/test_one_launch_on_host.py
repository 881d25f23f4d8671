"""The one-launch prefill on the CPU, from its own source, against float64 and against the two
stages, whose bits it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kda_backend.prefill import two_stage_sm90 as pipeline
from tests.kda.cases import Pool, assert_close, assert_result, assert_same_bits
from tests.kda.one_launch_on_host import CPU, ON, case_of, use_one_launch
from tests.kda.prefill_on_host import ROW, use_two_stages
from tools.cuda_on_host.driver import GXX
from tools.cuda_on_host.planted import plant

pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]


def run_case(case: Any, **overrides: Any) -> tuple[torch.Tensor, ...]:
    selection = CPU.selection(case.shape).with_path(ON)
    return CPU.chunk(case, selection=selection, **overrides)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ((16, 1, 0, 9), 16),
        ((32, 1, 17, 0), 32),
        ((64, 33, 0, 1, 16), 64),
    ],
    ids=["16", "32", "64"],
)
def test_ragged_sequences(
    monkeypatch: pytest.MonkeyPatch, seed: int, lengths: tuple[int, ...], rows: int
) -> None:
    made = use_one_launch(monkeypatch, seed)
    case = case_of(seed, lengths)
    assert_result(case, *run_case(case))
    assert [launch.rows for launch in made.launches] == [rows]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(("length", "rows"), [(9, 16), (27, 32), (50, 64), (64, 64)])
def test_bits_are_those_of_the_two_stages(
    monkeypatch: pytest.MonkeyPatch, seed: int, length: int, rows: int, split: bool
) -> None:
    """Prefix caching relies on it: the step's other lengths choose the form."""
    case = case_of(seed, (length, 3), regime="long")
    use_two_stages(monkeypatch, seed)
    want = CPU.chunk(case, selection=CPU.selection(case.shape).with_path(ROW))
    use_one_launch(monkeypatch, seed, rows=rows, split=split)
    for name, got, same in zip(("output", "state"), run_case(case), want, strict=True):
        assert_same_bits(name, got, same)


def test_bounded_gate_and_grouped_heads(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    use_one_launch(monkeypatch, seed, split=True)
    case = case_of(seed, (20, 32), gate="bounded", heads=1, value_heads=2)
    assert_result(case, *run_case(case))


def test_given_decays_without_norm(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    use_one_launch(monkeypatch, seed)
    case = case_of(seed, (30,), gate="log", beta="given", l2norm=False)
    assert_result(case, *run_case(case))


@pytest.mark.parametrize(
    ("regime", "gate"),
    [
        ("collinear", "softplus"),
        ("extreme", "softplus"),
        ("steep", "softplus"),
        ("steep", "bounded"),
    ],
)
def test_hard_gates_and_keys(
    monkeypatch: pytest.MonkeyPatch, seed: int, regime: str, gate: str
) -> None:
    use_one_launch(monkeypatch, seed)
    case = case_of(seed, (64,), regime=regime, gate=gate)
    assert_result(case, *run_case(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_pool_with_a_padded_and_a_cold_row(
    monkeypatch: pytest.MonkeyPatch, seed: int, dtype: torch.dtype
) -> None:
    """Snapshots are written, offsets are int64, and nothing else of the pool changes."""
    use_one_launch(monkeypatch, seed, ctas=3)
    case = case_of(seed, (60, 9, 16, 0))
    pool = Pool(6, case, dtype)
    slots, has_initial = (4, 2, -1, 0), (True, False, True, True)
    pool.fill((4, 2, 0), case.state[[0, 1, 3]])
    before = pool.copy()
    chunks = torch.tensor([[0, 1], [0, 1], [1, -1], [0, -1]], dtype=torch.int32)
    snapshots = torch.full((4, 2, 1, 128, 128), 7.0)
    o, *_ = run_case(
        case,
        cu_seqlens=case.cu_seqlens.long(),
        state_pool=pool.view,
        state_indices=torch.tensor(slots, dtype=torch.int32),
        has_initial_state=torch.tensor(has_initial),
        snapshot_chunks=chunks,
        snapshots=snapshots,
    )
    want_o, want = case.expected(from_zero=[1, 2])
    assert_close("output", o[0], want_o, 5e-3)
    states = pool.states([4, 2, 0]).float()
    assert_close("states", states, want[[0, 1, 3]], 4e-3)
    pool.assert_only_changed(before, (4, 2, 0))
    for got, expected in ((snapshots[0, 0], case.state[0]), (snapshots[0, 1], want[0])):
        assert_close("snapshot", got, expected, 4e-3)
    assert not snapshots[1, 0].any()
    assert (snapshots[2, 1] == 7.0).all() and (snapshots[3, 1] == 7.0).all()


def test_intermediate_states_and_an_output_in_place_of_v(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    use_one_launch(monkeypatch, seed)
    case = case_of(seed, (50,))
    want_o, want = case.expected()
    o, state, *rest = run_case(case, out=case.v, return_intermediate_states=True)
    assert o.data_ptr() == case.v.data_ptr()
    assert_close("output", o[0], want_o, 5e-3)
    assert_close("state", state, want, 4e-3)
    assert_close("first chunk's state", rest[0].reshape(1, 1, 128, 128)[0], case.state[0], 4e-3)


class Mistake(NamedTuple):
    """``right`` becomes ``wrong`` in ``file``; ``report`` is a pattern of what is said."""

    file: str
    right: str
    wrong: str
    report: str
    lengths: tuple[int, ...] = (40, 64)


WRONG_RESULT = r"(output|state).* is off by ([0-9.e+-]+|inf), allowed"
PLANTED = {
    "a next task that warps have not met for": Mistake(
        "one_launch.cu",
        "            __syncthreads();  // the tile has been read, and the next task found\n",
        "",
        r"race: .*nothing orders",
        (40, 64, 20, 33),
    ),
    "a meeting of warps without rows left out": Mistake(
        "one_launch.cu",
        "    for (int slice = 0; slice < 4; ++slice) {\n        meet();\n        meet();\n",
        "    for (int slice = 0; slice < 4; ++slice) {\n        meet();\n",
        r"deadlock|race: |" + WRONG_RESULT,
        (20,),
    ),
    "a row block with few tokens left out": Mistake(
        "one_launch.cu",
        "(length + 15) / 16 : ROW_BLOCKS;",
        "length / 16 : ROW_BLOCKS;",
        WRONG_RESULT,
    ),
    "an output row too many": Mistake(
        "one_launch.cu",
        "        if (row + i < task.rows(0))\n            *reinterpret_cast",
        "        if (row + i <= task.rows(0))\n            *reinterpret_cast",
        r"overrun: one_launch\.cu:\d+ .*writes|race: one_launch\.cu:\d+ .*o_ptr|race: .*|"
        + WRONG_RESULT,
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    """The call that passes without it fails; the report says what is wrong."""
    file, right, wrong, report, lengths = PLANTED[mistake]
    sources = plant(pipeline.KERNELS, tmp_path, file, right, wrong)
    use_one_launch(monkeypatch, seed, sources=sources)
    case = case_of(seed, lengths, regime="weak")
    with pytest.raises((AssertionError, RuntimeError), match=report) as failure:
        assert_result(case, *run_case(case))
    print(failure.value)


def test_what_mistakes_are_planted_in_is_right(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    use_one_launch(monkeypatch, seed)
    for lengths in {(20,) * 4, *(mistake.lengths for mistake in PLANTED.values())}:
        case = case_of(seed, lengths, regime="weak")
        assert_result(case, *run_case(case))
