"""The executed cases: every case of every family's test kit on every row of its table, and what no
table chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from backend_core.family import families
from backend_core.tables.load import load_table
from backend_core.target import Target
from dsv4_backend import variants as dsv4_variants
from kda_backend import (
    ConvInputs,
    DraftInputs,
    NormInputs,
    StateRef,
    build_step_plan,
    kda_decode_step,
    kda_prefill,
    kda_recurrent,
    kda_verify_step,
    layer_checkpoints,
    layer_stages,
)
from kda_backend.prefill import two_stage
from kda_backend.selection import select
from kda_backend.testing.cases import Case, chunks_of, make_case
from kda_backend.testing.regimes import HARD_REGIMES
from kda_backend.testing.steps import StepPools, make_step
from kda_backend.testing.tolerances import STEP_TOLERANCES, TOLERANCES
from tools.amdgcn import attention_cases
from tools.amdgcn.case import CPU, Answer, ExecutionCase, error_of, worse
from tools.amdgcn.device import TARGETS

FAMILIES = ("kda", "dsv4")
"""Families whose check cases run as they are; `attention_cases` has those of the others."""


def all_cases(arch: str) -> list[ExecutionCase]:
    return [*_kit_cases(arch), *_kda_cases(arch), *attention_cases.all_cases(arch)]


def _kit_cases(arch: str) -> Iterator[ExecutionCase]:
    """Each family's checks on each row of its table for ``arch``."""
    for family in (families()[name] for name in FAMILIES):
        for row in load_table(family.tables, TARGETS[arch]).rows:
            for name, case in family.check_cases(row).items():
                if (family.name, row.operator) == ("kda", "prefill") and name != "small":
                    continue  # hundreds of tiles; `_kda_cases` has their gates and dtypes in few
                if name.startswith("split channels"):
                    continue  # see opcodes.NOT_EXECUTED
                title = f"{family.name} {row.operator} {row.name}: {name}"
                is_usual = name.startswith("small") or family.name == "dsv4"
                is_usual = is_usual and not name.startswith("adversarial")
                is_quick = family.name == "dsv4" and row.operator != "main_c128_prefill"
                is_quick = is_quick and is_usual

                def run(target: Target, case: Any = case) -> Answer:
                    # products take the dtype that they take on the GPU
                    with mock.patch.object(dsv4_variants, "interprets", lambda: False):
                        return case(target, CPU)

                yield ExecutionCase(title, arch, run, False, is_quick)
                if is_usual:
                    yield ExecutionCase(f"{title}, over 2 GiB", arch, run, True)


