"""What serving launches has been compiled in the profile run: no variant is left for a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS
from kda_backend.engines import vllm_layer, vllm_packed, vllm_profile
from kda_backend.engines.draft_records import VARIABLE
from kda_backend.engines.vllm import register
from tests.engines.kda.vllm import models
from tests.engines.kda.vllm.harness import (
    DRAFT,
    NGRAM,
    bind_cache,
    build_layer,
    engine_config,
    run_layer,
    step_metadata,
)
from tests.engines.kda.vllm.models import MODELS, Model, build
from tests.engines.kda.vllm.test_checkpoints import caching_config
from tests.engines.kda.weights import drawn
from tests.engines.launches import Variant, variant

VllmStep = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]
# (tokens of each request, tokens before them, no drafts), decodes first
STEPS: list[VllmStep] = [
    ((1,), (30,), None),
    ((1, 1, 1), (3, 4, 5), None),
    ((64,), (0,), None),
    ((512,), (0,), None),  # with a checkpoint
    ((7, 9), (0, 3), None),
    ((1, 65), (4, 0), None),
    ((1, 150, 7, 130), (4, 0, 0, 64), None),  # with two
    ((1, 1, 1, 100, 5), (4, 9, 2, 0, 64), None),
    ((1, 2, 70, 3, 9, 5, 130), (4, 0, 0, 64, 0, 0, 0), None),
]
# The same with drafts, and what was accepted of the draft before (0: none).
DRAFTED: list[VllmStep] = [
    ((4,), (30,), (1,)),
    ((4, 4, 4), (3, 4, 5), (1, 4, 2)),
    ((1, 4), (7, 9), (0, 1)),
    ((1, 1, 3), (7, 8, 9), (0, 0, 2)),
    ((150, 4), (0, 9), (0, 2)),
    ((3, 1, 40), (9, 5, 0), (2, 0, 0)),
    ((7, 150, 4, 130), (0, 0, 9, 64), (0, 0, 2, 0)),  # prompts on both sides, with checkpoints
    ((1, 1, 17), (4, 9, 2), (0, 0, 0)),
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    """The variants of kernels that are launched; none runs. On a part whose paths are Triton's."""
    register()
    found: list[Variant] = []
    monkeypatch.setattr(
        KernelLaunch, "_interpret", lambda self, grid, *args: found.append(variant(self, args))
    )
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS["A100"])
    monkeypatch.setattr(vllm_layer, "PARTIAL_CHUNKS", -5)  # the last of STEPS is two calls
    vllm_layer._runtime.cache_clear()
    vllm_profile._warm.clear()
    yield found
    vllm_layer._runtime.cache_clear()


def names(variants: Sequence[Variant]) -> set[str]:
    return {key[0] for key in variants}


def kernels_of(layer: Any, config: Any, launched: list[Variant], steps: list[VllmStep]) -> set[str]:
    """The kernels of all steps, each of whose variants the profile run has launched."""
    x = torch.randn(512, 256).bfloat16()
    run_layer(layer, config, x, None)
    compiled = set(launched)
    bind_cache(layer, config)
    kernels: set[str] = set()
    for lengths, before, accepted in steps:
        launched.clear()
        slots = torch.arange(1, 1 + 8 * len(lengths), dtype=torch.int32).view(-1, 8).clamp(max=11)
        metadata = step_metadata(layer, config, lengths, before, slots, accepted)
        run_layer(layer, config, x[: sum(lengths)], metadata)
        if getattr(metadata, "kda_commit", None) is not None:
            metadata.commit_recoverssm_state(torch.ones(len(lengths), dtype=torch.int32))
        late = set(launched) - compiled
        assert launched and not late, f"compiled in a step of {lengths}: {sorted(map(str, late))}"
        kernels |= names(launched)
    assert names(list(compiled)) >= kernels
    return kernels


