"""States of fp16 pools that grow beyond its range stay at its largest number, with their sign.

Every operator is compared with the definition's state, bounded by 65,504. Keys are a quarter of a
unit vector and values 60,000, so that a state that matches them is 240,000.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from kda_backend.testing.cases import Case
from kda_backend.testing.steps import StepCase, StepPools, make_step
from tests.kda import one_launch_on_host, prefill_on_host, test_step_on_host
from tests.kda.cases import Backend, Pool, Run, assert_close, run_step, run_verify
from tools.cuda_on_host.driver import GXX

LARGEST = 65504.0
LENGTHS = (130, 70, 0)
SLOTS = (4, 0, 2)
CPU = Backend("kernels", torch.device("cpu"))
GROWING: dict[str, Any] = {"gate": "log", "l2norm": False}


def growing(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys along the channel 1, and values of both signs by their row."""
    k, v = torch.zeros_like(k), torch.full_like(v, 60000.0)
    k[..., 1] = 0.25
    v[..., 1::2] *= -1.0
    return k, v


def assert_bounded(states: torch.Tensor, want: torch.Tensor) -> None:
    assert want.abs().max() > 1.5 * LARGEST  # the definition's is beyond
    states, want = states.cpu().double(), want.cpu().clamp(-LARGEST, LARGEST)
    assert states.isfinite().all()
    beyond = want.abs() == LARGEST
    assert torch.equal(states[beyond], want[beyond])
    assert_close("states", states, want, 1e-2)


def growing_case(backend: Backend, seed: int, lengths: tuple[int, ...]) -> Case:
    case = backend.case(seed, lengths, beta="given", dims="narrow", **GROWING)
    k, v = growing(case.k, case.v)
    return dataclasses.replace(
        case, k=k, v=v, g=torch.zeros_like(case.g), beta=torch.ones_like(case.beta)
    )


def test_sequences(backend: Backend, run: Run, seed: int) -> None:
    assert_sequences_are_bounded(growing_case(backend, seed, LENGTHS), run)


def assert_sequences_are_bounded(case: Case, run: Run) -> None:
    """Of three sequences, the last of which has no token; and a NaN stays one."""
    pool = Pool(6, case, torch.float16)
    pool.fill(SLOTS, 40000.0 * case.state.sign())
    want_o, want = dataclasses.replace(case, state=pool.states(SLOTS).float().cpu()).expected()
    handed_on = pool.states(SLOTS[2:]).clone()
    before = pool.copy()
    indices = torch.tensor(SLOTS, dtype=torch.int32, device=case.q.device)
    o, _ = run(case, state_pool=pool.view, state_indices=indices)
    assert o.isfinite().all() and want_o.isfinite().all()
    assert_bounded(pool.states(SLOTS), want)
    assert torch.equal(pool.states(SLOTS[2:]), handed_on)
    pool.assert_only_changed(before, SLOTS)
    pool.view[SLOTS[0], 0, 0, 2] = torch.nan
    run(case, state_pool=pool.view, state_indices=indices)
    assert pool.view[SLOTS[0], 0, 0, 2].isnan()
    assert pool.view[SLOTS[1]].isfinite().all()


def test_snapshots(backend: Backend, seed: int) -> None:
    """In slots of the states' own pool."""
    case = growing_case(backend, seed, (130,))
    pool = Pool(4, case, torch.float16)
    pool.fill([1], case.state)
    before = pool.copy()
    i32 = {"dtype": torch.int32, "device": backend.device}
    backend.chunk(
        case,
        state_pool=pool.view,
        state_indices=torch.tensor([1], **i32),
        snapshot_chunks=torch.tensor([[1, 2]], **i32),
        snapshots=pool.view,
        snapshot_indices=torch.tensor([[3, 0]], **i32),
    )
    for slot, tokens in ((3, 64), (0, 128), (1, 130)):
        assert_bounded(pool.states([slot]), case.part(0, tokens, case.state).expected()[1])
    pool.assert_only_changed(before, (0, 1, 3))


