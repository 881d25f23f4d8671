"""What serving launches has been compiled in the profile run: no variant is left for a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm
from torch.utils._python_dispatch import TorchDispatchMode

from backend_core.engines import Engine
from backend_core.launch.triton import KernelLaunch
from backend_core.target import KNOWN_TARGETS
from kda_backend.engines import vllm_layer, vllm_profile
from kda_backend.engines.vllm import register
from kda_backend.selection import KdaShape
from tests.engines.kda.vllm.harness import (
    bind_cache,
    build_layer,
    core_of,
    drawn_weights,
    engine_config,
    run_layer,
    step_metadata,
)
from tests.engines.launches import variant

VERIFIES = Engine("vllm", "0.30.0", None).supports(vllm.__version__)

# (tokens of each request, tokens before them), decodes first
STEPS = [
    ((1,), (30,)),
    ((1, 1, 1), (3, 4, 5)),
    ((64,), (0,)),
    ((512,), (0,)),
    ((7, 9), (0, 3)),
    ((1, 65), (4, 0)),
    ((1, 1, 17), (4, 9, 2)),
    ((1, 1, 1, 100, 5), (4, 9, 2, 0, 64)),
    ((1, 1, 1, 1, 33), (4, 9, 2, 6, 0)),
]


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


@pytest.mark.parametrize(("name", "measured"), [("L40S", False), ("H200", True)])
def test_a_gpu_on_which_nothing_was_measured_is_told_so(
    name: str, measured: bool, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS[name])
    vllm_layer._runtime.cache_clear()
    shape = KdaShape(4, 4, 128, 128)
    vllm_layer._runtime(torch.device("cpu"), shape, 1, 0, False, False)
    notes = [x for x in log_lines if "no launch parameters of these paths were measured" in x]
    assert len(notes) == (not measured)
    assert measured or "on L40S (sm89)" in notes[0]
    vllm_layer._runtime.cache_clear()


def test_a_prefill_layer_launches_its_kernels_and_its_products_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host time is launches: the second layer of a step derives, copies and fills nothing."""
    register()
    launched: list[str] = []
    monkeypatch.setattr(
        KernelLaunch,
        "__call__",
        lambda self, grid, *args: launched.append(self._fn.fn.__name__),
    )
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS["A100"])
    vllm_layer._runtime.cache_clear()
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

    monkeypatch.setattr(core_of(type(layers[1])), "attend", counted)
    with Computed() as all_of_it:
        run_layer(layers[1], config, x, metadata)
    assert launched == ["short_conv_kernel", "intra_kernel", "scan_kernel", "gated_norm_kernel"]
    assert not core.names  # nor checks, as the first layer does, indices in host memory
    if hasattr(layers[1], "_in_proj"):
        rest = [name for name in all_of_it.names if name not in core.names]
        positions = "zeros.default"  # of the harness
        assert rest == [positions, "mm.default", "bmm.default", "mm.out"]
    vllm_layer._runtime.cache_clear()


# The same with drafts of at most four tokens, and what was accepted of the draft before (0: none).
DRAFTED = [
    ((4,), (30,), (1,)),
    ((4, 4, 4), (3, 4, 5), (1, 4, 2)),
    ((1, 4), (7, 9), (3, 1)),
    ((4, 65), (9, 0), (2, 0)),
    ((3, 1, 40), (9, 5, 0), (2, 0, 0)),
    ((1, 1, 17), (4, 9, 2), (0, 0, 0)),
    ((1, 1, 1), (4, 9, 2), (0, 0, 0)),
]


@pytest.mark.parametrize("heads", [2, 5])
def test_serving_drafts_launches_what_the_profile_run_has_compiled(
    monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    if not VERIFIES:
        pytest.skip("this release is served without drafts")
    register()
    compiled, launched = set[tuple[Any, ...]](), set[tuple[Any, ...]]()
    monkeypatch.setattr(
        KernelLaunch, "__call__", lambda self, grid, *args: launched.add(variant(self, args))
    )
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS["A100"])
    vllm_layer._runtime.cache_clear()
    vllm_profile._warm.clear()
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = engine_config(flag=True, speculative_config=draft)
    config.model_config.hf_config.linear_attn_config["num_heads"] = heads
    layer = build_layer(config, weights=drawn_weights(heads))
    x = torch.randn(256, 256).bfloat16()
    run_layer(layer, config, x, None)
    compiled |= launched
    assert any(key[0] == "verify_step_kernel" for key in compiled)
    bind_cache(layer, config)
    for lengths, before, accepted in DRAFTED:
        slots = torch.arange(1, 1 + 4 * len(lengths), dtype=torch.int32).view(-1, 4).clamp(max=11)
        launched.clear()
        metadata = step_metadata(layer, config, lengths, before, slots, accepted)
        run_layer(layer, config, x[: sum(lengths)], metadata)
        assert any(key[0] == "verify_step_kernel" for key in launched) == any(accepted)
        late = launched - compiled
        assert not late, f"compiled in a step of {lengths}: {sorted(map(str, late))}"
    vllm_layer._runtime.cache_clear()


def test_serving_launches_what_the_profile_run_has_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register()
    launched: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(
        KernelLaunch, "__call__", lambda self, grid, *args: launched.add(variant(self, args))
    )
    # a part whose paths are all Triton's
    monkeypatch.setattr(vllm_layer, "detect_target", lambda device: KNOWN_TARGETS["A100"])
    vllm_layer._runtime.cache_clear()
    vllm_profile._warm.clear()
    config = engine_config(flag=True)
    layer = build_layer(config)
    x = torch.randn(1024, 256).bfloat16()
    run_layer(layer, config, x, None)
    compiled = set(launched)
    assert {key[0] for key in compiled} >= {"short_conv_kernel", "gated_norm_kernel", "scan_kernel"}
    bind_cache(layer, config)
    for lengths, before in STEPS:
        slots = torch.zeros(len(lengths), 4, dtype=torch.int32)
        slots[:, 0] = torch.arange(1, len(lengths) + 1)
        launched.clear()
        metadata = step_metadata(layer, config, lengths, before, slots)
        run_layer(layer, config, x[: sum(lengths)], metadata)
        assert launched
        late = launched - compiled
        assert not late, f"compiled in a step of {lengths}: {sorted(map(str, late))}"
    vllm_layer._runtime.cache_clear()
