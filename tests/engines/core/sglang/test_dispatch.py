"""The flag in sglang whatever the families: linear attention and full attention by two of them."""

from __future__ import annotations

from typing import Any

import pytest

from backend_core.engines import sglang_flag
from backend_core.engines.seams import Part
from backend_core.engines.sglang_flag import SglangBackendClaim
from kda_backend.engines.sglang_kernel import KdaKernel
from tests.engines.kda.sglang.harness import Served

PART = Part("sglang", "full attention", ())


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


def claim(answer: type | str, kind: str = "attention") -> tuple[SglangBackendClaim]:
    made = SglangBackendClaim(
        kind=kind, title="full-attention", part=PART, of_model=bool, choose=lambda *_: answer
    )
    return (made,)


def test_two_families_serve_one_model(families: Any, log_lines: list[str]) -> None:
    plain = Served("--attention-backend", "kda").backend.full_attn_backend
    families["mla"] = claim(Ours)
    served = Served("--attention-backend", "kda")
    full = served.backend.full_attn_backend
    assert type(served.dispatcher.extend_kernel) is KdaKernel
    assert type(full) is Ours and full.runner is served.runner
    assert type(full.upstream) is type(plain)
    assert (
        "kda-dsv4-backend: full-attention layers are served by mla"
        f" (Ours in the place of {type(plain).__name__})"
    ) in log_lines


@pytest.mark.parametrize("other", [claim("upstream's is ahead here"), claim(Ours, kind="mla")])
def test_what_is_declined_or_of_another_kind_is_upstreams(
    families: Any, log_lines: list[str], other: tuple[SglangBackendClaim]
) -> None:
    families["mla"] = other
    served = Served("--attention-backend", "kda")
    name = type(served.backend.full_attn_backend).__name__
    assert name != "Ours" and type(served.dispatcher.extend_kernel) is KdaKernel
    line = f"kda-dsv4-backend: full-attention layers stay on {name}: upstream's is ahead here"
    assert (line in log_lines) is (other[0].kind == "attention")


def test_without_the_flag_nobody_is_asked(families: Any) -> None:
    families["mla"] = claim(Ours)
    assert type(Served().backend.full_attn_backend) is not Ours
