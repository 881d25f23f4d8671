"""Bits of a request that do not depend on what else is in a call: which rows promise them, and
requests alone and among others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS, Target, detect_target
from kda_backend import kda_decode_step, kda_verify_step, layer
from kda_backend.contract.values import DraftInputs, GateSpec, StateRef, TokenInputs
from kda_backend.decode_step import fused as step
from kda_backend.prefill import two_stage
from kda_backend.selection import KdaShape, select
from kda_backend.verify import fused as verification
from tests.core.golden import CONFIGS
from tests.kda.cases import ON_GPU, Backend, assert_same_bits
from tests.kda.prefill_on_host import ROW, use_two_stages
from tools.cuda_on_host.driver import GXX
from tools.fuzz import kda_same_bits
from tools.fuzz.batches import Draw, FuzzBatch, MismatchError

H200 = KNOWN_TARGETS["H200"]
SHAPE = KdaShape(8, 8, 128, 128, batch_invariant=True)


def test_no_row_that_cuts_by_the_call_is_chosen() -> None:
    chosen = select(H200, SHAPE)
    assert {path.name for path in chosen.prefill.rows} == {"one_launch_sm90", "two_stage_sm90"}
    refused = "prefill segmented_sm90: refused, lacks batch_invariant, deterministic_prefix"
    assert refused in chosen.explain()
    # its shapes give the same bits (test_step_on_host.py), so each may serve its grids
    assert len({path.params.split for path in chosen.decode_step.rows}) > 1
    free = select(H200, replace(SHAPE, batch_invariant=False))
    assert free.decode_step.rows[0].params == chosen.decode_step.rows[0].params


def test_a_table_that_mixes_orders_is_left_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the user's own, tuned by the size of the call."""
    table = (CONFIGS / "kda" / "nvidia_sm80.toml").read_text()
    row = table[
        table.index('[[path]]\noperator = "decode_step"') : table.index(
            '[[path]]\noperator = "verify"'
        )
    ]
    small = row.replace('name = "fused"', 'name = "fused"\nmax_grid = 64').replace("= 4", "= 8")
    (tmp_path / "kda").mkdir()
    (tmp_path / "kda" / "nvidia_sm80.toml").write_text(table.replace(row, small + row))
    monkeypatch.setenv("KDA_DSV4_CONFIG_DIR", str(tmp_path))
    target = replace(KNOWN_TARGETS["A100"], num_sms=107)  # select keeps what it has chosen
    free = select(target, replace(SHAPE, batch_invariant=False))
    assert [path.params.num_warps for path in free.decode_step.rows] == [8, 4]
    chosen = select(target, SHAPE)
    assert [path.params.num_warps for path in chosen.decode_step.rows] == [4]
    assert "decode_step fused: refused, lacks batch_invariant" in chosen.explain()


@pytest.mark.parametrize("invariant", [False, True])
def test_the_scan_is_split_as_for_one_sequence(
    monkeypatch: pytest.MonkeyPatch, seed: int, invariant: bool
) -> None:
    """In Triton, whose products of another width may add in another order."""
    cpu = Backend("kernels", torch.device("cpu"))
    if ON_GPU:
        pytest.skip("of the interpreter, where a device of 8 SMs can be thought of")
    monkeypatch.setattr(two_stage, "detect_target", lambda device: replace(H200, num_sms=8))
    case = cpu.case(seed, (5,) * 3, value_dim=64)
    shape = replace(case.shape, batch_invariant=invariant)
    asked: list[int] = []
    values = two_stage._TwoStageKernels.value_rows

    def value_rows(kernels: Any, tasks: int, sms: int) -> int:
        asked.append(values(kernels, tasks, sms))
        return asked[-1]

    monkeypatch.setattr(two_stage._TwoStageKernels, "value_rows", value_rows)
    for number in (3, 1):
        part = case.part(0, 5 * number, case.state[:number])
        part = replace(part, lengths=(5,) * number)
        cpu.chunk(part, selection=cpu.selection(shape))
    assert (asked[0] == asked[1]) is invariant


