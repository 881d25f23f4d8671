"""The flag in sglang whatever the families: linear attention and full attention by two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backend_core.engines import sglang_flag
from backend_core.engines.sglang_flag import BackendClaim
from kda_backend.engines.sglang_kernel import KdaKernel
from tests.engines.kda.sglang.harness import Served
from tests.engines.toy_family import run_beside


class Ours:
    """A full-attention backend that hands everything to upstream's."""

    def __init__(self, runner: Any, upstream: Any) -> None:
        self.runner, self.upstream = runner, upstream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.upstream, name)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    copy = dict(sglang_flag._families)
    monkeypatch.setattr(sglang_flag, "_families", copy)
    return copy


def claim(answer: type | str, kind: str = "attention") -> tuple[BackendClaim]:
    return (BackendClaim(kind, "full-attention", lambda runner, upstream: answer),)


def test_two_families_serve_one_model(families: Any, log_lines: list[str]) -> None:
    plain = Served("--attention-backend", "kda").backend.full_attn_backend
    families["softmax"] = claim(Ours)
    served = Served("--attention-backend", "kda")
    full = served.backend.full_attn_backend
    assert type(served.dispatcher.extend_kernel) is KdaKernel
    assert type(full) is Ours and full.runner is served.runner
    assert type(full.upstream) is type(plain)
    assert (
        "kda-dsv4: full-attention layers are served by softmax"
        f" (Ours in the place of {type(plain).__name__})"
    ) in log_lines


@pytest.mark.parametrize("other", [claim("upstream's is ahead here"), claim(Ours, kind="mla")])
def test_what_is_declined_or_of_another_kind_is_upstreams(
    families: Any, log_lines: list[str], other: tuple[BackendClaim]
) -> None:
    families["softmax"] = other
    served = Served("--attention-backend", "kda")
    name = type(served.backend.full_attn_backend).__name__
    assert name != "Ours" and type(served.dispatcher.extend_kernel) is KdaKernel
    line = f"kda-dsv4: full-attention layers stay on {name}: upstream's is ahead here"
    assert (line in log_lines) is (other[0].kind == "attention")


def test_without_the_flag_nobody_is_asked(families: Any) -> None:
    families["softmax"] = claim(Ours)
    assert type(Served().backend.full_attn_backend) is not Ours


BESIDE = """
from tests.engines.sglang_process import load_plugins
load_plugins()
from sglang.srt.layers.attention import attention_registry
from types import SimpleNamespace
from tests.engines.kda.sglang.harness import server_args
arguments = server_args("--attention-backend", "toy")
assert arguments._kda_dsv4_requested == "toy"
runner = SimpleNamespace(
    server_args=arguments, device="cpu", use_mla_backend=True, is_draft_worker=False,
    model_config=SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Toy"]), hf_text_config=None))
from backend_core.engines import sglang_flag
built = sglang_flag.build_backend(lambda runner, full: full, runner, object())
print("CHOSE", type(built).__name__)
runner.device = "cuda"
built = sglang_flag.build_backend(lambda runner, full: full, runner, object())
print("CHOSE", type(built).__name__)
"""


def test_a_family_of_another_package_is_dispatched(tmp_path: Path) -> None:
    printed = run_beside(tmp_path, BESIDE)
    assert "TOOK ToyBackend" in printed and "CHOSE ToyBackend" in printed
    assert "TOOK object" in printed and "CHOSE object" in printed
