"""kda_decode_step against its definition in float64: stages on and off, rows, pools, layouts."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest
import torch

from backend_core.target import KNOWN_TARGETS, detect_target
from kda_backend import StateRef, kda_decode_step
from kda_backend.decode_step import fused as step
from kda_backend.selection import select
from kda_backend.testing.steps import StepCase, StepPools, make_step
from kda_backend.testing.tolerances import STEP_TOLERANCES
from tests.kda.calls import decode_step, step_arguments
from tests.kda.cases import (
    ON_GPU,
    Backend,
    assert_close,
    assert_same_bits,
    run_step,
    shipped_rows,
)

STAGES = ("has_conv", "has_norm", "l2norm")


def assert_rows(
    case: StepCase, out: torch.Tensor, indices: list[int], before: StepPools, after: StepPools
) -> None:
    """Rows are the definition's, padded rows are zero, everything else has the bits it had."""
    tolerance_o, tolerance_s = STEP_TOLERANCES[after.states.dtype]
    wanted_o, wanted_s, got_o, got_s = [], [], [], []
    before = before.copy()
    for row, slot in enumerate(indices):
        if slot < 0:
            assert not out[row].any(), f"padded row {row} is not zero"
            continue
        o, state, window = case.expected(
            row, before.states[slot].cpu(), before.windows[slot, :, :3].cpu()
        )
        wanted_o.append(o)
        wanted_s.append(state)
        got_o.append(out[row])
        got_s.append(after.states[slot])
        assert_close(f"output of row {row}", out[row], o, 3 * tolerance_o)
        assert_close(f"state of row {row}", after.states[slot], state, 3 * tolerance_s)
        before.states[slot] = after.states[slot]
        if case.has_conv:
            before.windows[slot, :, :3] = window.to(before.windows)
    if wanted_o:
        assert_close("output", torch.stack(got_o), torch.stack(wanted_o), tolerance_o)
        assert_close("state", torch.stack(got_s), torch.stack(wanted_s), tolerance_s)
    assert_same_bits("states elsewhere", after.memory, before.memory)
    assert_same_bits("windows", after.window_memory, before.window_memory)


def check(
    backend: Backend,
    seed: int,
    indices: list[int],
    *,
    pool: dict[str, Any] | None = None,
    **model: Any,
) -> None:
    case = make_step(seed, len(indices), device=backend.device, **model)
    live = [slot for slot in indices if slot >= 0]
    pools = StepPools(case, max(live, default=0) + 2, **(pool or {}))
    pools.fill(seed + 1, live)
    before = pools.copy()
    out = run_step(backend, case, pools, indices)
    assert out.dtype == case.packed.dtype
    assert_rows(case, out, indices, before, pools)


