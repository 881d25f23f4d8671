"""Checkpoints of a layer's prefill: both states inside of a sequence, in slots of their own."""

from __future__ import annotations

import pytest
import torch

from kda_backend import layer
from kda_backend.contract.values import StateRef
from kda_backend.layer import Projections
from kda_backend.layer_checkpoints import Checkpoints
from kda_backend.scratch import Scratch
from tests.kda.cases import ON_GPU, Backend, assert_close, assert_same_bits
from tests.kda.test_layer import Model

LENGTHS = (130, 3, 64, 70)
SLOTS, INITIAL = (4, 1, 6, 3), (True, True, False, True)
OFFSETS, KEPT = (128, 0, 0, 64), (0, 5, 5, 2)  # 5: the null slot here


def model_of(backend: Backend, seed: int, lengths: tuple[int, ...] = LENGTHS) -> Model:
    return Model(backend, seed, lengths, dim=128 if backend.name == "kernels_128" else 16)


def assert_same(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """By other variants of the same kernels: to the bit, or compiled apart for a GPU nearly so."""
    if ON_GPU:
        assert_close(name, got.float(), want.double().cpu(), 1e-2)
    else:
        assert_same_bits(name, got, want)


def run(model: Model, checkpoints: Checkpoints | None) -> torch.Tensor:
    device = model.qkv.device
    out = torch.empty_like(model.g)
    layer.prefill(
        model.weights,
        model.selection,
        Projections(model.qkv, model.g, model.beta, model.gate, out),
        model.conv_pool,
        StateRef.pool(
            model.state_pool,
            torch.tensor(SLOTS, dtype=torch.int32, device=device),
            torch.tensor(INITIAL, device=device),
        ),
        model.step_plan,
        Scratch(device),
        checkpoints=checkpoints,
    )
    return out


def asked(
    device: torch.device, offsets: tuple[int, ...] = OFFSETS, slots: tuple[int, ...] = KEPT
) -> Checkpoints:
    places = torch.tensor(offsets, dtype=torch.int32, device=device)
    return Checkpoints.of(places, torch.tensor(slots, dtype=torch.int64, device=device), 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checkpoints_are_the_states_of_shorter_prefills(
    backend: Backend, seed: int, dtype: torch.dtype
) -> None:
    model, plain = model_of(backend, seed), model_of(backend, seed)
    cut = model_of(backend, seed)
    for each in (model, plain, cut):
        each.state_pool = each.state_pool.to(dtype)
    before = (model.conv_pool.clone(), model.state_pool.clone())
    model.step_plan = plain.step_plan
    out = run(plain, None)
    assert_same("output", run(model, asked(backend.device)), out)
    # the same sequences, each as long as its checkpoint is far in
    begin = 0
    for n, length in enumerate(LENGTHS):
        if KEPT[n] != 5:
            shorter = model_of(backend, seed, (OFFSETS[n],))
            for name in ("qkv", "g", "beta", "gate"):
                setattr(shorter, name, getattr(cut, name)[begin : begin + OFFSETS[n]])
            shorter.weights = cut.weights
            shorter.conv_pool, shorter.state_pool = cut.conv_pool.clone(), cut.state_pool.clone()
            shorter.run(layer.prefill, SLOTS[n : n + 1], INITIAL[n : n + 1])
            slot, want = KEPT[n], SLOTS[n]
            assert_same_bits("window", model.conv_pool[slot], shorter.conv_pool[want])
            kept, state = model.state_pool[slot].float(), shorter.state_pool[want].double().cpu()
            assert_close(f"state {n}", kept, state, 1e-2 if dtype == torch.bfloat16 else 2e-3)
        begin += length
    for slot in SLOTS:
        assert_same_bits("window", model.conv_pool[slot], plain.conv_pool[slot])
        assert_same("state", model.state_pool[slot], plain.state_pool[slot])
    rest = [slot for slot in range(7) if slot not in (*SLOTS, 0, 2)]
    assert_same_bits("other windows", model.conv_pool[rest], before[0][rest])
    assert_same_bits("other states", model.state_pool[rest], before[1][rest])


def test_nothing_asked_for_writes_nothing_more(backend: Backend, seed: int) -> None:
    model, plain = model_of(backend, seed), model_of(backend, seed)
    none = asked(backend.device, (0, 0, 0, 0), (5, 5, 5, 5))
    before = model.state_pool.clone()
    assert_same("output", run(model, none), run(plain, None))
    assert_same_bits("windows", model.conv_pool, plain.conv_pool)
    for slot in range(7):
        if slot in SLOTS:
            assert_same("state", model.state_pool[slot], plain.state_pool[slot])
        else:
            assert_same_bits("another state", model.state_pool[slot], before[slot])


@pytest.mark.parametrize(
    ("offsets", "slots", "message"),
    [
        ((96, 0, 0, 0), (0, 5, 5, 5), r"multiples of 64, got \[96, 0, 0, 0\]"),
        ((0, 64, 0, 0), (5, 0, 5, 5), "within its sequence of 3 tokens, got one after 64"),
        ((64, 0), (0, 5), r"checkpoint offsets must have shape \[4\], got \[2\]"),
    ],
)
def test_bad_checkpoints_are_refused_before_anything_is_written(
    seed: int, offsets: tuple[int, ...], slots: tuple[int, ...], message: str
) -> None:
    model = Model(Backend("torch", torch.device("cpu")), seed, LENGTHS)
    before = (model.conv_pool.clone(), model.state_pool.clone())
    with pytest.raises(ValueError, match=message):
        run(model, asked(torch.device("cpu"), offsets, slots))
    assert_same_bits("windows", model.conv_pool, before[0])
    assert_same_bits("states", model.state_pool, before[1])
