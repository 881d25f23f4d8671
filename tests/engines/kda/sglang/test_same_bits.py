"""``--enable-deterministic-inference``: layers that are served, cuts of prompts, and prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import server_args as arguments
from sglang.srt.arg_groups.cuda_graph_hook import resolving_view

from backend_core.strict import FallbackError
from kda_backend.engines import sglang_cuts
from kda_backend.engines.sglang_kernel import KdaKernel
from tests.engines.core.sglang.test_dispatch import Ours, claim, families  # noqa: F401
from tests.engines.kda.sglang.harness import LING, Served, server_args

FLAG = ("--attention-backend", "kda", "--enable-deterministic-inference")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang's list of backends for the option has none of a CPU's."""
    for name in (
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    ):
        known = [*getattr(arguments, name), "intel_amx", "torch_native"]
        monkeypatch.setattr(arguments, name, known)
    monkeypatch.setenv("SGLANG_MAMBA_SSM_DTYPE", "float32")  # an option sets it, for good


def test_kda_layers_are_served_and_others_stay(
    families: Any,  # noqa: F811
    log_lines: list[str],
) -> None:
    families["mla"] = claim(Ours)
    served = Served(*FLAG)
    kernel = served.dispatcher.extend_kernel
    assert type(kernel) is KdaKernel and kernel.selection.shape.batch_invariant
    assert not Served(*FLAG[:2]).dispatcher.extend_kernel.selection.shape.batch_invariant
    (line,) = [x for x in log_lines if "full-attention layers stay on" in x]
    assert "--enable-deterministic-inference is on, and the kernel paths" in line


def test_a_family_without_such_layers_says_so(
    families: Any,  # noqa: F811
    log_lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    families["kda"] = claim(Ours)
    Served(*FLAG)
    reason = "--attention-backend kda: --enable-deterministic-inference is on"
    assert any(reason in line for line in log_lines)
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match=reason):
        Served(*FLAG)


def resolved(*options: str) -> Any:
    return resolving_view(server_args(*FLAG, *options))


def test_ling_v3_is_served_too(tmp_path: Path) -> None:
    """Its configuration does not name KDA layers as the others' do."""
    (tmp_path / "config.json").write_text(json.dumps(LING))
    model = ("--model-path", str(tmp_path))
    assert resolved(*model).page_size == 64
    kernel = Served(*FLAG, *model).dispatcher.extend_kernel
    assert type(kernel) is KdaKernel and kernel.selection.shape.batch_invariant


def test_prompts_are_cut_at_multiples_of_64() -> None:
    assert resolved().page_size == 64
    assert resolved("--disable-radix-cache", "--page-size", "128").page_size == 128
    without = resolving_view(server_args("--enable-deterministic-inference"))
    assert without.page_size == 1 and not without.disable_radix_cache


def test_prefixes_resume_from_states_of_prefills_or_are_not_cached(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    found = resolved()  # the harness asks for no_buffer, which keeps the state of a request's end
    assert found.disable_radix_cache
    assert any("the prefix cache is off: it would resume" in line for line in log_lines)
    declared: dict[str, Any] = {}
    asked = server_args(*FLAG)
    view = SimpleNamespace(
        page_size=None,
        chunked_prefill_size=2048,
        enable_mixed_chunk=False,
        enable_dynamic_chunking=False,
        schedule_policy="fcfs",
        disable_radix_cache=False,
        mamba_radix_cache_strategy="extra_buffer",
        enable_int8_mamba_checkpoint=False,
    )
    hook = "sglang.srt.arg_groups.cuda_graph_hook"
    monkeypatch.setattr(f"{hook}.resolving_view", lambda _: view)
    monkeypatch.setattr(f"{hook}.declare_resolution", lambda _, source, **x: declared.update(x))
    sglang_cuts.resolve(asked, lambda _: None)
    assert declared == {"page_size": 64, "mamba_track_interval": 1 << 30}
    vars(view).update(declared)
    assert sglang_cuts.refusal(asked, torch.float32) is None
    view.mamba_track_interval = 256
    reason = sglang_cuts.refusal(asked, torch.float32)
    assert reason == "the prefix cache keeps states that decodes have left"
    view.page_size, view.enable_int8_mamba_checkpoint = None, True  # rounded states have other bits
    declared.clear()
    sglang_cuts.resolve(asked, lambda _: None)
    assert declared == {"page_size": 64, "disable_radix_cache": True}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--enable-mixed-chunk",), "--enable-mixed-chunk runs decodes in the kernels of prefills"),
        (("--disable-radix-cache", "--page-size", "16"), "--page-size must be a multiple of 64"),
        (("--chunked-prefill-size", "100"), "--chunked-prefill-size must be a multiple of 64"),
        (("--mamba-ssm-dtype", "bfloat16"), "states in bfloat16 are rounded wherever a step ends"),
    ],
)
def test_servers_that_cannot_keep_the_promise_are_refused(
    options: tuple[str, ...], reason: str, log_lines: list[str]
) -> None:
    served = Served(*FLAG, *options)
    assert type(served.dispatcher.extend_kernel) is not KdaKernel
    assert any(f"--enable-deterministic-inference is on, and {reason}" in x for x in log_lines)
