"""Faults planted in the Hopper prefill on the CPU: nothing waits for ever, and the host learns why.

The kernels run from their own sources (tools/cuda_on_host), with few looks before they give up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backend_core.launch import faults
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import PrefillVariant, Track
from kda_backend.prefill.sm_schedule import PrefillShape, Schedule
from kda_backend.scratch import Scratch
from kda_backend.spec import Beta, Gate
from kda_backend.step_plan import build_step_plan
from tests.kda.cases import Backend, assert_result
from tests.kda.prefill_on_host import ROW
from tools.cuda_on_host.driver import GXX, HostKernel, run_launches

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
FEW = {"MAX_POLLS": 3000}
VARIANT = PrefillVariant(
    Gate.SOFTPLUS, Beta.SIGMOID, True, torch.bfloat16, False, torch.float32, Track.NONE
)
NEXT_TILE, STARTED = 1, 4  # of the counters
CPU = Backend("kernels", torch.device("cpu"))
Plant = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def clean_record() -> Iterator[None]:
    pipeline.fault_record().words.zero_()
    yield
    pipeline.fault_record().words.zero_()


def kernels(seed: int, split: bool, tiles_of_reserved: int) -> pipeline.StageKernels:
    intra = HostKernel(
        pipeline.KERNELS / "intra_chunk.cu",
        "intra_chunk",
        pipeline.INTRA_PARAMS,
        pipeline.intra_defines(VARIANT, 2) | FEW,
    )
    name = "scan_split" if split else "scan"
    scan = HostKernel(
        pipeline.KERNELS / f"{name}.cu",
        name,
        pipeline.SCAN_PARAMS,
        pipeline.scan_defines(VARIANT) | FEW,
        cluster_size=2 if split else 1,
        run_seed=seed,
    )

    def schedule(shape: PrefillShape) -> Schedule:
        scan_ctas = 4 * shape.tasks if split else min(shape.tasks, 2)
        return Schedule(2, split, scan_ctas, 3, 2, tiles_of_reserved, False)

    return pipeline.StageKernels({2: intra}, (scan, scan), schedule, 4)  # type: ignore[dict-item, arg-type]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, seed: int) -> Callable[..., None]:
    """One right call with a scratch memory, through kernels that ``plant`` has changed."""

    def call(
        scratch: Scratch, plant: Plant = lambda x: x, *, split: bool = False, reserved: int = 1
    ) -> None:
        made = plant(kernels(seed, split, reserved))
        monkeypatch.setattr(pipeline.TwoStageSm90, "kernels", lambda *_: made)
        case = CPU.case(seed, (67, 130), key_dim=128, value_dim=128)
        selection = CPU.selection(case.shape).with_path(ROW)
        assert_result(case, *CPU.chunk(case, selection=selection, scratch=scratch))

    return call


class NotLaunched:
    """In the place of a kernel: the launch is lost."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def without_intra(made: pipeline.StageKernels) -> pipeline.StageKernels:
    return made._replace(intra={2: NotLaunched()})  # type: ignore[dict-item]


def sentence() -> str:
    found = pipeline.fault_record().sentence()
    assert found is not None
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize("split", [False, True], ids=["scan", "scan_split"])
def test_a_scan_without_the_intra_stage_gives_up(call: Callable[..., None], split: bool) -> None:
    with pytest.raises(RuntimeError, match="a kernel has trapped"):
        call(Scratch(torch.device("cpu")), without_intra, split=split)
    assert "scan of KDA's prefill waited in vain for tile" in sentence()
    assert "of launch 1, whose flag holds 0" in sentence()


@pytest.mark.interpreter
@pytest.mark.parametrize("left_over", [1, 3, 1000])
def test_tiles_that_were_counted_before_are_missed(
    call: Callable[..., None], left_over: int
) -> None:
    """As a launch of the intra stage without its scan leaves the counters."""
    scratch = Scratch(torch.device("cpu"))
    scratch.reserve(64, pipeline.TILE_BYTES, pipeline.DIM)
    scratch.flags()[NEXT_TILE] = left_over
    with pytest.raises(RuntimeError, match="a kernel has trapped"):
        call(scratch)
    assert "waited in vain for tile" in sentence()
    scratch.clear_flags()
    pipeline.fault_record().words.zero_()
    call(scratch)  # usable again
    assert pipeline.fault_record().sentence() is None


