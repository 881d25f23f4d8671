"""The plug-in in sglang: its loader, its command line, what is refused, and upstream without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from backend_core.engines import seams, sglang_flag
from backend_core.engines.sglang_flag import build_backend
from backend_core.strict import FallbackError
from kda_backend.engines import sglang, sglang_layer
from kda_backend.engines.sglang_kernel import KdaKernel
from kda_backend.engines.sglang_seams import SGLANG_LAYERS
from tests.engines.kda.sglang.harness import Served, server_args

ROOT = Path(__file__).parents[4]


def test_sglangs_own_loader_has_run_the_plugin() -> None:
    assert ATTENTION_BACKEND_CHOICES.count("kda") == 1
    assert "kda" in attention_registry.ATTENTION_BACKENDS
    ours = {target for target, hooks in HookRegistry._hooks.items() if hooks}
    assert len(ours) == 2
    assert ours <= HookRegistry._patched  # sglang only logs a hook that finds no target
    sglang.register()
    assert ATTENTION_BACKEND_CHOICES.count("kda") == 1


def test_the_flag_leaves_every_other_decision_to_sglang() -> None:
    """Resolved arguments with the flag are those of a server without it."""
    upstream, ours = server_args(), server_args("--attention-backend", "kda")
    assert ours._kda_dsv4_requested
    assert not hasattr(upstream, "_kda_dsv4_requested")
    assert resolved(ours) == resolved(upstream)
    assert resolved(ours)["attention_backend"] == "torch_native"


def test_full_attention_can_still_be_named() -> None:
    named = ("--prefill-attention-backend", "triton", "--decode-attention-backend", "triton")
    arguments = server_args("--attention-backend", "kda", *named)
    assert resolved(arguments)["attention_backend"] == "triton"
    assert arguments._kda_dsv4_requested


@pytest.mark.parametrize("flag", ["prefill", "decode"])
def test_other_flags_refuse_the_name(flag: str) -> None:
    with pytest.raises(ValueError, match=f"--{flag}-attention-backend must name a full-attention"):
        server_args(f"--{flag}-attention-backend", "kda")


def test_a_name_that_was_not_resolved_says_so() -> None:
    with pytest.raises(RuntimeError, match="--attention-backend kda reached sglang's model runner"):
        attention_registry.ATTENTION_BACKENDS["kda"](None)


def test_without_the_flag_the_kernels_are_stock() -> None:
    served = Served()
    assert type(served.dispatcher.extend_kernel) is TritonKDAKernel
    assert type(served.dispatcher.decode_kernel) is TritonKDAKernel
    assert "forward_decode" not in vars(served.backend.linear_attn_backend)


def test_with_the_flag_prefill_and_decode_are_ours(log_lines: list[str]) -> None:
    served = Served("--attention-backend", "kda")
    assert type(served.dispatcher.extend_kernel) is KdaKernel
    assert served.dispatcher.decode_kernel is served.dispatcher.extend_kernel
    # verification of drafts, and sglang's test for prefill CUDA graphs
    assert type(served.dispatcher.verify_kernel) is TritonKDAKernel
    assert isinstance(served.dispatcher.extend_kernel, TritonKDAKernel)
    # the full-attention layers: what sglang would have built
    assert type(served.backend.full_attn_backend) is type(Served().backend.full_attn_backend)
    ours = [line for line in log_lines if line.startswith("kda-dsv4")]
    assert "prefill and decode of 2 KDA layers on cpu" in ours[0]
    assert any("prefill grid 1 and more: torch" in line for line in ours)


def test_a_model_without_kda_layers_is_reported(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = SimpleNamespace(
        server_args=SimpleNamespace(
            _kda_dsv4_requested="kda", enable_deterministic_inference=False
        ),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"])),
        is_draft_worker=False,
        use_mla_backend=False,
    )
    build_backend(lambda *given: object(), runner, None)
    assert log_lines == [
        "falling back to upstream's code: LlamaForCausalLM has no Kimi Delta Attention layers"
    ]
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="LlamaForCausalLM has no Kimi Delta Attention layers"):
        build_backend(lambda *given: object(), runner, None)
    runner.is_draft_worker = True  # drafts of a KDA model may be all softmax attention
    build_backend(lambda *given: object(), runner, None)


def test_a_head_size_without_a_path_stays_on_stock(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_path(*_: Any) -> None:
        raise LookupError("no path of cpu serves K = 512")

    monkeypatch.setattr(sglang_layer, "selection_for", no_path)
    served = Served("--attention-backend", "kda")
    assert type(served.dispatcher.extend_kernel) is TritonKDAKernel
    assert "falling back to upstream's code: no path of cpu serves K = 512" in log_lines
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="no path of cpu serves K = 512"):
        Served("--attention-backend", "kda")


def test_a_kernel_that_sglang_or_a_flag_chose_is_left_alone(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherKernel(TritonKDAKernel):  # type: ignore[misc]
        pass

    upstream = KDAKernelDispatcher.__init__

    def chosen(self: Any, *backends: Any) -> None:
        upstream(self, *backends)
        self.extend_kernel = OtherKernel()

    monkeypatch.setattr(KDAKernelDispatcher, "__init__", chosen)
    served = Served("--attention-backend", "kda")
    assert type(served.dispatcher.extend_kernel) is OtherKernel
    assert type(served.dispatcher.decode_kernel) is KdaKernel
    assert any("pass --linear-attn-prefill-backend triton" in line for line in log_lines)


def test_another_scale_is_refused() -> None:
    kernel = Served("--attention-backend", "kda").dispatcher.decode_kernel
    x = torch.zeros(1, 2, 128)
    with pytest.raises(ValueError, match=r"scale must be K \*\* -0.5, got 1.0 for K = 128"):
        kernel.step(
            kernel.selection, x, x, x, x, x[..., 0],
            ssm_states=x, cache_indices=x, A_log=x, dt_bias=x, scale=1.0,
        )  # fmt: skip


def test_layers_of_another_release_stay_upstreams_and_it_is_said_before_weights_load(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = f"sglang 0.5.24 does not fit the {SGLANG_LAYERS.name}: extend must take 5, got 6"
    monkeypatch.setattr(seams, "refusal", {SGLANG_LAYERS: reason}.get)
    served = Served("--attention-backend", "kda")
    assert type(served.dispatcher.extend_kernel) is TritonKDAKernel
    assert f"falling back to upstream's code: {reason}" in log_lines
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    loaded: list[object] = []
    load = sglang_flag._after(sglang_flag._hold, loaded.append)
    with pytest.raises(FallbackError, match="extend must take 5, got 6"):
        load(served.runner)
    assert not loaded


LOAD = """
{before}
load_plugins()
from tests.engines.kda.sglang.harness import server_args
try:
    server_args({options})
    print("UPSTREAM SERVES", "kda_backend.engines.sglang_layer" in sys.modules)
