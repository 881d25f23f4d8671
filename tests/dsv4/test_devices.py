"""Calls whose tensors are on another GPU than the current one, and on two GPUs at once."""

from __future__ import annotations

import pytest
import torch

from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS, Target, detect_target
from dsv4_backend import (
    LaunchCache,
    SeqLens,
    compress_decode_,
    compress_norm_rope_hadamard_,
    compress_prefill_,
    quantise_indexer_queries,
    warm_up,
    window_ends,
)
from dsv4_backend.step_plan import StateLayout
from tests.current_device import (
    Call,
    Make,
    Results,
    check_elsewhere,
    check_on_second_gpu,
    needs_two_gpus,
    run_elsewhere,
)
from tests.dsv4.cases import Engine, make_history, make_layer, make_spec, rope_table

CPU, OTHER = torch.device("cpu"), torch.device("meta")
LENGTHS = [6, 8]


def target_of(device: torch.device) -> Target:
    """That of the device; on a CPU Hopper's, whose kernels the interpreter runs."""
    return detect_target(device) if device.type == "cuda" else KNOWN_TARGETS["H200"]


def step(device: torch.device, layout: StateLayout, is_prefill: bool, cached: bool) -> Call:
    spec = make_spec("fp8_ds_mla", 4)
    layer, engine = make_layer(spec, device=device), Engine(layout, spec, LENGTHS, device=device)
    rows = [make_history(spec, length, n, device=device) for n, length in enumerate(LENGTHS)]
    tensors = (engine.state, engine.cache)
    launches = LaunchCache() if cached else None
    target = target_of(device)

    def call() -> Results:
        if is_prefill:
            plan = engine.prefill_plan([(n, 0, length) for n, length in enumerate(LENGTHS)])
            kv_score = torch.cat(rows)
            compress_prefill_(layer, kv_score, *tensors, plan, target=target, launches=launches)
        else:
            for request, history in enumerate(rows):
                engine.fill_state(layer, request, history[:-1])
            decode = engine.decode_plan(list(enumerate(LENGTHS)))
            last = torch.stack([history[-1] for history in rows])
            compress_decode_(layer, last, *tensors, decode, target=target, launches=launches)
        return tensors

    return call


def in_place(device: torch.device) -> Call:
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(3, 512, generator=generator).to(device)
    weight, table = torch.ones(512, device=device), rope_table(generator=generator, device=device)
    plan = SeqLens(torch.tensor([4, 5, 8], device=device))
    options = {"head_dim": 512, "compress_ratio": 4, "rotate": True}

    def call() -> Results:
        compress_norm_rope_hadamard_(
            kv, weight, 1e-6, table, plan, **options, target=target_of(device)
        )
        return (kv,)

    return call


def queries(device: torch.device) -> Call:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(5, 3, 128, generator=generator).bfloat16().to(device)
    weights = torch.randn(5, 3, generator=generator).to(device)
    positions = torch.arange(5, device=device)
    arguments = (q, positions, rope_table(generator=generator, device=device), weights, 0.1, 0.2)
    spec, target = make_spec("indexer_mxfp4"), target_of(device)
    return lambda: quantise_indexer_queries(spec, *arguments, target=target)


CALLS: dict[str, Make] = {
    "compress_norm_rope_hadamard_": in_place,
    "compress_decode_, ring": lambda device: step(device, "ring", False, False),
    "compress_decode_, paged": lambda device: step(device, "paged", False, True),
    "compress_prefill_, ring": lambda device: step(device, "ring", True, False),
    "compress_prefill_, paged": lambda device: step(device, "paged", True, True),
    "quantise_indexer_queries": queries,
}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_another_device_than_the_current_one_runs_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = check_elsewhere(CALLS[name], monkeypatch)
    assert seen.entered == [CPU]
    assert seen.launched and set(seen.launched) == {CPU}


@pytest.mark.interpreter
def test_kernels_are_compiled_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("fp8_ds_mla", 4)
    layer, engine = make_layer(spec, device=CPU), Engine("paged", spec, LENGTHS, device=CPU)
    plan = engine.decode_plan(list(enumerate(LENGTHS)))
    kv_score = torch.zeros(2, spec.row_width)
    compiled = []
    monkeypatch.setattr(KernelLaunch, "warm_up", lambda self, *args: compiled.append(self))

    def call() -> Results:
        warm_up(layer, kv_score, engine.state, engine.cache, plan, target=target_of(CPU))
        return ()

    _, seen = run_elsewhere(call, monkeypatch)
    assert compiled and seen.entered == [CPU]


@needs_two_gpus
@pytest.mark.parametrize("name", CALLS)
def test_a_call_runs_on_the_gpu_of_its_tensors(name: str) -> None:
    check_on_second_gpu(CALLS[name])


@needs_two_gpus
def test_one_launch_cache_serves_layers_on_two_gpus() -> None:
    first, second = (torch.device("cuda", n) for n in range(2))
    spec, launches, caches = make_spec("fp8_ds_mla", 4), LaunchCache(), []
    for device in (first, second, first, second):
        layer, engine = make_layer(spec, device=device), Engine("paged", spec, [8], device=device)
        history = make_history(spec, 8, 1, device=device)
        engine.fill_state(layer, 0, history[:-1])
        plan = engine.decode_plan([(0, 8)])
        compress_decode_(layer, history[-1:], engine.state, engine.cache, plan, launches=launches)
        caches.append(engine.cache.cpu())
    assert all(torch.equal(cache, caches[0]) for cache in caches)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["kv_score", "state", "cache"])
def test_a_step_on_two_devices_is_refused(name: str) -> None:
    spec = make_spec("fp8_ds_mla", 4)
    layer, engine = make_layer(spec, device=CPU), Engine("paged", spec, LENGTHS, device=CPU)
    plan = engine.decode_plan(list(enumerate(LENGTHS)))
    before = engine.cache.clone()
    tensors = {
        "kv_score": torch.zeros(2, spec.row_width), "state": engine.state, "cache": engine.cache
    }  # fmt: skip
    tensors[name] = tensors[name].to(OTHER)
    with pytest.raises(ValueError, match=f"{name} must be on cpu .*, got meta"):
        compress_decode_(layer, *tensors.values(), plan, target=target_of(CPU))
    assert torch.equal(engine.cache, before)


def test_window_ends_of_two_devices_are_refused() -> None:
    positions = torch.arange(8)
    with pytest.raises(ValueError, match="state_slots must be on cpu, got meta"):
        window_ends(positions, positions.to(OTHER), 1, 4)
