"""What serving launches has been compiled when the model was loaded."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from backend_core.engines import sglang_flag
from backend_core.launch.triton import KernelLaunch
from kda_backend.engines import sglang_layer
from tests.engines.kda.sglang.harness import Served
from tests.engines.kda.sglang.test_layer import kernels_of_an_a100, tokens
from tests.engines.launches import Variant, variant

# tokens of each request, tokens before them, requests whose state the prefix cache wants
PREFILLS: list[tuple[list[int], list[int], list[tuple[int, int]]]] = [
    ([64], [0], []),
    ([512], [0], []),
    ([1], [9], []),
    ([16], [0], []),
    ([70, 1, 5], [0, 64, 3], []),
    ([70, 64, 20], [0, 64, 0], [(0, 8), (1, 10)]),
    ([17, 1, 1, 1, 100], [0, 3, 4, 5, 64], []),
]
DECODES = (1, 2, 5, 8)


def test_serving_launches_what_loading_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[Variant] = set()
    monkeypatch.setattr(
        KernelLaunch, "__call__", lambda self, grid, *args: launched.add(variant(self, args))
    )
    # a part whose paths are all Triton's
    monkeypatch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
    with torch.no_grad():
        served = Served("--attention-backend", "kda")
        compiled = set(launched)
        assert {key[0] for key in compiled} >= {"scan_kernel", "decode_step_kernel"}
        slots = [3, 1, 7, 5, 9]
        for new, prefix, tracked in PREFILLS:
            batch = served.batch(
                ForwardMode.EXTEND, new, prefix, slots[: len(new)], tracked=tracked
            )
            serve(served, batch, sum(new), launched, compiled, f"a prefill of {new}")
        for number in DECODES:
            batch = served.batch(
                ForwardMode.DECODE, [1] * number, [9] * number, [*slots, 2, 4, 6][:number]
            )
            serve(served, batch, number, launched, compiled, f"{number} decodes")


def serve(
    served: Any,
    batch: Any,
    number: int,
    launched: set[Variant],
    compiled: set[Variant],
    what: str,
) -> None:
    launched.clear()
    served.forward(tokens(number, seed=1), batch)
    assert launched
    late = launched - compiled
    assert not late, f"compiled in {what}: {sorted(map(str, late))}"


def test_scratch_memory_is_taken_before_the_pools_are_sized(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """By sglang's own ``alloc_memory_pool``, and no step that the arguments allow takes more."""
    from sglang.srt.model_executor import model_runner

    seen: list[int] = []

    def upstream(self: Any) -> None:
        seen.append(vars(self)[sglang_layer._SCRATCH].nbytes)

    monkeypatch.setattr(model_runner.ModelRunner, "alloc_memory_pool", upstream)
    sglang_flag._reserve_before_pools(model_runner)
    monkeypatch.setattr(sglang_layer, "plan_for", kernels_of_an_a100)
    with torch.no_grad():
        sizes = ("--chunked-prefill-size", "128", "--max-running-requests", "4")
        served = Served("--attention-backend", "kda", *sizes)
        model_runner.ModelRunner.alloc_memory_pool(served.runner)
        (taken,) = seen
        assert taken > 2**18
        for name in ("extend_kernel", "decode_kernel"):  # as before the first installation
            setattr(served.dispatcher, name, sglang_layer.TritonKDAKernel())
        sglang_layer.install(served.backend.linear_attn_backend, served.runner)
        kernel = served.dispatcher.extend_kernel
        assert kernel._workspace.nbytes == taken
        for new in ([128], [100, 20, 4, 4], [1, 1, 1, 125]):
            batch = served.batch(ForwardMode.EXTEND, new, [0] * len(new), [3, 1, 7, 5][: len(new)])
            served.forward(tokens(sum(new), seed=1), batch)
        assert kernel._workspace.nbytes == taken
    assert any("scratch memory of 128 tokens of 4 requests is" in line for line in log_lines)


def test_the_seam_of_the_pools_is_in_the_wheel() -> None:
    from sglang.srt.model_executor import model_runner

    source = inspect.getsource(inspect.unwrap(model_runner.ModelRunner.alloc_memory_pool))
    assert "self.kv_cache_configurator.configure(" in source  # which sizes the pools
    assert hasattr(model_runner.ModelRunner.alloc_memory_pool, "_kda_dsv4")
