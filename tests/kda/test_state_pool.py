"""States in an engine's pool: read and written in place, nothing else touched; snapshots."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backend_core.testing.numerics import poisoned
from kda_backend.testing.cases import Case
from kda_backend.testing.tolerances import TOLERANCES
from tests.kda.cases import Backend, Pool, Run, assert_close, assert_result, assert_same_bits
from tests.kda.test_sequences import lengths_of

SLOTS = 6


def indices(backend: Backend, *slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=backend.device)


def flags(backend: Backend, *values: bool) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool, device=backend.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slots_are_updated_in_place_and_no_other_bit_changes(
    backend: Backend, run: Run, seed: int, dtype: torch.dtype
) -> None:
    case = backend.case(seed, lengths_of(run), heads=2)
    pool = Pool(SLOTS, case, dtype)
    assert pool.view.stride(0) > case.state[0].numel()
    pool.fill((4, 1, 3), case.state)
    read = pool.states((4, 1, 3)).float()
    before = pool.copy()
    o, returned = run(case, state_pool=pool.view, state_indices=indices(backend, 4, 1, 3))
    assert returned is None
    want_o, want_state = run(case, initial_state=read)
    if dtype == torch.float32:
        backend.assert_same("output", o, want_o)
    else:  # another kernel, in which other products may be fused
        assert_close("output", o, want_o, 1e-3)
    # rounded once on the way out
    tolerance = {torch.float32: 0.0, torch.bfloat16: 3e-3, torch.float16: 7e-4}[dtype]
    assert_close("states", pool.states((4, 1, 3)), want_state, tolerance)
    pool.assert_only_changed(before, (4, 1, 3))
    assert_same_bits("slot of the empty sequence", pool.states([1]), before.states([1]))


def test_padded_rows_start_from_zero_and_write_no_state(
    backend: Backend, run: Run, seed: int
) -> None:
    first, _, last = lengths_of(run)
    case = backend.case(seed, (first, last, last))
    pool = Pool(SLOTS, case, torch.float32)
    pool.fill([2], case.state[:1])
    before = pool.copy()
    o, _ = run(case, state_pool=pool.view, state_indices=indices(backend, 2, -1, -1))
    case.state[1:] = 0.0
    assert_result(case, o, None)
    pool.assert_only_changed(before, [2])
    assert not pool.states([2]).isnan().any()


def test_cold_rows_start_from_zero_whatever_their_slot_holds(
    backend: Backend, run: Run, seed: int
) -> None:
    case = backend.case(seed, lengths_of(run), heads=2)
    pool = Pool(SLOTS, case, torch.float32)
    pool.fill([5], case.state[:1])
    before = pool.copy()
    o, _ = run(
        case,
        state_pool=pool.view,
        state_indices=indices(backend, 5, 0, 2),
        has_initial_state=flags(backend, True, False, False),
    )
    case.state[1:] = 0.0
    assert_result(case, o, pool.states((5, 0, 2)))
    pool.assert_only_changed(before, (5, 0, 2))
    assert (pool.states([0]) == 0.0).all(), "a cold sequence without tokens leaves a zero state"


def test_a_pool_of_one_slot_may_have_any_slot_stride(backend: Backend, run: Run, seed: int) -> None:
    case = backend.case(seed, lengths_of(run)[:1])
    pool = case.state.clone().as_strided(case.state.shape, (0, *case.state.stride()[1:]))
    run(case, state_pool=pool, state_indices=indices(backend, 0))
    assert_close("state", pool, case.expected()[1], TOLERANCES[torch.bfloat16][1])


def test_decode_after_prefill_through_the_pool(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (68,))
    pool = Pool(SLOTS, case, torch.float32)
    slot: dict[str, Any] = {"state_pool": pool.view, "state_indices": indices(backend, 3)}
    outputs = [
        backend.chunk(
            case.part(0, 66, case.state), has_initial_state=flags(backend, False), **slot
        )[0]
    ]
    outputs += [backend.recurrent(case.part(t, t + 1, case.state), **slot)[0] for t in (66, 67)]
    assert_result(case, torch.cat(outputs, 1), pool.states([3]), from_zero=True)


def states_after(case: Case, n: int, tokens: int) -> torch.Tensor:
    sequence = case.only(n)
    return sequence.part(0, tokens, sequence.state).expected()[1][0]


@pytest.mark.parametrize("in_pool", [False, True])
def test_snapshots_are_the_states_at_the_chosen_boundaries(
    backend: Backend, seed: int, in_pool: bool
) -> None:
    """Boundary 0 is the initial state, the last one the final state; past the end is no boundary,
    and neither is one below zero."""
    case = backend.case(seed, (130, 0, 64), heads=2, dims="uneven", dtype=torch.float32)
    boundaries = torch.tensor(
        [[0, 2, 3, 4], [0, 1, -1, 0], [1, 1, -1, -7]], dtype=torch.int32, device=backend.device
    )
    snapshots = poisoned(3, 4, *case.state.shape[1:], dtype=torch.float32, device=backend.device)
    asked: dict[str, Any] = {"snapshot_chunks": boundaries, "snapshots": snapshots}
    want_o, want_state = backend.chunk(case)
    if in_pool:
        pool = Pool(SLOTS, case, torch.float32)
        pool.fill((0, 1, 2), case.state)
        # the padded row has a snapshot too: of the state it ends with, from zero
        asked |= {"state_pool": pool.view, "state_indices": indices(backend, 0, 1, 2)}
    o, state = backend.chunk(case, **asked)
    assert_same_bits("output", o, want_o)
    if not in_pool:
        assert_same_bits("state", state, want_state)
    written = {(0, 0): 0, (0, 1): 128, (0, 2): 130, (1, 0): 0, (1, 3): 0, (2, 0): 64, (2, 1): 64}
    for n in range(3):
        for s in range(4):
            if (n, s) in written:
                want = states_after(case, n, written[n, s])
                assert_close(
                    f"snapshot {n}, {s}", snapshots[n, s], want, TOLERANCES[torch.float32][1]
                )
            else:
                assert snapshots[n, s].isnan().all(), f"snapshot {n}, {s} was not asked for"
    assert_same_bits("initial state", snapshots[0, 0], case.state[0])
    assert_same_bits("last state", snapshots[0, 2], want_state[0])


@pytest.mark.parametrize("is_state_pool", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_snapshots_go_to_slots_of_a_pool(
    backend: Backend, seed: int, is_state_pool: bool, dtype: torch.dtype
) -> None:
    """To the bit what is written one after another, rounded to the pool's dtype; -1, and what is no
    boundary, writes nothing."""
    case = backend.case(seed, (130, 0, 64), heads=2, dims="uneven", dtype=torch.float32)
    boundaries = ((0, 2, 3, 4), (0, 1, -1, 0), (1, 1, -1, -7))
    slots = ((7, 3, -1, 8), (10, 9, 6, -1), (-1, 5, 4, 2))
    chunks = torch.tensor(boundaries, dtype=torch.int32, device=backend.device)
    in_order = poisoned(3, 4, *case.state.shape[1:], dtype=torch.float32, device=backend.device)
    # the operator gets all slots but the first, which would be its slot -1
    pools = [Pool(13, case, dtype) for _ in range(2)]
    own = (1, 2, 12)
    for each in pools:
        each.fill(own, case.state)
    before, state_slots = pools[0].copy(), indices(backend, 0, 1, 11)
    asked: dict[str, Any] = {"snapshot_chunks": chunks, "state_indices": state_slots}
    want_o, _ = backend.chunk(case, state_pool=pools[0].view[1:], snapshots=in_order, **asked)
    mine = pools[1] if is_state_pool else Pool(13, case, dtype, gap=1)
    unwritten = mine.copy()
    o, _ = backend.chunk(
        case,
        state_pool=pools[1].view[1:],
        snapshots=mine.view[1:],
        snapshot_indices=torch.tensor(slots, dtype=torch.int32, device=backend.device),
        **asked,
    )
    assert_same_bits("output", o, want_o)
    assert_same_bits("states", pools[1].states(own), pools[0].states(own))
    written = ((0, 0), (0, 1), (1, 0), (2, 1))
    places = [1 + slots[n][s] for n, s in written]
    for (n, s), place in zip(written, places, strict=True):
        assert_same_bits(f"snapshot {n}, {s}", mine.view[place], in_order[n, s].to(dtype))
    mine.assert_only_changed(unwritten, (*places, *(own if is_state_pool else ())))
    pools[0].assert_only_changed(before, own)


def test_in_its_own_slot_the_state_after_a_sequence_stays(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (130,), heads=2)
    pools = [Pool(SLOTS, case, torch.float32) for _ in range(2)]
    for pool in pools:
        pool.fill([4], case.state)
    slots: dict[str, Any] = {"state_indices": indices(backend, 4)}
    want_o, _ = backend.chunk(case, state_pool=pools[0].view, **slots)
    o, _ = backend.chunk(
        case,
        state_pool=pools[1].view,
        snapshot_chunks=indices(backend, 0, 1)[None],
        snapshots=pools[1].view,
        snapshot_indices=indices(backend, 4, 4)[None],
        **slots,
    )
    assert_same_bits("output", o, want_o)
    assert_same_bits("pool", pools[1]._memory, pools[0]._memory)


def test_a_snapshot_resumes_the_sequence(backend: Backend, seed: int) -> None:
    """What prefix caching does: the suffix starts from the stored state."""
    case = backend.case(seed, (140,), dtype=torch.float32)
    snapshots = poisoned(1, 1, *case.state.shape[1:], dtype=torch.float32, device=backend.device)
    boundary = torch.tensor([[1]], dtype=torch.int32, device=backend.device)
    o, state = backend.chunk(case, snapshot_chunks=boundary, snapshots=snapshots)
    resumed_o, resumed = backend.chunk(case.part(64, 140, snapshots[:, 0]))
    assert_close("output", resumed_o, o[:, 64:], 1e-6)
    assert_close("state", resumed, state, 1e-6)


def test_no_snapshots_to_take(backend: Backend, seed: int) -> None:
    case = backend.case(seed, (70,))
    nothing = torch.empty(1, 0, dtype=torch.int32, device=backend.device)
    o, _ = backend.chunk(
        case, snapshot_chunks=nothing, snapshots=case.state.new_empty(1, 0, *case.state.shape[1:])
    )
    assert_same_bits("output", o, backend.chunk(case)[0])
