"""Which steps are scanned by segments, and with what; on a GPU, that they are right there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backend_core.launch.cuda_params import CudaParams
from backend_core.tables.load import load_table
from backend_core.target import KNOWN_TARGETS
from kda_backend.launch_params import TABLES
from kda_backend.prefill import segmented_sm90 as segmented
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import SNAPSHOT_POOL_FIELDS
from kda_backend.prefill.sm_schedule import CostModel
from kda_backend.selection import KdaShape, deterministic_prefix, rounded_prefix, select
from kda_backend.step_plan import StepPlan, build_step_plan
from kda_backend.testing.regimes import REGIMES
from tests.kda.cases import ON_GPU, Backend, assert_result, assert_same_bits
from tests.kda.prefill_on_host import segmented_row

H200 = KNOWN_TARGETS["H200"]


def plan_of(lengths: tuple[int, ...], *, known: bool = True) -> StepPlan:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    plan = build_step_plan(bounds, int(bounds[-1]), chunk_table=False)
    return plan if known else replace(plan, cu_seqlens_cpu=None, max_tokens=None)


def test_a_step_is_divided_from_each_sequences_start() -> None:
    # of 128 tokens: 4 segments and 2 results for each of the two in the middle; 1; 1; 2
    found = segmented.segments_of(2, plan_of((450, 0, 128, 129)))
    assert found == segmented.Segments(total=8, ends=5 + 1, merged=1)
    longer = segmented.segments_of(2, plan_of((450 + 128, 0, 128, 129)))
    assert longer == segmented.Segments(total=9, ends=7 + 1, merged=1)


def test_which_steps_are_scanned_by_segments() -> None:
    """One sequence of 4,096 tokens and 8 heads, or as much work side by side."""
    chosen = select(H200, KdaShape(8, 8, 128, 128)).prefill

    def path(lengths: tuple[int, ...], heads: int, *, known: bool = True) -> str:
        plan = plan_of(lengths, known=known)
        return chosen.row(plan.num_chunks * heads, plan.max_tokens).name

    assert path((4096,), 8) == path((4096, 20), 8) == path((8192,) * 2, 4) == "segmented_sm90"
    assert path((4095,), 8) == path((4096,), 9) == path((4096,) * 2, 8) == "two_stage_sm90"
    assert path((4096,), 8, known=False) == "two_stage_sm90"


@pytest.mark.parametrize("num_sms", [132, 114, 78])
@pytest.mark.parametrize("tasks", [1, 8, 32, 33, 128, 4096])
def test_all_ctas_of_the_split_scan_run_at_once(num_sms: int, tasks: int) -> None:
    """A cluster takes one task after the other only where all have a place."""
    model = CostModel(num_sms)
    schedule = segmented.choose_segment_schedule(model, 16 * tasks, tasks, 16)
    assert schedule.scan_ctas == (4 * tasks if schedule.split else min(tasks, num_sms))
    assert schedule.split <= (4 * tasks <= num_sms)
    assert schedule.first_scan_sm == num_sms and schedule.reserved_sm_tile_cap == 0
    assert schedule.intra_ctas in (num_sms, num_sms * schedule.intra_ctas_per_sm)


def test_a_model_whose_prefixes_keep_their_bits_is_refused_segments() -> None:
    shape = KdaShape(4, 4, 128, 128, deterministic_prefix=True)
    chosen = select(H200, shape)
    assert [path.name for path in chosen.prefill.rows] == ["one_launch_sm90", "two_stage_sm90"]
    assert any("segmented_sm90: refused, lacks deterministic_prefix" in x for x in chosen.explain())
    free = select(H200, replace(shape, deterministic_prefix=False))
    assert "segmented_sm90" in [path.name for path in free.prefill.rows]


def test_the_user_may_ask_for_prefixes_that_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "KDA_DSV4_DETERMINISTIC_PREFIX"
    monkeypatch.delenv(name, raising=False)
    assert not deterministic_prefix()
    monkeypatch.setenv(name, "1")
    assert deterministic_prefix()
    monkeypatch.setenv(name, "yes")
    with pytest.raises(ValueError, match=f"{name} must be 0 or 1, got 'yes'"):
        deterministic_prefix()


def test_states_of_16_bits_keep_no_promise_about_cuts() -> None:
    shape = KdaShape(4, 4, 128, 128, deterministic_prefix=True)
    note = rounded_prefix(shape, torch.float16)
    assert note is not None and "needs fp32 states: those in float16 are rounded" in note
    assert rounded_prefix(shape, torch.float32) is None
    assert rounded_prefix(replace(shape, deterministic_prefix=False), torch.float16) is None


def test_the_scans_parameters_and_those_of_segments_are_one_struct() -> None:
    """`segmented_sm90` appends bytes to those that `two_stage_sm90` has packed."""
    structs = dict(pipeline.STRUCTS)
    groups = (pipeline.SCAN_FIELDS, SNAPSHOT_POOL_FIELDS, segmented._MORE_FIELDS)
    values = {
        name: tuple(range(i, i + len(structs[kind]))) if kind in structs else i
        for i, (name, kind) in enumerate((field for group in groups for field in group), start=1)
    }
    scan, pool, more = ({name: values[name] for name, _ in group} for group in groups)
    whole = CudaParams(pipeline.SCAN_FIELDS, pipeline.STRUCTS)
    packed = whole.pack(**scan), segmented._MORE_PARAMS.pack(**more)
    assert segmented.SEGMENT_PARAMS.pack(**scan, **more) == b"".join(packed)
    in_pool = CudaParams(SNAPSHOT_POOL_FIELDS).pack(**pool)
    joined = packed[0] + in_pool + packed[1]
    assert segmented.POOL_SEGMENT_PARAMS.pack(**values) == joined


@pytest.mark.skipif(not ON_GPU, reason="needs the GPU that the kernels are for")
@pytest.mark.parametrize("chunks", [1, 4, 16])
@pytest.mark.parametrize("regime", REGIMES)
def test_segments_on_the_gpu(device: torch.device, seed: int, regime: str, chunks: int) -> None:
    kernels = Backend("kernels_128", device)
    lengths = (64 * chunks * 3 + 70, 0, 30, 64 * chunks * 2)
    case = kernels.case(seed, lengths, regime=regime, heads=2)
    if "segmented_sm90" not in {row.name for row in load_table(TABLES, kernels.target).rows}:
        pytest.skip(f"no segmented_sm90 in the table of {kernels.target.arch}")
    selection = kernels.selection(case.shape).with_path(segmented_row(chunks))
    bounds = case.cu_seqlens.cpu()
    plan = build_step_plan(case.cu_seqlens, int(bounds[-1]), cu_seqlens_cpu=bounds)
    call = {"selection": selection, "step_plan": plan}
    o, state = kernels.chunk(case, **call)
    assert_result(case, o, state)
    again = kernels.chunk(case, **call)
    assert_same_bits("output", again[0], o)
    assert_same_bits("state", again[1], state)