def _kda_cases(arch: str) -> Iterator[ExecutionCase]:
    """Cases that the kit lacks, in the shapes and variants of the compile report."""
    wide: dict[str, Any] = {"key_dim": 128, "value_dim": 128}
    prefills: dict[str, tuple[dict[str, Any], str]] = {
        "one chunk": ({"lengths": (64,)} | wide, "pool"),
        "two chunks, snapshots": ({"lengths": (70,)} | wide, "snapshots"),
        "two chunks, snapshots in a pool": ({"lengths": (70,)} | wide, "snapshot pool"),
        "two chunks, snapshots in an fp16 pool": ({"lengths": (70,)} | wide, "fp16 snapshot pool"),
        "many heads, snapshots in an fp16 pool": (
            {"lengths": (70,)} | wide,
            "fp16 snapshot pool, many heads",
        ),
        "two chunks, intermediate states": ({"lengths": (70,)} | wide, "functional"),
        "many heads, one chunk": ({"lengths": (33,)} | wide, "pool, many heads"),
        "many heads, snapshots": ({"lengths": (70,)} | wide, "snapshots, many heads"),
        "many heads, intermediate states": ({"lengths": (70,)} | wide, "functional, many heads"),
        "four regimes": ({"lengths": (70,), "heads": 4, "regime": HARD_REGIMES} | wide, "pool"),
        "four regimes, bounded gate": (
            {"lengths": (33,), "heads": 4, "regime": HARD_REGIMES, "gate": "bounded"} | wide,
            "pool",
        ),
        "ragged, grouped values, uneven dimensions, fp32": (
            {"lengths": (65,), "value_heads": 2, "key_dim": 48, "value_dim": 24}
            | {"dtype": torch.float32},
            "pool",
        ),
        "given decay and step sizes": (
            {"lengths": (33,), "gate": "log", "beta": "given", "l2norm": False} | wide,
            "pool",
        ),
        "fp32": ({"lengths": (33,), "dtype": torch.float32} | wide, "pool"),
        "K = V = 64": ({"lengths": (65,), "key_dim": 64, "value_dim": 64}, "pool"),
        "many heads, K = V = 64": (
            {"lengths": (33,), "key_dim": 64, "value_dim": 64},
            "pool, many heads",
        ),
        "K = V = 256": ({"lengths": (20,), "key_dim": 256, "value_dim": 256}, "pool"),
    }
    for name, (model, form) in prefills.items():
        is_quick = name in ("one chunk",)

        def run(target: Target, model: Any = model, form: str = form) -> Answer:
            return _prefill(target, make_case(5, **model), form)

        yield ExecutionCase(f"kda prefill: {name}", arch, run, False, is_quick)
    for operator, model in (
        ("recurrent", {"lengths": (2,)} | wide),
        ("recurrent", {"lengths": (1,), "key_dim": 256, "value_dim": 256}),
        ("recurrent", {"lengths": (1,), "key_dim": 64, "value_dim": 64, "gate": "bounded"}),
    ):
        title = f"kda {operator}: {model['lengths'][0]} tokens, K = V = {model['key_dim']}"

        def recurrent(target: Target, model: Any = model) -> Answer:
            return _recurrent(target, make_case(6, **model))

        yield ExecutionCase(title, arch, recurrent, False, model["key_dim"] == 128)
    yield ExecutionCase(
        "kda decode step: convolution, norm, K = V = 64", arch, _decode, False, True
    )
    for in_slots in (True, False):
        for dim in (128, 64):
            form = "slots" if in_slots else "buffers"

            def verify(target: Target, dim: int = dim, in_slots: bool = in_slots) -> Answer:
                return _verify(target, dim, in_slots)

            title = f"kda verify: convolution, norm, {form}, K = V = {dim}"
            yield ExecutionCase(title, arch, verify, False, in_slots and dim == 128)
    yield ExecutionCase("kda chunk table", arch, _chunk_table, False, True)
    yield ExecutionCase("kda short convolution", arch, _short_conv, False, True)
    yield ExecutionCase("kda checkpoints", arch, _checkpoints, False, True)
    for dim in (128, 64):
        title = f"kda gated norm, D = {dim}"
        yield ExecutionCase(title, arch, lambda target, dim=dim: _gated_norm(dim), False, True)


def _prefill(target: Target, case: Case, form: str) -> Answer:
    """``kda_prefill`` of one sequence: in a pool's slot, with states at chosen chunks, or in FLA's
    form with the states before all chunks. With many heads a scan's programs take more value rows;
    a GPU with one compute unit has many heads already."""
    form, _, heads = form.partition(", ")
    counted = dataclasses.replace(target, num_sms=1) if heads else target
    with mock.patch.object(two_stage, "detect_target", lambda device: counted):
        return _prefill_answer(target, case, form)