def growing_rows(seed: int, rows: int, device: torch.device, **model: Any) -> StepCase:
    stages = {"has_conv": False, "has_norm": False, "beta_kind": "given"}
    case = make_step(seed, rows, device=device, **stages, **GROWING, **model)
    packed = case.packed.clone()
    case = dataclasses.replace(
        case, packed=packed, g=torch.zeros_like(case.g), beta=torch.ones_like(case.beta)
    )
    for mine, value in zip(case.qkv[1:], growing(*case.qkv[1:]), strict=True):
        mine.copy_(value)
    return case


def growing_pools(case: StepCase, slots: int) -> StepPools:
    """With states of the values' sign that a step brings beyond the range."""
    pools = StepPools(case, slots, dtype=torch.float16)
    pools.states.copy_(60000.0 * case.qkv[2][0].sign()[None, :, :, None])
    return pools


def test_a_decode_step(backend: Backend, seed: int) -> None:
    case = growing_rows(seed, 2, backend.device)
    assert_steps_are_bounded(backend, case)


def assert_steps_are_bounded(backend: Backend, case: StepCase, **call: Any) -> None:
    pools = growing_pools(case, 3)
    pools.states[0, 0, 0, 2] = torch.nan
    for _ in range(8):
        before = pools.copy()
        out = run_step(backend, case, pools, [2, 0], **call)
        assert out[0].isfinite().all()
        for row, slot in ((0, 2), (1, 0)):
            want = case.expected(row, before.states[slot], before.windows[slot])[1]
            got, want = pools.states[slot, :, 1:], want[:, 1:].float()  # no row has a NaN
            assert torch.equal(got[..., 1].cpu(), want[..., 1].half().clamp(-LARGEST, LARGEST))
    assert (pools.states[2, ..., 1].abs() == LARGEST).all()
    assert pools.states[0, 0, 0, 2].isnan()
    assert pools.states[2].isfinite().all()


def test_drafts(backend: Backend, seed: int) -> None:
    """The state after each token; within a draft it goes on in fp32."""
    case = growing_rows(seed, 6, backend.device)
    pools = growing_pools(case, 3)
    shape = (2, 3, *pools.states.shape[1:])
    kept = torch.full(shape, torch.nan, dtype=torch.float16, device=backend.device)
    slots = torch.tensor([2, 0], dtype=torch.int32, device=backend.device)
    rows = torch.arange(2, dtype=torch.int32, device=backend.device)
    run_verify(backend, case, pools, slots, intermediate_states=kept, intermediate_indices=rows)
    signs = pools.states[[2, 0], None, ..., 1].sign()
    assert torch.equal(kept[..., 1], LARGEST * signs.expand_as(kept[..., 1]))
    assert kept.isfinite().all()


def on_host(test: Any) -> Any:
    return pytest.mark.interpreter(pytest.mark.skipif(GXX is None, reason="needs g++")(test))


@on_host
@pytest.mark.parametrize("form", ["one launch", "segments"])
def test_prefill_on_hopper(monkeypatch: pytest.MonkeyPatch, seed: int, form: str) -> None:
    """From the kernels' own sources on the CPU; by segments with all those of the two stages."""
    if form == "segments":
        prefill_on_host.use_two_stages(
            *(monkeypatch, seed),
            segment_chunks=1,
            state_dtype=torch.float16,
            beta="given",
            **GROWING,
        )
        row = prefill_on_host.segmented_row(1)
    else:
        one_launch_on_host.use_one_launch(monkeypatch, seed)
        row = one_launch_on_host.ON
    case = growing_case(Backend("kernels_128", CPU.device), seed, (130, 10, 0))
    selection = CPU.selection(case.shape).with_path(row)

    def run(case: Case, **call: Any) -> tuple[torch.Tensor, ...]:
        return CPU.chunk(case, selection=selection, **call)

    assert_sequences_are_bounded(case, run)


@on_host
@pytest.mark.parametrize("shape", ["1x8", "8x4"])
def test_a_decode_step_on_hopper(monkeypatch: pytest.MonkeyPatch, seed: int, shape: str) -> None:
    """States through shared memory, and through registers."""
    test_step_on_host.use_host(monkeypatch, seed)
    case = growing_rows(seed, 2, CPU.device, key_dim=128, value_dim=128, heads=1)
    row = dataclasses.replace(test_step_on_host.ROWS[shape], max_grid=None)
    selection = CPU.selection(case.shape).with_path(row)
    assert_steps_are_bounded(CPU, case, selection=selection)
