"""Scratch memory is taken at load, beside sglang's pools, for the largest step that it can make."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention import attention_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import publish

from backend_core.engines import sglang_flag
from backend_core.launch.triton import KernelLaunch
from kda_backend.engines import sglang_layer, sglang_scratch
from kda_backend.selection import KdaShape
from tests.engines.kda.sglang.harness import (
    Served,
    kernels_of_an_a100,
    leave_out_upstreams_kernels,
    one_rank,
    pools_of,
    server_args,
)
from tests.engines.kda.sglang.test_layer import tokens

CPU = torch.device("cpu")


def installed(monkeypatch: pytest.MonkeyPatch, *options: str) -> Served:
    """A server whose kernels, an A100's, are exchanged as sglang's ModelRunner has it done."""
    from sglang.srt.model_executor import model_runner

    monkeypatch.setattr(model_runner.ModelRunner, "alloc_memory_pool", lambda self: None)
    sglang_flag._wrap_model_runner(model_runner)
    monkeypatch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
    # the interpreter compiles nothing, and a small call takes less than what is asked for here
    monkeypatch.setattr(sglang_layer, "compile_kernels", lambda *_: None)
    served = Served("--attention-backend", "kda", *options)
    model_runner.ModelRunner.alloc_memory_pool(served.runner)
    for name in ("extend_kernel", "decode_kernel"):  # as before the first installation
        setattr(served.dispatcher, name, sglang_layer.TritonKDAKernel())
    sglang_layer.install(served.backend.linear_attn_backend, served.runner)
    return served


def test_no_step_takes_more_scratch_memory_than_is_taken_at_load(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *args: None)
    leave_out_upstreams_kernels(monkeypatch)
    with torch.no_grad():
        served = installed(
            monkeypatch, "--chunked-prefill-size", "128", "--max-running-requests", "4"
        )
        kernel = served.dispatcher.extend_kernel
        taken = kernel._scratch.nbytes
        assert taken > 2**18
        for new in ([128], [100, 20, 4, 4], [1, 1, 1, 125]):
            batch = served.batch(ForwardMode.EXTEND, new, [0] * len(new), [3, 1, 7, 5][: len(new)])
            served.forward(tokens(sum(new), seed=1), batch)
        assert kernel._scratch.nbytes == taken
    assert any("scratch memory of 128 tokens of 4 requests is" in line for line in log_lines)


def test_attention_backends_of_one_runner_share_it(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    """As with --speculative-adaptive, which builds one for each length of drafts."""
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *args: None)
    served = installed(monkeypatch, "--chunked-prefill-size", "128")
    full = attention_registry.ATTENTION_BACKENDS["torch_native"](served.runner)
    another = attention_registry.attn_backend_wrapper(served.runner, full).linear_attn_backend
    first, second = served.dispatcher.extend_kernel, another.kernel_dispatcher.extend_kernel
    assert first is not second and second._scratch is first._scratch
    assert second._most_chunks == first._most_chunks
    assert len([line for line in log_lines if "scratch memory of 128 tokens" in line]) == 1


def test_calls_are_not_divided_where_two_batches_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a batch may end inside of a request, and the host does not know its lengths."""
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *args: None)
    monkeypatch.setattr(sglang_scratch, "is_tbo_enabled", lambda: True)
    served = installed(monkeypatch, "--chunked-prefill-size", "128")
    assert served.dispatcher.extend_kernel._most_chunks is None


@pytest.mark.parametrize(
    ("options", "divides", "requests"),
    [
        ((), True, 17),
        ((), False, 300),
        (("--prefill-max-requests", "9"), True, 9),
        (("--prefill-max-requests", "40"), False, 40),
        (("--prefill-max-requests", "40", "--enable-mixed-chunk"), False, 300),
        (("--chunked-prefill-size", "8"), False, 8),
    ],
)
def test_the_largest_call(options: tuple[str, ...], divides: bool, requests: int) -> None:
    """Of a server that runs 300 requests."""
    publish(server_args("--chunked-prefill-size", "8192", *options), role="test")
    one_rank()
    runner = SimpleNamespace(max_running_requests=300)
    selection = kernels_of_an_a100(CPU, KdaShape(2, 2, 128, 128))
    found = sglang_scratch.largest_prefill(runner, selection, divides=divides)
    assert found == (8 if "8" in options else 8192, requests)


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
        pools = pools_of(arguments, model_config, gib)
        runs[dtype] = int(pools.resolve_max_num_reqs(10**9))
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")
    publish(arguments, role="test")
    runner = SimpleNamespace(
        model_config=ModelConfig.from_server_args(arguments), max_running_requests=runs["float32"]
    )
    assert sglang_scratch.gain_of_16_bits(runner) is None
    sglang_scratch.note_asked_slots(runner)
    line = sglang_scratch.gain_of_16_bits(runner)
    assert line is not None and f"to {runs['float32']} requests" in line
    would = int(line.split("about ")[1].split()[0])
    assert abs(would - runs["float16"]) <= 0.02 * would + 1
    runner.max_running_requests = 300 if options else 2048
    assert sglang_scratch.gain_of_16_bits(runner) is None
    runner.max_running_requests = 40
    publish(server_args(*options, "--max-mamba-cache-size", "900"), role="test")
    sglang_scratch.note_asked_slots(runner)
    assert sglang_scratch.gain_of_16_bits(runner) is None
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float16")
    publish(arguments, role="test")
    sglang_scratch.note_asked_slots(runner)
    runner.model_config = ModelConfig.from_server_args(arguments)
    assert sglang_scratch.gain_of_16_bits(runner) is None


def test_prompts_that_are_not_cut(log_lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest is bounded by nothing; what is taken is that of a step of several."""
    monkeypatch.setattr(KernelLaunch, "_interpret", lambda self, grid, *args: None)
    installed(monkeypatch, "--chunked-prefill-size", "-1", "--max-prefill-tokens", "256")
    assert any("scratch memory of 256 tokens of" in line for line in log_lines)
    assert any("prompts are not cut, and one of more than 256 tokens" in x for x in log_lines)