except SystemExit as error:
    print("EXIT", error)
"""
FORKS = """
import os, pathlib, sys
from tests.engines.sglang_process import load_plugins
import sglang.srt.plugins  # most of sglang, once for all of the processes
for place in pathlib.Path(sys.argv[1]).iterdir():
    child = os.fork()
    if child == 0:
        output = os.open(place / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["KDA_DSV4_STRICT"] = place.name[-1]
        exec((place / "script").read_text())
        break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (place / "status").write_text(str(status))
"""
UNSUPPORTED = (
    "from backend_core.engines import entry\n"
    "entry.difference = lambda part: 'sglang 9.0 does not fit'"
)
BROKEN = "sys.modules['kda_backend.engines.sglang'] = None"


CASES = [
    (UNSUPPORTED, "", "0", "sglang 9.0 does not fit; --attention-backend means sglang"),
    (UNSUPPORTED, "'--attention-backend', 'kda'", "0", "invalid choice: 'kda'"),
    (UNSUPPORTED, "", "1", "sglang 9.0 does not fit; --attention-backend means sglang"),
    (BROKEN, "", "0", "could not register kda with sglang: ModuleNotFoundError"),
    (BROKEN, "", "1", "could not register kda with sglang: ModuleNotFoundError"),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each case a folder with what its process printed, and its exit status."""
    folder = tmp_path_factory.mktemp("processes")
    for number, (before, options, strict, _) in enumerate(CASES):
        place = folder / f"case {number}, strict {strict}"
        place.mkdir()
        (place / "script").write_text(LOAD.format(before=before, options=options))
    subprocess.run([sys.executable, "-c", FORKS, folder], cwd=ROOT, timeout=600, check=True)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_cannot_load_serves_stock_or_ends(ended: Path, number: int) -> None:
    """In a process of its own: releases without the flag's hooks, broken installs; also strict."""
    _, options, strict, line = CASES[number]
    place = ended / f"case {number}, strict {strict}"
    output = (place / "output").read_text()
    assert output.count(line) == 1, output
    if strict == "1":
        assert (place / "status").read_text() == "1", output
        assert "UPSTREAM SERVES" not in output
    else:
        assert ("EXIT 2" if options else "UPSTREAM SERVES False") in output, output


def resolved(arguments: Any) -> dict[str, Any]:
    """Every argument as sglang will use it."""
    fields: dict[str, Any] = arguments.resolved_dict()
    # drawn anew for each server
    drawn = {"random_seed", "port", "nccl_port", "dist_init_addr", "model_config", "stat_loggers"}
    return {name: str(value) for name, value in fields.items() if name not in drawn}