@pytest.mark.interpreter
def test_an_intra_stage_whose_ctas_cannot_all_start_gives_up(call: Callable[..., None]) -> None:
    """A counter left over, with which one CTA too few is counted (the low half is 0xffff + 3)."""
    scratch = Scratch(torch.device("cpu"))
    scratch.reserve(64, pipeline.TILE_BYTES, pipeline.DIM)
    scratch.flags()[STARTED] = 0xFFFF
    with pytest.raises(RuntimeError, match="a kernel has trapped"):
        call(scratch, reserved=0)
    assert "waited in vain for its 3 CTAs to start, of which 2 did" in sentence()


@pytest.mark.interpreter
def test_a_scan_that_cannot_be_launched_leaves_the_scratch_usable(
    call: Callable[..., None], seed: int
) -> None:
    """The intra stage ran, and nobody read what it made."""

    class Refused:
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            run_launches(seed)
            raise RuntimeError("launch of scan failed: out of resources")

    scratch = Scratch(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="out of resources"):
        call(scratch, lambda made: made._replace(scan=(Refused(), Refused())))
    assert not scratch.flags().any()
    call(scratch)


class Later:
    """A kernel whose launches wait until they are asked for, as those of another stream do."""

    def __init__(self, kernel: HostKernel, waiting: list[Callable[[], None]]) -> None:
        self._kernel, self._waiting = kernel, waiting

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._waiting.append(lambda: self._kernel(*args, **kwargs))


@pytest.mark.interpreter
def test_two_calls_at_once_on_one_scratch_give_up(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Both intra stages, then both scans: what two streams would do that do not take turns
    (`backend_core.launch.streams` has them take turns). The second call's tiles count as made."""
    waiting = list[Callable[[], None]]()
    made = kernels(seed, False, 1)
    scan = Later(made.scan[0], waiting)  # type: ignore[arg-type]
    deferred = made._replace(scan=(scan, scan))  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline.TwoStageSm90, "kernels", lambda *_: deferred)
    case = CPU.case(seed, (67, 130), key_dim=128, value_dim=128)
    arguments = {
        "selection": CPU.selection(case.shape).with_path(ROW),
        "scratch": Scratch(torch.device("cpu")),
        "step_plan": build_step_plan(case.cu_seqlens, sum(case.lengths)),
    }
    results = [CPU.chunk(case, **arguments) for _ in range(2)]
    first, second = waiting
    first()
    assert_result(case, *results[0])
    with pytest.raises(RuntimeError, match="a kernel has trapped"):
        second()
    assert "waited in vain for tile" in sentence()
    assert "another call used its scratch memory meanwhile" in sentence()


@pytest.mark.interpreter
def test_a_scratch_is_used_again_and_again(call: Callable[..., None]) -> None:
    scratch = Scratch(torch.device("cpu"))
    for _ in range(3):
        call(scratch)
    assert scratch.flags()[0] == 3 and not scratch.flags()[1:5].any()


def test_who_comes_next_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The record is added to the error of the next launch, and logged at the end."""
    assert faults.with_fault("launch of scan failed: error") == "launch of scan failed: error"
    record = pipeline.fault_record()
    record.words[:4] = torch.tensor([1, 7, -1, 4], dtype=torch.int32)
    message = faults.with_fault("launch of scan failed: unspecified launch failure")
    assert (
        "unspecified launch failure: the scan of KDA's prefill waited in vain for tile 7" in message
    )
    assert "of launch 4, whose flag holds 4294967295" in message
    with caplog.at_level(logging.ERROR, "kda_dsv4"):
        faults._tell()
    assert "tile 7" in caplog.text
    record.words[0] = 99
    assert record.sentence() == "a kernel gave up for a reason of number 99"