@pytest.mark.parametrize("calls", ["few", "one of each prompt"])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_serving_compiles_nothing(
    name: str, drafts: bool, calls: str, launched: list[Variant]
) -> None:
    """Also where the calls of a step begin at any of its tokens and requests."""
    model: Model = MODELS[name]
    options = {"speculative_config": NGRAM} if drafts else {}
    make = caching_config if model.exports else engine_config
    config = make(**{"flag": True, "dtype": "bfloat16", **options})
    layer = build(model, config)
    if calls != "few":
        layer.kda_runtime = replace(layer.kda_runtime, most_chunks=1)
    found = kernels_of(layer, config, launched, DRAFTED if drafts else STEPS)
    assert {"short_conv_kernel", "scan_kernel", "gated_norm_kernel"} <= found
    assert ("verify_step_kernel" in found) == drafts
    assert ("store_checkpoints_kernel" in found) == model.exports


@pytest.mark.parametrize("states", ["float32", "float16"])
def test_serving_drafts_from_records_compiles_nothing(
    states: str, launched: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    config = caching_config(flag=True, dtype="bfloat16", speculative_config=NGRAM)
    config.cache_config.mamba_ssm_cache_dtype = states
    layer = build(MODELS["Kimi-Linear"], config)
    if layer.recoverssm_records is None:
        pytest.skip("this release is not served")
    layer.recoverssm_records.committed = True
    found = kernels_of(layer, config, launched, DRAFTED)
    assert "verify_records_kernel" in found and "verify_step_kernel" not in found
    assert ("commit_records_kernel" in found) == (states == "float16")  # else vLLM's own


def test_an_engine_with_records_after_one_without_compiles_nothing(
    launched: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one process, where the second takes over what was chosen for the first."""
    config = caching_config(flag=True, dtype="bfloat16", speculative_config=NGRAM)
    monkeypatch.setenv(VARIABLE, "0")
    first = build(MODELS["Kimi-Linear"], config)
    run_layer(first, config, torch.randn(512, 256).bfloat16(), None)
    assert "verify_step_kernel" in names(launched)
    launched.clear()
    monkeypatch.setenv(VARIABLE, "1")
    config = caching_config(flag=True, dtype="bfloat16", speculative_config=NGRAM)
    layer = build(MODELS["Kimi-Linear"], config)
    if layer.recoverssm_records is None:
        pytest.skip("this release is not served")
    layer.recoverssm_records.committed = True
    assert layer.kda_runtime is first.kda_runtime
    assert "verify_records_kernel" in kernels_of(layer, config, launched, DRAFTED)


def test_a_commit_in_a_cache_of_gigabytes_compiles_nothing(
    launched: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose states of one layer have more elements than an int32 counts."""
    monkeypatch.setenv(VARIABLE, "1")
    config = caching_config(flag=True, dtype="bfloat16", speculative_config=NGRAM)
    config.cache_config.mamba_ssm_cache_dtype = "float16"
    layer = build(MODELS["Kimi-Linear"], config)
    if layer.recoverssm_records is None:
        pytest.skip("this release is not served")
    from kda_backend.engines.vllm_fold import compile_fold

    run_layer(layer, config, torch.randn(512, 256).bfloat16(), None)
    compiled = set(launched)
    bind_cache(layer, config)
    windows, states = layer.kv_cache
    slots = 2**31 // states.stride(0) + 1
    states = torch.empty_strided(
        (slots, *states.shape[1:]), states.stride(), dtype=states.dtype, device="meta"
    )
    launched.clear()
    compile_fold(layer, layer.kda_runtime.selection, (windows, states))
    assert names(launched) == {"commit_records_kernel"} and set(launched) <= compiled


def test_kimi_k3s_overlapped_projections_compile_nothing(
    launched: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight ranks a captured step of one token has step sizes in rows of 140 elements, and
    eager ones in rows of 6,288."""
    model = MODELS["Kimi-K3"]
    gemms = pytest.importorskip("vllm.models.kimi_k3.nvidia.low_latency_gemm")
    monkeypatch.setattr(models, "HEADS", 12)  # of a rank
    config = caching_config(flag=True, dtype="bfloat16")
    layer = build(model, config)
    monkeypatch.setattr(gemms, "shape_dynamic_skinny_gemm", lambda x, weight, *_: x @ weight.T)
    monkeypatch.setattr(gemms, "maybe_execute_in_parallel", lambda one, two, *_: (one(), two()))

    def dsv3_fused_a_gemm(
        out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **_: bool
    ) -> None:
        out.copy_(x @ weight)

    monkeypatch.setattr(gemms, "ops", SimpleNamespace(dsv3_fused_a_gemm=dsv3_fused_a_gemm))
    x = torch.randn(32, 256).bfloat16()
    run_layer(layer, config, x, None)
    compiled = set(launched)
    bind_cache(layer, config)
    layer._projection_overlap_max_tokens = 1
    layer._projection_aux_stream, layer._projection_events = object(), (None, None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    metadata = step_metadata(layer, config, (1,), (30,), torch.ones(1, 8, dtype=torch.int32))
    launched.clear()
    run_layer(layer, config, x[:1], metadata)
    assert names(launched) == {"decode_step_kernel"} and set(launched) <= compiled


@pytest.mark.parametrize("drafts", [0, 1])
def test_many_prefills_fit_into_the_scratch_memory_of_a_few(
    launched: list[Variant], monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """By themselves, and before a request that drafts."""
    monkeypatch.setattr(vllm_layer, "PARTIAL_CHUNKS", 16)
    config = engine_config(
        flag=True, max_num_seqs=256, speculative_config=NGRAM if drafts else None
    )
    config.scheduler_config.max_num_batched_tokens = 512
    layer = build_layer(config)
    x = torch.randn(512, 256)
    run_layer(layer, config, x, None)
    bind_cache(layer, config)
    scratch = layer.kda_runtime.scratch
    taken, calls = scratch.nbytes, []
    for number in (17, 250):
        launched.clear()
        lengths = (512 - 2 * (number - 1) - DRAFT * drafts,) + (2,) * (number - 1)
        slots = torch.ones(number + drafts, 8, dtype=torch.int32)
        requests = lengths + (DRAFT,) * drafts, (0,) * number + (9,) * drafts
        accepted = (0,) * number + (1,) if drafts else None
        metadata = step_metadata(layer, config, *requests, slots, accepted)
        assert (metadata.num_prefills, metadata.num_spec_decodes) == (number, drafts)
        run_layer(layer, config, x, metadata)
        calls.append([key[0] for key in launched].count("scan_kernel"))
    assert calls == [1, 11] and scratch.nbytes == taken > 0


def test_serving_rows_of_an_odd_width_compiles_nothing(launched: list[Variant]) -> None:
    """With five heads the rows of a projection are aligned at some tokens only."""
    config = engine_config(flag=True, speculative_config=NGRAM)
    config.model_config.hf_config.linear_attn_config["num_heads"] = 5
    layer = build_layer(config, weights=drawn(5))
    assert "verify_step_kernel" in kernels_of(layer, config, launched, DRAFTED)


class Computed(TorchDispatchMode):
    """The names of torch's operators that compute or copy: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and func.namespace == "aten" and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_prefill_layer_launches_its_kernels_and_its_products_alone(
    launched: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host time is launches: the second layer of a step derives, copies and fills nothing."""
    config = engine_config(flag=True)
    layers = [build_layer(config, index) for index in range(2)]
    for layer in layers:
        bind_cache(layer, config)
    slots = torch.tensor([[1, 0, 0, 0], [2, 0, 0, 0]], dtype=torch.int32)
    x = torch.randn(96, 256).bfloat16()
    metadata = step_metadata(layers[0], config, (64, 32), (0, 0), slots)
    run_layer(layers[0], config, x, metadata)
    attend = vllm_layer.attend
    launched.clear()
    core = Computed()

    def counted(*args: Any) -> None:
        with core:
            attend(*args)

    monkeypatch.setattr(vllm_packed, "attend", counted)
    run_layer(layers[1], config, x, metadata)
    assert [key[0] for key in launched] == [
        *("short_conv_kernel", "intra_kernel", "scan_kernel", "gated_norm_kernel")
    ]
    assert not core.names  # nor checks, as the first layer does, indices in host memory