@pytest.mark.parametrize("operator", ["decode_step", "verify"])
def test_triton_gets_rows_in_one_layout(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int, operator: str
) -> None:
    """A projection's rows of an odd width, of which a single one has a stride of its own."""
    wide, heads, dim = 3 * 64 + 4, 1, 64
    seen: list[set[tuple[int, int]]] = []

    def launch(grid: Any, **given: Any) -> None:
        rows = (given[name] for name in ("q_ptr", "k_ptr", "g_ptr"))
        seen.append({(x.stride(-3) % 16, x.data_ptr() % 16) for x in rows})

    kernel = SimpleNamespace(launch=launch)
    monkeypatch.setattr(step, "step_kernel", lambda *_: (kernel, 1))
    monkeypatch.setattr(verification, "verify_kernel", lambda *_: kernel)
    shape = KdaShape(heads, heads, dim, dim, batch_invariant=True)
    selection = Backend("kernels", device).selection_of(shape, operator, "fused")
    for count in (1, 2, 3):
        memory = torch.randn(4, wide, device=device).bfloat16()[-count:]
        q, k, v = memory[:, : 3 * dim].view(count, 3, heads, dim).unbind(1)
        g = torch.zeros(count, heads, dim, dtype=torch.bfloat16, device=device)
        gate = GateSpec.of(torch.zeros(heads, device=device), None, None)
        tokens = TokenInputs.of(q, k, v, g, g[:, :, 0])
        pool = torch.zeros(count, heads, dim, dim, device=device)
        slots = torch.arange(count, dtype=torch.int32, device=device)
        options = {"selection": selection}
        if operator == "verify":
            state, one = StateRef.pool(pool, slots[:, None]), torch.ones_like(slots)
            kda_verify_step(tokens, gate, state, DraftInputs.in_pool(one), **options)
        else:
            kda_decode_step(tokens, gate, StateRef.pool(pool, slots), **options)
    assert seen == [{(0, 0)}] * 3


@pytest.mark.interpreter
@pytest.mark.skipif(GXX is None, reason="g++ is not installed")
def test_a_sequence_has_its_bits_in_every_schedule(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """On Hopper: alone on the split scan, and among others on the whole one, in another order."""
    cpu = Backend("kernels", torch.device("cpu"))
    case = cpu.case(seed, (5, 70, 40), key_dim=128, value_dim=128, regime="long")
    selection = cpu.selection(case.shape).with_path(ROW)
    use_two_stages(monkeypatch, seed, sequence_major=True)
    among, states = cpu.chunk(case, selection=selection)
    use_two_stages(monkeypatch, seed, split=True)
    alone, state = cpu.chunk(case.only(1), selection=selection)
    assert_same_bits("output", alone, among[:, 5:75])
    assert_same_bits("state", state[0], states[1])


def interpreted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Target:
    """The requests' layers run on the kernels."""
    backend = Backend("kernels", device)
    monkeypatch.setattr(kda_same_bits, "select", lambda _, shape: backend.selection(shape))
    return backend.target


def test_a_request_among_others_on_kernels(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, seed: int
) -> None:
    monkeypatch.setattr(kda_same_bits, "_HEADS", (1,))
    monkeypatch.setattr(kda_same_bits, "_LONGEST_ON_CPU", 66)
    batch = kda_same_bits.same_bits_case(Draw(seed), interpreted(monkeypatch, device), device)
    batch.fill(seed)
    batch.run()
    assert batch.error() == (0.0, 1.0)


def found(number: int) -> bool:
    """Whether the request has other bits among others than alone."""
    device = torch.device("cuda" if ON_GPU else "cpu")
    batch: FuzzBatch = kda_same_bits.same_bits_case(Draw(number), detect_target(), device)
    batch.fill(number)
    batch.run()
    try:
        batch.error()
    except MismatchError:
        return True
    return False


@pytest.mark.parametrize("operator", ["prefill", "decode", "verify"])
def test_a_choice_by_the_size_of_a_step_is_found(
    monkeypatch: pytest.MonkeyPatch, operator: str
) -> None:
    """Planted: calls of more than two rows round their output once more."""
    planted = getattr(layer, operator)

    def by_size(weights: Any, selection: Any, x: Any, *rest: Any, **options: Any) -> None:
        planted(weights, selection, x, *rest, **options)
        size = rest[2].num_sequences if operator == "prefill" else len(x.out)
        if size > 2:
            x.out.mul_(1.0 + 2.0**-8)

    monkeypatch.setattr(layer, operator, by_size)
    assert any(found(number) for number in range(12))
