"""Scratch memory is taken before sglang sizes its pools, for the largest step that it can make."""

from __future__ import annotations

import dataclasses
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_schedule, publish

from backend_core.engines import sglang_flag
from backend_core.launch.triton import KernelLaunch
from kda_backend.engines import sglang_layer, sglang_scratch
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaShape
from tests.engines.kda.sglang.harness import Served, one_rank, server_args
from tests.engines.kda.sglang.test_layer import kernels_of_an_a100, tokens

CPU = torch.device("cpu")


def test_scratch_memory_is_taken_before_the_pools_are_sized(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """By sglang's own ``alloc_memory_pool``, and no step that the arguments allow takes more."""
    from sglang.srt.model_executor import model_runner

    seen: list[int] = []

    def upstream(self: Any) -> None:
        seen.append(vars(self)[sglang_scratch._RESERVED].scratch.nbytes)

    monkeypatch.setattr(model_runner.ModelRunner, "alloc_memory_pool", upstream)
    sglang_flag._wrap_model_runner(model_runner)
    monkeypatch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
    # the interpreter compiles nothing, and a small call takes less than what is asked for here
    monkeypatch.setattr(sglang_layer, "compile_kernels", lambda *_: None)
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
        assert kernel._scratch.nbytes == taken
        for new in ([128], [100, 20, 4, 4], [1, 1, 1, 125]):
            batch = served.batch(ForwardMode.EXTEND, new, [0] * len(new), [3, 1, 7, 5][: len(new)])
            served.forward(tokens(sum(new), seed=1), batch)
        assert kernel._scratch.nbytes == taken
    assert any("scratch memory of 128 tokens of 4 requests is" in line for line in log_lines)


@pytest.mark.parametrize("gib", [0.3, 1.5, 30.0])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--disable-radix-cache",),
        ("--max-running-requests", "300"),
        ("--max-mamba-cache-size", "900"),
        ("--prefill-max-requests", "40"),
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_no_server_runs_more_requests_than_are_expected(
    options: tuple[str, ...], gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside sglang's own functions, which it sizes its pools with, of so much free memory."""
    arguments = server_args(*options, "--chunked-prefill-size", "8192")
    publish(arguments, role="test")
    one_rank()
    model_config = ModelConfig.from_server_args(arguments)
    runner = SimpleNamespace(
        device="cpu", gpu_id=0, model_config=model_config, pre_model_load_memory=4.0
    )
    free = gib + 4.0 * (1 - get_schedule().mem_fraction_static)
    monkeypatch.setattr(sglang_scratch, "get_available_gpu_memory", lambda *_: free)
    layers = len(mambaish_config(model_config).mamba2_cache_params.layers)
    prefill_tokens, requests = sglang_scratch.largest_prefill(runner, layers)
    assert prefill_tokens == 8192

    theirs = upstreams_requests(arguments, model_config, gib)
    admitted = get_schedule().prefill_max_requests
    theirs = theirs if admitted is None else min(theirs, admitted)
    assert theirs <= requests <= max(2 * theirs, theirs + 2)


def upstreams_requests(arguments: Any, model_config: Any, gib: float) -> int:
    """``--max-running-requests`` as sglang resolves it, with so much memory for its pools."""
    sizes = {"attn_dp_size": 1, "pp_size": 1}
    configurator = SimpleNamespace(
        server_args=arguments,
        model_config=model_config,
        mambaish_config=mambaish_config(model_config),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        hybrid_gdn_config=None,
        hybrid_kda_config=None,
        extra_mamba_cache_bytes_per_req=0,
        fused_entry_bytes=lambda kind: None,
        ps=SimpleNamespace(**sizes),
        **sizes,
    )
    for name in ("_calculate_mamba_ratio", "_handle_max_mamba_cache", "resolve_max_num_reqs"):
        method = getattr(KVCacheConfigurator, name)
        setattr(configurator, name, MethodType(method, configurator))
    configurator._handle_max_mamba_cache(gib)
    return int(configurator.resolve_max_num_reqs(10**9))


@pytest.mark.parametrize("options", [(), ("--max-running-requests", "300")])
def test_a_server_that_fp32_states_bound_is_told(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sglang's own arithmetic for both formats; not where slots or requests are the user's."""
    arguments = server_args(*options)
    publish(arguments, role="test")
    one_rank()
    gib = 0.3
    runs = {}
    for dtype in ("float32", "float16"):
        monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", dtype)
        publish(arguments, role="test")
        model_config = ModelConfig.from_server_args(arguments)
        runs[dtype] = upstreams_requests(arguments, model_config, gib)
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")
    reserved = sglang_scratch.Reserved(Scratch(CPU), 8192, 100, torch.float32)
    runner = SimpleNamespace(
        model_config=ModelConfig.from_server_args(arguments),
        max_running_requests=runs["float32"],
        _kda_dsv4_reserved=reserved,
    )
    line = sglang_scratch.gain_of_16_bits(runner)
    assert line is not None and f"to {runs['float32']} requests" in line
    would = int(line.split("about ")[1].split()[0])
    assert abs(would - runs["float16"]) <= 0.02 * would + 1
    runner.max_running_requests = 300 if options else 2048
    assert sglang_scratch.gain_of_16_bits(runner) is None
    runner.max_running_requests = 40
    runner._kda_dsv4_reserved = dataclasses.replace(reserved, asked_slots=True)
    assert sglang_scratch.gain_of_16_bits(runner) is None
    runner._kda_dsv4_reserved = dataclasses.replace(reserved, state_dtype=torch.float16)
    assert sglang_scratch.gain_of_16_bits(runner) is None


def test_pools_that_became_larger_take_more_at_load_and_say_so(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *args: None)
    selection = kernels_of_an_a100(CPU, KdaShape(2, 2, 128, 128))
    runner = SimpleNamespace(max_running_requests=40)
    scratch = Scratch(CPU)
    sglang_scratch.grow(scratch, selection, 256, 8, torch.float16)
    before = scratch.nbytes
    runner._kda_dsv4_reserved = sglang_scratch.Reserved(scratch, 256, 8, torch.float16)
    assert sglang_scratch.reserved_scratch(runner, selection) == (scratch, None)
    assert scratch.nbytes > before
    assert any("40 requests run where 8 were expected" in line for line in log_lines)


def test_prompts_that_are_not_cut(log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest is bounded by nothing; what was taken is that of a step of several."""
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *args: None)
    monkeypatch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
    monkeypatch.setattr(sglang_layer, "compile_kernels", lambda *_: None)
    sizes = ("--chunked-prefill-size", "-1", "--max-prefill-tokens", "256")
    served = Served("--attention-backend", "kda", *sizes)
    sglang_layer.reserve(served.runner)
    assert served.runner._kda_dsv4_reserved.tokens == 256
    assert any("prompts are not cut, and one of more than 256 tokens" in x for x in log_lines)
