"""The short convolution inside the Hopper intra stage on the CPU, from its own sources: a whole
layer against float64, on pools in an engine's layout, and with mistakes planted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_backend import layer
from kda_backend.contract.values import ConvInputs, StateRef, TokenInputs
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.prefill import conv_sm90
from kda_backend.prefill import two_stage_sm90 as pipeline
from kda_backend.prefill.arguments_sm90 import PrefillVariant, Track
from kda_backend.scratch import Scratch
from kda_backend.step_plan import build_chunk_table, build_step_plan
from kda_backend.testing.cases import cu_tensor
from tests.kda.cases import Backend, assert_close, assert_same_bits
from tests.kda.prefill_on_host import ROW, segmented_row, use_two_stages
from tests.kda.test_layer import Model, check
from tools.cuda_on_host.driver import GXX, HostKernel
from tools.cuda_on_host.planted import plant

pytestmark = [
    pytest.mark.skipif(GXX is None, reason="g++ is not installed"),
    pytest.mark.interpreter,
]
CPU = Backend("kernels", torch.device("cpu"))
ON = dataclasses.replace(ROW, params=dataclasses.replace(ROW.params, fused_conv_tiles=1))
# an empty sequence before another, one without a slot, windows that keep old rows
LENGTHS, INDICES = (70, 1, 2, 0, 130, 3), (4, 1, 6, 0, 3, -1)
INITIAL = (True, True, False, True, True, True)


class Loaded:
    """Stands in for `conv_sm90.load_kernels`.

    Attributes:
        launches: of the kernel that convolves.
    """

    def __init__(self, sources: Path) -> None:
        self.sources, self.launches = sources, 0

    def __call__(
        self, device: object, variant: PrefillVariant, taps: torch.dtype
    ) -> dict[int, Loaded]:
        self.kernel = HostKernel(
            self.sources / "intra_chunk.cu",
            "intra_chunk",
            conv_sm90.CONV_PARAMS,
            conv_sm90.conv_defines(variant, 2, taps) | {"MAX_POLLS": 3000},
        )
        return {2: self._Launch(self)}  # type: ignore[dict-item]

    class _Launch:
        def __init__(self, owner: Loaded) -> None:
            self.owner = owner

        def __call__(self, grid: int, block: int, params: bytes) -> None:
            self.owner.launches += 1
            self.owner.kernel(grid, block, params)


def use_conv(
    monkeypatch: pytest.MonkeyPatch, seed: int, sources: Path = pipeline.KERNELS, **call: Any
) -> Loaded:
    use_two_stages(monkeypatch, seed, sources=sources, **call)
    loaded = Loaded(sources)
    monkeypatch.setattr(conv_sm90, "load_kernels", loaded)
    return loaded


def model_of(seed: int, lengths: tuple[int, ...], *, fused: bool = True, heads: int = 1) -> Model:
    model = Model(CPU, seed, lengths, heads=heads, dim=128)
    model.qkv = model.qkv.contiguous()  # rows off 16 bytes are copied behind a convolution
    model.selection = model.selection.with_path(ON if fused else ROW)
    return model


@pytest.mark.parametrize("taps", [torch.float32, torch.bfloat16])
def test_a_layer_is_the_definition_and_keeps_its_windows(
    monkeypatch: pytest.MonkeyPatch, seed: int, taps: torch.dtype
) -> None:
    loaded = use_conv(monkeypatch, seed)
    model = model_of(seed, LENGTHS, heads=2)
    conv = model.weights.conv.to(taps)
    model.weights = model.weights._replace(conv=conv)
    model.case = dataclasses.replace(model.case, conv_weight=conv)
    check(model, layer.prefill, INDICES, INITIAL)
    assert loaded.launches == 1


def test_a_layer_is_as_near_as_with_a_launch_for_the_convolution(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    use_conv(monkeypatch, seed)
    errors = []
    for fused in (False, True):
        model = model_of(seed, (100, 9), fused=fused)
        want, _, states = model.expected((2, 5), (True, False))
        out = model.run(layer.prefill, (2, 5), (True, False))
        errors.append(
            [float((x.double() - y).norm() / y.norm())
             for x, y in ((out, want), (model.state_pool[[2, 5]], states[[2, 5]]))]
        )  # fmt: skip
    apart, fused_errors = errors
    assert all(new <= 1.1 * old for new, old in zip(fused_errors, apart, strict=True)), errors


@pytest.mark.parametrize("split", [2, 64])
def test_a_prompt_in_two_steps_has_the_bits_of_one(
    monkeypatch: pytest.MonkeyPatch, seed: int, split: int
) -> None:
    """Rows before a step come from the window, which earlier steps have written."""
    use_conv(monkeypatch, seed)
    whole, halves = model_of(seed, (70,)), model_of(seed, (70,))
    out = whole.run(layer.prefill, (2,), None)
    parts = []
    for begin, end in ((0, split), (split, 70)):
        part = model_of(seed, (end - begin,))
        part.weights = halves.weights
        part.qkv, part.beta = halves.qkv[begin:end], halves.beta[begin:end]
        part.g, part.gate = halves.g[begin:end], halves.gate[begin:end]
        part.conv_pool, part.state_pool = halves.conv_pool, halves.state_pool
        parts.append(part.run(layer.prefill, (2,), None))
    assert_close("output", torch.cat(parts), out, 6e-3)
    assert_close("state", halves.state_pool[2], whole.state_pool[2], 6e-3)
    assert_same_bits("conv state", halves.conv_pool[2], whole.conv_pool[2])
    if split == 64:  # chunks begin where they did
        assert_same_bits("output", torch.cat(parts), out)


def test_segments_of_a_convolved_sequence(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    loaded = use_conv(monkeypatch, seed, segment_chunks=1)
    model = model_of(seed, (150,))
    row = segmented_row(1)
    params = dataclasses.replace(row.params, fused_conv_tiles=1)
    model.selection = model.selection.with_path(dataclasses.replace(row, params=params))
    check(model, layer.prefill, (4,), (True,))
    assert loaded.launches == 1


def test_a_checkpoint_is_the_state_of_a_shorter_prefill(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of the recurrent state and of the window, beside those of the sequence's end."""
    use_conv(monkeypatch, seed)
    model, plain, shorter = model_of(seed, (70,)), model_of(seed, (70,)), model_of(seed, (64,))
    for name in ("qkv", "g", "beta", "gate"):
        setattr(shorter, name, getattr(plain, name)[:64])
    shorter.weights = plain.weights
    shorter.conv_pool, shorter.state_pool = plain.conv_pool.clone(), plain.state_pool.clone()
    shorter.run(layer.prefill, (2,), (True,))
    whole = plain.run(layer.prefill, (2,), (True,))
    use_conv(monkeypatch, seed, track=Track.POOL)
    out = torch.empty_like(model.g)
    layer.prefill(
        model.weights,
        model.selection,
        layer.Projections(model.qkv, model.g, model.beta, model.gate, out),
        model.conv_pool,
        StateRef.pool(model.state_pool, torch.tensor([2], dtype=torch.int32), torch.tensor([True])),
        model.step_plan,
        Scratch(torch.device("cpu")),
        checkpoints=Checkpoints.of(torch.tensor([64]), torch.tensor([5]), null_slot=0),
    )
    assert_same_bits("output", out, whole)
    for name in ("conv_pool", "state_pool"):
        pool = getattr(model, name)
        assert_same_bits(f"checkpoint in {name}", pool[5], getattr(shorter, name)[2])
        assert_same_bits(f"end in {name}", pool[2], getattr(plain, name)[2])