MODELS: list[dict[str, Any]] = [
    *(dict(zip(STAGES, are_on, strict=True)) for are_on in product((False, True), repeat=3)),
    {"has_bias": False},
    {"heads": 2, "value_heads": 4, "has_conv": False},
    *({"dtype": dtype} for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *({"pool": {"dtype": dtype}} for dtype in (torch.bfloat16, torch.float16)),
    *({"pool": {"layout": x, "width": width}} for x in ("SD", "DS") for width in (3, 6)),
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_every_kind_of_model(backend: Backend, seed: int, model: dict[str, Any]) -> None:
    check(backend, seed, [2, 1], **model)


@pytest.mark.parametrize("gate", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("beta", ["given", "sigmoid", "twice_sigmoid"])
def test_gate_and_beta_kinds(backend: Backend, seed: int, gate: str, beta: str) -> None:
    check(backend, seed, list(range(8)), heads=1, gate=gate, beta_kind=beta)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (48, 80), (1, 3), (64, 128)])
def test_head_dimensions(
    backend: Backend, seed: int, key_dim: int, value_dim: int, fused: bool
) -> None:
    dims = {"key_dim": key_dim, "value_dim": value_dim}
    rows = list(range(8))  # the mean of fewer roundings of three values would vary too much
    check(backend, seed, rows, heads=1, has_conv=fused, has_norm=fused, **dims)


@pytest.mark.parametrize("rows", [0, 1, 3, 64, 300])
def test_batches_with_padded_rows(backend: Backend, seed: int, rows: int) -> None:
    """All rows of a small batch are live; of a large one every fourth, the rest is padding."""
    live = range(rows) if rows <= 3 else range(1, rows, 4)
    slots = dict(zip(live, torch.randperm(len(live)).tolist(), strict=True))
    check(backend, seed, [slots.get(row, -1) for row in range(rows)], heads=1)


def test_null_slot_is_padding_too(backend: Backend, seed: int) -> None:
    case = make_step(seed, 4, device=backend.device)
    pools = StepPools(case, 4)
    pools.fill(seed + 1, [2, 3])
    before = pools.copy()
    out = run_step(backend, case, pools, [0, 3, -1, 2], null_slot=0)
    assert_rows(case, out, [-1, 3, -1, 2], before, pools)


def test_padded_rows_may_hold_anything(backend: Backend, seed: int) -> None:
    case = make_step(seed, 3, device=backend.device)
    for x in (case.packed, case.g, case.beta, case.z):
        x[1] = float("nan")
    pools = StepPools(case, 2)
    pools.fill(seed + 1, [0, 1])
    before = pools.copy()
    out = run_step(backend, case, pools, [0, -1, 1])
    assert_rows(case, out, [0, -1, 1], before, pools)


def test_output_goes_to_the_given_buffer_or_over_v(backend: Backend, seed: int) -> None:
    case = make_step(seed, 2, device=backend.device)
    pools = StepPools(case, 2)
    pools.fill(seed + 1, [0, 1])
    twin, third = pools.copy(), pools.copy()
    want = run_step(backend, case, pools, [1, 0])
    wide = torch.full((2, 3 * case.z[0].numel()), float("nan"), dtype=want.dtype)
    wide = wide.to(want.device)
    room = wide[:, case.z[0].numel() : 2 * case.z[0].numel()].unflatten(1, case.z.shape[1:])
    out = run_step(backend, case, twin, [1, 0], out=room)
    assert out.data_ptr() == room.data_ptr()
    assert_same_bits("output", room, want)
    assert wide[:, : case.z[0].numel()].isnan().all()
    assert wide[:, 2 * case.z[0].numel() :].isnan().all(), "written beside the output"
    v = case.qkv[2]
    run_step(backend, case, third, [1, 0], out=v)
    assert_same_bits("output over v", v.contiguous(), want)
    assert_same_bits("states", third.memory, pools.memory)
    assert_same_bits("windows", third.window_memory, pools.window_memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drift_over_many_steps(backend: Backend, seed: int, dtype: torch.dtype) -> None:
    """The state after many steps in place is as near to float64 as after one, in fp32."""
    off_gpu = 2_000 if backend.name == "torch" and dtype == torch.float32 else 100
    steps = 10_000 if ON_GPU else off_gpu
    case = make_step(seed, steps, device=backend.device, heads=1, has_norm=False)
    pools = StepPools(case, 2, dtype=dtype)
    pools.fill(seed + 1, [1])
    state, window = pools.states[1].double().cpu(), pools.windows[1].double().cpu()
    got, want = [], []
    for t in range(steps):
        got.append(run_step(backend, case.part(slice(t, t + 1)), pools, [1])[0].cpu())
        o, state, window = case.expected(t, state, window)
        want.append(o)
    tolerance_o, tolerance_s = {torch.float32: (5e-3, 2e-5), torch.bfloat16: (3e-2, 3e-2)}[dtype]
    assert_close("output", torch.stack(got), torch.stack(want), tolerance_o)
    assert_close("last output", got[-1], want[-1], 4 * tolerance_o)
    assert_close("state", pools.states[1], state, tolerance_s)
    assert_same_bits("window", pools.windows[1].contiguous(), window.to(pools.windows).contiguous())


@pytest.mark.parametrize("row", shipped_rows("decode_step"))
@pytest.mark.parametrize("fused", [True, False])
def test_every_row_of_the_tables_is_exact(
    kernels: Backend, seed: int, row: Any, fused: bool
) -> None:
    dims = {"key_dim": 128, "value_dim": 128, "heads": 1}
    case = make_step(seed, 2, device=kernels.device, has_conv=fused, has_norm=fused, **dims)
    pools = StepPools(case, 2)
    pools.fill(seed + 1, [0, 1])
    before = pools.copy()
    selection = kernels.selection(case.shape).with_path(row)
    out = run_step(kernels, case, pools, [1, 0], selection=selection)
    assert_rows(case, out, [1, 0], before, pools)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("fused", [True, False])
def test_the_state_has_its_axes_in_either_order(
    kernels: Backend, seed: int, axis: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's release chooses one; 128 channels are two blocks."""
    monkeypatch.setattr(step, "blocks_axis", lambda: axis)
    select.cache_clear()
    dims = {"key_dim": 128, "value_dim": 64, "heads": 1}
    check(kernels, seed, [1, -1, 0], has_conv=fused, has_norm=fused, **dims)
    select.cache_clear()


@pytest.mark.parametrize("row", shipped_rows("decode_step"))
def test_a_prefetch_before_the_wait_changes_no_bit(kernels: Backend, seed: int, row: Any) -> None:
    """Steps of other sequences, each of which may read states while the step before still runs."""
    rows, steps = 3, 4 if ON_GPU else 2
    case = make_step(seed, rows * steps, device=kernels.device, heads=1, key_dim=128, value_dim=128)
    pools = StepPools(case, rows * steps)
    pools.fill(seed + 1, list(range(rows * steps)))
    twin = pools.copy()
    selection = kernels.selection(case.shape).with_path(row)
    table = torch.randperm(rows * steps).int().view(steps, rows)
    table[-1, 0] = -1
    table = table.to(kernels.device)
    parts = [case.part(slice(rows * i, rows * (i + 1))) for i in range(steps)]
    outs = case.z.new_full((2, steps, rows, *case.z.shape[1:]), float("nan"))
    for prefetch, pool in enumerate((twin, pools)):
        if ON_GPU:
            torch.cuda.synchronize()
        for i, part in enumerate(parts):
            kda_decode_step(
                *part.inputs,
                StateRef.pool(pool.states, table[i]),
                pdl_prefetch_safe=bool(prefetch),
                selection=selection,
                out=outs[prefetch, i],
                **part.stages(pool.windows),
            )
    assert_same_bits("output", outs[1], outs[0])
    assert_same_bits("states", pools.memory, twin.memory)
    assert_same_bits("windows", pools.window_memory, twin.window_memory)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_graph_replay_equals_the_call(kernels: Backend, seed: int) -> None:
    case = make_step(seed, 6, device=kernels.device, heads=4, key_dim=128, value_dim=128)
    pools = StepPools(case, 6)
    pools.fill(seed + 1, list(range(6)))
    twin = pools.copy()
    selection = kernels.selection(case.shape)
    table = torch.tensor([4, -1, 0, 2, 5, 1], dtype=torch.int32, device=kernels.device)
    out = torch.full_like(case.z, float("nan"))

    def call(pool: StepPools, out: torch.Tensor) -> None:
        state, stages = StateRef.pool(pool.states, table), case.stages(pool.windows)
        kda_decode_step(*case.inputs, state, out=out, selection=selection, **stages)

    warm = pools.copy()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(warm, out.clone())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(pools, out)
    assert out.isnan().all()
    want = torch.empty_like(out)
    for _ in range(3):  # the replays walk on, as the calls do
        graph.replay()
        call(twin, want)
        torch.cuda.synchronize()
        assert_same_bits("output", out, want)
        assert_same_bits("states", pools.memory, twin.memory)
        assert_same_bits("windows", pools.window_memory, twin.window_memory)


def test_a_misaligned_pool_is_refused_by_the_hopper_path_and_served_by_the_other(
    seed: int, device: torch.device
) -> None:
    if ON_GPU and detect_target().key != "nvidia_sm90":
        pytest.skip("the H200's table is for Hopper")
    here = Backend("kernels", device)
    case = make_step(seed, 2, device=device, heads=1, key_dim=128, value_dim=128)
    pools = StepPools(case, 2)
    # every slot starts four bytes after a multiple of 16
    memory = torch.full((pools.memory.numel() + 1,), float("nan"), device=device)
    pools.memory = memory
    pools.states = memory.as_strided(pools.states.shape, pools.states.stride(), 17)
    pools.fill(seed + 1, [0, 1])
    assert pools.states.data_ptr() % 16
    before = pools.copy()
    aligned = select(KNOWN_TARGETS["H200"], case.shape)
    with pytest.raises(ValueError, match=r"pass a selection .*aligned_state=False"):
        run_step(here, case, pools, [1, 0], selection=aligned)
    assert_same_bits("states", pools.memory, before.memory)
    shape = dataclasses.replace(case.shape, aligned_state=False)
    served = select(KNOWN_TARGETS["H200"], shape)
    out = run_step(here, case, pools, [1, 0], selection=served)
    assert_rows(case, out, [1, 0], before, pools)


def wrong_arguments(case: StepCase, pools: StepPools) -> list[tuple[str, dict[str, Any]]]:
    q, k, _ = case.qkv
    bf16 = torch.bfloat16
    wide = torch.zeros(2, 2, 32, dtype=bf16)
    return [
        ("q must have shape [N, H, K], got [2, 16]", {"q": q[:, 0]}),
        ("k must have shape [2, 2, 16], got [1, 2, 16]", {"k": k[:1]}),
        ("k must have dtype bfloat16, got float32", {"k": k.float()}),
        ("g must have shape [2, 2, 16], got [2, 1, 16]", {"g": case.g[:, :1]}),
        ("beta must have shape [2, 2], got [2]", {"beta": case.beta[:, 0]}),
        ("q must have stride 16 in dimension 1", {"q": wide[..., :16]}),
        ("v must have a multiple of q's 2 heads", {"v": torch.zeros(2, 3, 16, dtype=bf16),
            "g": torch.zeros(2, 3, 16), "beta": torch.zeros(2, 3)}),
        ("state_pool must have shape [slots, 2, 16, 16]", {"state_pool": pools.states[:, :1]}),
        (
            "state_pool must have dtype float32 or bfloat16 or float16",
            {"state_pool": pools.states.double()},
        ),
        ("state_pool must have stride 1 in dimension 3", {"state_pool": pools.states.mT}),
        ("state_pool must have states at least 512 elements apart",
            {"state_pool": pools.states[:1].expand(2, -1, -1, -1)}),
        ("state_indices must have dtype int32", {"state_indices": torch.zeros(2).long()}),
        ("state_indices must have shape [2] and stride 1",
            {"state_indices": torch.zeros(3, dtype=torch.int32)}),
        ("state_indices must be negative or a slot below 2, got 2",
            {"state_indices": torch.tensor([0, 2], dtype=torch.int32)}),
        ("conv_state must have shape [slots, 96, W]", {"conv_state": pools.windows.mT}),
        ("conv_state must have at least 3 columns", {"conv_state": pools.windows[:, :, :2]}),
        ("conv_state must have state_pool's 2 slots", {"conv_state": pools.windows[:1]}),
        ("conv_weight must have shape [96, 4]", {"conv_weight": case.conv_weight[:, :3]}),
        ("conv_bias must have shape [96]", {"conv_bias": case.conv_bias[:4]}),
        ("norm_weight must have shape [16]", {"norm_weight": case.norm_weight[:4]}),
        ("norm_gate must have shape [2, 2, 16]", {"norm_gate": case.z[:, 0]}),
        ("dt_bias must have 32 elements", {"dt_bias": case.dt_bias[0]}),
        ("out must have shape [2, 2, 16]", {"out": case.z[:1]}),
        ("out must have dtype bfloat16", {"out": case.z.float()}),
        ("selection must be for", {"selection": "another model's"}),
    ]  # fmt: skip


def test_wrong_input_is_refused_before_anything_is_written(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    case = make_step(seed, 2, device=cpu.device)
    pools = StepPools(case, 2)
    pools.fill(seed, [0, 1])
    before = pools.copy()
    right = {
        **step_arguments(case, pools.windows),
        "state_pool": pools.states,
        "state_indices": torch.tensor([1, 0], dtype=torch.int32),
        "out": torch.full_like(case.z, 7.0),
        "selection": cpu.selection(case.shape),
    }
    other = cpu.selection(make_step(seed, 1, device=cpu.device, heads=4).shape)
    for message, wrong in wrong_arguments(case, pools):
        if "selection" in wrong:
            wrong = {"selection": other}
        with pytest.raises(ValueError) as raised:
            decode_step(**(right | wrong))
        assert message in str(raised.value)
        assert (right["out"] == 7.0).all(), message
        assert_same_bits(message, pools.memory, before.memory)
        assert_same_bits(message, pools.window_memory, before.window_memory)


def test_convolution_of_grouped_values_is_refused(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    case = make_step(seed, 1, device=cpu.device, heads=1, value_heads=2)
    pools = StepPools(case, 1)
    with pytest.raises(ValueError, match="as many value heads as heads, got 2 and 1"):
        run_step(cpu, case, pools, [0])


def test_large_heads_are_refused(seed: int) -> None:
    cpu = Backend("torch", torch.device("cpu"))
    case = make_step(seed, 1, device=cpu.device, heads=1, key_dim=160)
    with pytest.raises(ValueError, match="1 to 128, got K = 160 and V = 16"):
        run_step(cpu, case, StepPools(case, 1), [0])