def _prefill_answer(target: Target, case: Case, form: str) -> Answer:
    tolerance_o, tolerance_s = TOLERANCES[case.q.dtype]
    selection = select(target, case.shape)
    want_o, want_state = case.expected()
    if form == "functional":
        given = StateRef.functional(case.state, v_first=True, final=True)
        o, after, before = kda_prefill(
            *case.inputs, given, case.cu_seqlens, keeps_chunk_states=True, selection=selection
        )
        assert after is not None and before is not None
        first = worse(*((error_of(before[n], _state_at(case, 64 * n)[0]), 5e-3) for n in range(2)))
        answers = [(error_of(after[0], want_state[0]), tolerance_s), first]
        return worse((error_of(o[0], want_o), tolerance_o), *answers)
    dtype = torch.float16 if form.startswith("fp16 ") else torch.float32
    pool = torch.full((3, *case.state.shape[1:]), torch.nan, dtype=dtype)
    pool[1] = case.state[0].to(dtype)
    state = StateRef.pool(pool, torch.tensor([1], dtype=torch.int32))
    answers = []
    if form == "snapshots":
        kept = torch.full((1, 2, *case.state.shape[1:]), torch.nan)
        state = state.with_snapshots(torch.tensor([[1, -1]], dtype=torch.int32), kept)
    elif form.endswith("snapshot pool"):
        chunks, slots = (torch.tensor([[n]], dtype=torch.int32) for n in (1, 2))
        state = state.with_snapshots(chunks, pool, slots)
    o = kda_prefill(*case.inputs, state, case.cu_seqlens, selection=selection).out
    if form == "snapshots":
        answers.append((error_of(kept[0, 0], _state_at(case, 64)[0]), tolerance_s))
        if not bool(kept[0, 1].isnan().all()):
            raise AssertionError("a snapshot that was not asked for was written")
    if form.endswith("snapshot pool"):
        answers.append((error_of(pool[2], _state_at(case, 64)[0]), tolerance_s))
        pool[2] = torch.nan
    if not bool(pool[[0, 2]].isnan().all()):
        raise AssertionError("a slot outside the call was written")
    answers.append((error_of(pool[1], want_state[0]), tolerance_s))
    return worse((error_of(o[0], want_o), tolerance_o), *answers)


def _state_at(case: Case, tokens: int) -> torch.Tensor:
    return case.part(0, tokens, case.state).expected()[1] if tokens else case.state


def _recurrent(target: Target, case: Case) -> Answer:
    given = StateRef.functional(case.state, v_first=True, final=True)
    o, state, _ = kda_recurrent(*case.inputs, given, selection=select(target, case.shape))
    assert state is not None
    want_o, want_state = case.expected()
    tolerance_o, tolerance_s = TOLERANCES[case.q.dtype]
    return worse((error_of(o[0], want_o), tolerance_o), (error_of(state, want_state), tolerance_s))


def _decode(target: Target) -> Answer:
    """A token of one sequence."""
    case = make_step(7, 1, device=CPU, heads=1, key_dim=64, value_dim=64)
    pools = StepPools(case, 2)
    pools.fill(8, [1])
    before = pools.copy()
    o = kda_decode_step(
        *case.inputs,
        StateRef.pool(pools.states, torch.tensor([1], dtype=torch.int32)),
        selection=select(target, case.shape),
        **case.stages(pools.windows),
    )
    state, window = before.states[1].double(), before.windows[1, :, :3].double()
    want, state, _ = case.expected(0, state, window)
    tolerance_o, tolerance_s = STEP_TOLERANCES[torch.float32]
    return worse(
        (error_of(o[0], want), tolerance_o), (error_of(pools.states[1], state), tolerance_s)
    )


def _verify(target: Target, dim: int, in_slots: bool) -> Answer:
    """A draft of two tokens of one sequence: states into a row of slots of the pool (vLLM's form)
    or into buffers (sglang's)."""
    case = make_step(7, 2, device=CPU, heads=1, key_dim=dim, value_dim=dim)
    width = 4 if in_slots else 3
    pools = StepPools(case, 4, width=width)
    pools.fill(8, [1])
    before = pools.copy()
    if in_slots:
        slots = torch.tensor([[1, 2]], dtype=torch.int32)
        draft = DraftInputs.in_pool(torch.tensor([1], dtype=torch.int32))
    else:
        slots = torch.tensor([1], dtype=torch.int32)
        kept = torch.full((1, 2, *pools.states.shape[1:]), torch.nan)
        windows = torch.full((1, 2, 3, case.channels), torch.nan, dtype=torch.bfloat16)
        row = torch.tensor([0], dtype=torch.int32)
        draft = DraftInputs.in_buffers(kept, row, windows.transpose(2, 3))
    o = kda_verify_step(
        *case.inputs,
        StateRef.pool(pools.states, slots),
        draft,
        selection=select(target, case.shape),
        **case.stages(pools.windows),
    )
    state, window = before.states[1].double(), before.windows[1, :, :3].double()
    answers = []
    for token in range(2):
        want, state, window = case.expected(token, state, window)
        got = pools.states[1 + token] if in_slots else kept[0, token]
        tolerance_o, tolerance_s = STEP_TOLERANCES[torch.float32]
        answers += [(error_of(o[token], want), tolerance_o), (error_of(got, state), tolerance_s)]
    return worse(*answers)


