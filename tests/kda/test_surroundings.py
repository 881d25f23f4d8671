"""What a caller has set around a call: autocast, default device and dtype, gradients, a capture."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from backend_core.launch.faults import FaultRecord
from kda_backend import chunk_kda, fused_recurrent_kda
from kda_backend import scratch as scratch_module
from kda_backend import step_plan as step_plan_module
from kda_backend.contract.values import ConvInputs, StateRef
from kda_backend.layer_stages import short_conv
from kda_backend.scratch import Scratch
from kda_backend.step_plan import build_step_plan, equal_length_plan, plan_of_rows
from kda_backend.testing.steps import StepPools, make_step
from tests.current_device import (
    check_elsewhere,
    check_on_second_gpu,
    needs_two_gpus,
)
from tests.kda import calls
from tests.kda.calls import Arguments, step_arguments
from tests.kda.cases import Backend, run_step
from tests.kda.test_verify import Draft

CPU = torch.device("cpu")
ON_CPU = Backend("torch", CPU)
HEADS, DIM = 4, 32
SWITCH = "use_qk_l2norm_in_kernel"
NO_BACKWARD = re.escape("kda_backend has no backward pass: call it under torch.no_grad()")

Results = tuple[torch.Tensor, ...]


def tokens(seed: int, batch: int, length: int, device: torch.device = CPU) -> Arguments:
    """Tokens of the operators on sequences, in fp32."""
    rng = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(batch, length, HEADS, *size, generator=rng).to(device)

    return {
        "q": randn(DIM),
        "k": randn(DIM),
        "v": randn(DIM),
        "g": -randn(DIM).abs(),
        "beta": randn().sigmoid(),
        SWITCH: True,
    }


def prefill(seed: int) -> Callable[[], Results]:
    equal_length_plan.cache_clear()  # the call makes its plan
    kwargs = tokens(seed, 2, 70) | {"output_final_state": True}
    return lambda: chunk_kda(**kwargs)


def recurrent(seed: int) -> Callable[[], Results]:
    kwargs = tokens(seed, 2, 3) | {"output_final_state": True}
    return lambda: fused_recurrent_kda(**kwargs)


def step(seed: int) -> Callable[[], Results]:
    case = make_step(seed, 3, device=CPU, dtype=torch.float32)
    pools = StepPools(case, 5)
    pools.fill(seed, [0, 2, 4])
    return lambda: (run_step(ON_CPU, case, pools, [0, 2, -1]), pools.states[[0, 2, 4]])


def verification(seed: int) -> Callable[[], Results]:
    draft = Draft(ON_CPU, seed, (2, 1))
    return lambda: (draft.run(ON_CPU), draft.states[draft.rows[0]])


def convolution(seed: int) -> Callable[[], Results]:
    rng = torch.Generator().manual_seed(seed)
    x, weight, pool = (torch.randn(*size, generator=rng) for size in ((7, 64), (64, 4), (2, 64, 3)))
    slots = torch.tensor([0, 1], dtype=torch.int32)
    plan = build_step_plan(torch.tensor([0, 3, 7], dtype=torch.int32), 7, chunk_table=False)
    conv, state = ConvInputs(pool, weight), StateRef.pool(pool, slots)
    return lambda: (short_conv(x, conv, state, plan), pool)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "default dtype": default_dtype,
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("make", [prefill, recurrent, step, verification, convolution])
def test_a_result_is_that_of_the_arguments_alone(
    make: Callable[[int], Callable[[], Results]], surroundings: str, seed: int
) -> None:
    want, call = make(seed)(), make(seed)
    with SURROUNDINGS[surroundings]():
        got = call()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_kernels_report_faults_to_host_memory_whatever_the_default_device() -> None:
    with torch.device("meta"):
        words = FaultRecord({}).words
    assert words.device == CPU and words.tolist() == [0] * 8


@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_without_gradients_arguments_may_ask_for_them(
    operator: Callable[..., Results], seed: int
) -> None:
    kwargs = tokens(seed, 1, 3)
    kwargs["g"] = kwargs["g"].requires_grad_()
    with torch.no_grad():
        assert not operator(**kwargs)[0].requires_grad


@pytest.mark.parametrize("name", ["conv_weight", "conv_bias", "norm_weight", "A_log", "dt_bias"])
def test_gradients_of_a_layer_s_weights_are_refused(name: str, seed: int) -> None:
    case = make_step(seed, 3, device=CPU)
    pools = StepPools(case, 5)
    pools.fill(seed, [0, 2, 4])
    before = pools.copy()
    arguments = step_arguments(case, pools.windows) | {"A_log": case.a_log, "dt_bias": case.dt_bias}
    weight = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=NO_BACKWARD):
        run_step(ON_CPU, case, pools, [0, 2, 4], **{name: weight})
    draft = Draft(ON_CPU, seed, (2, 1))
    with pytest.raises(ValueError, match=NO_BACKWARD):
        draft.run(ON_CPU, **{name: weight})
    assert torch.equal(pools.memory.view(torch.int32), before.memory.view(torch.int32))


def test_a_plan_of_ragged_rows_gives_all_chunks_in_one_row(seed: int) -> None:
    """Three chunks are not a number for each of two rows."""
    kwargs = tokens(seed, 2, 64)
    packed = {n: x.reshape(1, 128, *x.shape[2:]) for n, x in kwargs.items() if n != SWITCH}
    bounds = torch.tensor([0, 30, 128])
    plan = build_step_plan(bounds, 128, chunk_table=False)
    got = calls.prefill(**kwargs, step_plan=plan, return_intermediate_states=True)
    packed[SWITCH] = True
    want = chunk_kda(**packed, cu_seqlens=bounds, return_intermediate_states=True)
    assert len(got) == len(want) == 3
    assert got[2].shape == (1, 3, HEADS, DIM, DIM) and torch.equal(got[2], want[2])


def test_max_num_seqs_is_of_cu_seqlens(seed: int) -> None:
    """As in FLA, which does not look at it where the rows are the sequences."""
    chunk_kda(**tokens(seed, 2, 3), use_graph=True, max_num_seqs=8)


@pytest.mark.parametrize("offsets", [(-1, 3), (0, 2, 1), (0, 2, 4), (0, 4, 3)])
def test_a_draft_s_offsets_in_host_memory_are_checked(
    backend: Backend, offsets: tuple[int, ...], seed: int
) -> None:
    if backend.device != CPU:
        pytest.skip("values on a GPU are trusted")
    draft = Draft(backend, seed, (2, 1)[: len(offsets) - 1])
    bounds = torch.tensor(offsets, dtype=torch.int32)
    count = sum(draft.lengths)
    message = f"cu_seqlens must not decrease and lie within 0 to {count}, got {list(offsets)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        draft.run(backend, cu_seqlens=bounds)
    assert draft.states.isnan().all() and draft.windows.isnan().all()
    assert torch.equal(draft.pools.memory.nan_to_num(), draft.before.memory.nan_to_num())


def test_what_a_capture_has_seen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph's replay reads and writes at the addresses of its capture."""
    capturing = [True]
    for module in (scratch_module, step_plan_module):
        monkeypatch.setattr(module, "is_capturing", lambda device: capturing[0])
    q = torch.zeros(3, 71, HEADS, DIM)
    plan = weakref.ref(plan_of_rows(q, False))
    scratch = Scratch(CPU)
    memory = [*scratch.buffers(2, 256, 32), scratch.flags()]
    seen = [weakref.ref(tensor) for tensor in memory]
    bytes_seen = scratch.nbytes
    capturing[0] = False
    forgotten = weakref.ref(plan_of_rows(q[:2], False))
    equal_length_plan.cache_clear()  # as 64 other shapes do
    memory = [*scratch.buffers(4, 256, 32), scratch.flags()]
    outgrown = [weakref.ref(tensor) for tensor in memory]
    memory = [*scratch.buffers(8, 256, 32), scratch.flags()]
    assert all(ref() is not None for ref in seen) and plan() is not None
    assert all(ref() is None for ref in outgrown) and forgotten() is None
    assert scratch.nbytes == bytes_seen + sum(tensor.nbytes for tensor in memory)