def test_lengths_that_the_host_does_not_know(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The plan has room for more chunks; a last sequence without tokens keeps its window."""
    use_conv(monkeypatch, seed)
    model = model_of(seed, (65, 3, 0))
    plan, capacity = model.step_plan, 6
    model.step_plan = dataclasses.replace(
        plan,
        cu_seqlens_cpu=None,
        num_chunks=capacity,
        chunk_table=build_chunk_table(plan.cu_seqlens, capacity),
    )
    check(model, layer.prefill, (4, 1, 3), (True, True, True))


@pytest.mark.parametrize("split", [False, True])
def test_a_graph_for_any_batch(monkeypatch: pytest.MonkeyPatch, seed: int, split: bool) -> None:
    """Tokens before the first sequence belong to none, and most rows of the table have no request:
    a few CTAs take what tasks there are."""
    use_conv(monkeypatch, seed, split=split)
    model = model_of(seed, (3, 65, 4))
    want, windows, states = model.expected((-1, 4, 1), (True, True, False))
    bounds = torch.tensor([3, 68, *[72] * 8], dtype=torch.int32)
    model.step_plan = dataclasses.replace(
        model.step_plan,
        cu_seqlens=bounds,
        cu_seqlens_cpu=None,
        num_sequences=9,
        num_chunks=10,
        max_tokens=None,
        chunk_table=build_chunk_table(bounds, 10),
        any_batch=True,
    )
    out = model.run(layer.prefill, (4, 1, *[-1] * 7), (True, False, *[True] * 7))
    assert_close("output", out[3:], want[3:], 1.5e-2)
    assert_close("states", model.state_pool, states, 1.5e-2)
    assert torch.equal(model.conv_pool.double(), windows)


MISTAKES = {
    "a window too early": ("tokens - HALO + j;", "tokens - HALO + j - 1;", r"torch\.equal"),
    "a barrier dropped": (
        "    __syncthreads();  // the rows before are another thread's, which overwrites them\n",
        "",
        r"race: conv_rows\.cuh:\d+",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, mistake: str
) -> None:
    right, wrong, report = MISTAKES[mistake]
    sources = plant(pipeline.KERNELS, tmp_path, "conv_rows.cuh", right, wrong)
    use_conv(monkeypatch, seed, sources)
    with pytest.raises((AssertionError, RuntimeError), match=report) as failure:
        check(model_of(seed, (70, 5)), layer.prefill, (4, 1), (True, True))
    print(failure.value)


def test_which_steps_are_convolved_in_the_kernel() -> None:
    model = model_of(0, (70, 5))
    q, k, v = model.qkv.view(1, sum(model.lengths), 3, -1, 128).unbind(2)
    rows = TokenInputs.of(q, k, v, model.g[None], model.beta[None])
    conv = ConvInputs(model.conv_pool, model.weights.conv)

    def serves(conv: ConvInputs = conv, least: int = 1) -> bool:
        return conv_sm90.serves(least, conv, rows, model.step_plan)

    assert serves()
    tiles = model.step_plan.num_chunks * rows.v.shape[2]
    assert serves(least=tiles)
    assert not serves(least=tiles + 1)
    assert not serves(conv._replace(state=conv.state.float()))
    assert not serves(conv._replace(weight=conv.weight.half()))


def test_which_sequence_begins_with_a_chunk() -> None:
    lengths = (0, 130, 0, 0, 64, 1, 0)
    plan = build_step_plan(cu_tensor(lengths, torch.device("cpu")), sum(lengths))
    assert plan.chunk_begins[: plan.num_chunks].tolist() == [1, -1, -1, 4, 5]