def _chunk_table(target: Target) -> Answer:
    """Lengths with zeros; more sequences and chunks than a program has. Exact."""
    lengths = [70, 0, 64, 1, 300, *[1] * 140]
    total = sum(lengths)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    plan = build_step_plan(offsets, total)
    table = plan.chunk_table
    assert table is not None
    start, length, first = chunks_of(lengths)
    count = len(start)
    wrong = int((table.start[:count] != torch.tensor(start)).sum())
    wrong += int((table.length[:count] != torch.tensor(length)).sum())
    wrong += int((table.offsets[: len(first)] != torch.tensor(first)).sum())
    wrong += int((table.length[count : plan.num_chunks] != 0).sum())
    return float(wrong), 0.5


def _short_conv(target: Target) -> Answer:
    """Two sequences over a pool, against torch's convolution in float64."""
    rng = torch.Generator().manual_seed(9)
    lengths, channels, width = (70, 3), 160, 4
    x = torch.randn(sum(lengths), channels, generator=rng).bfloat16()
    weight = torch.randn(channels, width, generator=rng)
    pool = torch.randn(4, channels, width - 1, generator=rng).bfloat16()
    before = pool.clone()
    offsets = torch.tensor([0, 70, 73], dtype=torch.int32)
    slots = torch.tensor([2, 1], dtype=torch.int32)
    initial = torch.tensor([True, False])
    plan = build_step_plan(offsets, sum(lengths))
    state = StateRef.pool(pool, slots, initial)  # of which the convolution reads the slots
    out = layer_stages.short_conv(x, ConvInputs(pool, weight), state, plan)
    wants, answers = [], []
    for n, (begin, end) in enumerate(((0, 70), (70, 73))):
        slot = int(slots[n])
        window = before[slot].double() if bool(initial[n]) else torch.zeros(channels, 3).double()
        line = torch.cat([window, x[begin:end].double().T], 1)
        taps = line.unfold(1, width, 1)  # [channels, tokens, width]
        y = (taps * weight.double()[:, None]).sum(-1).T
        wants.append(y * y.sigmoid())
        answers.append((error_of(pool[slot], line[:, -3:]), 1e-9))
    if not torch.equal(pool[[0, 3]], before[[0, 3]]):
        raise AssertionError("a slot outside the call was written")
    return worse((error_of(out, torch.cat(wants)), 5e-3), *answers)


def _checkpoints(target: Target) -> Answer:
    """Of three sequences two have a window to keep, in their slots. Exact."""
    rng = torch.Generator().manual_seed(10)
    lengths, channels, width = (70, 65, 3), 1100, 4
    offsets = torch.tensor([0, 70, 135, 138], dtype=torch.int32)
    x = torch.randn(sum(lengths), channels, generator=rng).bfloat16()
    conv = torch.full((5, channels, width - 1), torch.nan, dtype=torch.bfloat16)
    given = torch.tensor([64, 64, 0]), torch.tensor([3, 1, 4])
    checkpoints = layer_checkpoints.Checkpoints.of(*given, 0)
    plan = build_step_plan(offsets, sum(lengths))
    layer_checkpoints.store_checkpoints(x, conv, checkpoints, plan)
    wrong = 0
    for n, slot in ((0, 3), (1, 1)):
        end = int(offsets[n]) + 64
        wrong += int((conv[slot] != x[end - width + 1 : end].T).sum())
    if not bool(conv[[0, 2, 4]].isnan().all()):
        raise AssertionError("a slot outside the call was written")
    return float(wrong), 0.5


def _gated_norm(dim: int) -> Answer:
    rng = torch.Generator().manual_seed(dim)
    x, gate = (torch.randn(5, 3, dim, generator=rng).bfloat16() for _ in range(2))
    weight = 1.0 + 0.1 * torch.randn(dim, generator=rng)
    wide, plan = x.double(), build_step_plan(torch.tensor([0, 5], dtype=torch.int32), 5)
    layer_stages.gated_norm(x, NormInputs(weight, gate, 1e-5), plan)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    want = want * weight.double() * gate.double().sigmoid()
    return error_of(x, want), 5e-3