def test_a_capture_waits_for_nothing_and_keeps_its_plans_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan that is made in a capture is written by that graph's replays alone."""
    capturing = [True]
    monkeypatch.setattr(step_plan_module, "is_capturing", lambda device: capturing[0])
    equal_length_plan.cache_clear()
    q = torch.zeros(3, 73, HEADS, DIM)

    def waits(*_: object) -> None:
        raise AssertionError("a copy from the host, in a capture")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", waits)
        first, second = plan_of_rows(q, False), plan_of_rows(q, False)
    assert first is not second and first.cu_seqlens_cpu == (0, 73, 146, 219)
    assert first.cu_seqlens.tolist() == [0, 73, 146, 219]
    capturing[0] = False
    kept = plan_of_rows(q, False)
    assert kept is not first and kept is not second and plan_of_rows(q, False) is kept
    capturing[0] = True
    assert plan_of_rows(q, False) is kept  # what was there before the capture


def test_flags_that_a_capture_has_made_are_zeros_there_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their fill is a kernel of the graph: until it replays, anything lies there."""
    capturing = [True]
    monkeypatch.setattr(scratch_module, "is_capturing", lambda device: capturing[0])
    scratch = Scratch(CPU)
    sizes = (2, 256, 32)
    for _ in range(2):  # a layer, and the next one of the graph, or a layer of another graph
        scratch.addresses(*sizes)
        scratch.segment_addresses(4, (128,), 24)
        assert not scratch.flags().any() and not scratch._segment_flags.any()
        of_graph, segments = scratch.flags(), scratch._segment_flags
        of_graph.fill_(7), segments.fill_(7)
    capturing[0] = False
    addresses = scratch.addresses(*sizes)
    scratch.segment_addresses(4, (128,), 24)
    assert scratch.flags() is not of_graph and scratch._segment_flags is not segments
    assert not scratch.flags().any() and not scratch._segment_flags.any()
    scratch.flags().fill_(5)
    assert scratch.addresses(*sizes) == addresses and scratch.flags().eq(5).all()


@pytest.mark.parametrize("make", [prefill, recurrent, step, verification])
def test_a_call_on_another_device_than_the_current_one_runs_there(
    make: Callable[[int], Callable[[], Results]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every launch is on the current device; what would be elsewhere is a matter of a stub here."""
    seen = check_elsewhere(lambda _: make(seed), monkeypatch)
    assert seen.entered == [CPU]


