"""The plug-in in sglang: its loader, its command line, what is refused, and upstream without it."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.linear.kda_backend import KDAKernelDispatcher
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

from backend_core.engines import entry, seams, sglang_flag
from backend_core.engines.sglang_flag import build_backend
from backend_core.strict import FallbackError
from kda_backend.engines import sglang, sglang_layer
from kda_backend.engines.sglang_kernel import KdaKernel
from kda_backend.engines.sglang_seams import SGLANG_LAYERS
from tests.engines.kda.sglang.harness import Served, server_args


def test_sglangs_own_loader_has_run_the_plug_ins() -> None:
    assert ATTENTION_BACKEND_CHOICES.count("kda") == 1
    assert ATTENTION_BACKEND_CHOICES.count("dsv4") == 1  # which sglang has too
    assert set(sglang_flag._families) == {"kda", "dsv4", "mla"}
    assert "kda" in attention_registry.ATTENTION_BACKENDS
    hooks = {target: len(found) for target, found in HookRegistry._hooks.items() if found}
    assert list(hooks.values()) == [1, 1]
    assert set(hooks) <= HookRegistry._patched  # sglang only logs a hook that finds no target
    sglang.register()
    assert ATTENTION_BACKEND_CHOICES.count("kda") == 1
    assert hooks == {target: len(found) for target, found in HookRegistry._hooks.items() if found}


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


def test_a_stage_of_a_pipeline_may_have_no_kda_layers(
    log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    served = Served("--attention-backend", "kda")
    args = copy.copy(served.args)  # which may be changed, and has lost the flag
    args.pp_size, args._kda_dsv4_requested = 2, "kda"
    served.runner.server_args, served.runner.model = args, torch.nn.ModuleList()
    full = served.backend.full_attn_backend
    backend = attention_registry.attn_backend_wrapper(served.runner, full)
    assert type(backend.linear_attn_backend.kernel_dispatcher.extend_kernel) is TritonKDAKernel
    assert "kda-dsv4-backend: this stage of the pipeline has no KDA layers" in log_lines


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


def test_decode_is_left_alone_where_states_are_in_a_layout_of_sglangs(log_lines: list[str]) -> None:
    """It is said as the model is loaded, and of what ours serve decode is no part."""
    served = Served("--attention-backend", "kda", "--enable-linear-replayssm")
    assert served.pool.mamba2_layer_cache(0).replayssm_d is not None
    assert type(served.dispatcher.extend_kernel) is KdaKernel
    assert type(served.dispatcher.decode_kernel) is TritonKDAKernel
    assert "forward_decode" not in vars(served.backend.linear_attn_backend)
    assert any("decode is sglang's: --enable-linear-replayssm" in line for line in log_lines)
    assert any("prefill of 2 KDA layers" in line for line in log_lines)


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
    runner = SimpleNamespace(load_model=loaded.append)
    sglang_flag._act_before(runner, "load_model", sglang_flag._hold)
    with pytest.raises(FallbackError, match="extend must take 5, got 6"):
        runner.load_model(served.runner)
    assert not loaded


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (False, "sglang 9.0 does not fit; --attention-backend means sglang's own backends alone"),
        (True, "could not register kda with sglang: ModuleNotFoundError"),
    ],
)
def test_what_cannot_load_serves_stock_or_ends_in_strict_mode(
    broken: bool, line: str, log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release without the flag's hooks, and a broken install."""
    if broken:
        monkeypatch.setitem(sys.modules, sglang.__name__, None)
    else:
        monkeypatch.setattr(entry, "difference", lambda part: "sglang 9.0 does not fit")
    entry.sglang.kda()
    assert len(log_lines) == 1 and line in log_lines[0]
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(SystemExit, match=line):
        entry.sglang.kda()


def resolved(arguments: Any) -> dict[str, Any]:
    """Every argument as sglang will use it."""
    fields: dict[str, Any] = arguments.resolved_dict()
    # drawn anew for each server
    drawn = {"random_seed", "port", "nccl_port", "dist_init_addr", "model_config", "stat_loggers"}
    return {name: str(value) for name, value in fields.items() if name not in drawn}
