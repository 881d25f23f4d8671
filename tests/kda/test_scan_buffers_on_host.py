"""The scan whose buffers are handed on apart (`PrefillCostModel.scan_buffers`) on the CPU, from its
own sources: against float64, with the bits of joint buffers, and with mistakes planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kda_backend.launch_params import PrefillCostModel
from kda_backend.prefill import two_stage_sm90 as pipeline
from tests.cuda_on_host.driver import GXX
from tests.cuda_on_host.planted import plant
from tests.kda.cases import assert_close, assert_same_bits
from tests.kda.one_launch_on_host import CPU, case_of
from tests.kda.prefill_on_host import APART, EARLY, ROW, run_prefill, use_two_stages

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


@pytest.mark.parametrize("params", [APART, EARLY], ids=["apart", "output early"])
@pytest.mark.parametrize(
    ("lengths", "model"),
    [
        ((67, 5, 130), {}),
        ((0, 300, 64), {"regime": "weak"}),
        ((100, 64), {"gate": "bounded", "heads": 1, "value_heads": 2, "sequence_major": True}),
        ((70,), {"gate": "log", "beta": "given", "l2norm": False}),
        ((130,), {"regime": "collinear"}),
        ((130,), {"regime": "extreme"}),
        ((450, 0, 30, 200), {"segment_chunks": 2, "in_pool": True}),
    ],
    ids=["ragged", "long and empty", "bounded", "log", "collinear", "extreme", "segments"],
)
def test_against_float64(
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    lengths: tuple[int, ...],
    model: dict[str, Any],
    params: PrefillCostModel,
) -> None:
    run_prefill(monkeypatch, seed, lengths, params=params, **model)


def test_bits_are_those_of_joint_buffers(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """More chunks than any buffer has places, and tasks one after the other in a CTA."""
    case = case_of(seed, (330, 0, 70, 1), heads=1, regime="long")
    found = []
    for params in (ROW.params, APART, EARLY):
        use_two_stages(monkeypatch, seed, params=params)
        found.append(CPU.chunk(case, selection=CPU.selection(case.shape).with_path(ROW)))
    for name, joint, apart, early in zip(("output", "state"), *found, strict=True):
        assert_same_bits(name, apart, joint)
        assert_same_bits(name, early, joint)


def test_states_inside_of_sequences(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    case = case_of(seed, (200,), heads=1)
    use_two_stages(monkeypatch, seed, params=APART, track=True)
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
    params: PrefillCostModel = APART


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
    "a tile that is not waited for": Mistake(
        "        full[step % STAGES].wait((step / STAGES) & 1);\n    }\n    // By a consumer",
        "    }\n    // By a consumer",
        r"race: scan_chunk\.cuh:\d+ .*(wgmma|load_decays|float4).*",
    ),
    "an output over the one before": Mistake(
        "        if (step > 0) stored[half].wait((step - 1) & 1);\n",
        "",
        r"race: scan_chunk\.cuh:\d+ `stmatrix_trans\(.*nothing orders|race: .*load_shared",
    ),
    "an output that is not waited for": Mistake(
        "        written[half].wait(step & 1);\n",
        "",
        r"race: scan_chunk\.cuh:\d+ .*nothing orders",
    ),
    "a stage freed by one half of the value rows": Mistake(
        "            empty[i].init(CONSUMERS);\n        }\n#pragma unroll\n"
        "        for (int i = 0; i < VALUE_STAGES; ++i) {",
        "            empty[i].init(CONSUMERS / 2);\n        }\n#pragma unroll\n"
        "        for (int i = 0; i < VALUE_STAGES; ++i) {",
        r"race: scan\.cu:\d+ .* copy writes byte|deadlock|barrier: ",
    ),
    "an output before its products are over": Mistake(
        "            if (OUTPUT_EARLY) warpgroup_wait<1>();\n",
        "",
        r"wgmma: .* reads registers that the wgmma begun at .* accumulates in",
        "scan.cu",
        EARLY,
    ),
    "a product that is rounded before it is over": Mistake(
        "            warpgroup_wait<OUTPUT_EARLY ? 1 : 0>();",
        "            warpgroup_wait<OUTPUT_EARLY ? 2 : 0>();",
        r"wgmma: .* reads registers that the wgmma begun at .* accumulates in",
        "scan.cu",
        EARLY,
    ),
    "a tile freed while the state's product reads it": Mistake(
        "    warpgroup_wait<0>();\n    warpgroup_fence_operand(state);\n    s.free_tile(step, at);",
        "    s.free_tile(step, at);\n    warpgroup_wait<0>();\n    warpgroup_fence_operand(state);",
        r"race: scan\.cu:\d+ .* copy writes byte .*wgmma reads",
        "scan.cu",
        EARLY,
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    right, wrong, report, file, params = PLANTED[mistake]
    sources = plant(pipeline.KERNELS, tmp_path, file, right, wrong)
    with pytest.raises((AssertionError, RuntimeError), match=report) as failure:
        run_prefill(
            monkeypatch,
            seed,
            (330,),
            sources=sources,
            regime="weak",
            heads=1,
            params=params,
            max_polls=3000,
        )
    print(failure.value)
    pipeline.fault_record().words.zero_()


def test_what_mistakes_are_planted_in_is_right(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for params in (APART, EARLY):
        run_prefill(monkeypatch, seed, (330,), regime="weak", heads=1, params=params)


def test_the_shipped_row_is_to_be_measured_first() -> None:
    assert ROW.params.scan_buffers == "joint"
    assert not ROW.params.scan_output_early and not ROW.params.scan_state_ahead


def test_an_early_output_needs_buffers_apart() -> None:
    with pytest.raises(ValueError, match="unless scan_buffers is 'apart', got 'joint'"):
        replace(ROW.params, scan_output_early=True)
