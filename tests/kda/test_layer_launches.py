"""The launches of a layer on Hopper, recorded: a step's later layers make those of its first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import JITFunction

from backend_core.launch import triton as triton_launch
from backend_core.launch.triton import KernelLaunch
from backend_core.tables.schema import Row
from kda_backend import layer, layer_stages
from kda_backend.contract.values import StateRef
from kda_backend.kernels import gated_norm, short_conv
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.prefill import conv_sm90, paths
from kda_backend.prefill import one_launch_sm90 as in_one
from kda_backend.prefill import segmented_sm90 as segmented
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.scratch import Scratch
from tests.kda.cases import Backend
from tests.kda.one_launch_on_host import ON as IN_ONE
from tests.kda.prefill_on_host import ROW, schedule_of, segmented_row
from tests.kda.test_layer import INDICES, INITIAL, LENGTHS, Model

pytestmark = pytest.mark.interpreter
CPU = torch.device("cpu")
FUSED = dataclasses.replace(ROW, params=dataclasses.replace(ROW.params, fused_conv_tiles=1))
ROWS = {"apart": ROW, "fused": FUSED, "one launch": IN_ONE, "segments": segmented_row(1)}


class Recorded:
    """The launches of all kernels, none of which runs.

    Attributes:
        launches: (kernel, grid, block and bytes; or grid and run-time arguments).
        memory: what the layer takes for its convolution, at the same addresses in every call.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.memory = torch.zeros(1 << 20, dtype=torch.bfloat16)

    def kernel(self, name: str) -> Callable[..., None]:
        return lambda *launched, **options: self.launches.append((name, *launched, options))

    def find(self, kernel: KernelLaunch, exact: tuple[object, ...], *_: object) -> Any:
        def run(*launched: object) -> None:
            self.launches.append((kernel.kernel.__name__, *launched))

        return SimpleNamespace(run=run, function=1, packed_metadata=())

    def empty(self, *size: int, **options: Any) -> torch.Tensor:
        return self.memory[: size[0] * size[1]].view(size)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    made = Recorded()
    for module, name in ((short_conv, "short_conv_kernel"), (gated_norm, "gated_norm_kernel")):
        monkeypatch.setattr(module, name, JITFunction(getattr(module, name).fn))
    stages = (layer_stages._short_conv_kernel, layer_stages._gated_norm_kernel)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(triton_launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(KernelLaunch, "_find", lambda *args: made.find(*args))
    scans = made.kernel("scan"), made.kernel("scan_split")
    kernels = pipeline.StageKernels(
        dict.fromkeys((2, 4), made.kernel("intra")),  # type: ignore[dict-item]
        scans,  # type: ignore[arg-type]
        lambda shape: schedule_of(shape, split=False, sequence_major=False),
        4,
    )
    monkeypatch.setattr(pipeline.TwoStageSm90, "kernels", lambda *_: kernels)
    monkeypatch.setattr(
        conv_sm90, "load_kernels", lambda *_: dict.fromkeys((2, 4), made.kernel("intra, conv"))
    )
    in_one_launch = {(64, ctas): made.kernel("one launch") for ctas in (1, 2)}
    monkeypatch.setattr(in_one.OneLaunchSm90, "kernels", lambda *_: in_one_launch)
    of_segments = segmented.SegmentKernels(
        made.kernel("ends"),  # type: ignore[arg-type]
        made.kernel("merge"),  # type: ignore[arg-type]
        scans,  # type: ignore[arg-type]
    )
    monkeypatch.setattr(segmented.SegmentedSm90, "kernels", lambda *_: of_segments)
    for module in (paths, layer_stages):
        torch_here = SimpleNamespace(**{**vars(torch), "empty": made.empty})
        monkeypatch.setattr(module, "torch", torch_here)
    for stage in stages:
        stage.cache_clear()
    yield made
    for stage in stages:
        stage.cache_clear()


class Step:
    """The tensors that the layers of a step share."""

    def __init__(
        self, models: list[Model], row: Row, *, starts: bool = True, keeps: bool = False
    ) -> None:
        self.plan, self.scratch = models[0].step_plan, Scratch(CPU)
        self.selection = models[0].selection.with_path(row)
        if row is FUSED:  # which copies rows of other widths than of multiples of 16 bytes
            for model in models:
                model.qkv = model.qkv.contiguous()
        self.slots = torch.tensor(INDICES, dtype=torch.int32)
        self.initial = torch.tensor(INITIAL) if starts else None
        offsets = torch.tensor([64, 0, 0, 0, 128, 0], dtype=torch.int32)
        offsets.clamp_(max=row.max_longest or 128)
        kept = Checkpoints.of(offsets, torch.tensor([2, 0, 0, 0, 5, 0]), 0)
        self.checkpoints = kept if keeps else None

    def run(self, model: Model, out: torch.Tensor, *, fresh: bool = False) -> None:
        """``fresh``: as if the plan had prepared nothing."""
        prepared = dict(self.plan.prepared)
        if fresh:
            self.plan.prepared.clear()
        x = layer.Projections(model.qkv, model.g, model.beta, model.gate, out)
        state = StateRef.pool(model.state_pool, self.slots, self.initial)
        layer.prefill(
            model.weights,
            self.selection,
            x,
            model.conv_pool,
            state,
            self.plan,
            self.scratch,
            checkpoints=self.checkpoints,
        )
        if fresh:
            self.plan.prepared.clear()
            self.plan.prepared.update(prepared)

    @property
    def layouts(self) -> int:
        """That the plan has prepared."""
        return len(self.plan.prepared)


@pytest.mark.parametrize(
    ("gate", "starts", "keeps"),
    [("softplus", True, False), ("bounded", False, False), ("softplus", True, True)],
)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_later_layers_make_the_launches_of_their_own_tensors(
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    row: Row,
    gate: str,
    starts: bool,
    keeps: bool,
) -> None:
    def views(*_: object) -> None:
        raise AssertionError("a prepared layer was given tensors")

    backend = Backend("kernels", CPU)
    lengths = [min(length, row.max_longest or length) for length in LENGTHS]
    models = [Model(backend, seed + n, lengths, dim=128, gate=gate) for n in range(3)]
    step = Step(models, row, starts=starts, keeps=keeps)
    outs = [torch.empty(model.g.shape, dtype=torch.bfloat16) for model in models]
    step.run(models[0], outs[0])
    for model, out in zip(models[1:], outs[1:], strict=True):
        step.scratch._asked = (0, 0, 0)
        step.scratch._tiles = step.scratch._tiles.new_empty(0)  # another call had it grow
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_typed", views)  # no view of a tensor is made
            recorded.launches.clear()
            step.run(model, out)
        again = list(recorded.launches)
        recorded.launches.clear()
        step.run(model, out, fresh=True)
        assert again == recorded.launches and step.layouts == 1
    assert len(again) == {"one launch": 3, "segments": 6}.get(row.name, len(again)) >= 3


@pytest.mark.parametrize("what", ["g", "conv_pool", "eps", "bound", "weight"])
def test_another_layout_is_not_launched_as_the_known_one(
    recorded: Recorded, seed: int, what: str
) -> None:
    """Every property that a launch has from its step's first layer, but shapes and dtypes."""
    backend = Backend("kernels", CPU)
    first, other = (Model(backend, seed + n, LENGTHS, dim=128, gate="bounded") for n in range(2))
    step, out = Step([first, other], ROW), torch.empty(first.g.shape, dtype=torch.bfloat16)
    weights = other.weights
    if what == "g":
        other.g = torch.cat([other.g, other.g], 2)[..., :128]
    elif what == "conv_pool":
        other.conv_pool = other.conv_pool.contiguous()
        assert other.conv_pool.stride() != first.conv_pool.stride()
    elif what == "eps":
        other.weights = weights._replace(norm_eps=1e-2)
    elif what == "bound":
        other.weights = weights._replace(gate=weights.gate._replace(lower_bound=-2.5))
    else:
        conv = torch.cat([weights.conv.flatten(), weights.conv[0]])[1 : 1 + weights.conv.numel()]
        other.weights = weights._replace(conv=conv.view(weights.conv.shape))
    step.run(first, out)
    recorded.launches.clear()
    step.run(other, out)
    assert step.layouts == 2
    known = list(recorded.launches)
    recorded.launches.clear()
    step.run(other, out, fresh=True)
    assert known == recorded.launches


def test_steps_that_convolve_in_the_kernel_and_others_keep_strides_of_their_own(
    recorded: Recorded, seed: int
) -> None:
    """Both may have as many tokens and sequences, and pass one check."""
    row = dataclasses.replace(ROW, params=dataclasses.replace(ROW.params, fused_conv_tiles=6))
    backend, launches = Backend("kernels", CPU), []
    models = [Model(backend, seed, lengths, dim=128) for lengths in ((64, 64), (63, 65))]
    out = torch.empty(models[0].g.shape, dtype=torch.bfloat16)
    slots, scratch = torch.tensor(INDICES[:2], dtype=torch.int32), Scratch(CPU)
    for model in models:
        model.qkv = model.qkv.contiguous()
    for before in ([models[0]], []):
        steps = [Step([model], row, starts=False) for model in [*before, models[1]]]
        for step, model in zip(steps, [*before, models[1]], strict=True):
            step.slots, step.selection, step.scratch = slots, steps[0].selection, scratch
            step.plan.prepared.clear()
            recorded.launches.clear()
            step.run(model, out)
        launches.append(list(recorded.launches))
    assert [name for name, *_ in launches[0]][1] == "intra, conv"
    assert launches[0] == launches[1]