@needs_two_gpus
@pytest.mark.parametrize("operator", [chunk_kda, fused_recurrent_kda])
def test_a_call_runs_on_the_gpu_of_its_tensors(operator: Callable[..., Results], seed: int) -> None:
    first, second = (torch.device("cuda", n) for n in range(2))
    kwargs = tokens(seed, 2, 130, first) | {"output_final_state": True}
    want = operator(**kwargs)
    elsewhere = {n: x.to(second) if isinstance(x, torch.Tensor) else x for n, x in kwargs.items()}
    got = operator(**elsewhere)
    assert torch.cuda.current_device() == 0
    for x, y in zip(got, want, strict=True):
        assert x.device == second and torch.equal(x.to(first), y)


def chunk_table_of(device: torch.device) -> Callable[[], Results]:
    cu_seqlens = torch.tensor([0, 70, 70, 200], dtype=torch.int32, device=device)

    def call() -> Results:
        table = build_step_plan(cu_seqlens, 200).chunk_table
        assert table is not None
        return tuple(table)

    return call


@pytest.mark.interpreter
def test_a_step_plan_is_made_on_the_device_of_its_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = check_elsewhere(chunk_table_of, monkeypatch)
    assert seen.entered == [CPU] and seen.launched and set(seen.launched) == {CPU}


@needs_two_gpus
def test_a_step_plan_is_made_on_the_gpu_of_its_offsets() -> None:
    check_on_second_gpu(chunk_table_of)
